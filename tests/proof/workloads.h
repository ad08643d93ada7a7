// SPDX-License-Identifier: Apache-2.0
// What writers of checkpoints do, and what must hold afterwards however they were cut off. The crash, power-loss and
// fault proofs share them.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_manager.h"
#include "tests/support/long_run.h"

namespace torpor::proof {

// What a workload says of a generation while it runs.
enum class Word : char {
  kMust = 'm',     // it was acknowledged: from now on it must be there, whole
  kFree = 'f',     // it may go from now on
  kDamaged = 'd',  // it is being damaged on purpose
};

struct World {
  FileSystem& file_system;
  std::string directory;
  std::function<void(Word, uint64_t generation)> report;
};

// The ways of writing a checkpoint.
struct Variant {
  const char* name;
  CheckpointManagerOptions options;
  int ranks = 1;
};
const std::vector<Variant>& variants();  // plain, authenticated, encrypted, compressed, two ranks

struct Workload {
  const char* name;
  std::function<Status(const World&, const Variant&)> run;
};
const std::vector<Workload>& workloads();  // nine

// What was told, as far as it goes.
struct Promise {
  std::set<uint64_t> must;
  std::set<uint64_t> damaged;
  void hear(Word word, uint64_t generation);
};

// Every visible checkpoint is whole, but those damaged on purpose; all that must be there are. Then a writer comes,
// works, and leaves nothing behind but whole checkpoints. Empty: all right.
std::string broken_promise(FileSystem& file_system, const std::string& directory, const Variant& variant,
                           const Promise& promise);

using test::long_run;

}  // namespace torpor::proof
