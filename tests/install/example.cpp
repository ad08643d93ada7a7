// SPDX-License-Identifier: Apache-2.0
// A program with memory that can sleep: what docs/memory.md shows, against the installed library.
#include <cstdio>
#include <cstring>

#include "allocator/host_device.h"
#include "base/file_system.h"
#include "engine/memory_saver.h"

int main() {
  torpor::MemorySaver memory([](int) -> torpor::Result<std::unique_ptr<torpor::RankMemory>> {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<torpor::DeviceMemory> device, torpor::make_host_device());
    return torpor::RankMemory::create(std::move(device), torpor::linux_file_system());
  });
  const auto address = memory.allocate(0, 64 << 20);
  if (!address) return std::printf("%s\n", address.error().to_string().c_str()), 1;
  auto* const bytes = reinterpret_cast<char*>(*address);
  std::memset(bytes, 7, 64 << 20);
  const auto asleep = memory.sleep({});  // its physical memory is given back
  const auto awake = memory.wake({});    // the same bytes under the same address
  std::printf("%s, %d\n", asleep && awake ? "slept and woke" : "failed", bytes[12345]);
  return asleep && awake && bytes[12345] == 7 ? 0 : 1;
}
