// MANIFEST. A checksum would keep the fuzzer out, so the body is also given a right one; with every other input the
// header is the fuzzer's too.
#include <cstdlib>
#include <cstring>

#include "checkpoint/manifest.h"
#include "checkpoint/manifest_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  const auto raw = std::as_bytes(std::span(data, size));
  (void)decode_manifest(raw);
  static const Key key(std::array<uint8_t, kKeyBytes>{});
  (void)decode_manifest(raw, &key);
  constexpr size_t kHeader = 128;
  constexpr size_t kMac = 96;
  Bytes file = encode_manifest(Manifest{});
  file.resize(kHeader);
  file.insert(file.end(), data, data + size);
  const uint64_t body_bytes = size;
  std::memcpy(file.data() + 16, &body_bytes, sizeof body_bytes);
  std::memset(file.data() + kMac, 0, 32);
  const auto all = std::as_bytes(std::span(file));
  const ManifestMac mac = unkeyed_mac(all.first(kHeader), all.subspan(kHeader));
  std::memcpy(file.data() + kMac, mac.data(), mac.size());
  const Result<Manifest> decoded = decode_manifest(std::as_bytes(std::span(file)));
  if (!decoded) return 0;
  const Bytes again = encode_manifest(*decoded);
  const Result<Manifest> twice = decode_manifest(std::as_bytes(std::span(again)));
  if (!twice || encode_manifest(*twice) != again) std::abort();
  return 0;
}
