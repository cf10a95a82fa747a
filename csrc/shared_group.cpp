#include "quire/shared_group.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <numeric>
#include <string>
#include <system_error>
#include <utility>

#include "quire/round_up.h"
#include "quire/thread_pool.h"

namespace quire {

struct GroupWords {
  std::atomic<uint64_t> aborted;  // the number of a rank + 1, and above it the cause; 0: none
};

// The report of a rank. Its turn and its signatures of two turns lie on one cache line, which the others read.
struct alignas(128) RankWords {
  std::atomic<uint32_t> turn;
  std::atomic<uint32_t> num_sleepers;  // ranks that sleep until this one arrives
  std::atomic<uint64_t> signatures[2];
  std::atomic<uint64_t> left[2];    // by parity of a void step: the step and the turn in which the rank left it
  std::atomic<uint32_t> done;       // the last step that the rank has ended
  std::atomic<uint32_t> void_step;  // only in the first rank: the last step that a rank has left; 0: none
};

// What a rank sends to another machine when it has written to its words. Bytes of its slot follow, if it has filled it.
struct Note {
  enum Kind : uint32_t { kTurn, kEnd, kLeft };

  uint32_t kind;
  uint32_t number;  // of the turn, or of the step that the rank has ended or left
  uint64_t word;    // the signature of the turn, or the turn in which it has left
  int64_t bytes;
  int64_t begin = 0;  // the place of the bytes in the slot
};

// The progress of a rank in its step. Only this rank writes it. Others read it when they have waited too long.
struct alignas(64) WhereWords {
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> begun, ended, turns;
  std::atomic<int32_t> awaited;  // the number of a rank + 1; 0: none
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPageBytes = 4096;
constexpr auto kNap = std::chrono::milliseconds(100);   // the time after which a sleeper looks for failed ranks
constexpr auto kLook = std::chrono::microseconds(100);  // the time between two checks whether all have left a void step
constexpr int kPausesPerClockRead = 64;
constexpr int64_t kMinCopyBytes = 256 * 1024;  // with fewer bytes, waking another thread costs more than it saves

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

// Sleeps as long as the word has this value, at most for kNap.
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
  if (rows == 0 || width == 0) return;
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

static_assert((Whereabouts::kMostRanks + 1) * sizeof(WhereWords) <= SharedGroup::kFirstPart);

WhereWords& where(char* memory, int number) { return reinterpret_cast<WhereWords*>(memory)[1 + number]; }

char* map(int fd, int64_t num_bytes) {
  void* const memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the ranks' memory");
  return static_cast<char*>(memory);
}

#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int kSendFlags = MSG_DONTWAIT;  // Python ignores SIGPIPE
#endif

// Returns kNotKnown, or the cause for which the connection has ended.
int receive(int socket, void* to, int64_t bytes) {
  for (char* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t count = recv(socket, at, bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count == 0 ? SharedGroup::kClosed : errno;
    at += count;
    bytes -= count;
  }
  return SharedGroup::kNotKnown;
}

}  // namespace

Whereabouts::Whereabouts(int fd, int number) : memory_(map(fd, SharedGroup::kFirstPart)), number_(number) {
  where(memory_, number_).pid = getpid();
}

Whereabouts::~Whereabouts() { munmap(memory_, SharedGroup::kFirstPart); }

void Whereabouts::begin_step() {
  WhereWords& own = where(memory_, number_);
  own.turns.store(0, std::memory_order_relaxed);
  own.begun.fetch_add(1, std::memory_order_relaxed);
}

void Whereabouts::end_step() {
  WhereWords& own = where(memory_, number_);
  own.ended.store(own.begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void Whereabouts::await(int number) { where(memory_, number_).awaited.store(number + 1, std::memory_order_relaxed); }

Whereabouts::Place Whereabouts::of(int number) const {
  const WhereWords& words = where(memory_, number);
  return {words.pid.load(), words.begun.load(), words.ended.load(), words.turns.load(), words.awaited.load() - 1};
}

int64_t SharedGroup::num_bytes(int size, int64_t slot_bytes) {
  return round_up(static_cast<int64_t>(sizeof(RankWords)) * size, kPageBytes) +
         round_up(2 * size * slot_bytes, kPageBytes);
}

SharedGroup::SharedGroup(int fd, int64_t begin, std::vector<int> members, int rank, int64_t slot_bytes,
                         int spin_microseconds, double timeout_seconds, const std::vector<std::pair<int, int>>& peers)
    : begin_(begin),
      members_(std::move(members)),
      rank_(rank),
      size_(static_cast<int>(members_.size())),
      slot_bytes_(slot_bytes),
      spin_microseconds_(spin_microseconds),
      timeout_seconds_(timeout_seconds),
      num_local_(size_ / (static_cast<int>(peers.size()) + 1)) {
  memory_ = map(fd, begin_ + num_bytes(size_, slot_bytes));
  try {
    for (const auto& [other, socket] : peers) {
      const int own = fcntl(socket, F_DUPFD_CLOEXEC, 0);
      if (own < 0) throw std::system_error(errno, std::generic_category(), "a connection of the ranks");
      peers_.push_back({other, own, {}});
      peers_.back().listener = std::thread([this, other = other, own] { listen(other, own); });
    }
  } catch (...) {
    free_all();
    throw;
  }
}

SharedGroup::~SharedGroup() { free_all(); }

void SharedGroup::free_all() {
  close();
  for (const Peer& peer : peers_) ::close(peer.socket);
  munmap(memory_, begin_ + num_bytes(size_, slot_bytes_));
}

void SharedGroup::close() {
  is_closing_ = true;
  for (Peer& peer : peers_) {
    shutdown(peer.socket, SHUT_RDWR);
    if (peer.listener.joinable()) peer.listener.join();
  }
}

RankWords& SharedGroup::words(int rank) const { return reinterpret_cast<RankWords*>(memory_ + begin_)[rank]; }

char* SharedGroup::slot(int rank, uint32_t turn) const {
  return memory_ + begin_ + num_bytes(size_, 0) + (2 * rank + turn % 2) * slot_bytes_;
}

// Writes to the words and slots of a rank of another machine what it has written there, in the same order.
void SharedGroup::listen(int rank, int socket) {
  int cause = kNotKnown;
  for (Note note; (cause = receive(socket, &note, sizeof note)) == kNotKnown;) {
    cause = kNonsense;
    if (note.kind > Note::kLeft || note.begin < 0 || note.begin > slot_bytes_ || note.bytes < 0 ||
        note.bytes > slot_bytes_ - note.begin)
      break;
    if ((cause = receive(socket, slot(rank, note.number) + note.begin, note.bytes)) != kNotKnown) break;
    if (note.kind == Note::kTurn)
      write_turn(rank, note.number, note.word);
    else if (note.kind == Note::kEnd)
      words(rank).done.store(note.number, std::memory_order_release);
    else
      write_left(rank, note.number, static_cast<uint32_t>(note.word));
  }
  if (!is_closing_) abort(members_[rank], cause);
}

// Tells other machines what this rank has written. The slot goes where a rank reads it. With `begins`, each machine
// gets its own part: from begins[machine] to begins[machine + 1].
void SharedGroup::tell(const Note& note, int reader, const int64_t* begins) {
  for (const Peer& peer : peers_) {
    Note own = note;
    if (begins != nullptr) {
      own.begin = begins[machine(peer.rank)];
      own.bytes = begins[machine(peer.rank) + 1] - own.begin;
    } else if (reader != GatherArgs::kAllRanks && machine(reader) != machine(peer.rank)) {
      own.bytes = 0;
    }
    send(peer, own);
  }
}

// A connection that ends is the failure of the rank at its other end.
void SharedGroup::send(const Peer& peer, const Note& note) {
  const auto start = Clock::now();
  std::atomic<int32_t>& awaited = where(memory_, members_[rank_]).awaited;
  iovec parts[2] = {{const_cast<Note*>(&note), sizeof note},
                    {slot(rank_, turn_) + note.begin, static_cast<size_t>(note.bytes)}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  while (parts[0].iov_len + parts[1].iov_len > 0) {
    const ssize_t count = sendmsg(peer.socket, &message, kSendFlags);
    if (count >= 0) {
      size_t rest = static_cast<size_t>(count);
      for (iovec& part : parts) {
        const size_t sent = std::min(rest, part.iov_len);
        part = {static_cast<char*>(part.iov_base) + sent, part.iov_len - sent};
        rest -= sent;
      }
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (aborted() >= 0) check();
      if (std::chrono::duration<double>(Clock::now() - start).count() > timeout_seconds_) give_up(peer.rank);
      pollfd writable{peer.socket, POLLOUT, 0};
      awaited.store(members_[peer.rank] + 1, std::memory_order_relaxed);
      poll(&writable, 1, kNap / std::chrono::milliseconds(1));
      awaited.store(0, std::memory_order_relaxed);
    } else if (errno != EINTR) {
      abort(members_[peer.rank], errno);
      check();
    }
  }
}

// Ranks that sleep in other groups notice it after their nap.
void SharedGroup::abort(int number, int cause) {
  uint64_t none = 0;
  const uint64_t word = uint64_t{static_cast<uint32_t>(cause)} << 32 | static_cast<uint32_t>(number + 1);
  reinterpret_cast<GroupWords*>(memory_)->aborted.compare_exchange_strong(none, word);
  for (int other = 0; other < size_; ++other) wake_all(words(other).turn);
}

int SharedGroup::aborted() const {
  return static_cast<int>(reinterpret_cast<const GroupWords*>(memory_)->aborted.load()) - 1;
}

std::string SharedGroup::cause() const {
  const auto cause = static_cast<int>(reinterpret_cast<const GroupWords*>(memory_)->aborted.load() >> 32);
  switch (cause) {
    case kNotKnown:
      return "";
    case kClosed:
      return "its connection was closed";
    case kNonsense:
      return "it has sent something that no rank sends";
    case kDiffers:
      return "it does something else than another rank";
    case kLate:
      return "it did not come in time";
    case kStopped:
      return "its process was stopped by a signal";
    default:
      return "its connection has failed: " + std::generic_category().message(cause);
  }
}

void SharedGroup::begin_step() { ++step_; }

void SharedGroup::end_step() {
  words(rank_).done.store(step_, std::memory_order_release);
  tell({Note::kEnd, step_, 0, 0}, GatherArgs::kAllRanks);
}

bool SharedGroup::is_void() const { return step_ != 0 && words(0).void_step.load() == step_; }

// Whether a rank is no longer in this step. If a rank has ended the step, it has seen all ranks in its last turn. So
// all of them end the step, or have failed after that turn. Otherwise all leave the step, and the number of the next
// turn is higher than the turns of all ranks.
bool SharedGroup::has_left(int rank) {
  const uint64_t left = words(rank).left[step_ % 2].load(std::memory_order_acquire);
  if (static_cast<uint32_t>(left >> 32) == step_) {
    const auto turn = static_cast<uint32_t>(left);
    if (static_cast<int32_t>(turn - turn_) > 0) turn_ = turn;
    return true;
  }
  return static_cast<int32_t>(words(rank).done.load(std::memory_order_acquire) - step_) >= 0;
}

void SharedGroup::write_left(int rank, uint32_t step, uint32_t turn) {
  words(rank).left[step % 2].store(uint64_t{step} << 32 | turn, std::memory_order_release);
  auto& newest = words(0).void_step;
  for (uint32_t seen = newest.load(); static_cast<int32_t>(step - seen) > 0;)
    if (newest.compare_exchange_weak(seen, step)) break;
  for (int other = 0; other < size_; ++other) wake_all(words(other).turn);
}

void SharedGroup::void_step() {
  write_left(rank_, step_, turn_);
  tell({Note::kLeft, step_, turn_, 0}, GatherArgs::kAllRanks);
}

void SharedGroup::leave_step() {
  void_step();
  const auto start = Clock::now();
  std::atomic<int32_t>& awaited = where(memory_, members_[rank_]).awaited;
  for (int rank = 0; rank < size_; ++rank) {
    while (!has_left(rank)) {
      awaited.store(members_[rank] + 1, std::memory_order_relaxed);
      if (aborted() >= 0) check();
      const timespec look = timespec_of(kLook);
      nanosleep(&look, nullptr);
      if (std::chrono::duration<double>(Clock::now() - start).count() > timeout_seconds_) give_up(rank);
    }
    awaited.store(0, std::memory_order_relaxed);
  }
}

// Throws for a rank of the group that has not come. If this rank waits for a rank in another group, that one is to
// blame.
void SharedGroup::give_up(int rank) {
  int late = members_[rank];
  for (int hops = 0; hops < Whereabouts::kMostRanks; ++hops) {
    const int awaited = where(memory_, late).awaited.load() - 1;
    if (awaited < 0 || awaited == members_[rank_]) break;
    late = awaited;
  }
  abort(late, kLate);
  if (aborted() != late) check();  // another rank has named the rank to blame before
  throw RankLate("rank " + std::to_string(late) + " did not come within " +
                 std::to_string(static_cast<int64_t>(timeout_seconds_)) + " s (--distributed-timeout-seconds)");
}

std::string SharedGroup::name(int rank) const { return "rank " + std::to_string(members_[rank]); }

void SharedGroup::check() const {
  const int number = aborted();
  if (number >= 0) {
    const std::string why = cause();
    throw GroupError("rank " + std::to_string(number) + " has failed" + (why.empty() ? "" : ": " + why));
  }
  if (is_void()) throw StepVoid("another rank has left the step");
}

// The numbers of turns wrap around.
bool SharedGroup::has_arrived(int rank) const {
  return static_cast<int32_t>(words(rank).turn.load(std::memory_order_acquire) - turn_) >= 0;
}

void SharedGroup::write_turn(int rank, uint32_t turn, uint64_t signature) {
  RankWords& its = words(rank);
  its.signatures[turn % 2].store(signature, std::memory_order_relaxed);
  // This store comes before the check for sleepers, so that a rank that is about to sleep does not miss it.
  its.turn.store(turn, std::memory_order_seq_cst);
  if (its.num_sleepers.load(std::memory_order_seq_cst) != 0) wake_all(its.turn);
}

// Other machines are told first, because they are further away.
void SharedGroup::arrive(uint64_t signature, int64_t bytes, int reader, const int64_t* begins) {
  std::atomic<uint32_t>& turns = where(memory_, members_[rank_]).turns;
  turns.store(turns.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  tell({Note::kTurn, turn_, signature, bytes}, reader, begins);
  write_turn(rank_, turn_, signature);
}

void SharedGroup::wait_for(int rank, uint64_t signature) {
  RankWords& other = words(rank);
  if (!has_arrived(rank)) {
    const auto start = Clock::now();
    const auto spin_until = start + std::chrono::microseconds(spin_microseconds_);
    do {
      for (int i = 0; i < kPausesPerClockRead && !has_arrived(rank); ++i)
        peers_.empty() ? pause_cpu() : std::this_thread::yield();  // a listener may have no core of its own
    } while (!has_arrived(rank) && Clock::now() < spin_until);
    if (!has_arrived(rank)) {
      bool is_late = false;
      std::atomic<int32_t>& awaited = where(memory_, members_[rank_]).awaited;
      awaited.store(members_[rank] + 1, std::memory_order_relaxed);
      other.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
      while (!has_arrived(rank) && aborted() < 0 && !is_void()) {
        const uint32_t seen = other.turn.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - turn_) >= 0) break;
        sleep_on(other.turn, seen);
        if (std::chrono::duration<double>(Clock::now() - start).count() > timeout_seconds_) {
          is_late = true;
          break;
        }
      }
      other.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (is_late) give_up(rank);
      awaited.store(0, std::memory_order_relaxed);
    }
    waited_seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
  }
  if (!has_arrived(rank) || aborted() >= 0) check();
  if (other.signatures[turn_ % 2].load(std::memory_order_relaxed) != signature) {
    abort(members_[rank], kDiffers);
    throw GroupError(name(rank) + " does something else than " + name(rank_));
  }
}

char* SharedGroup::begin_turn() {
  check();
  ++turn_;
  return slot(rank_, turn_);
}

void SharedGroup::end_turn(uint64_t signature, int64_t bytes) {
  arrive(signature, bytes, GatherArgs::kAllRanks);
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) wait_for(rank, signature);
}

// The columns of this rank go straight to its own result. They go through its slot if another rank gets them.
void SharedGroup::gather(const GatherArgs& args) {
  check();
  const int64_t widest = *std::max_element(args.widths.begin(), args.widths.begin() + size_);
  const int64_t piece_bytes = std::min(widest, slot_bytes_);
  if (piece_bytes == 0) return;
  const int64_t most_rows = slot_bytes_ / piece_bytes;
  uint64_t signature = static_cast<uint64_t>(args.rows) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(args.reader);
  for (int rank = 0; rank < size_; ++rank) signature = signature * 0x9e3779b97f4a7c15u + args.widths[rank];
  if (args.owners != nullptr)
    for (int64_t row = 0; row < args.rows; ++row) signature = signature * 0x9e3779b97f4a7c15u + args.owners[row];
  std::array<int64_t, kMaxRanks> columns;
  std::exclusive_scan(args.widths.begin(), args.widths.begin() + size_, columns.begin(), int64_t{0});
  int64_t out_row = 0;
  for (int64_t row = 0; row < args.rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, args.rows - row);
    const int32_t* const owners = args.owners == nullptr ? nullptr : args.owners + row;
    // Rows for the ranks of a machine lie side by side in the slots, so that only they are sent there.
    std::array<int64_t, kMaxRanks + 1> firsts, begins;  // of each machine: its first place, and where it begins
    std::vector<int64_t> places;
    if (owners != nullptr) {
      firsts.fill(0);
      for (int64_t i = 0; i < rows; ++i) {
        if (owners[i] < 0 || owners[i] >= size_) throw std::invalid_argument("a row belongs to no rank of the group");
        ++firsts[machine(owners[i]) + 1];
      }
      std::partial_sum(firsts.begin(), firsts.end(), firsts.begin());
      auto next = firsts;
      for (int64_t i = 0; i < rows; ++i) places.push_back(next[machine(owners[i])]++);
    }
    for (int64_t first = 0; first < widest; first += piece_bytes) {
      ++turn_;
      const auto width_of = [&](int rank) { return std::clamp<int64_t>(args.widths[rank] - first, 0, piece_bytes); };
      const int64_t own_width = width_of(rank_);
      const char* const own = args.part.data + row * args.part.stride + first;
      if (owners != nullptr) {
        for (int64_t i = 0; i < rows; ++i)
          if (owners[i] != rank_ && own_width > 0)
            std::memcpy(slot(rank_, turn_) + places[i] * own_width, own + i * args.part.stride, own_width);
      } else if (args.reader != rank_) {
        copy_rows(own, args.part.stride, slot(rank_, turn_), own_width, own_width, rows);
      }
      if (owners != nullptr)
        std::transform(firsts.begin(), firsts.end(), begins.begin(), [&](int64_t place) { return place * own_width; });
      arrive(signature, own_width * rows, args.reader, owners == nullptr ? nullptr : begins.data());
      const auto take = [&](int rank, const char* from, int64_t stride) {
        if (args.out.data == nullptr || width_of(rank) == 0) return;
        char* to = args.out.data + out_row * args.out.stride + columns[rank] + first;
        if (to == from) return;  // this rank has computed its columns in their place
        if (owners == nullptr) return copy_rows(from, stride, to, args.out.stride, width_of(rank), rows);
        for (int64_t i = 0; i < rows; ++i) {
          if (owners[i] != rank_) continue;
          std::memcpy(to, from + (rank == rank_ ? i : places[i]) * stride, width_of(rank));
          to += args.out.stride;
        }
      };
      take(rank_, own, args.part.stride);
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_) continue;
        wait_for(rank, signature);
        take(rank, slot(rank, turn_), width_of(rank));
      }
    }
    out_row += owners == nullptr ? rows : std::count(owners, owners + rows, rank_);
  }
}

void SharedGroup::exchange(const ExchangeArgs& args) {
  check();
  const auto first_row = [&](int rank) { return static_cast<int64_t>(args.begins[args.firsts[rank]]); };
  int64_t most = 0;
  uint64_t signature = static_cast<uint64_t>(args.row_bytes);
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t rows = first_row(rank + 1) - first_row(rank);
    most = std::max(most, rows);
    signature = signature * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rows);
  }
  const int64_t piece_bytes = std::min(args.row_bytes, slot_bytes_), piece_rows = slot_bytes_ / piece_bytes;
  const int64_t last_byte = args.first_byte + args.num_columns_bytes;
  const bool has_all_rows = args.own_rows == args.rows;
  if (!has_all_rows && first_row(rank_ + 1) - first_row(rank_) > args.own_rows)
    throw std::invalid_argument("a rank has fewer rows than it should bring");
  const int64_t own_row = has_all_rows ? first_row(rank_) : 0;
  for (int64_t row = 0; row < most; row += piece_rows) {
    const auto rows_of = [&](int rank) {
      return std::clamp<int64_t>(first_row(rank + 1) - first_row(rank) - row, 0, piece_rows);
    };
    for (int64_t first = 0; first < args.row_bytes; first += piece_bytes) {
      ++turn_;
      const int64_t width = std::min(args.row_bytes - first, piece_bytes);
      copy_rows(args.own.data + (own_row + row) * args.own.stride + first, args.own.stride, slot(rank_, turn_), width,
                width, rows_of(rank_));
      arrive(signature, width * rows_of(rank_), GatherArgs::kAllRanks);
      const int64_t begin = std::max(first, args.first_byte), end = std::min(first + width, last_byte);
      for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_) wait_for(rank, signature);
        if (begin >= end) continue;
        copy_rows(slot(rank, turn_) + begin - first, width,
                  args.out.data + (first_row(rank) + row) * args.out.stride + begin - args.first_byte, args.out.stride,
                  end - begin, rows_of(rank));
      }
    }
  }
}

}  // namespace quire
