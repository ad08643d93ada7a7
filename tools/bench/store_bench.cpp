// SPDX-License-Identifier: Apache-2.0
// KV blocks from the device to segments on disk and back, digests taken and checked, durable at the end of the writing;
// beside the disk itself: direct I/O of the same sizes and the same depth into a file of the same kind, fresh in each
// round, preallocated, synced, in place of the last round's, which goes. Baseline: plain pwrite and pread of block
// after block through the page cache, synced at the end of the writing, the cache dropped before the reading.
//
// Interleaved, median of the rounds, after one that only warms.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <iostream>
#include <map>

#include <CLI/CLI.hpp>
#include <boost/filesystem.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "base/units.h"
#include "kvcache/offload_worker.h"
#include "offload/segment_store.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;
using bench::seconds;

// A rank that offloads to disk, as its scheduler would tell it to.
class Blocks {
 public:
  Blocks(const std::string& directory, uint64_t block_bytes, int32_t count) {
    device_ = must(make_host_device());
    size_ = align_up(block_bytes * static_cast<uint64_t>(count), device_->granularity());
    address_ = must(device_->reserve(size_));
    memory_ = must(device_->create(size_));
    must(device_->map(address_, memory_));
    must(device_->set_access(address_, size_, Access::kReadWrite));
    std::memset(reinterpret_cast<void*>(address_), 5, size_);  // NOLINT(performance-no-int-to-ptr)
    arena_ = must(HostArena::create());
    transfers_ = must(TransferEngine::create(*device_, *arena_));
    layout_ = {
        .num_blocks = static_cast<uint32_t>(count),
        .tensors = {{.address = address_, .layers = 1, .block_stride = block_bytes, .block_bytes = block_bytes}}};
    const auto most = static_cast<int32_t>(64 * kMiB / align_up(block_bytes, kPage));
    const int32_t slots = std::clamp(count / 8, 1, std::max(most, 1));
    segments_ = (count + slots - 1) / slots;
    SegmentStoreOptions options{.record_bytes = block_bytes, .slots_per_segment = slots};
    options.budget_bytes = static_cast<uint64_t>(segments_) * SegmentStore::most_bytes_of_segment(options);
    worker_ =
        must(OffloadWorker::create({.disk_segments = segments_, .segment_slots = slots}, layout_, *transfers_, nullptr,
                                   must(SegmentStore::open(linux_file_system(), directory, options, system_clock()))));
    worker_->open_space(1, {});
    for (int32_t slot = 0; slot < count; ++slot) {
      numbers_.push_back(slot);
      BlockKey key{.space = 1};
      std::memcpy(key.hash.data(), &slot, sizeof slot);
      keys_.push_back(key);
    }
  }
  ~Blocks() {
    worker_.reset();
    transfers_.reset();
    must(device_->unmap(address_, size_));
    must(device_->release(memory_));
    must(device_->free_reservation(address_));
  }
  std::string io() const { return worker_->store(StoreId::kDisk)->health().io; }

  // All blocks as one job, in segments of their own each time: the engine cuts the batches.
  void write() {
    run(PlanKind::kPut);
    must(worker_->store(StoreId::kDisk)->sync());
  }
  void read() { run(PlanKind::kGet); }

 private:
  void run(PlanKind kind) {
    TransferPlan plan{.number = ++plans_};
    if (kind == PlanKind::kPut) {
      for (int32_t segment = 0; segment < segments_; ++segment) plan.dropped.push_back({StoreId::kDisk, segment});
      plan.keys = keys_;
    }
    plan.add(plans_, kind, StoreId::kDisk, TransferPriority::kOffload).count = static_cast<uint32_t>(numbers_.size());
    plan.from = plan.to = numbers_;
    must(worker_->run(plan));
    worker_->wait();
    const TransferReport report = worker_->poll();
    if (report.jobs.size() == 1 && report.jobs[0].count == 0) return;
    fmt::print(stderr, "error: {}\n", report.jobs.empty() ? "no report" : report.jobs[0].cause);
    std::exit(2);
  }
  std::unique_ptr<DeviceMemory> device_;
  uint64_t size_ = 0;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  KvLayout layout_;
  int32_t segments_ = 0;
  std::unique_ptr<OffloadWorker> worker_;
  std::vector<int32_t> numbers_;
  std::vector<BlockKey> keys_;
  uint64_t plans_ = 0;
};

// The disk itself: the same bytes in the same batches from memory that is there.
class Raw {
 public:
  Raw(const std::string& directory, uint64_t block_bytes, int32_t count, int32_t batch)
      : block_bytes_(block_bytes), count_(count), batch_(batch), memory_(block_bytes * static_cast<uint64_t>(count)) {
    directory_ = must(linux_file_system().open_directory(directory, true));
  }
  void write() {
    if (file_ != nullptr) must(directory_->remove_file(name_));
    name_ = fmt::format("raw-{}", ++files_);
    file_ = must(directory_->create_file(name_, FileIo::kFastest));
    must(file_->preallocate(block_bytes_ * static_cast<uint64_t>(count_)));
    run(true);
    must(file_->sync());
    must(directory_->sync());
  }
  void read() { run(false); }

 private:
  void run(bool write) {
    std::atomic<int32_t> next = 0;
    bench::on_all_cores([&](uint64_t, uint64_t) {
      for (int32_t first = next.fetch_add(batch_); first < count_; first = next.fetch_add(batch_)) {
        std::vector<FilePart> parts;
        for (int32_t block = first; block < std::min(first + batch_, count_); ++block) {
          const uint64_t at = static_cast<uint64_t>(block) * block_bytes_;
          parts.push_back({at, memory_.bytes().subspan(at, block_bytes_), ok()});
        }
        write ? file_->pwrite_all(parts) : file_->pread_all(parts);
        for (const FilePart& part : parts) must(part.status);
      }
    });
  }
  const uint64_t block_bytes_;
  const int32_t count_;
  const int32_t batch_;
  const bench::WarmMemory memory_;
  int files_ = 0;
  std::string name_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<File> file_;
};

class Plain {
 public:
  Plain(const std::string& directory, uint64_t block_bytes, int32_t count)
      : block_bytes_(block_bytes), count_(count), memory_(block_bytes) {
    fd_ = ::open((directory + "/plain").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0) must(system_error(errno, "cannot open " + directory + "/plain"));
  }
  ~Plain() { ::close(fd_); }
  void write() {
    for (int32_t i = 0; i < count_; ++i)
      check(::pwrite(fd_, memory_.bytes().data(), block_bytes_, static_cast<off_t>(block_bytes_) * i));
    check(::fdatasync(fd_) == 0 ? static_cast<ssize_t>(block_bytes_) : -1);
  }
  void drop() { ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }
  void read() {
    for (int32_t i = 0; i < count_; ++i)
      check(::pread(fd_, memory_.bytes().data(), block_bytes_, static_cast<off_t>(block_bytes_) * i));
  }

 private:
  void check(ssize_t done) const {
    if (done != static_cast<ssize_t>(block_bytes_)) must(system_error(errno, "plain file"));
  }
  const uint64_t block_bytes_;
  const int32_t count_;
  const bench::WarmMemory memory_;
  int fd_ = -1;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"KV blocks to segments on disk and back, beside raw direct I/O and beside plain files."};
  std::string directory = "build/bench";
  uint64_t mib = 512;
  uint64_t block_kib = 2048;
  int32_t batch = 16;
  int rounds = 5;
  bool as_json = false;
  app.add_option("--dir", directory, "where the files go; they are removed")->capture_default_str();
  app.add_option("--mib", mib, "bytes moved")->capture_default_str()->check(CLI::Range(16, 65536));
  app.add_option("--block-kib", block_kib, "size of a block, a multiple of 4")
      ->capture_default_str()
      ->check(CLI::Range(4, 65536));
  app.add_option("--batch", batch, "blocks at once of raw I/O")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  const uint64_t block = block_kib / 4 * 4 * kKiB;
  const auto count = static_cast<int32_t>(mib * kMiB / block);
  const std::string place =
      (boost::filesystem::path(directory) / boost::filesystem::unique_path("disk-%%%%-%%%%")).string();
  boost::system::error_code problem;
  if (boost::filesystem::create_directories(place, problem); problem) {
    fmt::print(stderr, "error: --dir {}: {}\n", directory, problem.message());
    return 2;
  }

  nlohmann::ordered_json json;
  {
    Blocks ours(place, block, count);
    Raw raw(place, block, count, batch);
    Plain plain(place, block, count);
    std::map<std::string, std::vector<double>> times;
    for (int round = 0; round <= rounds; ++round) {
      const auto time = [&](const char* name, const std::function<void()>& work) {
        const double taken = seconds(work);
        if (round > 0) times[name].push_back(taken);
      };
      time("raw write", [&] { raw.write(); });
      time("write", [&] { ours.write(); });
      time("plain write", [&] { plain.write(); });
      plain.drop();
      time("raw read", [&] { raw.read(); });
      time("read", [&] { ours.read(); });
      time("plain read", [&] { plain.read(); });
    }
    const auto rate = [&](const std::string& name) {
      return static_cast<double>(block) * count / 1e9 / median(times[name]);
    };
    json = {{"bytes", block * static_cast<uint64_t>(count)},
            {"block_bytes", block},
            {"batch", batch},
            {"rounds", rounds},
            {"io", ours.io()},
            {"unit", "GB/s, median"}};
    for (const std::string name : {"write", "read"}) {
      json[name] = {{"torpor", rate(name)},
                    {"baseline", rate("plain " + name)},
                    {"ceiling", rate("raw " + name)},
                    {"times_baseline", rate(name) / rate("plain " + name)},
                    {"of_ceiling", rate(name) / rate("raw " + name)}};
    }
  }
  boost::filesystem::remove_all(place);
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} MiB in blocks of {} KiB, {} at once, through {}, median of {} rounds, GB/s\n", mib, block_kib, batch,
             json["io"].get<std::string>(), rounds);
  for (const char* name : {"write", "read"}) {
    const auto& row = json[name];
    fmt::print("{:<6} torpor {:.2f}, plain file {:.2f}, raw direct I/O {:.2f}: {:.2f} x, {:.0f} %\n", name,
               row["torpor"].get<double>(), row["baseline"].get<double>(), row["ceiling"].get<double>(),
               row["times_baseline"].get<double>(), 100 * row["of_ceiling"].get<double>());
  }
  return 0;
}
