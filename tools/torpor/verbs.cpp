// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/verb.h"

namespace torpor::cli {

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> all = {
      ls_verb(),   info_verb(),   tree_verb(), requests_verb(), show_verb(),    blocks_verb(), prefix_verb(),
      du_verb(),   verify_verb(), diff_verb(), cat_verb(),      extract_verb(), fits_verb(),   repair_verb(),
      gc_verb(),   rm_verb(),     push_verb(), pull_verb(),     events_verb(),  record_verb(), console_verb(),
      live_verb(), replay_verb(), mock_verb(), sessions_verb(), pair_verb(),    switch_verb()};
  return all;
}

const std::vector<ExitCode>& exit_codes() {
  static const std::vector<ExitCode> codes = {
      {kFine, "fine"},
      {kDamaged, "damaged"},
      {kUsage, "wrong usage"},
      {kNotFound, "not found"},
      {kOtherFormat, "of another format, version or kind"},
      {kFailed, "could not be read or written, or is not to be trusted (its owner, who may write to it)"},
      {kDiffers, "diff, replay: they differ; fits: it does not fit; console --lint: there is something"},
      {kKey, "the key is missing, or another one"},
      {kRefused, "refused: another process is writing, or there is no room or memory"},
      {kUnknown, "fits: nothing differs, but not all that counts is known here"}};
  return codes;
}

Exit exit_for(Code code) {
  switch (code) {
    case Code::kCorruption: return kDamaged;
    case Code::kInvalidArgument: return kUsage;
    case Code::kNotFound: return kNotFound;
    case Code::kIncompatible:
    case Code::kUnsupported: return kOtherFormat;
    case Code::kUnauthenticated: return kKey;
    case Code::kUnavailable:
    case Code::kAborted:
    case Code::kResourceExhausted: return kRefused;
    default: return kFailed;
  }
}

Json to_json(const Error& error) {
  return {{"code", name(error.code)}, {"what", error.what}, {"next_step", error.next_step}};
}

void declare_path(CLI::App& app, Arguments& arguments) {
  app.add_option("path", arguments.path, "a checkpoint, or a directory of checkpoints, of which the latest is taken")
      ->required();
}

}  // namespace torpor::cli
