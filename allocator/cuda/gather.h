// SPDX-License-Identifier: Apache-2.0
// A kernel that copies many small pieces between device memory and pinned host memory in one launch, where the copy
// engines would have a cost for each piece. nvcc compiles it (gather.cu) into an image that the driver loads; it is
// optional in a build.
//
// The pieces are the kernel's arguments, so no table has to live until the kernel ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#ifdef __CUDACC__
#define TORPOR_DEVICE_TOO __host__ __device__
#else
#define TORPOR_DEVICE_TOO
#endif

namespace torpor::cuda {

struct GatherPiece {
  uint64_t to = 0;  // addresses as the GPU sees them
  uint64_t from = 0;
  uint64_t bytes = 0;
};

// Most pieces of one launch: a kernel takes 32,764 bytes of arguments from CUDA 12.1 and compute capability 7.0 on
// (CUDA C++ Programming Guide, "Function Parameters").
constexpr uint64_t kGatherPieces = 1364;
constexpr int kGatherDriver = 12010;
struct GatherArguments {
  uint64_t count = 0;
  GatherPiece pieces[kGatherPieces];
};
static_assert(sizeof(GatherArguments) <= 32764);

constexpr const char* kGatherName = "torpor_gather";
constexpr unsigned kGatherThreads = 512;  // in the block that copies a piece; one block per piece

// Copy the share of thread `thread` of `threads` of one piece: 16 bytes at a time if both sides have the same
// alignment.
TORPOR_DEVICE_TOO inline void copy_share(unsigned char* to, const unsigned char* from, uint64_t bytes, uint64_t thread,
                                         uint64_t threads) {
  struct alignas(16) Wide {
    uint64_t words[2];
  };
  constexpr uint64_t kWide = sizeof(Wide);
  constexpr uint64_t kAtOnce = 4;  // loads in flight per thread: reads over the bus wait long
  const auto address = reinterpret_cast<uintptr_t>(to);
  if ((address - reinterpret_cast<uintptr_t>(from)) % kWide != 0) {
    for (uint64_t at = thread; at < bytes; at += threads) to[at] = from[at];
    return;
  }
  const uint64_t up_to_aligned = (kWide - address % kWide) % kWide;
  const uint64_t head = up_to_aligned < bytes ? up_to_aligned : bytes;
  const uint64_t wides = (bytes - head) / kWide;
  const uint64_t tail = head + wides * kWide;
  auto* const wide_to = reinterpret_cast<Wide*>(to + head);
  const auto* const wide_from = reinterpret_cast<const Wide*>(from + head);
  uint64_t at = thread;
  for (; at + (kAtOnce - 1) * threads < wides; at += kAtOnce * threads) {
    Wide held[kAtOnce];
    for (uint64_t i = 0; i < kAtOnce; ++i) held[i] = wide_from[at + i * threads];
    for (uint64_t i = 0; i < kAtOnce; ++i) wide_to[at + i * threads] = held[i];
  }
  for (; at < wides; at += threads) wide_to[at] = wide_from[at];
  if (thread < head) to[thread] = from[thread];
  if (thread < bytes - tail) to[tail + thread] = from[tail + thread];
}

// Return the image in this build; empty: nvcc was not found.
std::span<const std::byte> gather_image();

}  // namespace torpor::cuda
