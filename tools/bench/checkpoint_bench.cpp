// SPDX-License-Identifier: Apache-2.0
// A durable sleep to disk and the wake from it, beside raw direct I/O and plain files; `verify` beside the same reads;
// and listing many checkpoints. Bytes are logical: as many as were in device memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <thread>

#include <CLI/CLI.hpp>
#include <boost/filesystem.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "base/copy.h"
#include "base/units.h"
#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/verify.h"
#include "engine/rank_service.h"
#include "tools/bench/bench.h"

using namespace torpor;
using namespace torpor::bench;

namespace {

// Of a checkpoint without requests: the bytes of memory are what is measured.
EngineCheckpoint empty_state() {
  EngineCheckpoint state;
  state.state.scheduler.policy = "fcfs";
  state.state.kv.num_blocks = 2;
  state.state.kv.free_order = {1};
  return state;
}

// The first touch of as much fresh memory, which a wake cannot do without. Before each wake it also makes a hypervisor
// back what an earlier sleep gave back, or the wake would measure that.
struct FreshMemory {
  explicit FreshMemory(uint64_t size) {
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) must(Status(system_error(errno, "fresh memory")));
    ::madvise(memory, size, MADV_HUGEPAGE);
    bytes = {static_cast<std::byte*>(memory), size};
  }
  ~FreshMemory() { ::munmap(bytes.data(), bytes.size()); }
  std::span<std::byte> bytes;
};
void touch_fresh(uint64_t bytes) {
  const FreshMemory memory(bytes);
  on_all_cores([&](uint64_t part, uint64_t parts) {
    for (uint64_t at = bytes / parts * part; at < bytes / parts * (part + 1); at += 4096)
      static_cast<volatile char*>(static_cast<void*>(memory.bytes.data()))[at] = 1;
  });
}

// What the memory holds: random words; in each 4 KiB the first eighth random and the rest a repeated word, as in memory
// that is little used; bf16 values as weights have them.
enum class Content { kRandom, kSparse, kBf16 };

void fill(std::span<std::byte> bytes, Content content) {
  auto* const words = reinterpret_cast<uint64_t*>(bytes.data());
  std::mt19937_64 random(1);
  if (content == Content::kBf16) {
    std::normal_distribution<float> normal(0, 0.02F);
    const std::span values(reinterpret_cast<uint16_t*>(bytes.data()), std::min<uint64_t>(bytes.size() / 2, 1 << 24));
    for (uint16_t& value : values) value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
    for (uint64_t at = values.size_bytes(); at < bytes.size(); at += values.size_bytes())
      std::memcpy(bytes.data() + at, values.data(), std::min(values.size_bytes(), bytes.size() - at));
    return;
  }
  for (uint64_t i = 0; i < bytes.size() / 8; ++i)
    words[i] = content == Content::kSparse && i % 512 >= 64 ? 0x3f803f803f803f80 : random();
}

// A rank with one region of weights, that sleeps to disk and wakes.
class Sleeper {
 public:
  Sleeper(std::string directory, uint64_t bytes, Content content, CompressionOptions compression, int threads)
      : directory_(std::move(directory)), bytes_(bytes) {
    memory_ = must(RankMemory::create(must(make_host_device({})), linux_file_system(), {.threads = threads}));
    address_ = must(memory_->allocate("weights", "params", bytes));
    fill({reinterpret_cast<std::byte*>(address_), bytes}, content);
    const CheckpointManagerOptions options{.retention = {.keep = 1}, .compression = compression};
    manager_ = must(CheckpointManager::open(linux_file_system(), directory_, options));
  }
  void sleep() {
    PendingCheckpoint pending = must(manager_->begin(bytes_));
    must(pending.write_state(empty_state()));
    const orders::Save::Reply saved =
        call(orders::Save{.tags = kTags, .directory = pending.staging_path(), .writing = pending.writing()});
    pending.add_rank(saved.saved);
    path_ = must(pending.commit());
    call(orders::Inform{.committed = path_});
    call(orders::Detach{.tags = kTags});
    pending.retire_older();
  }
  void wake() { call(orders::Restore{.tags = kTags}); }
  void finish() {
    call(orders::Finish{.tags = kTags});
    must(manager_->woken_from(must(open_checkpoint(linux_file_system(), path_)).manifest().generation));
  }
  void verify() {
    const Verification found = must(torpor::verify(must(open_checkpoint(linux_file_system(), path_))));
    if (!found.problems.empty()) must(Status(found.problems[0]));
  }
  uint64_t stored_bytes() { return must(open_checkpoint(linux_file_system(), path_)).manifest().total_bytes(); }

 private:
  template <class Order>
  typename Order::Reply call(const Order& order) {
    return must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{"weights"};
  const std::string directory_;
  const uint64_t bytes_;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress address_{};
  std::unique_ptr<CheckpointManager> manager_;
  std::string path_;
};

// The machine's own: the same bytes, from warm memory, 16 MiB at a time on every core, in operations of 1 MiB.
class Raw {
 public:
  Raw(const std::string& directory, uint64_t bytes)
      : bytes_(bytes), memory_(bytes), directory_(must(linux_file_system().open_directory(directory, true))) {
    fill(memory_.bytes(), Content::kRandom);  // a disk below may store what repeats better
  }
  void write() {
    const std::string name = fmt::format("raw{}", ++number_);
    auto file = must(directory_->create_file(name, FileIo::kFastest));
    must(file->preallocate(bytes_));
    each([&](FilePart& part) { file->pwrite_all({&part, 1}); });
    must(file->sync());
    must(directory_->sync());
    if (number_ > 1) must(directory_->remove_file(fmt::format("raw{}", number_ - 1)));
  }
  void read() {
    read_into(memory_.bytes(), [](const FilePart&) {});
  }
  // What a wake does more than that, step by step: into memory that the system gives for it; and by way of warm memory,
  // where a digest is taken, as nothing goes up unchecked.
  void read_into_fresh() {
    const FreshMemory fresh(bytes_);
    read_into(fresh.bytes, [](const FilePart&) {});
  }
  void read_digest_and_copy() {
    const FreshMemory fresh(bytes_);
    read_into(memory_.bytes(), [&](const FilePart& part) {
      (void)digest_of(part.bytes);
      BulkCopy(part.bytes.size()).copy(fresh.bytes.subspan(part.offset, part.bytes.size()), part.bytes);
    });
  }
  void plain_write() {
    const std::string path = directory_->path() + "/plain";
    ::unlink(path.c_str());
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    for (uint64_t at = 0; at < bytes_; at += kMiB) {
      if (::pwrite(fd, memory_.bytes().data() + at, kMiB, static_cast<off_t>(at)) != static_cast<ssize_t>(kMiB))
        must(Status(system_error(errno, "plain write")));
    }
    if (::fsync(fd) != 0) must(Status(system_error(errno, "plain fsync")));
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
  void plain_read() {
    const int fd = ::open((directory_->path() + "/plain").c_str(), O_RDONLY | O_CLOEXEC);
    for (uint64_t at = 0; at < bytes_; at += kMiB) {
      if (::pread(fd, memory_.bytes().data() + at, kMiB, static_cast<off_t>(at)) != static_cast<ssize_t>(kMiB))
        must(Status(system_error(errno, "plain read")));
    }
    ::close(fd);
  }

 private:
  void read_into(std::span<std::byte> memory, const std::function<void(const FilePart&)>& then) {
    auto file = must(directory_->open_file(fmt::format("raw{}", number_), FileIo::kFastest));
    each([&](FilePart& part) {
      part.bytes = memory.subspan(part.offset, part.bytes.size());
      file->pread_all({&part, 1});
      then(part);
    });
  }
  void each(const std::function<void(FilePart&)>& work) {
    std::atomic<uint64_t> next = 0;
    on_all_cores([&](uint64_t, uint64_t) {
      constexpr uint64_t kAtOnce = 16 * kMiB;
      for (uint64_t at = next.fetch_add(kAtOnce); at < bytes_; at = next.fetch_add(kAtOnce)) {
        FilePart part{at, memory_.bytes().subspan(at, std::min(kAtOnce, bytes_ - at)), ok()};
        work(part);
        must(part.status);
      }
    });
  }
  const uint64_t bytes_;
  const WarmMemory memory_;
  std::unique_ptr<Directory> directory_;
  int number_ = 0;
};

double list_seconds(const std::string& directory, int count, int rounds) {
  const auto manager = must(CheckpointManager::open(linux_file_system(), directory, {.retention = {.keep = 1 << 30}}));
  {
    const std::string path = must([&]() -> Result<std::string> {
      TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager->begin(0));
      TORPOR_RETURN_IF_ERROR(pending.write_state(empty_state()));
      return pending.commit();
    }());
    namespace fs = boost::filesystem;
    for (int i = 2; i <= count; ++i) {
      const fs::path copy = fs::path(directory) / fmt::format("g-{:06}", i);
      fs::create_directory(copy);
      fs::permissions(copy, fs::owner_all);
      for (const char* name : {"MANIFEST", "STATE"}) fs::copy_file(fs::path(path) / name, copy / name);
    }
  }
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) {
    times.push_back(seconds([&] {
      if (must(manager->list()).size() != static_cast<size_t>(count)) std::exit(2);
    }));
  }
  times.erase(times.begin());
  return median(times);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A durable sleep to disk, the wake from it, verify, and ls, beside what the machine can."};
  std::string directory = "build/bench";
  uint64_t mib = 1024;
  int level = -5;
  int rounds = 5;
  int many = 10'000;
  int threads = 0;
  bool as_json = false;
  app.add_option("--dir", directory, "where the files go; they are removed")->capture_default_str();
  app.add_option("--mib", mib, "bytes of memory")->capture_default_str()->check(CLI::Range(16, 65536));
  app.add_option("--level", level, "zstd's, for the content that compresses")
      ->capture_default_str()
      ->check(CLI::Range(-100, 19));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads, "of each lane of copies; 0: as many as cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 64));
  app.add_option("--checkpoints", many, "to list")->capture_default_str()->check(CLI::Range(1, 100'000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  const uint64_t bytes = mib * kMiB;
  const boost::filesystem::path place =
      boost::filesystem::absolute(directory) / boost::filesystem::unique_path("checkpoint-%%%%-%%%%");
  boost::system::error_code problem;
  if (boost::filesystem::create_directories(place, problem); problem) {
    fmt::print(stderr, "error: --dir {}: {}\n", directory, problem.message());
    return 2;
  }
  nlohmann::ordered_json json;
  {
    Sleeper plain((place / "plain-store").string(), bytes, Content::kRandom, {.codec = Codec::kNone}, threads);
    Sleeper packed((place / "packed-store").string(), bytes, Content::kSparse, {.level = level}, threads);
    Sleeper values((place / "values-store").string(), bytes, Content::kBf16, {.codec = Codec::kBf16}, threads);
    Raw raw((place / "raw").string(), bytes);
    std::map<std::string, std::vector<double>> times;
    uint64_t stored = 0, stored_values = 0;
    for (int round = 0; round <= rounds; ++round) {
      const auto time = [&](const char* name, const std::function<void()>& work) {
        const double taken = seconds(work);
        if (round > 0) times[name].push_back(taken);
      };
      time("raw write", [&] { raw.write(); });
      time("sleep", [&] { plain.sleep(); });
      time("plain write", [&] { raw.plain_write(); });
      time("sleep, compresses", [&] { packed.sleep(); });
      stored = packed.stored_bytes();
      time("sleep, bf16", [&] { values.sleep(); });
      stored_values = values.stored_bytes();
      time("raw read", [&] { raw.read(); });
      touch_fresh(bytes);
      time("raw read, fresh", [&] { raw.read_into_fresh(); });
      touch_fresh(bytes);
      time("raw read, digest, copy", [&] { raw.read_digest_and_copy(); });
      time("verify", [&] { plain.verify(); });
      touch_fresh(bytes);
      time("touch", [&] { touch_fresh(bytes); });
      time("wake", [&] { plain.wake(); });
      plain.finish();
      time("plain read", [&] { raw.plain_read(); });
      touch_fresh(bytes);
      time("wake, compresses", [&] { packed.wake(); });
      packed.finish();
      touch_fresh(bytes);
      time("wake, bf16", [&] { values.wake(); });
      values.finish();
    }
    const auto rate = [&](const std::string& name) { return static_cast<double>(bytes) / 1e9 / median(times[name]); };
    json = {{"bytes", bytes},
            {"rounds", rounds},
            {"level", level},
            {"compressed_to", static_cast<double>(stored) / static_cast<double>(bytes)},
            {"bf16_to", static_cast<double>(stored_values) / static_cast<double>(bytes)},
            {"unit", "GB/s of memory, median"}};
    for (const auto& [name, direction] :
         {std::pair("sleep", "write"), std::pair("sleep, compresses", "write"), std::pair("wake", "read"),
          std::pair("sleep, bf16", "write"), std::pair("wake, compresses", "read"), std::pair("wake, bf16", "read"),
          std::pair("verify", "read")}) {
      const double ceiling = std::max(rate(std::string("raw ") + direction),
                                      std::string_view(direction) == "read" ? rate("plain read") : 0);
      json[name] = {{"torpor", rate(name)},
                    {"baseline", rate(std::string("plain ") + direction)},
                    {"ceiling", ceiling},
                    {"times_baseline", rate(name) / rate(std::string("plain ") + direction)},
                    {"of_ceiling", rate(name) / ceiling}};
    }
    json["raw_reads"] = {{"into_fresh_memory", rate("raw read, fresh")},
                         {"digest_and_copy", rate("raw read, digest, copy")}};
    json["fresh_memory"] = rate("touch");
    json["ls"] = {{"checkpoints", many}, {"seconds", list_seconds((place / "many").string(), many, rounds)}};
  }
  boost::filesystem::remove_all(place);
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print(
      "{} MiB of memory, median of {} rounds, GB/s; what compresses goes to {:.0f} % at level {}, bf16 to {:.0f} %\n",
      mib, rounds, 100 * json["compressed_to"].get<double>(), level, 100 * json["bf16_to"].get<double>());
  for (const char* name :
       {"sleep", "sleep, compresses", "sleep, bf16", "wake", "wake, compresses", "wake, bf16", "verify"}) {
    const auto& row = json[name];
    fmt::print("{:<18} torpor {:.2f}, plain file {:.2f}, the machine's best {:.2f}: {:.2f} x, {:.0f} %\n", name,
               row["torpor"].get<double>(), row["baseline"].get<double>(), row["ceiling"].get<double>(),
               row["times_baseline"].get<double>(), 100 * row["of_ceiling"].get<double>());
  }
  fmt::print("raw reads into fresh memory {:.2f}; into warm memory, a digest taken, then copied into fresh {:.2f}\n",
             json["raw_reads"]["into_fresh_memory"].get<double>(), json["raw_reads"]["digest_and_copy"].get<double>());
  fmt::print("first touch of fresh memory, part of every wake: {:.2f}\n", json["fresh_memory"].get<double>());
  fmt::print("ls of {} checkpoints: {:.3f} s\n", many, json["ls"]["seconds"].get<double>());
  return 0;
}
