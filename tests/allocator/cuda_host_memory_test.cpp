// SPDX-License-Identifier: Apache-2.0
// Host memory as a GPU takes it: pinned or not, at its own addresses or at others, in a forked child, and what it
// costs.
#include <fstream>
#include <sstream>

#include "allocator/cuda/cuda_device.h"
#include "allocator/prefault.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::FakeCudaOptions;
using test::value_of;

// Whole pages of memory, of the system's own mapping.
class Pages {
 public:
  explicit Pages(uint64_t bytes) : data_(map_fresh(bytes)), bytes_(bytes) {}
  ~Pages() { unmap_fresh(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::span<std::byte> bytes() const { return {data_, bytes_}; }

 private:
  std::byte* const data_;
  const uint64_t bytes_;
};

// A device with one mapped piece of memory and a stream.
class Scene {
 public:
  explicit Scene(FakeCudaOptions options = {}) : fake(options) {
    device = value_of(make_cuda_device(fake.driver(), {}, &info));
    unit = device->granularity();
    address = value_of(device->reserve(unit));
    id = value_of(device->create(unit));
    EXPECT_SUCCEEDS(device->map(address, id));
    EXPECT_SUCCEEDS(device->set_access(address, unit, Access::kReadWrite));
    stream = value_of(device->create_stream());
  }
  ~Scene() {
    EXPECT_SUCCEEDS(device->destroy_stream(stream));
    EXPECT_SUCCEEDS(device->unmap(address, unit));
    EXPECT_SUCCEEDS(device->release(id));
    EXPECT_SUCCEEDS(device->free_reservation(address));
    device.reset();
    EXPECT_EQ(fake.left(), "");
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;
  Drain copy(Direction direction, const std::vector<Copy>& copies) {
    EXPECT_SUCCEEDS(device->copy_async(stream, direction, copies));
    return device->wait(value_of(device->record(stream))).drain;
  }
  uint64_t calls(const char* function) { return fake.counts()[function]; }
  FakeCuda fake;
  CudaDeviceInfo info;
  std::unique_ptr<DeviceMemory> device;
  uint64_t unit = 0;
  DeviceAddress address = 0;
  PhysicalId id{};
  StreamId stream{};
};

TEST(CudaHostMemory, ABatchHasThePinnedPiecesAndTheOthersGoOneByOne) {
  Scene scene;
  const Pages pinned(64 * kKiB);
  const Pages other(64 * kKiB);
  ASSERT_SUCCEEDS(scene.device->pin_host(pinned.bytes()));
  std::fill(pinned.bytes().begin(), pinned.bytes().end(), std::byte{3});
  std::fill(other.bytes().begin(), other.bytes().end(), std::byte{4});
  std::byte* const in_pinned = pinned.bytes().data();
  std::byte* const in_other = other.bytes().data();
  EXPECT_EQ(scene.copy(Direction::kHostToDevice, {{scene.address, in_pinned, 100},
                                                  {scene.address + 100, in_other, 100},
                                                  {scene.address + 200, in_pinned + 100, 100}}),
            Drain::kCompleted);
  EXPECT_EQ(scene.calls("cuMemcpyBatchAsync"), 1u);
  EXPECT_EQ(scene.calls("cuMemcpyHtoDAsync"), 1u);
  EXPECT_EQ(scene.copy(Direction::kDeviceToHost, {{scene.address, in_other + 1000, 300}}), Drain::kCompleted);
  EXPECT_EQ(in_other[1099], std::byte{3});
  EXPECT_EQ(in_other[1100], std::byte{4});
  EXPECT_EQ(in_other[1299], std::byte{3});
  EXPECT_EQ(scene.calls("cuMemcpyBatchAsync"), 1u);
  ASSERT_SUCCEEDS(scene.device->unpin_host(pinned.bytes()));
}

TEST(CudaHostMemory, WhereTheDeviceHasOtherAddressesCopiesGoOneByOne) {
  Scene scene({.host_pointers = false});
  EXPECT_FALSE(scene.info.batched_copies);
  const Pages pinned(64 * kKiB);
  ASSERT_SUCCEEDS(scene.device->pin_host(pinned.bytes()));
  std::fill(pinned.bytes().begin(), pinned.bytes().end(), std::byte{3});
  std::byte* const host = pinned.bytes().data();
  EXPECT_EQ(scene.copy(Direction::kHostToDevice, {{scene.address, host, 100}, {scene.address + 100, host + 100, 100}}),
            Drain::kCompleted);
  EXPECT_EQ(scene.copy(Direction::kDeviceToHost,
                       {{scene.address, host + 1000, 100}, {scene.address + 100, host + 1100, 100}}),
            Drain::kCompleted);
  EXPECT_EQ(host[1199], std::byte{3});
  EXPECT_EQ(scene.calls("cuMemcpyBatchAsync"), 0u);
  ASSERT_SUCCEEDS(scene.device->unpin_host(pinned.bytes()));
}

// What the two before would meet: a batch over the driver itself.
TEST(FakeCudaHostMemory, ABatchWantsPinnedMemoryAtAddressesOfTheDevice) {
  for (const bool host_pointers : {true, false}) {
    FakeCuda fake({.host_pointers = host_pointers});
    const CudaDriver& driver = fake.driver();
    const auto device = value_of(make_cuda_device(driver, {}));
    const uint64_t unit = device->granularity();
    const DeviceAddress address = value_of(device->reserve(unit));
    const PhysicalId id = value_of(device->create(unit));
    ASSERT_SUCCEEDS(device->map(address, id));
    ASSERT_SUCCEEDS(device->set_access(address, unit, Access::kReadWrite));
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    ASSERT_EQ(driver.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    ASSERT_EQ(driver.cuCtxPushCurrent(context), CUDA_SUCCESS);
    ASSERT_EQ(driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    const Pages host(64 * kKiB);
    const auto batch = [&](CUdeviceptr from) {
      CUdeviceptr to = address;
      size_t bytes = 4096;
      CUmemcpyAttributes attributes{};
      attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
      size_t start = 0;
      size_t failed = 0;
      const CUresult result = driver.cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &start, 1, &failed, stream);
      return result == CUDA_SUCCESS ? driver.cuStreamSynchronize(stream) : result;
    };
    const auto raw = reinterpret_cast<CUdeviceptr>(host.bytes().data());
    EXPECT_EQ(batch(raw), CUDA_ERROR_INVALID_VALUE);  // not pinned
    EXPECT_EQ(fake.device_pointer(host.bytes().data()), 0u);
    ASSERT_SUCCEEDS(device->pin_host(host.bytes()));
    const CUdeviceptr own = fake.device_pointer(host.bytes().data());
    EXPECT_EQ(own == raw, host_pointers);
    EXPECT_EQ(batch(own), CUDA_SUCCESS);
    EXPECT_EQ(batch(raw), host_pointers ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
    size_t free = 0;
    size_t total = 0;
    const CUresult later = driver.cuMemGetInfo(&free, &total);  // for ever
    EXPECT_EQ(later, host_pointers ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(device->info().used_bytes.has_value(), host_pointers);
    fake.heal();
    ASSERT_EQ(driver.cuStreamDestroy(stream), CUDA_SUCCESS);
    ASSERT_SUCCEEDS(device->unpin_host(host.bytes()));
    ASSERT_SUCCEEDS(device->unmap(address, unit));
    ASSERT_SUCCEEDS(device->release(id));
    ASSERT_SUCCEEDS(device->free_reservation(address));
  }
}

TEST(FakeCuda, ReadOnlyMemoryIsRefused) {
  Scene scene;
  CUcontext context = nullptr;
  ASSERT_EQ(scene.fake.driver().cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  ASSERT_EQ(scene.fake.driver().cuCtxPushCurrent(context), CUDA_SUCCESS);
  CUmemAccessDesc access{};
  access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  EXPECT_EQ(scene.fake.driver().cuMemSetAccess(scene.address, scene.unit, &access, 1), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(scene.fake.driver().cuCtxPopCurrent(&context), CUDA_SUCCESS);
  ASSERT_EQ(scene.fake.driver().cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

TEST(FakeCuda, KnowsWhatASequenceOfCallsWouldHaveCost) {
  Scene scene;
  const Pages host(16 * kMiB);
  scene.fake.forget_cost();
  ASSERT_SUCCEEDS(scene.device->pin_host(host.bytes().first(8 * kMiB)));
  const uint64_t once = scene.fake.cost().locked;
  EXPECT_EQ(scene.fake.cost().longest_locked, once);
  ASSERT_SUCCEEDS(scene.device->pin_host(host.bytes().subspan(8 * kMiB)));
  EXPECT_EQ(scene.fake.cost().locked, 2 * once);
  EXPECT_EQ(scene.fake.cost().longest_locked, once);  // in two pieces nobody waits longer
  scene.fake.forget_cost();
  std::vector<Copy> copies;
  for (uint64_t i = 0; i < 16; ++i) copies.push_back({scene.address + i * 4096, host.bytes().data() + i * 8192, 4096});
  ASSERT_EQ(scene.copy(Direction::kDeviceToHost, copies), Drain::kCompleted);
  const test::FakeCudaCost batched = scene.fake.cost();
  scene.fake.forget_cost();
  for (const Copy& copy : copies)
    ASSERT_SUCCEEDS(scene.device->copy_async(scene.stream, Direction::kDeviceToHost, {&copy, 1}));
  ASSERT_EQ(scene.device->drain(scene.stream).drain, Drain::kCompleted);
  EXPECT_GT(scene.fake.cost().host, 2 * batched.host);
  EXPECT_EQ(scene.fake.cost().link, batched.link);
  ASSERT_SUCCEEDS(scene.device->unpin_host(host.bytes()));
}

// The flags of the mapping that has `address`, as /proc/self/smaps shows them.
std::string flags_at(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto at = reinterpret_cast<uintptr_t>(address);
      here = begin <= at && at < end;
    } else if (here && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return {};
}

TEST(CudaHostMemory, PinnedMemoryIsNotCopiedByAFork) {
  Scene scene;
  const Pages host(64 * kKiB);
  if (flags_at(host.bytes().data()).empty()) GTEST_SKIP() << "this kernel shows no flags of mappings";
  EXPECT_EQ(flags_at(host.bytes().data()).find(" dc "), std::string::npos);
  ASSERT_SUCCEEDS(scene.device->pin_host(host.bytes()));
  EXPECT_NE(flags_at(host.bytes().data()).find(" dc "), std::string::npos);
  ASSERT_SUCCEEDS(scene.device->unpin_host(host.bytes()));
  EXPECT_EQ(flags_at(host.bytes().data()).find(" dc "), std::string::npos);
}

TEST(CudaDevice, OtherDevicesMayReachItsMemoryWhereTheDeviceCan) {
  {
    Scene scene;
    EXPECT_EQ(scene.fake.rdma_bytes(), scene.unit);
    EXPECT_TRUE(scene.info.notes.empty());
  }
  Scene without({.attributes = false});
  EXPECT_EQ(without.fake.rdma_bytes(), 0u);
  EXPECT_TRUE(without.info.notes.empty());  // nobody asked for it
}

}  // namespace
}  // namespace torpor
