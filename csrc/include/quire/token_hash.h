// Hashes of the last tokens of a text, for the token indexes. A hash only chooses a bucket; tokens are compared there.
#pragma once

#include <cstdint>

namespace quire {

// The seed is random for each process, so that no client can choose tokens that all fall into one bucket.
uint64_t token_hash_seed();

// The hash of an n-gram is made backwards, from its last token to its first. So it passes the hash of each shorter
// n-gram.
inline uint64_t add_token(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace quire
