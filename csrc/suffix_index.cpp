#include "quire/suffix_index.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <functional>
#include <new>

#include "quire/token_hash.h"

namespace quire {
namespace {

constexpr int kNumChains = static_cast<int>(kChainLengths.size());
constexpr int kLongestNgram = kChainLengths.back();

// Calls use(chain, hash) for each n-gram that ends these tokens and has the length of a chain.
template <class Use>
void for_each_ngram(uint64_t hash, std::span<const int32_t> tokens, const Use& use) {
  const int num_tokens = static_cast<int>(tokens.size());
  int length = 0;
  for (int chain = 0; chain < kNumChains && kChainLengths[chain] <= num_tokens; ++chain) {
    while (length < kChainLengths[chain]) hash = add_token(hash, tokens[num_tokens - ++length]);
    use(chain, hash);
  }
}

uint64_t seed_of(const Tenant& tenant) { return token_hash_seed() ^ tenant.low; }

struct Draft {
  std::vector<int32_t> tokens;
  double score = 0;  // the expected number of tokens that hold
};

// Earlier places of the last tokens, the newest first, and the number of these tokens.
struct Places {
  int count = 0;
  Place place[kMostPlaces];
  int length[kMostPlaces];
};

template <class Text>
Places find_places(const Text& text, int chain, Place newest, std::span<const int32_t> context) {
  const int size = static_cast<int>(context.size());
  Places found;
  for (Place place = newest; place != 0 && found.count < kMostPlaces; place = text.older(chain, place)) {
    int length = 0;
    for (Place at = place; at != 0 && length < size && text.token(at) == context[size - 1 - length]; ++length)
      at = text.before(at);
    if (length < kChainLengths[chain]) continue;  // another n-gram of the same bucket
    found.place[found.count] = place;
    found.length[found.count++] = length;
  }
  return found;
}

// The draft of tokens that came most often after places that match at least `length` tokens.
template <class Text>
Draft follow(const Text& text, const Places& places, int length, int64_t most, double min_probability) {
  Draft draft;
  Place at[kMostPlaces];
  int32_t next[kMostPlaces];
  int num_places = 0;
  for (int i = 0; i < places.count; ++i)
    if (places.length[i] >= length) at[num_places++] = places.place[i];
  double probability = 1;
  while (static_cast<int64_t>(draft.tokens.size()) < most) {
    int num_next = 0;
    for (int i = 0; i < num_places; ++i) {
      const Place place = text.after(at[i]);
      if (place == 0) continue;
      at[num_next] = place;
      next[num_next++] = text.token(place);
    }
    int best = 0, best_count = 0;
    for (int i = 0; best_count < num_next - i; ++i) {
      const int count = static_cast<int>(std::count(next + i, next + num_next, next[i]));
      if (count > best_count) best = i, best_count = count;
    }
    if (best_count == 0) break;
    probability *= static_cast<double>(best_count) / num_places;
    if (probability < min_probability) break;
    draft.tokens.push_back(next[best]);
    draft.score += probability;
    num_places = 0;
    for (int i = best; i < num_next; ++i)
      if (next[i] == draft.tokens.back()) at[num_places++] = at[i];
  }
  return draft;
}

int64_t most_behind(const SuffixRule& rule, int length, int64_t most) {
  const double by_length = std::min(length * rule.max_spec_factor + 1e-6, 1e9);
  return std::min({most, static_cast<int64_t>(by_length), int64_t{rule.max_depth} - length});
}

// The most tokens of a draft, for matches of `shortest` to `longest` tokens.
int64_t most_behind(const SuffixRule& rule, int shortest, int longest, int64_t most) {
  int64_t found = 0;
  for (int length = shortest; length <= longest; ++length) found = std::max(found, most_behind(rule, length, most));
  return found;
}

// Replaces `best` by a better draft from a text, if there is one. Lengths with the same places differ only in the
// longest draft that they allow, and a shorter draft is the beginning of a longer one. So one draft is made for all of
// them.
template <class Text>
void improve(Draft& best, const Text& text, const Newest& newest, std::span<const int32_t> context, int64_t most,
             const SuffixRule& rule) {
  for (int chain = kNumChains - 1; chain >= 0; --chain) {
    const int longest = std::min<int>(context.size(), chain + 1 < kNumChains ? kChainLengths[chain + 1] - 1 : 1 << 30);
    const int shortest = kChainLengths[chain];
    const auto may_improve = [&](int64_t most_here) { return static_cast<double>(most_here) > best.score; };
    if (longest < shortest || !may_improve(most_behind(rule, shortest, longest, most))) continue;
    const Places places = find_places(text, chain, newest[chain], context.last(longest));
    int lengths[kMostPlaces + 1];
    std::copy_n(places.length, places.count, lengths);
    std::sort(lengths, lengths + places.count, std::greater<>());
    lengths[places.count] = shortest - 1;
    for (int i = 0; i < places.count; ++i) {
      if (lengths[i] == lengths[i + 1]) continue;
      const int64_t most_here = most_behind(rule, lengths[i + 1] + 1, lengths[i], most);
      if (!may_improve(most_here)) continue;  // no token counts more than 1
      Draft draft = follow(text, places, lengths[i], most_here, rule.min_token_prob);
      if (draft.score > best.score) best = std::move(draft);
    }
  }
}

}  // namespace

void OwnText::append(std::span<const int32_t> tokens) {
  const size_t num_known = tokens_.size(), num_tokens = num_known + tokens.size();
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  const bool is_crowded = num_tokens > 2 * chains_[0].newest.size();
  for (Chain& chain : chains_) {
    chain.older.resize(num_tokens);
    if (is_crowded) chain.newest.assign(std::bit_ceil(num_tokens), 0);
  }
  for (size_t index = is_crowded ? 0 : num_known; index < num_tokens; ++index) link(static_cast<Place>(index + 1));
}

void OwnText::link(Place place) {
  for_each_ngram(token_hash_seed(), std::span(tokens_).first(place), [&](int chain, uint64_t hash) {
    std::vector<Place>& newest = chains_[chain].newest;
    Place& first = newest[hash & (newest.size() - 1)];
    chains_[chain].older[place - 1] = first;
    first = place;
  });
}

Newest OwnText::newest() const {
  Newest found{};
  for (int chain = 0; chain < kNumChains; ++chain)
    if (!tokens_.empty()) found[chain] = older(chain, static_cast<Place>(tokens_.size()));
  return found;
}

int64_t OwnText::num_bytes() const {
  size_t count = tokens_.capacity();
  for (const Chain& chain : chains_) count += chain.older.capacity() + chain.newest.capacity();
  return static_cast<int64_t>(count * sizeof(Place));
}

namespace {

// An array of zeros. It takes no memory before it is written.
template <class T>
T* allocate_zeros(size_t count) {
  void* memory = std::calloc(count, sizeof(T));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

}  // namespace

SharedTexts::SharedTexts(int64_t max_bytes, int64_t max_requests) : max_requests_(max_requests) {
  constexpr int64_t kMostPages = int64_t{1} << 26;  // with more pages, 32 bits could not tell all places apart
  constexpr int64_t kPageBytes = sizeof(Page) + kPageTokens * kNumChains * sizeof(Place);
  num_pages_ = std::bit_floor(static_cast<uint32_t>(std::clamp<int64_t>(max_bytes / kPageBytes, 1, kMostPages)));
  pages_.reset(allocate_zeros<Page>(num_pages_));
  newest_.reset(allocate_zeros<Place>(size_t{num_pages_} * kPageTokens * kNumChains));
}

int64_t SharedTexts::num_bytes() const {
  return int64_t{num_pages_} * static_cast<int64_t>(sizeof(Page) + kPageTokens * kNumChains * sizeof(Place));
}

Place SharedTexts::append(const Tenant& tenant, Place previous, std::span<const int32_t> tokens) {
  if (end_ - first_ == num_pages_ * kPageTokens) drop_oldest();
  previous = live(previous, end_);
  if (previous == 0) {
    for (++num_requests_; num_requests_ > max_requests_;) drop_oldest();
  } else {
    page(previous).next = end_;
  }
  Page& made = page(end_);
  made.tenant = tenant;
  made.previous = previous;
  made.next = 0;
  made.num_tokens = static_cast<int32_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), made.tokens);

  int32_t text[kLongestNgram - 1 + kPageTokens];  // the first n-grams of the page begin with these tokens too
  int32_t* const begin = text + kLongestNgram - 1;
  std::copy(tokens.begin(), tokens.end(), begin);
  int num_before = 0;
  for (Place at = before(end_); at != 0 && num_before < kLongestNgram - 1; at = before(at))
    *(begin - ++num_before) = page(at).tokens[at % kPageTokens];
  for (size_t index = 0; index < tokens.size(); ++index) {
    const std::span<const int32_t> known(begin - num_before, num_before + index + 1);
    for_each_ngram(seed_of(tenant), known, [&](int chain, uint64_t hash) {
      Place& first = newest(chain, hash);
      made.older[chain][index] = first;
      first = end_ + static_cast<Place>(index);
    });
  }
  end_ += kPageTokens;
  return end_ - kPageTokens;
}

Place SharedTexts::before(Place place) const {
  if (place % kPageTokens != 0) return place - 1;
  const Place previous = live(page(place).previous, end_);
  return previous == 0 ? 0 : previous + kPageTokens - 1;
}

void SharedTexts::drop_oldest() {
  if (page(first_).next == 0) --num_requests_;
  first_ += kPageTokens;
}

Newest TextsOfTenant::newest(std::span<const int32_t> tokens) const {
  Newest found{};
  for_each_ngram(seed_of(tenant_), tokens, [&](int chain, uint64_t hash) {
    found[chain] = readable(chain, texts_.newest(chain, hash), texts_.end_);
  });
  return found;
}

Place TextsOfTenant::older(int chain, Place place) const {
  return readable(chain, texts_.page(place).older[chain][place % kPageTokens], place);
}

Place TextsOfTenant::after(Place place) const {
  const auto& page = texts_.page(place);
  const Place offset = place % kPageTokens + 1;
  return static_cast<int32_t>(offset) < page.num_tokens ? place + 1 : page.next;
}

Place TextsOfTenant::readable(int chain, Place place, Place end) const {
  while ((place = texts_.live(place, end)) != 0 && texts_.page(place).tenant != tenant_) {
    end = place;
    place = texts_.page(place).older[chain][place % kPageTokens];
  }
  return place;
}

void SuffixIndex::append(std::span<const int32_t> tokens) {
  own_.append(tokens);
  if (shared_ == nullptr) return;
  while (num_tokens() - num_not_to_share_ >= kPageTokens) share(kPageTokens);
}

void SuffixIndex::finish() {
  const int64_t rest = num_tokens() - num_not_to_share_;
  if (shared_ != nullptr && rest > 0) share(rest);
}

void SuffixIndex::share(int64_t count) {
  last_page_ = shared_->append(tenant_, last_page_, own_.tokens().subspan(num_not_to_share_, count));
  num_not_to_share_ += count;
}

std::vector<int32_t> SuffixIndex::draft(int64_t most) const {
  const std::span<const int32_t> tokens = own_.tokens();
  const auto context = tokens.last(std::min<int64_t>(num_tokens(), rule_.max_depth - 1));
  Draft best;
  improve(best, own_, own_.newest(), context, most, rule_);
  if (shared_ != nullptr) {
    const TextsOfTenant texts(*shared_, tenant_);
    improve(best, texts, texts.newest(context), context, most, rule_);
  }
  return best.tokens;
}

}  // namespace quire
