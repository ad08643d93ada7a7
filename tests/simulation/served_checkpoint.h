// SPDX-License-Identifier: Apache-2.0
// ServedCheckpoint: a checkpoint that is written while the engine steps: begun, cancelled, taken and ended in random
// steps. Sometimes the engine ends after that, and another one wakes from the checkpoint.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "console/reference_run.h"
#include "tests/simulation/scenario.h"

namespace torpor::test {

class ServedCheckpoint {
 public:
  struct Rewind {
    std::string checkpoint;
    Streams streams;  // at the time it was taken
    int step = 0;
  };
  // Counts in `written` and `rewound`.
  ServedCheckpoint(console::ReferenceRun& run, Dice& dice, double chance, int& written, int& rewound)
      : run_(run), dice_(dice), chance_(chance), written_(written), rewound_(rewound) {}

  bool faulted = false;  // a call failed since it began
  void gone() { writing_ = false; }
  void newer_one() { newest_ = false; }  // this checkpoint may have been removed: the engine keeps few
  std::optional<Rewind> take_rewind() { return std::exchange(rewind_, std::nullopt); }

  // Call after each step. Return an error if the checkpoint failed.
  Status serve(const Streams& streams, int step) {
    if (!writing_) {
      if (!dice_.chance(chance_)) return ok();
      faulted = false;
      Status begun = run_.begin_checkpoint();
      writing_ = begun.has_value();
      return begun;
    }
    if (dice_.chance(0.03)) {
      run_.cancel_checkpoint();
      writing_ = false;
      return ok();
    }
    if (dice_.chance(0.3)) return ok();
    TORPOR_ASSIGN_OR_RETURN(const CheckpointStage stage, run_.continue_checkpoint());
    if (stage == CheckpointStage::kReady && dice_.chance(0.5)) {
      taken_ = {.checkpoint = {}, .streams = streams, .step = step};
      newest_ = true;
      return run_.take_checkpoint();
    }
    if (stage != CheckpointStage::kEnded) return ok();
    writing_ = false;
    Result<SleepReport> report = run_.end_checkpoint();
    if (!report && report.error().code == Code::kAborted) return ok();  // a sleep ended it
    if (!report) return std::move(report).error();
    ++written_;
    if (!newest_ || rewound_ == kMostRewound || dice_.chance(0.5)) return ok();
    ++rewound_;
    rewind_ = taken_;
    rewind_->checkpoint = report->checkpoint;
    return ok();
  }

 private:
  static constexpr int kMostRewound = 3;
  console::ReferenceRun& run_;
  Dice& dice_;
  const double chance_;
  int& written_;
  int& rewound_;
  bool writing_ = false;
  bool newest_ = false;
  Rewind taken_;
  std::optional<Rewind> rewind_;
};

}  // namespace torpor::test
