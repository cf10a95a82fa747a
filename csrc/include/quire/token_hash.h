// Hashes of the last tokens of a text, for the indexes of tokens. They only choose buckets: tokens are compared.
#pragma once

#include <cstdint>

namespace quire {

// Random for each process, so that no client can choose tokens that all fall into one bucket.
uint64_t token_hash_seed();

// The hash of an n-gram is made backwards, from its last token to its first: each shorter one is on the way.
inline uint64_t add_token(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace quire
