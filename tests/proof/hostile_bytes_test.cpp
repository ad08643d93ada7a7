// SPDX-License-Identifier: Apache-2.0
// A checkpoint of 64 KiB with every bit flipped in turn, cut at every length, with sections and chunks of another one
// put into it, sealed and not: none is believed, and the memory taken before it is authenticated stays within its size.
#include <malloc.h>
#include <cstdlib>
#include <set>

#include <fmt/core.h>

#include "base/units.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/verify.h"
#include "tests/proof/workloads.h"
#include "tests/support/example_state.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"

namespace torpor::proof {
namespace {

using test::ModelFileSystem;
using test::value_of;

constexpr const char* kPath = "/store/g-000001";

// Chunks of whole pages, so that no byte of the files is without a meaning.
Status write_64_kib(CheckpointManager& manager, uint8_t seed) {
  EngineCheckpoint state = test::example_checkpoint();
  state.fingerprint["seed"] = std::to_string(seed);
  state.state.scheduler.requests[0].prompt_token_ids.resize(600 + seed, seed);  // so that sections differ
  TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager.begin(0));
  TORPOR_RETURN_IF_ERROR(pending.write_state(state));
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<RankWriter> writer, pending.create_rank(0));
  std::vector<SavedChunk> chunks;
  for (uint64_t i = 1; i <= 14; ++i) {
    std::vector<std::byte> bytes(kPage);
    for (size_t at = 0; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(at * 31 + i * 7 + seed);
    SavedChunk chunk{.key = {.kind = i <= 4 ? ChunkKind::kKvBlock : ChunkKind::kRegion,
                             .tag = i <= 4 ? "kv_cache" : "weights",
                             .region = i <= 4 ? "" : "w",
                             .index = i},
                     .bytes = bytes.size(),
                     .digest = digest_of(bytes)};
    RecordPart part{&chunk, bytes, ok()};
    writer->put({&part, 1});
    TORPOR_RETURN_IF_ERROR(std::move(part.status));
    chunks.push_back(chunk);
  }
  TORPOR_ASSIGN_OR_RETURN(RankSummary summary, writer->write_refs(chunks));
  pending.add_rank(std::move(summary));
  TORPOR_RETURN_IF_ERROR(pending.commit());
  return ok();
}

// Whether anything of it would be believed.
bool believed(ModelFileSystem& system, const std::shared_ptr<const Key>& key) {
  const Result<Checkpoint> checkpoint = open_checkpoint(system, kPath, key);
  if (!checkpoint) return false;
  const Result<Verification> found = verify(*checkpoint, {.threads = 1});
  return found && found->problems.empty();
}

class HostileBytes : public ::testing::TestWithParam<int> {
 protected:
  const Variant& variant() const { return variants()[static_cast<size_t>(GetParam())]; }
  void write(ModelFileSystem& system, uint8_t seed) const {
    const auto manager = value_of(CheckpointManager::open(system, "/store", variant().options));
    ASSERT_SUCCEEDS(write_64_kib(*manager, seed));
  }
  Bytes& file(ModelFileSystem& system, const std::string& name) const {
    const int node = system.find(std::string(kPath) + "/" + name);
    return system.disk().at(static_cast<size_t>(node)).bytes;
  }
  std::vector<SavedChunk> chunks(ModelFileSystem& system) const {
    const Checkpoint checkpoint = value_of(open_checkpoint(system, kPath, variant().options.key));
    return value_of(checkpoint.refs(checkpoint.manifest().ranks[0])).records;
  }
  size_t first_chunk(ModelFileSystem& system) const {
    size_t first = SIZE_MAX;
    for (const SavedChunk& chunk : chunks(system)) first = std::min(first, static_cast<size_t>(chunk.offset));
    return first;
  }
  // Flips every bit of the chunks, the same one of each chunk at a time: each must be found to be bad by itself.
  uint64_t flip_in_chunks(ModelFileSystem& system) const {
    Bytes& bytes = file(system, "chunks-r0");
    const std::vector<SavedChunk> all = chunks(system);
    const Checkpoint checkpoint = value_of(open_checkpoint(system, kPath, variant().options.key));
    uint64_t flips = 0;
    for (size_t bit = 0; bit < all[0].stored_bytes * 8; ++bit) {
      const auto flip = [&] {
        for (const SavedChunk& chunk : all) bytes.at(chunk.offset + bit / 8) ^= static_cast<uint8_t>(1u << (bit % 8));
      };
      flip();
      const Verification found = value_of(verify(checkpoint, {.threads = 1}));
      const std::set<std::string> bad(found.bad_chunks.begin(), found.bad_chunks.end());
      EXPECT_EQ(bad.size() + found.bad_blocks.size(), all.size()) << "bit " << bit;
      if (HasFailure()) break;
      flip();
      flips += all.size();
    }
    return flips;
  }
  static constexpr const char* kFiles[] = {"MANIFEST", "STATE", "refs-r0", "chunks-r0"};
};
INSTANTIATE_TEST_SUITE_P(Seals, HostileBytes, ::testing::Range(0, 3), [](const auto& info) {
  return std::string(variants()[static_cast<size_t>(info.param)].name);
});

TEST_P(HostileBytes, NoFlippedBitAndNoTruncationIsBelieved) {
  ModelFileSystem system;
  write(system, 1);
  const auto& key = variant().options.key;
  ASSERT_TRUE(believed(system, key));
  uint64_t flips = flip_in_chunks(system);
  uint64_t cuts = 0;
  for (const char* name : kFiles) {
    Bytes& bytes = file(system, name);
    const size_t until = std::string_view(name) == "chunks-r0" ? first_chunk(system) : bytes.size();
    for (size_t bit = 0; bit < until * 8; ++bit) {
      const auto mask = static_cast<uint8_t>(1u << (bit % 8));
      bytes[bit / 8] ^= mask;
      ASSERT_FALSE(believed(system, key)) << name << ", bit " << bit;
      bytes[bit / 8] ^= mask;
      ++flips;
    }
    const Bytes whole = bytes;
    for (size_t length = 0; length<whole.size(); length += whole.size()> 8192 && !long_run() ? 7 : 1) {
      bytes.resize(length);
      ASSERT_FALSE(believed(system, key)) << name << " cut to " << length;
      bytes = whole;
      ++cuts;
    }
  }
  ASSERT_TRUE(believed(system, key));
  std::printf("proof: %s: %lu flipped bits and %lu truncations, none believed\n", variant().name,
              static_cast<unsigned long>(flips), static_cast<unsigned long>(cuts));
  EXPECT_GT(flips, 500'000u);
}

TEST_P(HostileBytes, NothingSwappedOrTakenFromAnotherCheckpointIsBelieved) {
  ModelFileSystem system;
  ModelFileSystem other;
  write(system, 1);
  write(other, 2);
  const auto& key = variant().options.key;
  uint64_t splices = 0;
  const auto expect_refused = [&](const std::string& what) {
    EXPECT_FALSE(believed(system, key)) << what;
    ++splices;
  };
  for (const char* name : kFiles) {
    const Bytes whole = file(system, name);
    file(system, name) = file(other, name);
    expect_refused(fmt::format("{} of another one", name));
    file(system, name) = whole;
    // Every aligned piece of 64 bytes to 4 KiB, from elsewhere in the file and from the other one.
    for (const size_t size : {size_t{64}, size_t{512}, size_t{4096}}) {
      for (size_t at = 0; at + size <= whole.size(); at += size) {
        const Bytes& theirs = file(other, name);
        for (const Bytes* source : {&whole, &theirs}) {
          const size_t from = source == &whole ? (at + size * 2) % (whole.size() - size + 1) : at;
          if (from + size > source->size() || std::equal(source->begin() + static_cast<std::ptrdiff_t>(from),
                                                         source->begin() + static_cast<std::ptrdiff_t>(from + size),
                                                         whole.begin() + static_cast<std::ptrdiff_t>(at)))
            continue;
          std::copy_n(source->begin() + static_cast<std::ptrdiff_t>(from), size,
                      file(system, name).begin() + static_cast<std::ptrdiff_t>(at));
          expect_refused(fmt::format("{}: {} bytes at {}", name, size, at));
          file(system, name) = whole;
        }
      }
    }
  }
  ASSERT_TRUE(believed(system, key));
  std::printf("proof: %s: %lu splices, none believed\n", variant().name, static_cast<unsigned long>(splices));
  EXPECT_GT(splices, 500u);
}

TEST_P(HostileBytes, WhatWasEncryptedCannotBeFound) {
  if (std::string_view(variant().name) != "encrypted") GTEST_SKIP() << "only of the encrypted one";
  ModelFileSystem system;
  const auto manager = value_of(CheckpointManager::open(system, "/store", variant().options));
  EngineCheckpoint state = test::example_checkpoint();
  const std::string secret = "attack at dawn, says the prompt";
  state.state.scheduler.requests[0].id = secret;
  state.state.scheduler.running[0] = secret;
  state.state.kv.groups[0].tables[0].request = secret;
  state.state.workers[0].rows[0] = secret;
  state.fingerprint["secret"] = secret;
  PendingCheckpoint pending = value_of(manager->begin(0));
  ASSERT_SUCCEEDS(pending.write_state(state));
  ASSERT_SUCCEEDS(pending.commit());
  for (const test::ModelNode& node : system.disk())
    EXPECT_EQ(std::string(node.bytes.begin(), node.bytes.end()).find("dawn"), std::string::npos);
  EXPECT_EQ(value_of(value_of(open_checkpoint(system, kPath, variant().options.key)).read_state()), state);
}

// The same of refs, which say even less before MANIFEST's digest of them was right.
TEST(HostileSizes, NoMoreMemoryThanItsSizeIsTakenForRefs) {
  ModelFileSystem system;
  const Variant& encrypted = variants()[2];
  const auto manager = value_of(CheckpointManager::open(system, "/store", encrypted.options));
  ASSERT_SUCCEEDS(write_64_kib(*manager, 1));
  const Checkpoint checkpoint = value_of(open_checkpoint(system, kPath, encrypted.options.key));
  const RankSummary& rank = checkpoint.manifest().ranks[0];
  Bytes& refs = system.disk().at(static_cast<size_t>(system.find(std::string(kPath) + "/refs-r0"))).bytes;
  const Bytes whole = refs;
  uint64_t tried = 0;
  for (size_t at = 0; at + 8 <= whole.size(); ++at) {
    std::fill_n(refs.begin() + static_cast<std::ptrdiff_t>(at), 8, uint8_t{0x7f});
    const size_t before = ::mallinfo2().uordblks;
    EXPECT_FALSE(checkpoint.refs(rank).has_value());
    EXPECT_LE(::mallinfo2().uordblks, before + whole.size() + kMiB);
    refs = whole;
    ++tried;
  }
  EXPECT_SUCCEEDS(checkpoint.refs(rank));
  refs.resize(8 * kMiB);  // more than MANIFEST says: not even read
  EXPECT_FAILS(checkpoint.refs(rank), Code::kCorruption, "refs-r0");
  EXPECT_GT(tried, 1'000u);
}

// A manifest that promises much more than it is.
TEST(HostileSizes, NoMoreMemoryThanItsSizeIsTakenBeforeItIsAuthenticated) {
  ModelFileSystem system;
  const auto manager = value_of(CheckpointManager::open(system, "/store", variants()[1].options));
  ASSERT_SUCCEEDS(write_64_kib(*manager, 1));
  Bytes manifest = system.disk().at(static_cast<size_t>(system.find(std::string(kPath) + "/MANIFEST"))).bytes;
  uint64_t tried = 0;
  for (size_t at = 0; at + 8 <= manifest.size(); ++at) {
    Bytes forged = manifest;
    std::fill_n(forged.begin() + static_cast<std::ptrdiff_t>(at), 8, uint8_t{0x7f});
    const size_t before = ::mallinfo2().uordblks;
    const Result<OpenedManifest> decoded =
        decode_manifest(std::as_bytes(std::span(forged)), variants()[1].options.key.get());
    EXPECT_FALSE(decoded.has_value());
    EXPECT_LE(::mallinfo2().uordblks, before + forged.size() + kMiB);
    ++tried;
  }
  EXPECT_GT(tried, 500u);
}

}  // namespace
}  // namespace torpor::proof
