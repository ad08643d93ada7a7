// Part of every test program that no sanitizer watches: a crash that happens once, on a machine of others, says where
// it was. `addr2line -Cfie PROGRAM OFFSET...` names the lines of the offsets in round brackets.
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>

#include <execinfo.h>
#include <unistd.h>

namespace {

// Calls only what a signal handler may call. The first call of backtrace() loads a library, hence the one in install().
void tell(int signal, siginfo_t* info, void*) {
  std::array<char, 96> words{};
  const int length =
      std::snprintf(words.data(), words.size(), "\ncrash: signal %d at address %p\n", signal, info->si_addr);
  (void)!::write(STDERR_FILENO, words.data(), static_cast<size_t>(length));
  std::array<void*, 64> frames{};
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  (void)::raise(signal);  // which is no longer handled: the test ends by it
}

bool install() {
  static std::array<std::byte, 65536> own_stack;  // a stack that overflowed has no room for the handler
  const stack_t stack{.ss_sp = own_stack.data(), .ss_flags = 0, .ss_size = own_stack.size()};
  (void)::sigaltstack(&stack, nullptr);
  std::array<void*, 1> frame{};
  (void)::backtrace(frame.data(), 1);
  struct sigaction action {};
  action.sa_sigaction = tell;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) (void)::sigaction(signal, &action, nullptr);
  return true;
}

[[maybe_unused]] const bool installed = install();

}  // namespace
