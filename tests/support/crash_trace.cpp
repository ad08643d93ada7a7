// SPDX-License-Identifier: Apache-2.0
// A crash handler, linked into every test program without a sanitizer: it prints the stack of a crash, so that a crash
// that happens once on another machine can be located. `addr2line -Cfie PROGRAM OFFSET...` names the lines of the
// offsets in round brackets.
#include <array>
#include <charconv>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <execinfo.h>
#include <unistd.h>

namespace {

// Calls only functions that a signal handler may call. install() calls backtrace() once, because its first call loads a
// library.
void print_trace(int signal, siginfo_t* info, void*) {
  const auto say = [](std::string_view text) { (void)!::write(STDERR_FILENO, text.data(), text.size()); };
  const auto say_number = [&say](uintptr_t number, int base) {
    std::array<char, 24> digits{};
    say({digits.data(), std::to_chars(digits.begin(), digits.end(), number, base).ptr});
  };
  say("\ncrash: signal ");
  say_number(static_cast<uintptr_t>(signal), 10);
  say(" at address 0x");
  say_number(reinterpret_cast<uintptr_t>(info->si_addr), 16);
  say("\n");
  std::array<void*, 64> frames{};
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  (void)::raise(signal);  // the default action now: it ends the test
}

bool install() {
  static std::array<std::byte, 65536> own_stack;  // an overflowed stack has no space for the handler
  const stack_t stack{.ss_sp = own_stack.data(), .ss_flags = 0, .ss_size = own_stack.size()};
  (void)::sigaltstack(&stack, nullptr);
  std::array<void*, 1> frame{};
  (void)::backtrace(frame.data(), 1);
  struct sigaction action {};
  action.sa_sigaction = print_trace;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) (void)::sigaction(signal, &action, nullptr);
  return true;
}

[[maybe_unused]] const bool installed = install();

}  // namespace
