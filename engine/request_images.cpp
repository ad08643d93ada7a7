// SPDX-License-Identifier: Apache-2.0
#include "engine/request_images.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include <fmt/core.h>

#include "base/log.h"

namespace torpor {
namespace {

Error invalid(std::string what) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the call"};
}

}  // namespace

Result<const RequestImages::Image*> RequestImages::get(const std::string& id) const {
  if (const auto found = images_.find(id); found != images_.end()) return &found->second;
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no image {}", id),
               .next_step = "name one whose requests are hibernated; they may have been resumed or aborted"};
}

Result<RequestImages::Image*> RequestImages::image_of(const std::string& id) {
  TORPOR_RETURN_IF_ERROR(get(id));
  return &images_.find(id)->second;
}

const RequestImages::Request* RequestImages::find(const std::string& request) const {
  const auto id = image_of_.find(request);
  if (id == image_of_.end()) return nullptr;
  const std::vector<Request>& requests = images_.find(id->second)->second.requests;
  const auto is_it = [&](const Request& each) { return each.state.id == request; };
  return &*std::find_if(requests.begin(), requests.end(), is_it);
}

Result<const RequestImages::Image*> RequestImages::extract(const std::string& id, std::vector<RequestState> requests,
                                                           const std::vector<std::vector<int32_t>>& tables,
                                                           int32_t block_tokens) {
  return make(orders::Extract{.image = id, .blocks = {}}, std::move(requests), tables, block_tokens);
}

Result<const RequestImages::Image*> RequestImages::read(const std::string& id, std::vector<RequestState> requests,
                                                        std::vector<std::vector<int32_t>> tables, int32_t block_tokens,
                                                        const StoredBlocks& stored) {
  for (size_t i = 0; i < std::min(tables.size(), requests.size()) && block_tokens > 0; ++i) {
    const auto used = static_cast<size_t>((requests[i].num_computed_tokens + block_tokens - 1) / block_tokens);
    if (tables[i].size() > used) tables[i].resize(used);
  }
  return make(
      orders::ReadImage{
          .image = id, .blocks = {}, .directory = stored.directory, .generation = stored.generation, .id = stored.id},
      std::move(requests), tables, block_tokens);
}

template <class Order>
Result<const RequestImages::Image*> RequestImages::make(Order order, std::vector<RequestState> requests,
                                                        const std::vector<std::vector<int32_t>>& tables,
                                                        int32_t block_tokens) {
  const std::string id = order.image;
  if (id.empty() || requests.empty()) return invalid("an image needs an id and at least one request");
  if (block_tokens < 1) return invalid(fmt::format("a block of {} tokens", block_tokens));
  if (tables.size() != requests.size())
    return invalid(fmt::format("{} block tables for {} requests", tables.size(), requests.size()));
  const auto exists = [](const std::string& what) {
    return Error{.code = Code::kFailedPrecondition, .what = what, .next_step = "resume it, or give another id"};
  };
  if (images_.contains(id)) return exists(fmt::format("there is an image {} already", id));
  Image image;
  std::unordered_map<int32_t, int32_t> positions;  // block number -> position in the image
  std::set<std::string> ids;
  for (size_t i = 0; i < requests.size(); ++i) {
    TORPOR_RETURN_IF_ERROR(requests[i].validate());
    if (const auto other = image_of_.find(requests[i].id); other != image_of_.end())
      return exists(fmt::format("request {} is in the image {}", requests[i].id, other->second));
    if (!ids.insert(requests[i].id).second) return invalid(fmt::format("request {} is named twice", requests[i].id));
    const int64_t computed = requests[i].num_computed_tokens;
    if (static_cast<int64_t>(tables[i].size()) != (computed + block_tokens - 1) / block_tokens) {
      return invalid(fmt::format("request {} has {} computed tokens in {} blocks of {}", requests[i].id, computed,
                                 tables[i].size(), block_tokens));
    }
    Request& request = image.requests.emplace_back(Request{.state = std::move(requests[i])});
    for (const int32_t block : tables[i]) {
      const auto [place, is_new] = positions.emplace(block, static_cast<int32_t>(order.blocks.size()));
      if (is_new) order.blocks.push_back(block);
      request.chunks.push_back(place->second);
    }
  }
  std::map<std::string, std::string, std::less<>> known = image_of_;
  for (const std::string& request : ids) known.emplace(request, id);
  Image& made = images_[id];
  Result<std::vector<typename Order::Reply>> replies = try_catch([&] { return ranks_.call(order); });
  if (!replies) {
    images_.erase(id);
    (void)ranks_.undo(orders::DropImage{.image = id});  // what a rank keeps all the same goes with its process
    return std::move(replies).error();
  }
  image.bytes = total_bytes(*replies);
  image.block_tokens = block_tokens;
  image.count = static_cast<int32_t>(order.blocks.size());
  made = std::move(image);
  image_of_.swap(known);
  return &made;
}

Result<const RequestImages::Image*> RequestImages::verify(const std::string& id) {
  TORPOR_ASSIGN_OR_RETURN(Image* const image, image_of(id));
  TORPOR_RETURN_IF_ERROR(ranks_.call(orders::VerifyImage{.image = id}));
  return image;
}

Result<CapturedState> RequestImages::state_of(const std::string& id, size_t ranks) const {
  TORPOR_ASSIGN_OR_RETURN(const Image* const image, get(id));
  CapturedState state;
  state.scheduler.policy = "fcfs";
  std::vector<int32_t> references(static_cast<size_t>(image->count), 0);
  KvGroup group{.block_size = image->block_tokens, .tables = {}};
  for (const Request& request : image->requests) {
    const bool runs = request.state.status == RequestStatus::kRunning;
    (runs ? state.scheduler.running : state.scheduler.waiting).push_back(request.state.id);
    state.scheduler.requests.push_back(request.state);
    group.tables.push_back({.request = request.state.id, .blocks = request.chunks, .num_cached_blocks = -1});
    for (const int32_t chunk : request.chunks) ++references[static_cast<size_t>(chunk)];
  }
  KvSnapshot& kv = state.kv;
  kv.groups.push_back(std::move(group));
  kv.num_blocks = image->count + 1;
  kv.null_block = image->count;
  for (int32_t chunk = 0; chunk < image->count; ++chunk) {
    const int32_t used = references[static_cast<size_t>(chunk)];
    if (used > 0) kv.blocks.push_back({.id = chunk, .ref_count = used});
    if (used == 0) kv.free_order.push_back(chunk);  // of a request that has ended
  }
  for (size_t rank = 0; rank < ranks; ++rank) state.workers.push_back({.rank = static_cast<int32_t>(rank)});
  return state;
}

Status RequestImages::leave_memory(const std::string& id, Saved saved) {
  TORPOR_ASSIGN_OR_RETURN(Image* const image, image_of(id));
  image->in_memory = false;
  for (size_t i = 0; saved == Saved::kNow && i < image->requests.size(); ++i)
    image->requests[i].position = static_cast<int32_t>(i);
  if (const auto dropped = ranks_.undo(orders::DropImage{.image = id}); !dropped)
    log().error("image {}: a rank keeps its host memory: {}", id, dropped.error());
  return ok();
}

Result<const RequestImages::Image*> RequestImages::return_to_memory(const std::string& id, const StoredBlocks& stored) {
  TORPOR_ASSIGN_OR_RETURN(Image* const image, image_of(id));
  orders::ReadImage order{
      .image = id, .blocks = {}, .directory = stored.directory, .generation = stored.generation, .id = stored.id};
  for (int32_t chunk = 0; chunk < image->count; ++chunk) order.blocks.push_back(chunk);
  TORPOR_RETURN_IF_ERROR(ranks_.undo(orders::DropImage{.image = id}));  // of a rank that failed to free it before
  if (Result<std::vector<orders::ReadImage::Reply>> read = try_catch([&] { return ranks_.call(order); }); !read) {
    (void)ranks_.undo(orders::DropImage{.image = id});
    return std::move(read).error();
  }
  image->in_memory = true;
  return image;
}

Status RequestImages::begin(const std::string& id) {
  TORPOR_ASSIGN_OR_RETURN(Image* const image, image_of(id));
  if (image->resuming) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the requests of the image {} are being resumed already", id),
                 .next_step = "wait for their next tokens"};
  }
  image->resuming = true;
  return ok();
}

Result<Bytes> RequestImages::admit_order(const std::string& request, const std::vector<int32_t>& blocks) const {
  const Request* const found = find(request);
  if (found == nullptr) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("request {} is in no image", request),
                 .next_step = "name one that was extracted"};
  }
  const std::string& id = image_of_.find(request)->second;
  if (!images_.find(id)->second.resuming) return invalid(fmt::format("the image {} is not being resumed", id));
  const size_t count = found->chunks.size();
  if (blocks.size() < count)
    return invalid(fmt::format("request {} has {} chunks, for {} blocks", request, count, blocks.size()));
  const auto end = blocks.begin() + static_cast<std::ptrdiff_t>(count);
  return encode_order(orders::Admit{.image = id, .chunks = found->chunks, .blocks = {blocks.begin(), end}});
}

std::optional<Bytes> RequestImages::release(const std::string& request) {
  const auto id = image_of_.find(request);
  if (id == image_of_.end()) return std::nullopt;
  const auto image = images_.find(id->second);
  std::optional<Bytes> order;
  if (image->second.requests.size() == 1) order = encode_order(orders::DropImage{.image = id->second});
  std::erase_if(image->second.requests, [&](const Request& each) { return each.state.id == request; });
  if (order) images_.erase(image);
  image_of_.erase(id);
  return order;
}

}  // namespace torpor
