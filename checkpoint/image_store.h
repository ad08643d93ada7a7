// SPDX-License-Identifier: Apache-2.0
// ImageStore: images of requests that left their engine, on disk. Each is a checkpoint of these requests alone:
// DIRECTORY/images/NAME/g-000001, with their values, their KV, and a section that says what it is.
//
// An image has one owner. Who takes it renames its g-000001 away, and a rename has one winner: of several engines that
// read an image, one has its requests. Before that hold() takes the lock file of the image, so that they do not read
// for nothing; the lock ends with its process. A kill at any point leaves an image whole, or none.
//
// Owner: an engine core; each image is named by one of them. Threads: one at a time. Errors: those of
// CheckpointManager. Nothing of an image is believed that is not verified.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_manager.h"

namespace torpor {

inline constexpr std::string_view kImagesDirectory = "images";

struct ImageInfo {
  std::string name;
  std::string path;
  bool readable = false;  // its manifest is whole
  Error problem{};        // meaningful unless readable
  double created_unix_seconds = 0;
  uint64_t bytes = 0;         // of its files
  std::set<int32_t> ended{};  // positions of requests that have ended since
};

// An image that no other process takes meanwhile, where locks reach it.
class HeldImage {
 public:
  // `path`: of the image. kNotFound: there is none, or another process has taken it. kUnavailable: another process
  // holds it. kIncompatible: it is something else.
  static Result<HeldImage> hold(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key);
  HeldImage(HeldImage&&) noexcept;
  HeldImage& operator=(HeldImage&&) noexcept;
  ~HeldImage();  // lets go of it

  const std::string& name() const;
  const Checkpoint& checkpoint() const;
  const std::set<int32_t>& ended() const;  // positions of requests that have ended since it was written
  // What an error of reading it means: kNotFound where another engine has taken it meanwhile, as one on another host
  // can whose locks do not reach this one; kCorruption where a file of it is missing; else the error itself.
  Error meaning_of(Error error) const;
  template <class T>
  Result<T> checked(Result<T> result) const {
    return result ? std::move(result) : Result<T>(meaning_of(std::move(result).error()));
  }
  // Take it: from now on nobody else has it, and its files go. kNotFound: it is gone; whoever has it is another.
  Status take();

 private:
  struct Impl;
  explicit HeldImage(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class ImageStore {
 public:
  // `directory`: of checkpoints. `options`: how an image is written; retention does not count for it.
  ImageStore(FileSystem& file_system, std::string directory, CheckpointManagerOptions options);

  // kIo if the directory of images is not there, as where its file system is not mounted. No engine removes it.
  Status check_there() const;
  // kInvalidArgument: the name of an image must be a file's.
  static Status check_name(std::string_view name);
  // Begin an image, which commit() makes whole. kInvalidArgument: check_name(), or no directory is configured.
  // kFailedPrecondition: there is an image of this name. When what it returns has ended without commit(), or has been
  // withdrawn, call discard().
  Result<PendingCheckpoint> begin(const std::string& name, uint64_t expected_bytes);
  std::string path_of(std::string_view name) const;
  // Remove what is left of an image that was not committed. An image stays.
  void discard(const std::string& name) noexcept;
  Result<HeldImage> hold(const std::string& path) const;
  // Remove the image that was written as `id`. kNotFound: it is gone, or another one has its name. kUnavailable:
  // another process holds it.
  Status remove(const std::string& name, const SealId& id);
  // A request of this image has ended: who takes the image has not that one. kNotFound: as remove().
  Status note_ended(const std::string& name, const SealId& id, int32_t position);
  // By name. No directory: none.
  Result<std::vector<ImageInfo>> list() const;
  // Remove what killed processes left of images that were never whole, or are no more. Return the names.
  Result<std::vector<std::string>> remove_leftovers(bool dry_run = false);

 private:
  Result<std::unique_ptr<Directory>> images(bool create) const;

  FileSystem& file_system_;
  const std::string directory_;
  const CheckpointManagerOptions options_;
};

}  // namespace torpor
