// SPDX-License-Identifier: Apache-2.0
// MANIFEST, of both versions that are read. A checksum would keep the fuzzer out, so the body is also given a right
// one; the header is once the fuzzer's too.
#include <cstdlib>
#include <cstring>

#include "checkpoint/manifest_codec.h"

namespace {

torpor::Result<torpor::OpenedManifest> with_right_header(const uint8_t* data, size_t size, uint32_t version) {
  using namespace torpor;
  constexpr size_t kHeader = 128;
  constexpr size_t kMac = 96;
  Bytes file = encode_manifest(Manifest{});
  file.resize(kHeader);
  file.insert(file.end(), data, data + size);
  const uint64_t body_bytes = size;
  std::memcpy(file.data() + 8, &version, sizeof version);
  std::memcpy(file.data() + 16, &body_bytes, sizeof body_bytes);
  std::memset(file.data() + kMac, 0, 32);
  const auto all = std::as_bytes(std::span(file));
  const ManifestMac mac = unkeyed_mac(all.first(kHeader), all.subspan(kHeader));
  std::memcpy(file.data() + kMac, mac.data(), mac.size());
  return decode_manifest(std::as_bytes(std::span(file)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  const auto raw = std::as_bytes(std::span(data, size));
  (void)decode_manifest(raw);
  static const Key key(std::array<uint8_t, kKeyBytes>{});
  (void)decode_manifest(raw, &key);
  for (const uint32_t version : {3u, kFormatVersion}) {
    const Result<OpenedManifest> decoded = with_right_header(data, size, version);
    if (!decoded) continue;
    const Bytes again = encode_manifest(decoded->manifest);
    const Result<OpenedManifest> twice = decode_manifest(std::as_bytes(std::span(again)));
    if (!twice || encode_manifest(twice->manifest) != again) std::abort();
  }
  return 0;
}
