// SPDX-License-Identifier: Apache-2.0
// FakeCuda: a strict NVIDIA driver without a GPU, for tests. It has the same function table as the real one
// (allocator/cuda/driver.h).
//
// It models devices, contexts, address ranges, physical memory, maps, access, streams, events, pinned host memory, the
// gather kernel (its own code, allocator/cuda/gather.h, thread by thread) and a memory limit. Work on streams runs
// late: when a call waits for it, or at some later call, in an order fixed by the seed. The fake refuses what the real
// driver refuses, with the same code. misuses() lists what the real driver would punish later: unmapping, unpinning,
// freeing or reusing memory that a copy still uses. Any call can be made to fail.
//
// If the documentation leaves a question open, the fake takes the stricter answer: a batch takes pinned host memory
// only, memory is never read-only, and every call that may wait or changes memory is unsafe beside a capture of another
// thread (cuda.h, cuThreadExchangeStreamCaptureMode). An illegal address and similar errors last for ever, as they do
// for a context. Each call has a price (fake_cuda_prices.h).
//
// Owner: a test. Only one exists at a time, because the table's functions find it through a global. Threads: all
// functions from any thread. Failure: a misuse fails the test at the end.
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
  uint64_t memory_bytes = uint64_t{1} << 30;  // for each device
  uint64_t granularity_bytes = uint64_t{2} << 20;
  bool batched_copies = true;
  bool attributes = true;  // the device supports GPUDirect RDMA and export of memory
  // True: the device sees registered host memory at the host's addresses. False, as on WSL2: at others,
  // device_pointer(); the host's addresses are then illegal unless the driver translates them.
  bool host_pointers = true;
  bool virtual_memory = true;
  int host_numa_node = -1;
  uint64_t seed = 1;
};

class FakeCuda {
 public:
  // kOnce: only that call fails. kForever: later calls of the same function fail too. kSticky: all later calls fail, as
  // after an error that destroys the context; codes of such errors are always sticky.
  enum class Lasting : uint8_t { kOnce, kForever, kSticky };

  explicit FakeCuda(FakeCudaOptions options = {});
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  const CudaDriver& driver() const { return driver_; }
  void fail(uint64_t nth_call_from_now, CUresult code, Lasting lasting);
  void heal();              // ends failures and repairs a lost context; fired() and failed_function() stay
  void pause(bool paused);  // while paused, no call counts or fails
  uint64_t calls() const;   // since the last fail(), or the beginning
  bool fired() const;
  std::string failed_function() const;  // the first that failed on command
  // Block the next call of `function`, after `after` other calls of it, before it does anything, until resume(): a slow
  // driver.
  void hold(std::string function, uint64_t after = 0);
  void wait_until_held();  // fails the test if no call arrives
  void resume();
  // Begin a capture of this thread on `stream`, and return the stream. Null: on a stream that no caller of the table
  // has.
  CUstream begin_capture(CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL, CUstream stream = nullptr);
  // End this thread's capture. Return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if a call has spoiled it.
  CUresult end_capture();
  // Return the address at which the device sees registered host memory (cuMemHostGetDevicePointer); 0 if it is not
  // registered.
  CUdeviceptr device_pointer(const void* host) const;
  // Return the cost of all calls since the last forget_cost().
  FakeCudaCost cost() const;
  void forget_cost();
  // Return and remove the misuses. Those that are left at the end fail the current test.
  std::vector<std::string> take_misuses();
  // Describe the ranges, physical memory, maps, streams, events, pinned ranges and retained contexts that exist; empty
  // if there are none.
  std::string left() const;
  uint64_t used_bytes(int device = 0) const;
  uint64_t rdma_bytes() const;  // physical memory that other devices on the bus may access
  size_t contexts_of_this_thread() const;
  CUstreamCaptureMode capture_mode_of_this_thread() const;
  // Return the number of calls of each function.
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
    uint64_t source = 0;  // kWithin: in device memory too
    std::byte* host = nullptr;
    uint64_t bytes = 0;
    uint8_t value = 0;
    bool by_kernel = false;
    bool illegal = false;  // uses an address that is not the device's
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
  CUresult use_of_stream(uint64_t stream);  // a capture may be running on it
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
  std::string failing_;           // the function that failed first
  CUresult lost_ = CUDA_SUCCESS;  // the error that destroyed the context
  std::vector<Capture> captures_;
  FakeCudaCost cost_;
  std::map<std::string, uint64_t> counts_;
  uint64_t next_address_ = uint64_t{1} << 47;  // above Linux's user addresses, so never host memory too
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
  std::string gate_of_;      // empty: no call is held
  uint64_t gate_after_ = 0;  // number of calls to let pass
  bool held_ = false;
};

}  // namespace torpor::test
