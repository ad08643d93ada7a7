// SPDX-License-Identifier: Apache-2.0
// SessionEngine: one process of the simulation of sessions. It serves requests from KV blocks in device memory, and its
// requests leave, come back, fork, move and end.
//
// Images, forks, ownership of images on disk and the ranks are torpor's own code. What vLLM and
// bindings/python/torpor/vllm/sessions.py do around it is written here again: a scheduler, and in which order a call
// asks the parts. Each token depends on every byte of KV before it, so a wrong byte, or KV of other weights, shows as a
// wrong token.
//
// Owner: the test. Threads: one. Failure: errors are values; the engine is as before, unless a comment says otherwise.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/forks.h"
#include "engine/rank_memory.h"
#include "engine/reference/idle_hooks.h"
#include "engine/stored_images.h"
#include "tests/support/faulty_file_system.h"

namespace torpor::test {

// A mistake that the simulation must find.
enum class Planted : uint8_t {
  kNone,
  kNoEpochCheck,      // KV of other weights is used
  kFreeBeforeVerify,  // requests are forgotten, and their blocks freed, before their image is whole
  kAdmitTwice,        // an image is used that another engine has taken
};

// Return the token that a run without any pause gives after `tokens`.
int32_t expected_token(const std::vector<int32_t>& tokens, std::optional<int64_t> seed, uint64_t weights);

class SessionEngine final : public IdleHooks {
 public:
  static constexpr int32_t kBlocks = 40;
  static constexpr int32_t kBlockTokens = 4;

  struct Token {
    std::string request;
    size_t index = 0;  // among the output tokens
    int32_t token = 0;
    bool last = false;
  };

  // `number`: no other engine has it. `disk` and `clock` outlive the engine. `directory`: of checkpoints.
  SessionEngine(uint64_t number, FileSystem& disk, const Clock& clock, const std::string& directory, int32_t ranks,
                uint64_t weights, Planted planted);
  SessionEngine(const SessionEngine&) = delete;
  SessionEngine& operator=(const SessionEngine&) = delete;
  ~SessionEngine() override;

  // Steps of this process: calls to its file system, and orders to its ranks.
  FaultPlan& plan() { return files_.plan; }

  void add(RequestState request);
  // Bring the KV of requests that are resumed, if there are blocks, and compute a token of each running request.
  std::vector<Token> step();
  // Take requests out. `to_disk`: also write the image to disk; if that fails, the requests are resumed.
  Status hibernate(const std::string& image, const std::vector<std::string>& requests, bool to_disk);
  // Put the requests of an image of this engine back. kNotFound: another engine has taken it; they have ended here.
  Status resume_image(const std::string& image);
  // Read an image on disk, verified, and hold it. The engine takes no other call until finish().
  Status open(const std::string& path);
  // Take the image that is held, and go on with its requests; without `keep` put it back. After an error the image is
  // put back, or another engine has it.
  Status finish(bool keep);
  // Fork a running request into one child for each of `seeds`. Return their ids.
  Result<std::vector<std::string>> fork(const std::string& request, std::optional<int64_t> at,
                                        const std::vector<std::optional<int64_t>>& seeds);
  // End a request, wherever this engine has it.
  void end(const std::string& request);
  // Give the engine other weights: all KV from before is void.
  void set_weights(uint64_t weights);

  uint64_t number() const { return number_; }
  uint64_t weights() const { return weights_; }
  std::string path_of(const std::string& image) const { return stored_.path_of(image); }
  // Return the image that is held between open() and finish(), or "".
  std::string holds() const { return pending_ ? pending_->image : ""; }
  // Requests that run or wait to run, by id, with their output tokens.
  std::map<std::string, std::vector<int32_t>> served() const;
  std::set<std::string> running() const;  // of these, those that have KV in blocks, or compute it
  struct Held {
    std::set<std::string> requests{};
    bool in_memory = true;
  };
  // Images that are not being resumed, without the one that is held for another engine's requests.
  std::map<std::string, Held> hibernated() const;
  // Return what is wrong with the accounts of blocks and host memory, or "".
  std::string leak() const;

  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override;
  Result<Fingerprint> fingerprint() override;

 private:
  struct Rank {
    std::unique_ptr<RankMemory> memory{};
    DeviceAddress kv = 0;
  };
  struct Running {
    RequestState state;
    std::vector<int32_t> blocks{};
  };
  struct Waiting {
    RequestState state;
    int32_t computed = 0;  // tokens whose KV an image has
    uint64_t epoch = 0;    // when it was resumed
  };
  struct Pending {
    std::string image;
    std::vector<RequestState> requests{};
  };

  bool admit(const Waiting& waiting);
  bool compute(Running& running, std::vector<Token>& tokens);
  bool reserve(std::vector<int32_t>& blocks, size_t count);
  void free(std::vector<int32_t>& blocks);
  size_t free_blocks() const;
  uint64_t& kv(int32_t rank, const std::vector<int32_t>& blocks, size_t position);
  void release(const std::string& request);
  void send_drops();
  void wait(RequestState request, bool recompute);
  Status moved(const std::string& image, Error error);

  const uint64_t number_;
  FaultyFileSystem files_;
  const Planted planted_;
  uint64_t weights_;
  uint64_t epoch_ = 0;  // counts changes of the weights
  uint64_t forks_ = 0;
  std::vector<Rank> ranks_;
  std::vector<int> references_ = std::vector<int>(kBlocks, 0);
  std::map<std::string, Running> running_;
  std::vector<Waiting> waiting_;
  std::optional<Pending> pending_;
  std::vector<Bytes> drops_;                // orders that free images, and have not been carried out
  std::map<std::string, uint64_t> epochs_;  // of each image: epoch_ when it was made
  RequestImages images_;
  StoredImages stored_;
};

}  // namespace torpor::test
