#include "quire/ngram_index.h"

#include <algorithm>
#include <bit>
#include <random>

#include "quire/token_hash.h"

namespace quire {

uint64_t token_hash_seed() {
  static const uint64_t seed = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return seed;
}

NgramIndex::NgramIndex(int shortest, int longest) {
  for (int length = shortest; length <= longest; ++length) tables_.push_back({.length = length});
}

void NgramIndex::append(const std::vector<int32_t>& tokens) {
  for (Table& table : tables_) reserve(table, tokens.size());
  for (const int32_t token : tokens) {
    tokens_.push_back(token);
    match_end_ = 0;
    const int64_t end = num_tokens();
    uint64_t hash = token_hash_seed();
    int64_t num_hashed = 0;
    for (Table& table : tables_) {
      if (table.length > end) break;
      while (num_hashed < table.length) hash = add_token(hash, tokens_[end - ++num_hashed]);
      const int64_t first = first_end(table, end, hash);
      if (first != end) match_end_ = first;
    }
  }
}

std::vector<int32_t> NgramIndex::following(int64_t most) const {
  if (match_end_ == 0) return {};
  const auto begin = tokens_.begin() + match_end_;
  return {begin, begin + std::min(most, num_tokens() - match_end_)};
}

int64_t NgramIndex::num_bytes() const {
  size_t bytes = tokens_.capacity() * sizeof(int32_t);
  for (const Table& table : tables_) bytes += table.ends.size() * sizeof(uint32_t);
  return static_cast<int64_t>(bytes);
}

uint64_t NgramIndex::hash(int64_t end, int64_t length) const {
  uint64_t hash = token_hash_seed();
  for (int64_t back = 1; back <= length; ++back) hash = add_token(hash, tokens_[end - back]);
  return hash;
}

int64_t NgramIndex::first_end(Table& table, int64_t end, uint64_t hash) {
  const auto last = tokens_.begin() + end;
  const size_t mask = table.ends.size() - 1;
  for (size_t slot = hash & mask;; slot = (slot + 1) & mask) {
    uint32_t& first = table.ends[slot];
    if (first == 0) {
      first = static_cast<uint32_t>(end);
      ++table.num_used;
      return end;
    }
    if (std::equal(last - table.length, last, tokens_.begin() + first - table.length)) return first;
  }
}

void NgramIndex::reserve(Table& table, size_t count) {
  const size_t num_slots = 2 * (table.num_used + count);
  if (num_slots <= table.ends.size()) return;
  const std::vector<uint32_t> ends = std::move(table.ends);
  table.ends.assign(std::bit_ceil(num_slots), 0);
  const size_t mask = table.ends.size() - 1;
  for (const uint32_t end : ends) {
    if (end == 0) continue;
    size_t slot = hash(end, table.length) & mask;
    while (table.ends[slot] != 0) slot = (slot + 1) & mask;
    table.ends[slot] = end;
  }
}

}  // namespace quire
