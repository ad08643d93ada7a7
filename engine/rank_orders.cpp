// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_orders.h"

#include <array>
#include <optional>

#include "checkpoint/archived_values.h"

namespace torpor {
namespace {

constexpr const char* kSameVersion = "use the same version of torpor in all processes";

template <size_t... kAlternatives>
constexpr auto names_of(std::index_sequence<kAlternatives...>) {
  return std::array{std::variant_alternative_t<kAlternatives, RankOrder>::kName...};
}
constexpr auto kOrderNames = names_of(std::make_index_sequence<std::variant_size_v<RankOrder>>());

template <class Order, size_t kAlternative = 0>
constexpr uint8_t index_of() {
  if constexpr (std::is_same_v<Order, std::variant_alternative_t<kAlternative, RankOrder>>) {
    return kAlternative;
  } else {
    return index_of<Order, kAlternative + 1>();
  }
}

struct NumberedOrder {
  RankOrder order;
};

template <class Reply>
struct RankAnswer {
  std::optional<Error> error;
  Reply reply;  // if there is none
};

Error of_another_version(Error error) {
  error.next_step = kSameVersion;
  return error;
}

}  // namespace

template <class Archive>
void serialize(Archive& archive, Error& v) {
  archive(checked(v.code, kLastCode), v.what, v.next_step, checked(v.origin, Origin::kEngine), v.native,
          v.state_changed);
}
template <class Archive>
void serialize(Archive& archive, CompressionOptions& v) {
  archive(checked(v.codec, Codec::kBf16), v.level, v.long_distance);
}
template <class Archive>
void serialize(Archive& archive, RankWriting& v) {
  archive(v.id, checked(v.protection, Protection::kEncrypted), v.compression, v.base, v.base_id);
}
template <class Archive>
void serialize(Archive& archive, RankLedger::Tag& v) {
  archive(v.state, v.region_bytes, v.physical_bytes, v.backup_host_bytes, v.backup_disk_bytes, v.reused_bytes);
}
template <class Archive>
void serialize(Archive& archive, RankLedger& v) {
  archive(v.tags, v.device_physical_bytes, v.device_capacity_bytes, v.device_used_bytes, v.arena_held_bytes,
          v.arena_used_bytes, v.arena_budget_bytes, v.arena_unpinned_bytes, v.chunks_by_outcome,
          v.process_resident_bytes, v.process_resident_region_bytes);
}

template <class Archive>
void serialize(Archive& archive, orders::RestoredContents& v) {
  archive(v.id, v.blocks, v.versions, v.steps);
}
template <class Archive>
void serialize(Archive& archive, orders::Inform& v) {
  archive(v.written, v.committed, v.contents);
}
static_assert(orders::Save::kStages.size() == static_cast<size_t>(orders::Save::Stage::kStopAndCopy) + 1);
template <class Archive>
void serialize(Archive& archive, orders::Save& v) {
  archive(checked(v.stage, orders::Save::Stage::kStopAndCopy), v.tags, v.blocks, v.versions, v.steps, v.directory,
          v.writing, v.as_proven, v.carried, v.host_slots, v.progress, v.channel);
}
template <class Archive>
void serialize(Archive& archive, orders::PollSave& v) {
  archive(v.wait, v.stop);
}
static_assert(orders::Undo::kWhats.size() == static_cast<size_t>(orders::Undo::What::kRestore) + 1);
template <class Archive>
void serialize(Archive& archive, orders::Undo& v) {
  archive(checked(v.what, orders::Undo::What::kRestore), v.tags);
}
template <class Archive>
void serialize(Archive& archive, orders::Detach& v) {
  archive(v.tags);
}
template <class Archive>
void serialize(Archive& archive, orders::CheckpointSource& v) {
  archive(v.directory, v.generation, v.id, v.numbers);
}
template <class Archive>
void serialize(Archive& archive, orders::Restore& v) {
  archive(v.tags, v.checkpoint, v.progress, v.deferred, v.channel);
}
template <class Archive>
void serialize(Archive& archive, DeferredArrival& v) {
  archive(v.block, checked(v.how, BlockArrival::kUnproven));
}
template <class Archive>
void serialize(Archive& archive, orders::PollRestore& v) {
  archive(v.seen, checked(v.wait, DeferredWait::kAll), v.cancel, v.wanted, v.skipped);
}
template <class Archive>
void serialize(Archive& archive, orders::PollRestore::Reply& v) {
  archive(v.first, v.arrivals, v.why, v.ended);
}
template <class Archive>
void serialize(Archive& archive, orders::Finish& v) {
  archive(v.tags, v.keep_backup);
}
template <class Archive>
void serialize(Archive& archive, orders::DigestTags& v) {
  archive(v.tags, v.as_proven, v.named);
}
template <class Archive>
void serialize(Archive& archive, orders::WriteTestFile& v) {
  archive(v.directory);
}
template <class Archive>
void serialize(Archive& archive, orders::WriteTestFile::Reply& v) {
  archive(v.host);
}

template <class Archive>
void serialize(Archive& archive, orders::Extract& v) {
  archive(v.image, v.blocks);
}
template <class Archive>
void serialize(Archive& archive, orders::Extract::Reply& v) {
  archive(v.bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::ReadImage& v) {
  archive(v.image, v.blocks, v.directory, v.generation, v.id);
}
template <class Archive>
void serialize(Archive& archive, orders::ReadImage::Reply& v) {
  archive(v.bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::SaveImage& v) {
  archive(v.image, v.directory, v.writing);
}
template <class Archive>
void serialize(Archive& archive, orders::SaveImage::Reply& v) {
  archive(v.bytes, v.saved);
}
template <class Archive>
void serialize(Archive& archive, orders::VerifyImage& v) {
  archive(v.image);
}
template <class Archive>
void serialize(Archive& archive, orders::VerifyImage::Reply& v) {
  archive(v.bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::Admit& v) {
  archive(v.image, v.chunks, v.blocks);
}
template <class Archive>
void serialize(Archive& archive, orders::Admit::Reply& v) {
  archive(v.bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::DropImage& v) {
  archive(v.image);
}
template <class Archive>
void serialize(Archive& archive, orders::DropImage::Reply& v) {
  archive(v.bytes);
}

template <class Archive>
void serialize(Archive& archive, orders::CopyBlocks& v) {
  archive(v.from, v.to);
}
template <class Archive>
void serialize(Archive& archive, orders::CopyBlocks::Reply& v) {
  archive(v.bytes);
}

template <class Archive>
void serialize(Archive& archive, orders::Describe::Reply& v) {
  archive(v.ledger, v.bytes_per_block, v.num_blocks, v.writes, v.without_content, v.proven);
}
template <class Archive>
void serialize(Archive& archive, orders::Save::Reply& v) {
  archive(v.bytes, v.compacted_bytes, v.reused_bytes, v.spilled_bytes, v.saved, v.digests, v.digested_bytes,
          v.copied_bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::PollSave::Reply& v) {
  archive(v.ended, v.saved);
}
template <class Archive>
void serialize(Archive& archive, orders::Detach::Reply& v) {
  archive(v.ledger, v.bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::Restore::Reply& v) {
  archive(v.bytes, v.without_content, v.deferred_bytes);
}
template <class Archive>
void serialize(Archive& archive, orders::Finish::Reply& v) {
  archive(v.ledger);
}
template <class Archive>
void serialize(Archive& archive, orders::DigestTags::Reply& v) {
  archive(v.bytes, v.digests);
}
template <class Archive, class Reply>
void serialize(Archive& archive, RankAnswer<Reply>& v) {
  archive(v.error);
  if (!v.error) archive(v.reply);
}

template <size_t kAlternative = 0>
void load_order(BoundedInput& archive, RankOrder& order, size_t number) {
  if constexpr (kAlternative == std::variant_size_v<RankOrder>) {
    throw cereal::Exception(fmt::format("{} is not the number of an order", number));
  } else if (kAlternative == number) {
    archive(order.template emplace<kAlternative>());
  } else {
    load_order<kAlternative + 1>(archive, order, number);
  }
}
inline void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, NumberedOrder& numbered) {
  uint8_t number = 0;
  archive(number);
  load_order(archive, numbered.order, number);
}

template <class Order>
Bytes encode_order(const Order& order) {
  return to_bytes_after(0, index_of<Order>(), order);
}

Result<RankOrder> decode_order(const Bytes& bytes) {
  if (!bytes.empty() && bytes[0] >= kOrderNames.size()) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("a rank does not know the order {}", bytes[0]),
                 .next_step = kSameVersion};
  }
  Result<NumberedOrder> decoded = from_bytes<NumberedOrder>(std::as_bytes(std::span(bytes)), "an order to a rank");
  if (!decoded) return of_another_version(std::move(decoded).error());
  return std::move(decoded->order);
}

std::string_view order_name(const Bytes& bytes) {
  if (bytes.empty() || bytes[0] >= kOrderNames.size()) return "unknown";
  const auto part = [&](const auto& names) {
    return bytes.size() < 2 ? names[0] : bytes[1] < names.size() ? names[bytes[1]] : "unknown";
  };
  if (bytes[0] == index_of<orders::Save>()) return part(orders::Save::kStages);
  if (bytes[0] == index_of<orders::Undo>()) return part(orders::Undo::kWhats);
  return kOrderNames[bytes[0]];
}

template <class Order>
Bytes encode_reply(const typename Order::Reply& reply) {
  return to_bytes_after(0, std::optional<Error>(), reply);
}
Bytes encode_error(const Error& error) { return to_bytes(std::optional(error)); }

template <class Order>
Result<typename Order::Reply> decode_reply(const Bytes& bytes) {
  using Answer = RankAnswer<typename Order::Reply>;
  Result<Answer> decoded = from_bytes<Answer>(std::as_bytes(std::span(bytes)), "the reply of a rank");
  if (!decoded) return of_another_version(std::move(decoded).error());
  if (decoded->error) return std::move(*decoded->error);
  return std::move(decoded->reply);
}

#define TORPOR_ORDER(Order)                                                \
  template Bytes encode_order<orders::Order>(const orders::Order&);        \
  template Bytes encode_reply<orders::Order>(const orders::Order::Reply&); \
  template Result<orders::Order::Reply> decode_reply<orders::Order>(const Bytes&);
TORPOR_ORDER(Describe)
TORPOR_ORDER(Inform)
TORPOR_ORDER(Save)
TORPOR_ORDER(PollSave)
TORPOR_ORDER(Undo)
TORPOR_ORDER(Detach)
TORPOR_ORDER(Restore)
TORPOR_ORDER(PollRestore)
TORPOR_ORDER(Finish)
TORPOR_ORDER(DigestTags)
TORPOR_ORDER(WriteTestFile)
TORPOR_ORDER(Extract)
TORPOR_ORDER(ReadImage)
TORPOR_ORDER(VerifyImage)
TORPOR_ORDER(Admit)
TORPOR_ORDER(DropImage)
TORPOR_ORDER(SaveImage)
TORPOR_ORDER(CopyBlocks)
#undef TORPOR_ORDER

}  // namespace torpor
