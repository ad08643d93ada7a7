// SPDX-License-Identifier: Apache-2.0
// StoredImages: images of hibernated requests (engine/request_images.h) on disk (checkpoint/image_store.h).
//
//   in host memory ── store() ── on disk alone ── read_back(), take() ── in host memory, its files gone
//                                     │                └── put_back(): as before
//                                     └── release() of each request: they were aborted, its files go with the last
//
//   on disk, of another engine ── open(), RequestImages::read(), take() ── in host memory of this one
//
// An image is on disk, whole and durable, before its host memory goes; and its files go only after it was read and
// verified, by take(), which one of several engines can do. Owner: the engine core. Threads: its own.
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
  // All outlive it. `directory`: of checkpoints; empty: none is configured.
  StoredImages(EngineHooks& hooks, RequestImages& images, FileSystem& file_system, std::string directory,
               CheckpointManagerOptions options)
      : ranks_(hooks), images_(images), store_(file_system, std::move(directory), std::move(options)) {}

  // Write an image to disk, then free its host memory. Return its path. `fingerprint`: of this engine. `outputs`: the
  // front end's part of its requests. An image that is there already: its path. After an error it is in host memory,
  // and nothing is on disk.
  Result<std::string> store(const std::string& id, Fingerprint fingerprint, Value outputs);
  // Hold an image of this engine, and read it into host memory, verified. kNotFound: another engine has taken it.
  // kUnavailable: another one reads it. kCorruption: it is damaged, and stays. An image that never left memory is
  // verified there.
  Result<const RequestImages::Image*> read_back(const std::string& id);
  struct Opened {
    const HeldImage* image;  // until take() or put_back()
    EngineCheckpoint state;  // valid
  };
  // Hold an image of another engine, and read its state. kFailedPrecondition: this engine has an image of its name, or
  // holds it. kCorruption: it is damaged.
  Result<Opened> open(const std::string& path);
  // HeldImage::meaning_of(), of an image that is held. An error of another image stays as it is.
  Error meaning_of(const std::string& id, Error error) const;
  // The image that is held is this engine's: its files go. kNotFound: another engine was first. Nothing happens where
  // none is held.
  Status take(const std::string& id);
  // Let go of an image that is held. One that was read back leaves memory again.
  void put_back(const std::string& id) noexcept;
  // Let go of all images that are held, as the end of the process would.
  void close() noexcept { held_.clear(); }
  // As RequestImages::release(), of a request that has ended. The files of an image go with its last request, or note
  // that it has ended.
  std::optional<Bytes> release(const std::string& request);
  // Forget an image of this engine that another one has taken. Return its requests.
  std::vector<std::string> forget(const std::string& id);
  // Return the path of an image of this engine that is on disk alone; else "".
  std::string path_of(const std::string& id) const;

 private:
  Result<std::string> write(const std::string& id, uint64_t bytes, EngineCheckpoint checkpoint);

  RankGroup ranks_;
  RequestImages& images_;
  ImageStore store_;
  bool swept_ = false;                                  // of leftovers, once
  std::map<std::string, HeldImage, std::less<>> held_;  // by id
  std::map<std::string, SealId, std::less<>>
      written_;  // of each image that is on disk alone: the checkpoint that it is
};

}  // namespace torpor
