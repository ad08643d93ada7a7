// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/manifest_codec.h"

#include <array>
#include <set>

#include "checkpoint/archived_values.h"
#include "checkpoint/refs_codec.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kManifestMagic = {'T', 'O', 'R', 'P', 'O', 'R', 'C', 'K'};
constexpr uint32_t kEndianness = 0x01020304;

// The first fields of every version.
struct Beginning {
  std::array<char, 8> magic = kManifestMagic;
  uint32_t format_version = kFormatVersion;
  uint32_t endianness = kEndianness;
};

struct Header {
  Beginning beginning;
  uint64_t body_bytes = 0;
  uint32_t protection = 0;
  uint32_t zero = 0;
  SealId id{};
  KeyName key_name{};
  SealTag body_seal{};  // of an encrypted body
  std::array<uint8_t, 24> reserved{};
  ManifestMac mac{};  // over this header (this field zero) and the body
};
static_assert(sizeof(Header) == 128);

constexpr SealPlace kBodyPlace{.kind = SealPlace::Kind::kManifest, .what = "MANIFEST"};

Error unauthenticated(std::string what, std::string next_step) {
  return Error{
      .code = Code::kUnauthenticated, .what = fmt::format("MANIFEST: {}", what), .next_step = std::move(next_step)};
}

Status check(const RankSummary& rank, const SealId& id) {
  const auto wrong = [&](std::string_view what) {
    return damaged_manifest(fmt::format("rank {}: {}", rank.rank, what));
  };
  if (rank.files.empty() || rank.files[0].id != id) return wrong("it has no file of its own");
  if (!is_plain_name(rank.refs) || rank.refs_bytes > kMaxRefsBytes) return wrong("its refs are no file");
  std::set<std::string_view> names{rank.refs};
  std::set<SealId> ids;
  for (const LinkedFile& file : rank.files) {
    if (!is_plain_name(file.name)) return wrong("the name of a file is not a plain name");
    if (!names.insert(file.name).second || !ids.insert(file.id).second)
      return wrong(fmt::format("the file {} is listed twice", file.name));
  }
  return ok();
}

Status check(const Manifest& manifest) {
  TORPOR_RETURN_IF_ERROR(check_sections(manifest));
  std::set<int32_t> ranks;
  for (const RankSummary& rank : manifest.ranks) {
    if (rank.rank < 0 || !ranks.insert(rank.rank).second)
      return damaged_manifest(fmt::format("the rank {} is listed twice", rank.rank));
    TORPOR_RETURN_IF_ERROR(check(rank, manifest.id));
  }
  return ok();
}

// The body of version 3 has no owner.
struct BodyOfVersion3 {
  Manifest manifest;
};
template <class Archive>
void serialize(Archive& archive, BodyOfVersion3& v) {
  Manifest& m = v.manifest;
  archive(m.generation, m.created_unix_seconds, m.creator, m.fingerprint, m.sections, m.ranks);
}

// Check the header alone: what can be checked before the file is authenticated.
Status check(const Header& header, uint64_t body_bytes, const Key* key) {
  if (header.protection > static_cast<uint32_t>(Protection::kEncrypted) || header.zero != 0 ||
      header.reserved != decltype(header.reserved){}) {
    return damaged_manifest("its header is not whole");
  }
  if (body_bytes != header.body_bytes)
    return damaged_manifest(
        fmt::format("it has {} bytes after the header, {} were written", body_bytes, header.body_bytes));
  const auto protection = static_cast<Protection>(header.protection);
  if (protection != Protection::kNone && key == nullptr)
    return unauthenticated(fmt::format("the checkpoint is {}", name(protection)),
                           "give the key file that it was written with");
  if (protection == Protection::kNone && key != nullptr)
    return unauthenticated("a key was given, but the checkpoint was written without one",
                           "leave the key out if you trust the checkpoint, or use another directory");
  return ok();
}

}  // namespace

Bytes encode_manifest(const Manifest& manifest, const Seal* seal) {
  Header header{.protection = static_cast<uint32_t>(manifest.protection), .id = manifest.id};
  Bytes file = to_bytes_after(sizeof header, manifest);
  const auto body = std::as_writable_bytes(std::span(file)).subspan(sizeof header);
  header.body_bytes = body.size();
  if (seal != nullptr) {
    header.key_name = seal->key_name();
    if (seal->protection() == Protection::kEncrypted) header.body_seal = seal->seal(body, body, kBodyPlace);
  }
  const auto plain = std::as_bytes(std::span(&header, 1));
  header.mac = seal != nullptr ? seal->mac(plain, body) : unkeyed_mac(plain, body);
  std::memcpy(file.data(), &header, sizeof header);
  return file;
}

Result<OpenedManifest> decode_manifest(std::span<const std::byte> file, const Key* key) {
  Beginning beginning;
  if (file.size() < sizeof beginning)
    return damaged_manifest(fmt::format("it has {} bytes, fewer than its header", file.size()));
  std::memcpy(&beginning, file.data(), sizeof beginning);
  if (beginning.magic != kManifestMagic) return damaged_manifest("it does not begin as a manifest does");
  if (beginning.endianness != kEndianness) {
    return Error{.code = Code::kIncompatible,
                 .what = "MANIFEST: the checkpoint was written with another byte order",
                 .next_step = "wake it on the kind of machine that wrote it"};
  }
  if (beginning.format_version < kOldestFormatVersion || beginning.format_version > kFormatVersion) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("MANIFEST: the checkpoint has format version {}, this torpor reads {} to {}",
                                     beginning.format_version, kOldestFormatVersion, kFormatVersion),
                 .next_step = "use the version of torpor that wrote it"};
  }
  Header header;
  if (file.size() < sizeof header)
    return damaged_manifest(fmt::format("it has {} bytes, fewer than its header", file.size()));
  std::memcpy(&header, file.data(), sizeof header);
  const std::span<const std::byte> body = file.subspan(sizeof header);
  TORPOR_RETURN_IF_ERROR(check(header, body.size(), key));
  const auto protection = static_cast<Protection>(header.protection);
  std::shared_ptr<const Seal> seal;
  if (protection != Protection::kNone) {
    seal = std::make_shared<Seal>(*key, header.id, protection);
    if (seal->key_name() != header.key_name)
      return unauthenticated("the key is not the one that the checkpoint was written with",
                             "give the key file that it was written with");
  }
  Header unsigned_header = header;
  unsigned_header.mac = {};
  const auto plain = std::as_bytes(std::span(&unsigned_header, 1));
  if ((seal != nullptr ? seal->mac(plain, body) : unkeyed_mac(plain, body)) != header.mac)
    return damaged_manifest("its digest does not match");
  Bytes decrypted;
  std::span<const std::byte> clear = body;
  if (protection == Protection::kEncrypted) {
    decrypted.resize(body.size());
    std::memcpy(decrypted.data(), body.data(), body.size());
    TORPOR_RETURN_IF_ERROR(seal->open(std::as_writable_bytes(std::span(decrypted)), header.body_seal, kBodyPlace));
    clear = std::as_bytes(std::span(decrypted));
  }
  OpenedManifest opened{.seal = std::move(seal)};
  if (beginning.format_version == 3) {
    TORPOR_ASSIGN_OR_RETURN(BodyOfVersion3 body, from_bytes<BodyOfVersion3>(clear, "MANIFEST"));
    opened.manifest = std::move(body.manifest);
  } else {
    TORPOR_ASSIGN_OR_RETURN(opened.manifest, from_bytes<Manifest>(clear, "MANIFEST"));
  }
  opened.manifest.format_version = beginning.format_version;
  opened.manifest.protection = protection;
  opened.manifest.id = header.id;
  if (beginning.format_version < 4) opened.manifest.owner = owner_of(opened.manifest.fingerprint);
  TORPOR_RETURN_IF_ERROR(check(opened.manifest));
  return opened;
}

}  // namespace torpor
