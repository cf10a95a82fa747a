// Finds earlier places of the last tokens of a text, for prompt lookup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// The index of one text, which grows at its end. For each length of n-grams, a table holds the first place of each
// n-gram. A new token costs one lookup per length, however long the text is.
class NgramIndex {
 public:
  // Lengths of n-grams: 1 <= shortest <= longest.
  NgramIndex(int shortest, int longest);

  void append(const std::vector<int32_t>& tokens);

  // Let g be the longest n-gram that ends the text and also stands earlier in it. Returns at most `most` tokens that
  // follow the first place of g.
  std::vector<int32_t> following(int64_t most) const;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t num_bytes() const;

 private:
  // A hash table with open addressing. An entry is the position after the first place of an n-gram; 0: it is empty.
  struct Table {
    int64_t length;
    size_t num_used = 0;
    std::vector<uint32_t> ends = {};
  };

  uint64_t hash(int64_t end, int64_t length) const;
  // The position after the first place of the n-gram that ends at `end`. If the n-gram is new, `end` is noted.
  int64_t first_end(Table& table, int64_t end, uint64_t hash);
  // Makes room for this many more n-grams. Half of the slots stay free.
  void reserve(Table& table, size_t count);

  std::vector<int32_t> tokens_;
  std::vector<Table> tables_;  // by length, the shortest first
  int64_t match_end_ = 0;      // end of the n-gram of `following`; 0: there is none
};

}  // namespace quire
