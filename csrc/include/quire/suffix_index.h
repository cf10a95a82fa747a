// Suffix decoding (arXiv 2411.04975) without a tree: it finds the newest earlier places of the last tokens of a
// request, and makes a draft from the tokens that follow there. For four lengths of n-grams, each text keeps a chain of
// the places where the same n-gram ends, like matchers of LZ77. A token costs four entries. Old text can be dropped at
// any time. A draft looks only at the newest places.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

namespace quire {

inline constexpr std::array<int, 4> kChainLengths = {1, 2, 4, 8};  // lengths of n-grams
inline constexpr int kMostPlaces = 32;                             // places of a chain that a draft looks at
inline constexpr int kPageTokens = 32;

// A place is the number of the last token of an n-gram. 0 means that there is no place.
using Place = uint32_t;
using Newest = std::array<Place, kChainLengths.size()>;  // one entry of each chain

// The name of a tenant. Only requests of the same tenant may read a text.
struct Tenant {
  uint64_t high, low;
  bool operator==(const Tenant&) const = default;
};

// The text of one request.
class OwnText {
 public:
  void append(std::span<const int32_t> tokens);

  std::span<const int32_t> tokens() const { return tokens_; }
  int64_t num_bytes() const;

  // The newest earlier places of the n-grams that end the text.
  Newest newest() const;
  Place older(int chain, Place place) const { return chains_[chain].older[place - 1]; }
  Place before(Place place) const { return place - 1; }
  Place after(Place place) const { return place < tokens_.size() ? place + 1 : 0; }
  int32_t token(Place place) const { return tokens_[place - 1]; }

 private:
  struct Chain {
    std::vector<Place> older;   // by place
    std::vector<Place> newest;  // by bucket
  };
  void link(Place place);

  std::vector<int32_t> tokens_;
  std::array<Chain, kChainLengths.size()> chains_;
};

// Texts of many requests, in pages of a fixed amount of memory. The oldest pages make room for new pages, and also for
// new requests if there are too many requests.
class SharedTexts {
 public:
  // Takes at most `max_bytes` of memory, but at least one page. num_bytes() gives the exact limit. Memory is taken when
  // text comes in.
  SharedTexts(int64_t max_bytes, int64_t max_requests);

  int64_t num_bytes() const;
  int64_t num_requests() const { return num_requests_; }

  // Adds 1 to kPageTokens tokens as a new page after the page `previous` of the same request, which must be full. 0:
  // they are the first tokens of the request. Returns the page, as the place of its first token.
  Place append(const Tenant& tenant, Place previous, std::span<const int32_t> tokens);

 private:
  friend class TextsOfTenant;

  struct Page {
    Tenant tenant;
    Place previous, next;
    int32_t num_tokens;
    int32_t tokens[kPageTokens];
    Place older[kChainLengths.size()][kPageTokens];
  };

  Page& page(Place place) const { return pages_[(place / kPageTokens) & (num_pages_ - 1)]; }
  Place& newest(int chain, uint64_t hash) const {
    return newest_[(hash & (num_pages_ * kPageTokens - 1)) * kChainLengths.size() + chain];
  }
  // The place, if its page still exists and it is before `end`; else 0. The numbers of places grow, and wrap after
  // 2^32.
  Place live(Place place, Place end) const { return place - first_ < end - first_ ? place : 0; }
  Place before(Place place) const;
  void drop_oldest();

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  template <class T>
  using Memory = std::unique_ptr<T[], Free>;

  uint32_t num_pages_;  // a power of two
  int64_t max_requests_, num_requests_ = 0;
  Place first_ = kPageTokens, end_ = kPageTokens;  // places of the pages that are there
  Memory<Page> pages_;
  Memory<Place> newest_;  // by bucket and chain
};

// The texts that a tenant may read.
class TextsOfTenant {
 public:
  TextsOfTenant(const SharedTexts& texts, const Tenant& tenant) : texts_(texts), tenant_(tenant) {}

  // The newest places of the n-grams that end with these tokens.
  Newest newest(std::span<const int32_t> tokens) const;
  Place older(int chain, Place place) const;
  Place before(Place place) const { return texts_.before(place); }
  Place after(Place place) const;
  int32_t token(Place place) const { return texts_.page(place).tokens[place % kPageTokens]; }

 private:
  // The first place of a chain, from `place` on, that belongs to the tenant and is before `end`.
  Place readable(int chain, Place place, Place end) const;

  const SharedTexts& texts_;
  Tenant tenant_;
};

struct SuffixRule {
  int max_depth;  // tokens of a match and its draft together
  double max_spec_factor;
  double min_token_prob;
};

// The index of one request: its own text, and the output that it shares with others.
class SuffixIndex {
 public:
  // shared: nullptr if outputs are not shared. num_prompt: the tokens of the prompt, which are never shared.
  SuffixIndex(const SuffixRule& rule, SharedTexts* shared, const Tenant& tenant, int64_t num_prompt)
      : rule_(rule), shared_(shared), tenant_(tenant), num_not_to_share_(num_prompt) {}

  // Grows the text. Whole pages of output are shared.
  void append(std::span<const int32_t> tokens);
  // Shares the rest of the output. No more tokens will come.
  void finish();

  // A draft of at most `most` tokens, by the rule in spec_decode/suffix.py.
  std::vector<int32_t> draft(int64_t most) const;

  int64_t num_tokens() const { return static_cast<int64_t>(own_.tokens().size()); }
  int64_t num_bytes() const { return own_.num_bytes(); }

 private:
  void share(int64_t count);

  SuffixRule rule_;
  SharedTexts* shared_;
  Tenant tenant_;
  int64_t num_not_to_share_;  // tokens at the beginning that are not output, or that are shared already
  Place last_page_ = 0;
  OwnText own_;
};

}  // namespace quire
