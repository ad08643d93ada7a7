// SPDX-License-Identifier: Apache-2.0
#include "base/seal.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>
#include <sodium.h>

namespace torpor {
namespace {

static_assert(kKeyBytes == crypto_generichash_KEYBYTES && kKeyBytes == crypto_aead_xchacha20poly1305_ietf_KEYBYTES);
static_assert(std::tuple_size_v<SealTag> == crypto_aead_xchacha20poly1305_ietf_ABYTES);

const unsigned char* raw(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

ManifestMac blake2b(std::span<const uint8_t> key, std::span<const std::byte> header, std::span<const std::byte> body) {
  crypto_generichash_state state;
  crypto_generichash_init(&state, key.data(), key.size(), std::tuple_size_v<ManifestMac>);
  crypto_generichash_update(&state, raw(header), header.size());
  crypto_generichash_update(&state, raw(body), body.size());
  ManifestMac mac;
  crypto_generichash_final(&state, mac.data(), mac.size());
  return mac;
}

// Derive the checkpoint's own key for one purpose.
template <size_t kSize>
void derive(const Key& key, const SealId& id, std::string_view purpose, std::array<uint8_t, kSize>& out) {
  std::array<uint8_t, 32> whole{};
  crypto_generichash_state state;
  crypto_generichash_init(&state, key.bytes().data(), key.bytes().size(), whole.size());
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size());
  crypto_generichash_update(&state, id.data(), id.size());
  crypto_generichash_final(&state, whole.data(), whole.size());
  std::copy_n(whole.begin(), kSize, out.begin());
  sodium_memzero(whole.data(), whole.size());
}

struct Nonce {
  uint32_t kind;
  int32_t rank;
  uint64_t offset;
  uint64_t zero;
};
static_assert(sizeof(Nonce) == crypto_aead_xchacha20poly1305_ietf_NPUBBYTES);

Nonce nonce_of(const SealPlace& place) { return {static_cast<uint32_t>(place.kind), place.rank, place.offset, 0}; }

// libsodium chooses the machine's fastest code once. Call this before any other of its functions.
void prepare() {
  static const int ready = ::sodium_init();
  (void)ready;
}

std::string associated(const SealPlace& place) { return fmt::format("torpor {}:", place.what); }

}  // namespace

std::string_view name(Protection protection) {
  switch (protection) {
    case Protection::kNone: return "none";
    case Protection::kAuthenticated: return "authenticated";
    case Protection::kEncrypted: return "encrypted";
  }
  return "none";
}

Key::~Key() { sodium_memzero(bytes_.data(), bytes_.size()); }

Result<Key> Key::read_file(const std::string& path) {
  const auto wrong = [&path](std::string_view what) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the key file {} {}", path, what),
                 .next_step = "make one with: (umask 077; head -c 32 /dev/urandom > FILE)"};
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return system_error(errno, fmt::format("cannot open the key file {}", path));
  std::array<char, 2 * kKeyBytes + 2> text{};
  struct stat info {};
  const bool known = ::fstat(fd, &info) == 0;
  ssize_t size = 0;
  do {
    size = ::read(fd, text.data(), text.size());
  } while (size < 0 && errno == EINTR);
  ::close(fd);
  struct Wipe {
    std::array<char, 2 * kKeyBytes + 2>& text;
    ~Wipe() { sodium_memzero(text.data(), text.size()); }
  } const wipe{text};
  if (!known || !S_ISREG(info.st_mode)) return wrong("is not a regular file");
  if ((info.st_mode & 077) != 0) return wrong("may be read by others (chmod 600)");
  if (size < 0) return wrong("cannot be read");
  std::array<uint8_t, kKeyBytes> bytes{};
  if (size == static_cast<ssize_t>(kKeyBytes)) {
    std::memcpy(bytes.data(), text.data(), kKeyBytes);
  } else {
    if (size == 2 * kKeyBytes + 1 && text[2 * kKeyBytes] == '\n') --size;
    size_t decoded = 0;
    const char* end = nullptr;
    if (size != 2 * kKeyBytes ||
        sodium_hex2bin(bytes.data(), bytes.size(), text.data(), static_cast<size_t>(size), nullptr, &decoded, &end) !=
            0 ||
        decoded != kKeyBytes) {
      return wrong("holds neither 32 bytes nor 64 hexadecimal digits");
    }
  }
  Key key(bytes);
  sodium_memzero(bytes.data(), bytes.size());
  return key;
}

Seal::Seal(const Key& key, const SealId& id, Protection protection) : protection_(protection), id_(id) {
  prepare();
  derive(key, id, "torpor 2 key name", key_name_);
  derive(key, id, "torpor 2 manifest", mac_key_);
  derive(key, id, "torpor 2 contents", chunk_key_);
}

Seal::~Seal() {
  sodium_memzero(mac_key_.data(), mac_key_.size());
  sodium_memzero(chunk_key_.data(), chunk_key_.size());
}

ManifestMac Seal::mac(std::span<const std::byte> header, std::span<const std::byte> body) const {
  return blake2b(mac_key_, header, body);
}

ManifestMac unkeyed_mac(std::span<const std::byte> header, std::span<const std::byte> body) {
  prepare();
  return blake2b({}, header, body);
}

SealTag Seal::seal(std::span<const std::byte> in, std::span<std::byte> out, const SealPlace& place) const {
  const Nonce nonce = nonce_of(place);
  const auto* const npub = reinterpret_cast<const unsigned char*>(&nonce);
  std::string extra = associated(place);
  SealTag tag{};
  unsigned long long tag_bytes = 0;
  if (protection_ == Protection::kEncrypted) {
    unsigned char none = 0;  // libsodium needs an address even for no bytes
    crypto_aead_xchacha20poly1305_ietf_encrypt_detached(
        out.empty() ? &none : reinterpret_cast<unsigned char*>(out.data()), tag.data(), &tag_bytes, raw(in), in.size(),
        reinterpret_cast<const unsigned char*>(extra.data()), extra.size(), nullptr, npub, chunk_key_.data());
    return tag;
  }
  // Poly1305 over the bytes, with a one-time key for this place, and with the place's name in front.
  std::array<unsigned char, crypto_onetimeauth_KEYBYTES> once{};
  crypto_stream_xchacha20(once.data(), once.size(), npub, chunk_key_.data());
  crypto_onetimeauth_state state;
  crypto_onetimeauth_init(&state, once.data());
  const uint64_t name_bytes = extra.size();
  crypto_onetimeauth_update(&state, reinterpret_cast<const unsigned char*>(&name_bytes), sizeof name_bytes);
  crypto_onetimeauth_update(&state, reinterpret_cast<const unsigned char*>(extra.data()), extra.size());
  crypto_onetimeauth_update(&state, raw(in), in.size());
  crypto_onetimeauth_final(&state, tag.data());
  sodium_memzero(once.data(), once.size());
  return tag;
}

Status Seal::open(std::span<std::byte> bytes, const SealTag& tag, const SealPlace& place) const {
  bool right = false;
  if (protection_ == Protection::kEncrypted) {
    const Nonce nonce = nonce_of(place);
    const std::string extra = associated(place);
    unsigned char none = 0;  // libsodium needs an address even for no bytes
    auto* const data = bytes.empty() ? &none : reinterpret_cast<unsigned char*>(bytes.data());
    right = crypto_aead_xchacha20poly1305_ietf_decrypt_detached(
                data, nullptr, data, bytes.size(), tag.data(), reinterpret_cast<const unsigned char*>(extra.data()),
                extra.size(), reinterpret_cast<const unsigned char*>(&nonce), chunk_key_.data()) == 0;
  } else {
    const SealTag expected = seal(bytes, {}, place);
    right = sodium_memcmp(expected.data(), tag.data(), tag.size()) == 0;
  }
  if (right) return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{} is not what was sealed", place.what),
               .next_step = "use another checkpoint"};
}

SealId random_seal_id() {
  prepare();
  SealId id;
  randombytes_buf(id.data(), id.size());
  return id;
}

}  // namespace torpor
