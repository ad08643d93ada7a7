// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_cuda_driver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "allocator/cuda/context.h"
#include "allocator/cuda/gather.h"
#include "tests/support/fake_cuda_handles.h"

namespace torpor::test {
namespace {

// Copy as all threads of a kernel's block do.
void copy_by_kernel(std::byte* to, const std::byte* from, uint64_t bytes) {
  for (uint64_t thread = 0; thread < cuda::kGatherThreads; ++thread) {
    cuda::copy_share(reinterpret_cast<unsigned char*>(to), reinterpret_cast<const unsigned char*>(from), bytes, thread,
                     cuda::kGatherThreads);
  }
}

// Return the function's name without the version suffix that cuda.h's macros add.
std::string plain(std::string function) {
  if (const size_t version = function.find("_v"); version != std::string::npos) function.resize(version);
  return function;
}

}  // namespace

void FakeCuda::hold(std::string function, uint64_t after) {
  const std::lock_guard lock(gate_mutex_);
  gate_after_ = after;
  gate_of_ = std::move(function);
  held_ = false;
}

void FakeCuda::wait_until_held() {
  std::unique_lock lock(gate_mutex_);
  if (!gate_changed_.wait_for(lock, std::chrono::seconds(20), [this] { return held_; }))
    ADD_FAILURE() << "nobody called " << gate_of_;
}

void FakeCuda::resume() {
  const std::lock_guard lock(gate_mutex_);
  gate_of_.clear();
  gate_changed_.notify_all();
}

void FakeCuda::pass_gate(std::string function) {
  std::unique_lock lock(gate_mutex_);
  if (gate_of_.empty() || held_ || gate_of_ != plain(std::move(function))) return;
  if (gate_after_ > 0) {
    --gate_after_;
    return;
  }
  held_ = true;
  gate_changed_.notify_all();
  gate_changed_.wait(lock, [this] { return gate_of_.empty(); });
}

// Count the call, return an injected failure if one is due, and let some work on streams run.
CUresult FakeCuda::enter(std::string function, bool needs_context) {
  function = plain(std::move(function));
  ++counts_[function];
  charge(function, kFakeCudaPrices.call);
  some_time_passes();
  if (lost_ != CUDA_SUCCESS && needs_context && function != "cuCtxPopCurrent") return lost_;
  if (paused_) return needs_context && contexts.empty() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
  ++calls_;
  if (calls_ == fail_at_) failing_ = function;
  const bool fails =
      fail_at_ != 0 && calls_ >= fail_at_ &&
      (calls_ == fail_at_ || lasting_ == Lasting::kSticky || (lasting_ == Lasting::kForever && failing_ == function));
  if (fails) return code_;
  if (needs_context && contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_SUCCESS;
}

void FakeCuda::some_time_passes() {
  if (streams_.empty() || random_() % 4 != 0) return;
  auto stream = streams_.begin();
  std::advance(stream, static_cast<std::ptrdiff_t>(random_() % streams_.size()));
  for (uint64_t i = random_() % 3; i > 0 && !stream->second.queue.empty(); --i) run_one(stream->second);
}

std::byte* FakeCuda::bytes_at(uint64_t address, uint64_t& contiguous, CUmemAccess_flags& access) {
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin() || (--mapping)->first + mapping->second.size <= address) return nullptr;
  contiguous = mapping->first + mapping->second.size - address;
  access = mapping->second.access;
  return physical_.at(mapping->second.handle).bytes.data() + (address - mapping->first);
}

bool FakeCuda::accessible(uint64_t address, uint64_t size, bool writing) {
  while (size > 0) {
    uint64_t contiguous = 0;
    CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (bytes_at(address, contiguous, access) == nullptr || access == CU_MEM_ACCESS_FLAGS_PROT_NONE) return false;
    if (writing && access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return false;
    const uint64_t step = std::min(contiguous, size);
    address += step;
    size -= step;
  }
  return true;
}

void FakeCuda::run_one(Stream& stream) {
  const Work work = stream.queue.front();
  stream.queue.pop_front();
  ++stream.done;
  if (work.illegal) {
    lost_ = CUDA_ERROR_ILLEGAL_ADDRESS;
    return;
  }
  if (!accessible(work.device, work.bytes, work.kind != Work::Kind::kDown)) {
    misuse(fmt::format("work on {:#x} ran when that was not mapped with access", work.device));
    return;
  }
  if (work.kind == Work::Kind::kWithin && !accessible(work.source, work.bytes, false)) {
    misuse(fmt::format("work read {:#x} when that was not mapped with access", work.source));
    return;
  }
  uint64_t at = 0;
  while (at < work.bytes) {
    uint64_t contiguous = 0;
    CUmemAccess_flags access{};
    std::byte* const device = bytes_at(work.device + at, contiguous, access);
    uint64_t step = std::min(contiguous, work.bytes - at);
    if (work.kind == Work::Kind::kWithin) {
      const std::byte* const source = bytes_at(work.source + at, contiguous, access);
      step = std::min(step, contiguous);
      std::memcpy(device, source, step);
    }
    const auto copy = [&work](std::byte* to, const std::byte* from, uint64_t bytes) {
      work.by_kernel ? copy_by_kernel(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
    };
    if (work.kind == Work::Kind::kDown) copy(work.host + at, device, step);
    if (work.kind == Work::Kind::kUp) copy(device, work.host + at, step);
    if (work.kind == Work::Kind::kSet) std::memset(device, work.value, step);
    at += step;
  }
}

void FakeCuda::run_until(Stream& stream, uint64_t count) {
  while (stream.done < count) run_one(stream);
}

bool FakeCuda::in_flight(uint64_t address, uint64_t size) const {
  for (const auto& [id, stream] : streams_) {
    for (const Work& work : stream.queue) {
      if (overlap(address, size, work.device, work.bytes)) return true;
      if (work.kind == Work::Kind::kWithin && overlap(address, size, work.source, work.bytes)) return true;
    }
  }
  return false;
}

bool FakeCuda::host_in_flight(const std::byte* host, uint64_t size) const {
  for (const auto& [id, stream] : streams_) {
    for (const Work& work : stream.queue) {
      if (work.host != nullptr && overlap(number(host), size, number(work.host), work.bytes)) return true;
    }
  }
  return false;
}

CUresult FakeCuda::enqueue(uint64_t id, const Work& work) {
  const auto stream = streams_.find(id);
  if (stream == streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (work.bytes == 0 || !accessible(work.device, work.bytes, work.kind != Work::Kind::kDown))
    return CUDA_ERROR_INVALID_VALUE;
  const bool within = work.kind == Work::Kind::kWithin;
  if (within &&
      (!accessible(work.source, work.bytes, false) || overlap(work.source, work.bytes, work.device, work.bytes)))
    return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult captured = use_of_stream(id); captured != CUDA_SUCCESS) return captured;
  for (const auto& [base, size] : pinned_) {  // a copy's host memory is in one registration, or in none
    if (work.host != nullptr && overlap(number(base), size, number(work.host), work.bytes) &&
        (work.host < base || base + size < work.host + work.bytes))
      return CUDA_ERROR_INVALID_VALUE;
  }
  for (const auto& [other_id, other] : streams_) {
    if (other_id == id) continue;
    for (const Work& running : other.queue) {
      const bool both_read_host = work.kind == Work::Kind::kUp && running.kind == Work::Kind::kUp;
      const bool same_host = work.host != nullptr && running.host != nullptr &&
                             overlap(number(work.host), work.bytes, number(running.host), running.bytes);
      const bool both_read_device = work.kind == Work::Kind::kDown && running.kind == Work::Kind::kDown;
      if (same_host && !both_read_host) misuse("host memory is reused while a copy on another stream uses it");
      if (overlap(work.device, work.bytes, running.device, running.bytes) && !both_read_device)
        misuse("device memory is written while work on another stream uses it");
      const bool writes_its_source = running.kind == Work::Kind::kWithin && work.kind != Work::Kind::kDown &&
                                     overlap(work.device, work.bytes, running.source, running.bytes);
      const bool source_is_written = within && running.kind != Work::Kind::kDown &&
                                     overlap(work.source, work.bytes, running.device, running.bytes);
      if (writes_its_source || source_is_written)
        misuse("device memory is copied from while work on another stream writes it");
    }
  }
  if (work.host != nullptr) {
    const double rate = is_pinned(work.host, work.bytes) ? kFakeCudaPrices.link_bytes : kFakeCudaPrices.pageable_bytes;
    cost_.link += static_cast<uint64_t>(static_cast<double>(work.bytes) / rate);
  }
  stream->second.queue.push_back(work);
  ++stream->second.enqueued;
  return CUDA_SUCCESS;
}

// Enqueue the copies of one call in random order. If the call fails on command, some may have begun.
CUresult FakeCuda::enqueue_in_any_order(uint64_t id, std::vector<Work> works, CUresult asked, size_t* failed) {
  std::vector<size_t> order(works.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random_);
  if (asked != CUDA_SUCCESS) order.resize(random_() % (works.size() + 1));
  for (const size_t i : order) {
    const CUresult result = enqueue(id, works[i]);
    if (result == CUDA_SUCCESS || asked != CUDA_SUCCESS) continue;
    if (failed != nullptr) *failed = i;
    return result;
  }
  return asked;
}

FakeCuda::FakeCuda(FakeCudaOptions options)
    : options_(options), random_(options.seed), used_(static_cast<size_t>(options.devices)) {
  fill_table();
  contexts.clear();
  capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  active_ = this;
}

FakeCuda::~FakeCuda() {
  active_ = nullptr;
  for (const std::string& what : misuses_) ADD_FAILURE() << "misuse of the driver: " << what;
}

void FakeCuda::fail(uint64_t nth_call_from_now, CUresult code, Lasting lasting) {
  const std::lock_guard lock(mutex_);
  calls_ = 0;
  fail_at_ = nth_call_from_now;
  code_ = code;
  lasting_ = is_sticky(code) ? Lasting::kSticky : lasting;
  failing_.clear();
}

void FakeCuda::heal() {
  const std::lock_guard lock(mutex_);
  fail_at_ = 0;
  lost_ = CUDA_SUCCESS;
}

void FakeCuda::pause(bool paused) {
  const std::lock_guard lock(mutex_);
  paused_ = paused;
}

uint64_t FakeCuda::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

bool FakeCuda::fired() const {
  const std::lock_guard lock(mutex_);
  return !failing_.empty();
}

std::string FakeCuda::failed_function() const {
  const std::lock_guard lock(mutex_);
  return failing_;
}

std::vector<std::string> FakeCuda::take_misuses() {
  const std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}

std::string FakeCuda::left() const {
  const std::lock_guard lock(mutex_);
  std::string words;
  const auto count = [&words](size_t many, std::string_view what) {
    if (many > 0) words += fmt::format("{}{} {}", words.empty() ? "" : ", ", many, what);
  };
  count(ranges_.size(), "address ranges");
  count(physical_.size(), "physical allocations");
  count(mappings_.size(), "maps");
  count(streams_.size(), "streams");
  count(events_.size(), "events");
  count(pinned_.size(), "pinned ranges");
  count(modules_.size(), "modules");
  for (const auto& [device, times] : retained_) count(static_cast<size_t>(times), "retained contexts");
  return words;
}

uint64_t FakeCuda::used_bytes(int device) const {
  const std::lock_guard lock(mutex_);
  return used_.at(static_cast<size_t>(device));
}

uint64_t FakeCuda::rdma_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [id, physical] : physical_) bytes += physical.rdma ? physical.bytes.size() : 0;
  return bytes;
}

size_t FakeCuda::contexts_of_this_thread() const { return contexts.size(); }

std::map<std::string, uint64_t> FakeCuda::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace torpor::test
