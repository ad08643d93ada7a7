// SPDX-License-Identifier: Apache-2.0
// ImageStore: images of requests that left their engine, on disk. An image is a checkpoint of these requests alone:
// DIRECTORY/images/NAME/g-000001 with their values, their KV, and a section that marks it as an image.
//
// An image has one owner. take() renames its g-000001 away, and a rename has one winner: if several engines read an
// image, one of them gets its requests. Before that, hold() takes the lock file of the image, so that the others need
// not read it; the lock ends with its process. A kill at any point leaves a whole image or none.
//
// Owner: an engine core, which chooses the names of its images. Threads: one at a time. Errors: those of
// CheckpointManager. Nothing of an image is used before it is verified.
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
  bool readable = false;  // its manifest is intact
  Error problem{};        // set unless readable
  double created_unix_seconds = 0;
  uint64_t bytes = 0;         // size of its files
  std::set<int32_t> ended{};  // positions of requests that have ended since it was written
};

// Return the positions of the requests of an image that have ended since it was written. `image`: its g-000001.
Result<std::set<int32_t>> ended_in(const Directory& image);
// Return whether a file of this name in g-000001 notes that a request has ended.
bool is_ended_note(std::string_view name);

// An image that this process has locked. No other process takes it meanwhile, as far as locks work across hosts.
class HeldImage {
 public:
  // Lock and open the image at `path`. kNotFound: there is none, or another process has taken it. kUnavailable: another
  // process holds it. kIncompatible: it is a checkpoint of a whole engine.
  static Result<HeldImage> hold(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key);
  HeldImage(HeldImage&&) noexcept;
  HeldImage& operator=(HeldImage&&) noexcept;
  ~HeldImage();  // releases the lock

  const std::string& name() const;
  const Checkpoint& checkpoint() const;
  const std::set<int32_t>& ended() const;  // positions of requests that have ended since it was written
  // Return the error that a failed read of this image means. kNotFound: another engine has taken it meanwhile; one on
  // another host can, if locks do not work between the hosts. kCorruption: one of its files is missing. Otherwise
  // `error` itself.
  Error meaning_of(Error error) const;
  template <class T>
  Result<T> checked(Result<T> result) const {
    return result ? std::move(result) : Result<T>(meaning_of(std::move(result).error()));
  }
  // Take the image: no other engine can have it any more, and its files are removed. kNotFound: another engine has
  // taken it. kUnavailable: more of its requests have ended() since it was held; then it is there as before. kIo: more
  // have ended or that cannot be read, and the image could not be renamed back; the text says where it lies.
  Status take();

 private:
  struct Impl;
  explicit HeldImage(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class ImageStore {
 public:
  // `directory`: of checkpoints. `options`: how to write an image; its retention is not used.
  ImageStore(FileSystem& file_system, std::string directory, CheckpointManagerOptions options);

  // kIo: the directory of images is missing, for example because its file system is not mounted. No engine removes it.
  Status check_there() const;
  // kInvalidArgument: `name` cannot be the name of a file.
  static Status check_name(std::string_view name);
  // Begin an image; commit() of the result completes it. If the result is destroyed without commit(), or withdrawn,
  // call discard(). kInvalidArgument: check_name(), or no directory is configured. kFailedPrecondition: an image of
  // this name exists.
  Result<PendingCheckpoint> begin(const std::string& name, uint64_t expected_bytes);
  std::string path_of(std::string_view name) const;
  // Remove the remains of an image that was not committed. A committed image stays.
  void discard(const std::string& name) noexcept;
  Result<HeldImage> hold(const std::string& path) const;
  // Remove the image that was written as `id`. kNotFound: it is gone, or another image has its name. kUnavailable:
  // another process holds it.
  Status remove(const std::string& name, const SealId& id);
  // Record that a request of this image has ended; an engine that takes the image does not get that request. kNotFound:
  // as remove().
  Status note_ended(const std::string& name, const SealId& id, int32_t position);
  // Return all images, sorted by their names; none if there is no directory.
  Result<std::vector<ImageInfo>> list() const;
  // Remove what killed processes left of images that were not committed or were taken. Return the names. `dry_run`:
  // only return the names.
  Result<std::vector<std::string>> remove_leftovers(bool dry_run = false);

 private:
  Result<std::unique_ptr<Directory>> images(bool create) const;

  FileSystem& file_system_;
  const std::string directory_;
  const CheckpointManagerOptions options_;
};

}  // namespace torpor
