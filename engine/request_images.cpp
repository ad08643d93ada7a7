// SPDX-License-Identifier: Apache-2.0
#include "engine/request_images.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include <fmt/core.h>

namespace torpor {
namespace {

Error invalid(std::string what) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the call"};
}

}  // namespace

Result<RequestImages::Image*> RequestImages::image_of(const std::string& id) {
  if (const auto found = images_.find(id); found != images_.end()) return &found->second;
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no image {}", id),
               .next_step = "name one whose requests are hibernated; they may have been resumed or aborted"};
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
  std::unordered_map<int32_t, int32_t> positions;  // of each block
  std::set<std::string> ids;
  for (size_t i = 0; i < requests.size(); ++i) {
    TORPOR_TRY(requests[i].validate());
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
  Result<std::vector<typename Order::Reply>> replies = catching([&] { return ranks_.call(order); });
  if (!replies) {
    images_.erase(id);
    (void)ranks_.undo(orders::DropImage{.image = id});  // what a rank keeps all the same goes with its process
    return std::move(replies).error();
  }
  image.bytes = total_bytes(*replies);
  made = std::move(image);
  image_of_.swap(known);
  return &made;
}

Result<const RequestImages::Image*> RequestImages::verify(const std::string& id) {
  TORPOR_ASSIGN(Image* const image, image_of(id));
  TORPOR_TRY(ranks_.call(orders::VerifyImage{.image = id}));
  return image;
}

Status RequestImages::begin(const std::string& id) {
  TORPOR_ASSIGN(Image* const image, image_of(id));
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
