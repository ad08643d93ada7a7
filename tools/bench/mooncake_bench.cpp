// SPDX-License-Identifier: Apache-2.0
// KV blocks to a Mooncake store and back by MooncakeStore: a library for remote_mooncake.py. Mooncake's client is an
// object of Python, so its calls come in as a function.
#include "remote/mooncake_store.h"
#include "tools/bench/block_rates.h"

namespace {

using namespace torpor;
using remote::MooncakeAnswers;
using remote::MooncakeValue;

enum Verb : int { kUse, kPut, kGet, kExist, kRemove };
// Does it with so many keys; kUse: with one place alone. An answer each. 0: it did.
using Call = int (*)(int verb, size_t count, const char* const* keys, void* const* places, const size_t* sizes,
                     int64_t* answers);

class CalledMooncake final : public remote::MooncakeClient {
 public:
  explicit CalledMooncake(Call call) : call_(call) {}
  Status use(std::span<std::byte> memory) override {
    const MooncakeValue whole{.bytes = memory};
    const MooncakeAnswers answers = ask(kUse, {&whole, 1});
    return answers ? ok() : Status(answers.error());
  }
  MooncakeAnswers put(std::span<const MooncakeValue> values) override { return ask(kPut, values); }
  MooncakeAnswers get(std::span<const MooncakeValue> values) override { return ask(kGet, values); }
  MooncakeAnswers exist(std::span<const MooncakeValue> values) override { return ask(kExist, values); }
  MooncakeAnswers remove(std::span<const MooncakeValue> values, bool) override { return ask(kRemove, values); }

 private:
  MooncakeAnswers ask(Verb verb, std::span<const MooncakeValue> values) {
    std::vector<const char*> keys;
    std::vector<void*> places;
    std::vector<size_t> sizes;
    for (const MooncakeValue& value : values) {
      keys.push_back(value.key.c_str());
      places.push_back(value.bytes.data());
      sizes.push_back(value.bytes.size());
    }
    std::vector<int64_t> answers(values.size());
    if (call_(verb, values.size(), keys.data(), places.data(), sizes.data(), answers.data()) == 0) return answers;
    return Error{.code = Code::kUnavailable, .what = "Mooncake's client raises an error"};
  }

  const Call call_;
};

}  // namespace

// `rates`: of put and get, in GB/s.
extern "C" __attribute__((visibility("default"))) void torpor_mooncake_bench(Call call, uint64_t bytes, int32_t blocks,
                                                                             int threads, size_t batch, size_t warm,
                                                                             double (&rates)[2]) {
  const auto store = bench::must(remote::MooncakeStore::open(
      {.slots = blocks, .record_bytes = bytes, .timeout = std::chrono::seconds(60), .threads = threads},
      [call] { return std::make_shared<CalledMooncake>(call); }, system_clock()));
  store->open_space(1, digest_of({}));
  const bench::BlockRates found =
      bench::block_rates(*store, {.bytes = bytes, .blocks = blocks, .threads = threads, .batch = batch}, warm);
  rates[0] = found.put_gb_per_s;
  rates[1] = found.get_gb_per_s;
}
