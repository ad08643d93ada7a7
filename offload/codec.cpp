// SPDX-License-Identifier: Apache-2.0
#include "offload/codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include <fmt/core.h>
#include <zstd.h>

#include "offload/bf16_codec.h"

namespace torpor {
namespace {

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

// zstd's working memory, one for each thread: allocating it anew costs more than compressing a small chunk.
using Compressor = std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)>;
using Decompressor = std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)>;
ZSTD_CCtx* compressor() {
  thread_local const Compressor context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  return context.get();
}
ZSTD_DCtx* decompressor() {
  thread_local const Decompressor context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  return context.get();
}

}  // namespace

std::string_view name(Codec codec) {
  switch (codec) {
    case Codec::kNone: return "none";
    case Codec::kZstd: return "zstd";
    case Codec::kBf16: return "bf16";
  }
  return "unknown";
}

Result<CompressionOptions> CompressionOptions::of(std::optional<std::string_view> codec, std::optional<int> level) {
  constexpr std::array kCodecs{Codec::kNone, Codec::kZstd, Codec::kBf16};
  CompressionOptions options{.codec = level ? Codec::kZstd : Codec::kNone};
  if (codec) {
    const auto* const named = std::ranges::find_if(kCodecs, [&](Codec each) { return name(each) == *codec; });
    if (named == kCodecs.end()) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("there is no compression \"{}\"", *codec),
                   .next_step = "use none, zstd or bf16"};
    }
    options.codec = *named;
  }
  if (level && options.codec != Codec::kZstd) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the compression {} has no level", name(options.codec)),
                 .next_step = "leave the level out, or use zstd"};
  }
  options.level = level.value_or(options.level);
  return options;
}

Status CompressionOptions::validate() const {
  if (level >= ZSTD_minCLevel() && level <= 19) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("the compression level is {}", level),
               .next_step = "use -100 (fast) to 19 (small)"};
}

uint64_t compressed_bound(uint64_t bytes) {
  return std::max<uint64_t>(ZSTD_compressBound(bytes), bf16::compressed_bound(bytes));
}

std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      const CompressionOptions& options) {
  if (options.codec == Codec::kNone) return std::nullopt;
  if (options.codec == Codec::kBf16) return bf16::compress_into(bytes, out);
  ZSTD_CCtx* const context = compressor();
  if (context == nullptr) return std::nullopt;
  ZSTD_CCtx_reset(context, ZSTD_reset_session_and_parameters);
  ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, options.level);
  ZSTD_CCtx_setParameter(context, ZSTD_c_enableLongDistanceMatching, options.long_distance ? 1 : 0);
  const size_t size = ZSTD_compress2(context, out.data(), out.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(size) || size >= bytes.size() - bytes.size() / 8) return std::nullopt;
  return size;
}

std::optional<Bytes> compress(std::span<const std::byte> bytes, const CompressionOptions& options) {
  Bytes packed(compressed_bound(bytes.size()));
  const std::optional<uint64_t> size = compress_into(bytes, std::as_writable_bytes(std::span(packed)), options);
  if (!size) return std::nullopt;
  packed.resize(*size);
  return packed;
}

Encoded encode(std::span<const std::byte> bytes, std::span<std::byte> room, const CompressionOptions& options) {
  if (room.empty()) return {bytes, Codec::kNone};
  const std::optional<uint64_t> size = compress_into(bytes, room, options);
  return size ? Encoded{room.first(*size), options.codec} : Encoded{bytes, Codec::kNone};
}

Status decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out) {
  if (codec == Codec::kNone) {
    if (stored.size() != out.size())
      return damaged(fmt::format("{} bytes are stored where {} were promised", stored.size(), out.size()));
    if (!out.empty()) std::memcpy(out.data(), stored.data(), out.size());
    return ok();
  }
  if (codec == Codec::kBf16) return bf16::decompress(stored, out);
  ZSTD_DCtx* const context = decompressor();
  if (context == nullptr)
    return Error{
        .code = Code::kResourceExhausted, .what = "no memory for zstd", .next_step = "free some and try again"};
  const size_t size = ZSTD_decompressDCtx(context, out.data(), out.size(), stored.data(), stored.size());
  if (ZSTD_isError(size)) return damaged(fmt::format("zstd: {}", ZSTD_getErrorName(size)));
  if (size != out.size()) return damaged(fmt::format("zstd gave {} bytes where {} were promised", size, out.size()));
  return ok();
}

}  // namespace torpor
