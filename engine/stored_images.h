// SPDX-License-Identifier: Apache-2.0
// StoredImages: images of hibernated requests (engine/request_images.h) on disk (checkpoint/image_store.h).
//
//   in host memory ── store() ── on disk alone ── read_back(), take() ── in host memory, its files gone
//                                     │                └── put_back(): as before
//                                     └── release() of each request: they were aborted, its files go with the last
//
//   on disk, of another engine ── open(), RequestImages::read(), take() ── in host memory of this one
//
// An image is whole and durable on disk before its host memory is freed. Its files are deleted by take() only, after it
// was read and verified; only one of several engines can take an image.
//
// Owner: the engine core. Threads: the engine core's. Failure: errors are values.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/file_system.h"
#include "base/value.h"
#include "checkpoint/image_store.h"
#include "engine/engine_hooks.h"
#include "engine/rank_group.h"
#include "engine/request_images.h"

namespace torpor {

class StoredImages {
 public:
  // All outlive this object. `directory`: the directory of checkpoints; empty: none is configured.
  StoredImages(EngineHooks& hooks, RequestImages& images, FileSystem& file_system, std::string directory,
               CheckpointManagerOptions options)
      : ranks_(hooks), images_(images), store_(file_system, std::move(directory), std::move(options)) {}

  // Write an image to disk, then free its host memory. Return its path; if it is on disk already, only that.
  // `fingerprint`: of this engine. `outputs`: the front end's part of the requests. After an error the image is in host
  // memory, and nothing is on disk, unless the error says so.
  Result<std::string> store(const std::string& id, Fingerprint fingerprint, Value outputs);
  // Hold an image of this engine, and read it into host memory, verified. An image that never left memory is verified
  // there. kNotFound: another engine has taken it. kUnavailable: another engine reads it. kCorruption: it is damaged,
  // and stays.
  Result<const RequestImages::Image*> read_back(const std::string& id);
  struct Opened {
    const HeldImage* image;  // valid until take() or put_back()
    EngineCheckpoint state;  // checked: valid()
  };
  // Hold an image of another engine, and read its state. kFailedPrecondition: this engine has an image of its name, or
  // holds it. kCorruption: it is damaged.
  Result<Opened> open(const std::string& path);
  // Return what an error means for an image that is held (HeldImage::meaning_of()). Errors of other images are returned
  // unchanged.
  Error meaning_of(const std::string& id, Error error) const;
  // Make an image that is held this engine's, and delete its files. kNotFound: another engine was first. It does
  // nothing if the image is not held.
  Status take(const std::string& id);
  // Release an image that is held. One that was read back leaves memory again.
  void put_back(const std::string& id) noexcept;
  // Release all images that are held, as the end of the process would.
  void close() noexcept { held_.clear(); }
  // Release a request that has ended (RequestImages::release()). With the last request of an image its files are
  // deleted; before, they note that this request has ended.
  std::optional<Bytes> release(const std::string& request);
  // Forget an image of this engine that another engine has taken. Return the ids of its requests.
  std::vector<std::string> forget(const std::string& id);
  // Return the path of an image of this engine that is on disk alone; otherwise "".
  std::string path_of(const std::string& id) const;

 private:
  Result<std::string> write(const std::string& id, uint64_t bytes, EngineCheckpoint checkpoint);

  RankGroup ranks_;
  RequestImages& images_;
  ImageStore store_;
  bool swept_ = false;                                  // leftovers were removed, once
  std::map<std::string, HeldImage, std::less<>> held_;  // by id
  std::map<std::string, SealId, std::less<>>
      written_;  // image id -> the checkpoint that it is, for images that are on disk alone
};

}  // namespace torpor
