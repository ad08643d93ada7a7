// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/state_sections.h"

#include <rapidcheck.h>

#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::example_checkpoint;
using test::value_of;

Value arbitrary_value(int depth) {
  Value value;
  switch (*rc::gen::inRange(0, depth > 0 ? 10 : 8)) {
    case 0: break;
    case 1: value.data = *rc::gen::arbitrary<bool>(); break;
    case 2: value.data = *rc::gen::arbitrary<int64_t>(); break;
    case 3: value.data = *rc::gen::map(rc::gen::arbitrary<int>(), [](int i) { return i / 8.0; }); break;
    case 4: value.data = *rc::gen::arbitrary<std::string>(); break;
    case 5: value.data = *rc::gen::arbitrary<Bytes>(); break;
    case 6: value.data = *rc::gen::arbitrary<IntArray>(); break;
    case 7: value.data = RealArray{0.5, -1e300}; break;
    case 8: value.data = List{arbitrary_value(depth - 1), arbitrary_value(depth - 1)}; break;
    case 9: value.data = Dict{{"a", arbitrary_value(depth - 1)}, {"b", arbitrary_value(depth - 1)}}; break;
  }
  return value;
}

RequestState arbitrary_request(std::string id) {
  RequestState request{.id = std::move(id)};
  request.priority = *rc::gen::arbitrary<int32_t>();
  request.status = *rc::gen::element(RequestStatus::kWaiting, RequestStatus::kPreempted);
  request.prompt_token_ids = *rc::gen::arbitrary<std::vector<int32_t>>();
  request.output_token_ids = *rc::gen::arbitrary<std::vector<int32_t>>();
  if (*rc::gen::arbitrary<bool>()) request.cache_salt = *rc::gen::arbitrary<std::string>();
  if (*rc::gen::arbitrary<bool>()) request.sampling.seed = *rc::gen::arbitrary<int64_t>();
  request.sampling.stop = *rc::gen::arbitrary<std::vector<std::string>>();
  request.sampling.engine = arbitrary_value(3);
  request.block_hashes = *rc::gen::arbitrary<Bytes>();
  return request;
}

TEST(EngineCheckpoint, WhatIsEncodedIsDecoded) {
  EXPECT_EQ(value_of(decode(encode(example_checkpoint()))).state, example_checkpoint().state);
  EXPECT_EQ(value_of(decode(encode(EngineCheckpoint{}))), EngineCheckpoint{});
  EXPECT_TRUE(rc::check([] {
    EngineCheckpoint checkpoint = example_checkpoint();
    const int count = *rc::gen::inRange(0, 6);
    for (int i = 0; i < count; ++i) checkpoint.state.scheduler.requests.push_back(arbitrary_request(std::to_string(i)));
    checkpoint.outputs = arbitrary_value(4);
    checkpoint.metadata = {{"count", std::to_string(count)}};
    checkpoint.fingerprint.clear();  // the manifest's
    checkpoint.state.kv.free_order = *rc::gen::arbitrary<std::vector<int32_t>>();
    RC_ASSERT(*decode(encode(checkpoint)) == checkpoint);
  }));
}

TEST(EngineCheckpoint, AMissingSectionIsNamed) {
  std::vector<Section> sections = encode(example_checkpoint());
  for (size_t i = 0; i < sections.size(); ++i) {
    std::vector<Section> fewer = sections;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_FAILS(decode(fewer), Code::kCorruption, sections[i].name);
  }
}

// Digests keep accidents out before decode() runs; even without them nothing crashes or grows.
TEST(EngineCheckpoint, AnyDamagedByteIsAnErrorOrAnotherValueButNeverACrash) {
  const std::vector<Section> sections = encode(example_checkpoint());
  for (size_t s = 0; s < sections.size(); ++s) {
    for (size_t at = 0; at < sections[s].bytes.size(); ++at) {
      for (const uint8_t mask : {0x01, 0x80, 0xff}) {
        std::vector<Section> damaged = sections;
        damaged[s].bytes[at] ^= mask;
        const Result<EngineCheckpoint> decoded = decode(damaged);
        if (decoded) {
          EXPECT_NE(encode(*decoded), sections);  // by bytes: 0.0 equals -0.0
          (void)decoded->state.validate();
        }
      }
    }
    for (size_t cut = 0; cut < sections[s].bytes.size(); ++cut) {
      std::vector<Section> damaged = sections;
      damaged[s].bytes.resize(cut);
      EXPECT_FALSE(decode(damaged).has_value()) << sections[s].name << " cut to " << cut;
    }
  }
}

TEST(EngineCheckpoint, AnotherVersionOfASectionIsIncompatible) {
  std::vector<Section> sections = encode(example_checkpoint());
  sections[1].bytes[0] = 99;
  EXPECT_FAILS(decode(sections), Code::kIncompatible, "version");
}

TEST(EngineCheckpoint, ContradictionsBetweenThePartsAreFound) {
  const auto damaged = [](auto damage) {
    CapturedState state = example_checkpoint().state;
    damage(state);
    return state.validate();
  };
  EXPECT_SUCCEEDS(damaged([](auto&) {}));
  EXPECT_FAILS(damaged([](auto& s) { s.kv.groups[0].tables[0].request = "nobody"; }), Code::kCorruption, "nobody");
  EXPECT_FAILS(damaged([](auto& s) { s.kv.groups[0].block_size = 2; }), Code::kCorruption, "computed tokens in");
  EXPECT_FAILS(damaged([](auto& s) { s.scheduler.requests[1].num_computed_tokens = 2; }), Code::kCorruption,
               "no blocks");
  EXPECT_FAILS(damaged([](auto& s) { s.workers[0].rows = {"nobody"}; }), Code::kCorruption, "nobody");
  EXPECT_FAILS(damaged([](auto& s) { s.workers[0].rows = {"run", "run"}; }), Code::kCorruption, "two rows");
  EXPECT_FAILS(damaged([](auto& s) { s.workers[0].rank = 1; }), Code::kCorruption, "rank");
  EXPECT_SUCCEEDS(damaged([](auto& s) { s.workers[0].rows = {"run", "gone"}; }));  // finished, the worker not told yet
}

TEST(Fingerprint, EveryDifferenceIsNamedWithBothValues) {
  const Fingerprint ours{{"model", "a"}, {"dtype", "bf16"}, {"extra", "1"}};
  const Fingerprint theirs{{"model", "b"}, {"dtype", "bf16"}, {"other", "2"}};
  EXPECT_SUCCEEDS(compare_fingerprints(ours, ours));
  const Status compared = compare_fingerprints(theirs, ours);
  for (const char* part : {"model: checkpoint has b, this engine has a", "other", "extra"})
    EXPECT_FAILS(compared, Code::kIncompatible, part);
  EXPECT_EQ(compared.error().what.find("dtype"), std::string::npos);
}

TEST(Fingerprint, RequestsMoveBetweenEnginesOfOtherReleasesAndSizesOfTheSameModel) {
  const Fingerprint ours{{"model_config", "a"}, {"vllm_version", "0.32"}, {"max_num_seqs", "16"}, {"threads", "2"}};
  Fingerprint theirs{{"model_config", "a"}, {"vllm_version", "0.33"}, {"max_num_seqs", "8"}, {"prefix_hash", "x"}};
  EXPECT_SUCCEEDS(compare_portable(theirs, ours));
  EXPECT_FAILS(compare_fingerprints(theirs, ours), Code::kIncompatible, "vllm_version");
  theirs["model_config"] = "b";
  EXPECT_FAILS(compare_portable(theirs, ours), Code::kIncompatible, "model_config: checkpoint has b");
  theirs["model_config"] = "a";
  for (const char* field : {"kv_layout", "weights_digest_rank0", "model_runner", "dtype"}) {
    Fingerprint other = theirs;
    other[field] = "1";
    EXPECT_FAILS(compare_portable(other, ours), Code::kIncompatible, field);
  }
  // Another release of transformers makes another configuration of the same files.
  theirs["model_config"] = "b";
  theirs["transformers_version"] = "5";
  EXPECT_SUCCEEDS(compare_portable(theirs, ours));
}

}  // namespace
}  // namespace torpor
