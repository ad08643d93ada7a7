// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/prefix_hash.h"

#include <string_view>

#include "base/digest.h"

namespace torpor {
namespace {

void append(Bytes& out, std::string_view text) { out.insert(out.end(), text.begin(), text.end()); }
void append_little(Bytes& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}
void append_big(Bytes& out, uint64_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}
std::string_view text_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

Bytes hash(const Bytes& bytes) {
  const auto digest = sha256_of(std::as_bytes(std::span(bytes)));
  return {digest.begin(), digest.end()};
}

constexpr std::string_view kSaltKey = "cache_salt";

// Pickle protocol 5, as Python writes it for the values that occur here. Only one frame; larger input is not
// recomputed.
class Pickle final : public PrefixHasher {
 public:
  explicit Pickle(std::string seed) : seed_(std::move(seed)) {}
  Bytes first() const override {
    Bytes body;
    put_text(body, seed_);
    return *framed(std::move(body));
  }
  std::optional<Bytes> next(const Bytes& before, std::span<const int32_t> tokens,
                            const std::optional<std::string>& salt) const override {
    Bytes body;
    append(body, "C");  // SHORT_BINBYTES
    append_little(body, before.size(), 1);
    append(body, text_of(before));
    append(body, kMemoize);
    put_tuple(body, tokens);
    if (salt && !salt->empty()) {  // ((key, salt),)
      put_text(body, kSaltKey);
      put_text(body, *salt);
      append(body, "\x86\x94\x85\x94");  // TUPLE2, MEMOIZE, TUPLE1, MEMOIZE
    } else {
      append(body, "N");
    }
    append(body, "\x87\x94");  // TUPLE3, MEMOIZE
    return framed(std::move(body));
  }

 private:
  static constexpr std::string_view kMemoize = "\x94";
  static constexpr size_t kFrame = 64 * 1024;

  static void put_text(Bytes& body, std::string_view text) {
    if (text.size() < 256) {
      append(body, "\x8c");  // SHORT_BINUNICODE
      append_little(body, text.size(), 1);
    } else {
      append(body, "X");  // BINUNICODE
      append_little(body, text.size(), 4);
    }
    append(body, text);
    append(body, kMemoize);
  }
  static void put_tuple(Bytes& body, std::span<const int32_t> numbers) {
    if (numbers.empty()) return append(body, ")");  // EMPTY_TUPLE
    if (numbers.size() > 3) append(body, "(");      // MARK
    for (const int32_t number : numbers) {
      if (number >= 0 && number < 256) {
        append(body, "K");  // BININT1
        append_little(body, static_cast<uint64_t>(number), 1);
      } else if (number >= 0 && number < 65536) {
        append(body, "M");  // BININT2
        append_little(body, static_cast<uint64_t>(number), 2);
      } else {
        append(body, "J");  // BININT
        append_little(body, static_cast<uint32_t>(number), 4);
      }
    }
    constexpr std::string_view kEnds[] = {"t", "\x85", "\x86", "\x87"};
    append(body, kEnds[numbers.size() > 3 ? 0 : numbers.size()]);
    append(body, kMemoize);
  }
  static std::optional<Bytes> framed(Bytes body) {
    append(body, ".");  // STOP
    if (body.size() >= kFrame) return std::nullopt;
    Bytes whole;
    append(whole, "\x80\x05\x95");  // PROTO 5, FRAME
    append_little(whole, body.size(), 8);
    append(whole, text_of(body));
    return hash(whole);
  }
  const std::string seed_;
};

// Canonical CBOR (RFC 8949, 4.2.1).
class Cbor final : public PrefixHasher {
 public:
  explicit Cbor(std::string seed) : seed_(std::move(seed)) {}
  Bytes first() const override {
    Bytes body;
    put_text(body, seed_);
    return hash(body);
  }
  std::optional<Bytes> next(const Bytes& before, std::span<const int32_t> tokens,
                            const std::optional<std::string>& salt) const override {
    Bytes body;
    put_head(body, 4, 3);
    put_head(body, 2, before.size());
    append(body, text_of(before));
    put_head(body, 4, tokens.size());
    for (const int32_t token : tokens) put_head(body, 0, static_cast<uint64_t>(token));
    if (salt && !salt->empty()) {
      put_head(body, 4, 1);
      put_head(body, 4, 2);
      put_text(body, kSaltKey);
      put_text(body, *salt);
    } else {
      body.push_back(0xf6);  // null
    }
    return hash(body);
  }

 private:
  static void put_head(Bytes& body, uint8_t major, uint64_t value) {
    const auto first = static_cast<uint8_t>(major << 5);
    if (value < 24) {
      body.push_back(static_cast<uint8_t>(first | value));
    } else if (value < 0x100) {
      body.push_back(first | 24);
      append_big(body, value, 1);
    } else if (value < 0x10000) {
      body.push_back(first | 25);
      append_big(body, value, 2);
    } else {
      body.push_back(first | 26);
      append_big(body, value, 4);
    }
  }
  static void put_text(Bytes& body, std::string_view text) {
    put_head(body, 3, text.size());
    append(body, text);
  }
  const std::string seed_;
};

}  // namespace

std::unique_ptr<PrefixHasher> PrefixHasher::of(const std::string& described) {
  constexpr std::string_view kSeed = ", seed ";
  const size_t comma = described.find(kSeed);
  if (comma == std::string::npos) return nullptr;
  const std::string algorithm = described.substr(0, comma);
  std::string seed = described.substr(comma + kSeed.size());
  if (algorithm == "sha256") return std::make_unique<Pickle>(std::move(seed));
  if (algorithm == "sha256_cbor") return std::make_unique<Cbor>(std::move(seed));
  return nullptr;
}

}  // namespace torpor
