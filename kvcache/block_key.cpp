#include "kvcache/block_key.h"

#include <span>

namespace torpor {

Digest KeySpace::digest() const {
  StreamingDigest digest;
  for (const Digest* part : {&model, &weights, &adapters}) digest.update(std::as_bytes(std::span(part->bytes)));
  for (const std::string* part : {&layout, &hashing}) {
    const uint64_t length = part->size();  // so that nothing moves from one to the next unnoticed
    digest.update(std::as_bytes(std::span(&length, 1)));
    digest.update(std::as_bytes(std::span(*part)));
  }
  digest.update(std::as_bytes(std::span(&ranks, 1)));
  return digest.finish();
}

}  // namespace torpor
