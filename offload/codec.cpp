#include "offload/codec.h"

#include <cstring>

#include <fmt/format.h>
#include <zstd.h>

namespace torpor {
namespace {

constexpr int kLevel = 1;  // metadata is small; speed counts

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

}  // namespace

std::string_view name(Codec codec) { return codec == Codec::kZstd ? "zstd" : "none"; }

std::optional<Bytes> compress(std::span<const std::byte> bytes) {
  Bytes packed(ZSTD_compressBound(bytes.size()));
  const size_t size = ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), kLevel);
  if (ZSTD_isError(size) || size >= bytes.size() - bytes.size() / 8) return std::nullopt;
  packed.resize(size);
  return packed;
}

Status decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out) {
  if (codec == Codec::kNone) {
    if (stored.size() != out.size()) return damaged(fmt::format("{} bytes are stored where {} were promised", stored.size(), out.size()));
    if (!out.empty()) std::memcpy(out.data(), stored.data(), out.size());
    return ok();
  }
  const size_t size = ZSTD_decompress(out.data(), out.size(), stored.data(), stored.size());
  if (ZSTD_isError(size)) return damaged(fmt::format("zstd: {}", ZSTD_getErrorName(size)));
  if (size != out.size()) return damaged(fmt::format("zstd gave {} bytes where {} were promised", size, out.size()));
  return ok();
}

}  // namespace torpor
