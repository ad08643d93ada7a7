// SPDX-License-Identifier: Apache-2.0
// A strict NVIDIA driver without a GPU, for tests: the same table as the real one (allocator/cuda/driver.h).
//
// It models devices, contexts, address ranges, physical memory, maps, access, streams, events, pinned host memory, the
// kernel that gathers (its own code, allocator/cuda/gather.h, thread after thread) and a limit. Work on streams runs
// late: when something waits for it, or at some later call, in an order fixed by the seed. What the real driver refuses
// is refused with its code; what it would punish later (unmapping, unpinning, freeing or reusing memory that a copy
// still uses) is written down in misuses(). Any call can be made to fail.
//
// Where the documentation leaves a question open, the fake takes the stricter answer: a batch takes pinned host memory
// only, memory is never read-only, and every call that may wait or changes memory counts as unsafe beside a capture of
// another thread (cuda.h, cuThreadExchangeStreamCaptureMode). An illegal address and its like are for ever, as they
// are for a context. Each call has a price (fake_cuda_prices.h).
//
// Owner: a test. One at a time: the table's functions find it through a global. All functions may be called from any
// thread. Failure: what was misused fails the test at the end.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "allocator/cuda/driver.h"
#include "tests/support/fake_cuda_prices.h"

namespace torpor::test {

struct FakeCudaOptions {
  int devices = 1;
  uint64_t memory_bytes = uint64_t{1} << 30;  // of each device
  uint64_t granularity_bytes = uint64_t{2} << 20;
  bool batched_copies = true;
  bool attributes = true;  // GPUDirect RDMA and export of memory are there
  // The device reaches registered host memory at its own addresses. False, as on WSL2: at others, device_pointer(); the
  // host's, where the driver does not translate them, are illegal.
  bool host_pointers = true;
  bool virtual_memory = true;
  int host_numa_node = -1;
  uint64_t seed = 1;
};

class FakeCuda {
 public:
  // kOnce: that call. kForever: that call and later ones of the same function. kSticky: all calls from then on, as
  // after an error that destroys the context; codes of such errors are always sticky.
  enum class Lasting : uint8_t { kOnce, kForever, kSticky };

  explicit FakeCuda(FakeCudaOptions options = {});
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  const CudaDriver& driver() const { return driver_; }
  void fail(uint64_t nth_call_from_now, CUresult code, Lasting lasting);
  void heal();              // no more failures, a lost context is whole; fired() and failed_function() stay
  void pause(bool paused);  // while paused no call counts or is made to fail
  uint64_t calls() const;   // since the last fail() or the beginning
  bool fired() const;
  std::string failed_function() const;  // the first that was made to fail
  // A driver that takes its time: the next call of `function`, after so many others, stands still, before it does
  // anything, until resume().
  void hold(std::string function, uint64_t after = 0);
  void wait_until_held();  // fails the test if nobody calls it
  void resume();
  // Begin a capture on `stream`, of this thread; null: on a stream that is not of the table's caller. Returns the
  // stream.
  CUstream begin_capture(CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL, CUstream stream = nullptr);
  // End this thread's capture. CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if a call has spoiled it.
  CUresult end_capture();
  // Where the device sees registered host memory, as cuMemHostGetDevicePointer; 0 if it is not registered.
  CUdeviceptr device_pointer(const void* host) const;
  // What all calls since the last forget_cost() would have cost.
  FakeCudaCost cost() const;
  void forget_cost();
  // Taken away by the call; what is left of them at the end fails the test at work.
  std::vector<std::string> take_misuses();
  // Ranges, physical memory, maps, streams, events, pinned ranges and retained contexts that exist, in words; empty:
  // none.
  std::string left() const;
  uint64_t used_bytes(int device = 0) const;
  uint64_t rdma_bytes() const;  // of physical memory that other devices on the bus may reach
  size_t contexts_of_this_thread() const;
  CUstreamCaptureMode capture_mode_of_this_thread() const;
  // How often each function was called.
  std::map<std::string, uint64_t> counts() const;

 private:
  friend struct FakeCalls;
  struct Range {
    uint64_t size = 0;
  };
  struct Physical {
    int device = 0;
    std::vector<std::byte> bytes;
    uint64_t maps = 0;
    bool released = false;
    bool rdma = false;
  };
  struct Mapping {
    uint64_t size = 0;
    uint64_t handle = 0;
    CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  };
  struct Work {
    enum class Kind : uint8_t { kDown, kUp, kSet, kWithin } kind = Kind::kDown;
    uint64_t device = 0;
    uint64_t source = 0;  // kWithin: in device memory, too
    std::byte* host = nullptr;
    uint64_t bytes = 0;
    uint8_t value = 0;
    bool by_kernel = false;
    bool illegal = false;  // uses an address that the device does not have
  };
  struct Capture {
    uint64_t stream = 0;
    std::thread::id thread{};
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool spoiled = false;
  };
  struct Stream {
    std::deque<Work> queue;
    uint64_t enqueued = 0;
    uint64_t done = 0;
  };
  struct Event {
    uint64_t stream = 0;  // 0: not recorded
    uint64_t count = 0;
    bool captured = false;
  };

  void fill_table();
  void pass_gate(std::string function);
  CUresult enter(std::string function, bool needs_context = true);
  void some_time_passes();
  void run_one(Stream& stream);
  void run_until(Stream& stream, uint64_t count);
  // Refuse an unsafe call that this thread may not make beside a capture, and spoil the capture. A call that waits for
  // the whole context conflicts with every capture, whatever the thread's mode.
  CUresult beside_captures(bool whole_context = false);
  CUresult spoil(Capture& capture, CUresult result);
  CUresult use_of_stream(uint64_t stream);  // that a capture may be going on in
  bool is_pinned(const std::byte* host, uint64_t bytes) const;
  void charge(const std::string& function, uint64_t nanoseconds, bool locks = false);
  void misuse(std::string what) { misuses_.push_back(std::move(what)); }
  bool in_flight(uint64_t address, uint64_t size) const;
  bool host_in_flight(const std::byte* host, uint64_t size) const;
  CUresult enqueue(uint64_t stream, const Work& work);
  CUresult enqueue_in_any_order(uint64_t stream, std::vector<Work> works, CUresult asked, size_t* failed);
  std::byte* bytes_at(uint64_t address, uint64_t& contiguous, CUmemAccess_flags& access);
  bool accessible(uint64_t address, uint64_t size, bool writing);

  inline static FakeCuda* active_ = nullptr;
  const FakeCudaOptions options_;
  CudaDriver driver_;
  mutable std::mutex mutex_;  // guards all below
  std::mt19937_64 random_;
  uint64_t calls_ = 0;
  uint64_t fail_at_ = 0;
  bool paused_ = false;
  CUresult code_ = CUDA_SUCCESS;
  Lasting lasting_ = Lasting::kOnce;
  std::string failing_;           // the function that began to fail
  CUresult lost_ = CUDA_SUCCESS;  // what the context was lost by
  std::vector<Capture> captures_;
  FakeCudaCost cost_;
  std::map<std::string, uint64_t> counts_;
  uint64_t next_address_ = uint64_t{1} << 47;  // above what Linux gives to processes: never host memory, too
  uint64_t next_id_ = 1;
  std::map<uint64_t, Range> ranges_;
  std::map<uint64_t, Physical> physical_;
  std::map<uint64_t, Mapping> mappings_;
  std::map<uint64_t, Stream> streams_;
  std::map<uint64_t, Event> events_;
  std::map<const std::byte*, uint64_t> pinned_;
  std::set<uint64_t> modules_;
  std::map<int, int> retained_;
  std::vector<uint64_t> used_;
  std::vector<std::string> misuses_;

  std::mutex gate_mutex_;  // guards all below
  std::condition_variable gate_changed_;
  std::string gate_of_;      // empty: all pass
  uint64_t gate_after_ = 0;  // calls that pass before
  bool held_ = false;
};

}  // namespace torpor::test
