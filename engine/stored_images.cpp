// SPDX-License-Identifier: Apache-2.0
#include "engine/stored_images.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "checkpoint/image_section.h"

namespace torpor {

std::string StoredImages::path_of(const std::string& id) const {
  const Result<const RequestImages::Image*> image = images_.get(id);
  return image && !(*image)->in_memory ? store_.path_of(id) : "";
}

Result<std::string> StoredImages::store(const std::string& id, Fingerprint fingerprint, Value outputs) {
  TORPOR_ASSIGN_OR_RETURN(const RequestImages::Image* const image, images_.get(id));
  if (!image->in_memory) return store_.path_of(id);
  if (image->resuming) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the image {} is being resumed", id),
                 .next_step = "wait for the next tokens of its requests"};
  }
  TORPOR_RETURN_IF_ERROR(ImageStore::check_name(id));
  if (!std::exchange(swept_, true)) {
    if (const auto gone = store_.remove_leftovers(); !gone)
      log().warn("leftovers of images could not be removed: {}", gone.error());
  }
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Describe::Reply> ranks, ranks_.call(orders::Describe{}));
  EngineCheckpoint checkpoint{.fingerprint = std::move(fingerprint), .state = {}, .outputs = std::move(outputs)};
  TORPOR_ASSIGN_OR_RETURN(checkpoint.state, images_.state_of(id, ranks.size()));
  TORPOR_RETURN_IF_ERROR(checkpoint.state.validate());
  checkpoint.carried.push_back(image_section());
  Result<std::string> written = try_catch([&] { return write(id, image->bytes, std::move(checkpoint)); });
  const bool is_others = !written && written.error().code == Code::kUnavailable;
  if (!written && !is_others) store_.discard(id);
  return written;
}

Result<std::string> StoredImages::write(const std::string& id, uint64_t bytes, EngineCheckpoint checkpoint) {
  TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, store_.begin(id, bytes));
  std::vector<std::string> hosts;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::WriteTestFile::Reply> written,
                          ranks_.call(orders::WriteTestFile{.directory = pending.staging_path()}));
  for (const orders::WriteTestFile::Reply& reply : written) hosts.push_back(reply.host);
  TORPOR_RETURN_IF_ERROR(pending.check_test_files(hosts));
  TORPOR_RETURN_IF_ERROR(pending.write_state(checkpoint));
  TORPOR_ASSIGN_OR_RETURN(
      const std::vector<orders::SaveImage::Reply> saved,
      ranks_.call(orders::SaveImage{.image = id, .directory = pending.staging_path(), .writing = pending.writing()}));
  for (const orders::SaveImage::Reply& reply : saved) pending.add_rank(reply.saved);
  written_.insert_or_assign(id, pending.writing().id);
  if (const Result<std::string> committed = pending.commit(); !committed) {
    Error error = committed.error();
    written_.erase(id);
    if (!pending.withdraw())
      error.what +=
          fmt::format("; the image may be left at {}, where another engine could take it", store_.path_of(id));
    return error;
  }
  TORPOR_RETURN_IF_ERROR(images_.leave_memory(id, RequestImages::Saved::kNow));
  return store_.path_of(id);
}

Result<const RequestImages::Image*> StoredImages::read_back(const std::string& id) {
  TORPOR_ASSIGN_OR_RETURN(const RequestImages::Image* const image, images_.get(id));
  if (image->in_memory) return images_.verify(id);
  Result<HeldImage> opened = store_.hold(store_.path_of(id));
  if (!opened && opened.error().code == Code::kNotFound) TORPOR_RETURN_IF_ERROR(store_.check_there());
  if (!opened) return std::move(opened).error();
  HeldImage held = std::move(*opened);
  const Checkpoint& checkpoint = held.checkpoint();
  if (checkpoint.manifest().id != written_[id]) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("the image at {} is another one", store_.path_of(id)),
                 .next_step = "another engine has taken this one; give each image an id of its own"};
  }
  TORPOR_RETURN_IF_ERROR(
      held.checked(checkpoint.read_state()));  // damage of any part is reported before the image is taken
  const Manifest& manifest = checkpoint.manifest();
  TORPOR_ASSIGN_OR_RETURN(
      const RequestImages::Image* const read,
      held.checked(images_.return_to_memory(
          id, {.directory = checkpoint.path(), .generation = manifest.generation, .id = manifest.id})));
  held_.insert_or_assign(id, std::move(held));
  return read;
}

Result<StoredImages::Opened> StoredImages::open(const std::string& path) {
  TORPOR_ASSIGN_OR_RETURN(HeldImage held, store_.hold(path));
  const std::string id = held.name();
  if (images_.get(id) || held_.contains(id)) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("this engine has an image {} of its own", id),
                 .next_step = "resume that one first"};
  }
  TORPOR_ASSIGN_OR_RETURN(EngineCheckpoint state, held.checked(held.checkpoint().read_state()));
  TORPOR_RETURN_IF_ERROR(state.state.validate());
  return Opened{.image = &held_.insert_or_assign(id, std::move(held)).first->second, .state = std::move(state)};
}

Error StoredImages::meaning_of(const std::string& id, Error error) const {
  const auto held = held_.find(id);
  return held == held_.end() ? std::move(error) : held->second.meaning_of(std::move(error));
}

Status StoredImages::take(const std::string& id) {
  const auto held = held_.find(id);
  if (held == held_.end()) return ok();
  TORPOR_RETURN_IF_ERROR(held->second.take());
  held_.erase(held);
  written_.erase(id);
  return ok();
}

void StoredImages::put_back(const std::string& id) noexcept {
  (void)try_catch([&]() -> Status {
    if (held_.erase(id) == 0) return ok();
    const Result<const RequestImages::Image*> image = images_.get(id);
    if (!image || (*image)->resuming) return ok();
    return images_.leave_memory(id, RequestImages::Saved::kBefore);
  });
}

std::optional<Bytes> StoredImages::release(const std::string& request) {
  const RequestImages::Request* const found = images_.find(request);
  if (found == nullptr) return std::nullopt;
  const int32_t position = found->position;
  std::string id;
  for (const auto& [each, image] : images_.images()) {
    const auto is_it = [&](const RequestImages::Request& other) { return other.state.id == request; };
    if (!image.in_memory && std::any_of(image.requests.begin(), image.requests.end(), is_it)) id = each;
  }
  std::optional<Bytes> order = images_.release(request);
  if (id.empty()) return order;
  const SealId& written = written_[id];
  Status done = order ? store_.remove(id, written) : store_.note_ended(id, written, position);
  // Another engine reads the image, and has not taken it: it must learn that this request has ended.
  if (!done && order && done.error().code == Code::kUnavailable) done = store_.note_ended(id, written, position);
  if (!done && done.error().code != Code::kNotFound)
    log().warn("request {} of the image {} has ended, and is still on disk: {}", request, store_.path_of(id),
               done.error());
  if (order) written_.erase(id);
  return order;
}

std::vector<std::string> StoredImages::forget(const std::string& id) {
  std::vector<std::string> requests;
  if (const Result<const RequestImages::Image*> image = images_.get(id)) {
    for (const RequestImages::Request& request : (*image)->requests) requests.push_back(request.state.id);
  }
  for (const std::string& request : requests) (void)images_.release(request);
  written_.erase(id);
  return requests;
}

}  // namespace torpor
