#include "quire/shared_group.h"

#include <sys/mman.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <string>
#include <system_error>
#include <utility>

#include "quire/round_up.h"
#include "quire/thread_pool.h"

namespace quire {

// What a rank says. Its turn and its signatures of two turns lie on one line, which the others read.
struct alignas(128) RankWords {
  std::atomic<uint32_t> turn;
  std::atomic<uint32_t> num_sleepers;  // ranks that sleep until this one arrives
  std::atomic<uint64_t> signatures[2];
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPageBytes = 4096;
constexpr auto kNap = std::chrono::milliseconds(100);  // a sleeper looks whether somebody has failed
constexpr int kPausesPerClockRead = 64;
constexpr int64_t kMinCopyBytes = 256 * 1024;  // worth a wake-up of another thread

struct GroupWords {
  std::atomic<int32_t> aborted;  // a rank + 1; 0: none
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

timespec timespec_of(std::chrono::nanoseconds duration) {
  return {static_cast<time_t>(duration.count() / 1'000'000'000), static_cast<long>(duration.count() % 1'000'000'000)};
}

// Sleeps while the word has this value, at most for kNap.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  const timespec nap = timespec_of(kNap);
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
#else
  const timespec nap = timespec_of(std::chrono::microseconds(50));
  if (word.load(std::memory_order_acquire) == value) nanosleep(&nap, nullptr);
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t width, int64_t rows) {
  if (from_stride == width && to_stride == width) {
    width *= rows;
    rows = 1;
  }
  const int64_t num_tasks = std::clamp<int64_t>(rows * width / kMinCopyBytes, 1, rows);
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) std::memcpy(to + row * to_stride, from + row * from_stride, width);
  };
  if (num_tasks == 1 || num_threads() == 1) return copy(0, rows);
  parallel_for(static_cast<int>(num_tasks),
               [&](int task, int) { copy(rows * task / num_tasks, rows * (task + 1) / num_tasks); });
}

}  // namespace

int64_t SharedGroup::num_bytes(int size, int64_t slot_bytes) {
  return round_up(static_cast<int64_t>(sizeof(RankWords)) * size, kPageBytes) +
         round_up(2 * size * slot_bytes, kPageBytes);
}

SharedGroup::SharedGroup(int fd, int64_t begin, std::vector<int> members, int rank, int64_t slot_bytes,
                         int spin_microseconds, double timeout_seconds)
    : begin_(begin),
      members_(std::move(members)),
      rank_(rank),
      size_(static_cast<int>(members_.size())),
      slot_bytes_(slot_bytes),
      spin_microseconds_(spin_microseconds),
      timeout_seconds_(timeout_seconds) {
  void* const memory = mmap(nullptr, begin_ + num_bytes(size_, slot_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the ranks' memory");
  memory_ = static_cast<char*>(memory);
}

SharedGroup::~SharedGroup() { munmap(memory_, begin_ + num_bytes(size_, slot_bytes_)); }

RankWords& SharedGroup::words(int rank) const { return reinterpret_cast<RankWords*>(memory_ + begin_)[rank]; }

char* SharedGroup::slot(int rank) const {
  return memory_ + begin_ + num_bytes(size_, 0) + (2 * rank + turn_ % 2) * slot_bytes_;
}

// Ranks that sleep in other groups look after a nap.
void SharedGroup::abort(int number) {
  int32_t none = 0;
  reinterpret_cast<GroupWords*>(memory_)->aborted.compare_exchange_strong(none, number + 1);
  for (int other = 0; other < size_; ++other) wake_all(words(other).turn);
}

int SharedGroup::aborted() const { return reinterpret_cast<const GroupWords*>(memory_)->aborted.load() - 1; }

std::string SharedGroup::name(int rank) const { return "rank " + std::to_string(members_[rank]); }

void SharedGroup::check_aborted() const {
  const int number = aborted();
  if (number >= 0) throw GroupError("rank " + std::to_string(number) + " has failed");
}

// Turns wrap around.
bool SharedGroup::has_arrived(int rank) const {
  return static_cast<int32_t>(words(rank).turn.load(std::memory_order_acquire) - turn_) >= 0;
}

void SharedGroup::arrive(uint64_t signature) {
  RankWords& own = words(rank_);
  own.signatures[turn_ % 2].store(signature, std::memory_order_relaxed);
  // Ordered with the look for sleepers, so that a rank that is about to sleep does not miss it.
  own.turn.store(turn_, std::memory_order_seq_cst);
  if (own.num_sleepers.load(std::memory_order_seq_cst) != 0) wake_all(own.turn);
}

void SharedGroup::wait_for(int rank, uint64_t signature) {
  RankWords& other = words(rank);
  if (!has_arrived(rank)) {
    const auto start = Clock::now();
    const auto spin_until = start + std::chrono::microseconds(spin_microseconds_);
    do {
      for (int i = 0; i < kPausesPerClockRead && !has_arrived(rank); ++i) pause_cpu();
    } while (!has_arrived(rank) && Clock::now() < spin_until);
    if (!has_arrived(rank)) {
      other.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
      while (!has_arrived(rank) && aborted() < 0) {
        const uint32_t seen = other.turn.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - turn_) >= 0) break;
        sleep_on(other.turn, seen);
        if (std::chrono::duration<double>(Clock::now() - start).count() > timeout_seconds_) {
          abort(members_[rank]);
          break;
        }
      }
      other.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  check_aborted();
  if (other.signatures[turn_ % 2].load(std::memory_order_relaxed) != signature) {
    abort(members_[rank]);
    throw GroupError(name(rank) + " does something else than " + name(rank_));
  }
}

void SharedGroup::gather(const GatherArgs& args) {
  check_aborted();
  const int64_t widest = *std::max_element(args.widths.begin(), args.widths.begin() + size_);
  const int64_t piece_bytes = std::min(widest, slot_bytes_);
  if (piece_bytes == 0) return;
  const int64_t most_rows = slot_bytes_ / piece_bytes;
  uint64_t signature = static_cast<uint64_t>(args.rows);
  for (int rank = 0; rank < size_; ++rank) signature = signature * 0x9e3779b97f4a7c15u + args.widths[rank];
  for (int64_t row = 0; row < args.rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, args.rows - row);
    for (int64_t first = 0; first < widest; first += piece_bytes) {
      ++turn_;
      const auto width_of = [&](int rank) { return std::clamp<int64_t>(args.widths[rank] - first, 0, piece_bytes); };
      const int64_t own = width_of(rank_);
      copy_rows(args.part.data + row * args.part.stride + first, args.part.stride, slot(rank_), own, own, rows);
      arrive(signature);
      int64_t column = first;
      for (int rank = 0; rank < size_; column += args.widths[rank++]) {
        if (rank != rank_) wait_for(rank, signature);
        const int64_t width = width_of(rank);
        if (args.out.data == nullptr) continue;
        copy_rows(slot(rank), width, args.out.data + row * args.out.stride + column, args.out.stride, width, rows);
      }
    }
  }
}

}  // namespace quire
