// Ranks of one model on one machine. They exchange their results through shared memory.
//
// The memory begins with a part for all ranks. It says which rank has failed, and where each rank is in its step. Then
// come the parts of the groups; a rank may be in several groups. The part of a group has a pair of cache lines for each
// rank, and then two slots for each rank. In turn n, a rank writes to its slot n % 2, announces this, and reads the
// slots of the others. No slot is written while it is still read: a rank in turn n + 2 has seen all others in turn
// n + 1, and they had read the slots of turn n before.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "quire/strided.h"

namespace quire {

inline constexpr int kMaxRanks = 64;

// Another rank has failed, is late, or calls something other than this rank.
class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Another rank is late.
class RankLate : public GroupError {
 public:
  using GroupError::GroupError;
};

// Another rank has left the step. All ranks go on with the next step.
class StepVoid : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct RankWords;
struct Note;
struct GatherArgs;
struct ExchangeArgs;

class SharedGroup {
 public:
  // Maps `fd`. Its memory is zero when the first rank maps it. The part of the group has num_bytes(size, slot_bytes)
  // and begins at `begin`, which is kFirstPart or the end of other parts. `members` are the numbers of its ranks among
  // all ranks, and `rank` is the index of this rank among them. A waiting rank spins for `spin_microseconds` before it
  // sleeps. After `timeout_seconds` it throws RankLate. Throws std::system_error if the memory cannot be mapped.
  //
  // `peers` has the ranks of the group on other machines to which this rank is connected, one on each machine, and the
  // connections: blocking sockets, which the caller may close afterwards. It is empty if all ranks are on this machine.
  SharedGroup(int fd, int64_t begin, std::vector<int> members, int rank, int64_t slot_bytes, int spin_microseconds,
              double timeout_seconds, const std::vector<std::pair<int, int>>& peers);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  static constexpr int64_t kFirstPart = 65536;
  static int64_t num_bytes(int size, int64_t slot_bytes);

  // Brings the columns of all ranks side by side. Every rank calls it with the same number of rows, widths and owners.
  // Throws GroupError or StepVoid.
  void gather(const GatherArgs& args);

  // Every rank has some consecutive rows, and gets some columns of the rows of all ranks. All ranks give the same
  // numbers of rows. Throws GroupError or StepVoid.
  void exchange(const ExchangeArgs& args);

  // A turn in which the caller fills and reads the slots. begin_turn gives the slot of this rank, slot_bytes() in whole
  // cache lines. end_turn returns when all ranks have filled their slots, this one with `bytes`. slot_of(rank) may be
  // read until the next turn begins. All ranks must give the same signature, which says what they do. Both throw
  // GroupError or StepVoid.
  char* begin_turn();
  void end_turn(uint64_t signature, int64_t bytes);
  const char* slot_of(int rank) const { return slot(rank, turn_); }
  int64_t slot_bytes() const { return slot_bytes_; }

  // Begin and end a step around its turns. All ranks take the same steps in the same order. Ends, void steps and leaves
  // are told to other machines: they throw GroupError.
  void begin_step();
  void end_step();
  // Tells the ranks of this group that the step is void. A rank of several groups calls it in all of them before
  // leave_step, because leave_step waits, group by group.
  void void_step();
  // Leaves a step in place of end_step: the rank cannot end the step, or it has got StepVoid. Returns when no rank of
  // the group is in the step any more: each has left it, or has ended it before. Throws GroupError.
  void leave_step();

  // Causes for which a rank has failed. A cause above 0 is a number of errno: its connection has failed.
  static constexpr int kNotKnown = 0, kClosed = -1, kNonsense = -2, kStopped = -3, kDiffers = -4, kLate = -5;

  // Tells that a rank has failed, by its number among all ranks. All ranks of all groups stop waiting, now and later.
  // Only the first rank that fails is remembered, with its cause. Other machines notice that a connection ends.
  void abort(int number, int cause);

  // Ends the connections to other machines. This rank takes no more turns.
  void close();
  int rank() const { return rank_; }
  int size() const { return size_; }
  int aborted() const;        // the number of the rank that has failed; -1: none
  std::string cause() const;  // its cause as text for people; empty: it is not known

  double waited_seconds() const { return waited_seconds_; }  // the time spent waiting for other ranks in all turns

 private:
  // A rank of another machine to which this rank is connected.
  struct Peer {
    int rank, socket;
    std::thread listener;
  };

  void free_all();
  void arrive(uint64_t signature, int64_t bytes, int reader, const int64_t* begins = nullptr);
  void tell(const Note& note, int reader, const int64_t* begins = nullptr);
  void send(const Peer& peer, const Note& note);
  void listen(int rank, int socket);
  void write_turn(int rank, uint32_t turn, uint64_t signature);
  void write_left(int rank, uint32_t step, uint32_t turn);
  void wait_for(int rank, uint64_t signature);
  bool has_arrived(int rank) const;
  void check() const;
  bool is_void() const;
  bool has_left(int rank);
  char* slot(int rank, uint32_t turn) const;
  int machine(int rank) const { return rank / num_local_; }
  RankWords& words(int rank) const;

  std::string name(int rank) const;
  [[noreturn]] void give_up(int rank);

  char* memory_;
  int64_t begin_;
  std::vector<int> members_;
  int rank_, size_;
  int64_t slot_bytes_;
  int spin_microseconds_;
  double timeout_seconds_;
  uint32_t turn_ = 0;
  uint32_t step_ = 0;
  double waited_seconds_ = 0;
  int num_local_;  // the ranks of the group on each machine
  std::vector<Peer> peers_;
  std::atomic<bool> is_closing_ = false;
};

// The progress of the ranks of a machine, in the first part of their memory. Any thread may read it.
class Whereabouts {
 public:
  struct Place {
    int32_t pid;      // the id of its process; 0: it has no process here
    uint32_t begun;   // the number of its last step, from 1 on; 0: none
    uint32_t ended;   // the last step that it has ended or left
    uint32_t turns;   // the turns of all of its groups since its last step began
    int32_t awaited;  // the number of the rank that it waits for; -1: none
  };

  // Maps `fd` for the rank of this number among all ranks, in this process. Throws std::system_error.
  Whereabouts(int fd, int number);
  ~Whereabouts();
  Whereabouts(const Whereabouts&) = delete;
  Whereabouts& operator=(const Whereabouts&) = delete;

  static constexpr int kMostRanks = 1023;

  // Report what this rank does. A step that the rank leaves has ended too.
  void begin_step();
  void end_step();
  void await(int number);  // -1: it waits for no rank

  Place of(int number) const;

 private:
  char* memory_;
  int number_;
};

struct GatherArgs {
  static constexpr int kAllRanks = -1;

  SharedGroup* group;
  std::array<int64_t, kMaxRanks> widths;  // bytes of a row of each rank
  int64_t rows;
  const int32_t* owners;         // the rank that wants each row; nullptr: see reader
  int reader;                    // the rank that wants all rows, or kAllRanks
  StridedRows<const char> part;  // [rows, width of this rank], strides in bytes
  StridedRows<char> out;         // [rows that it wants, sum of widths], strides in bytes; nullptr: this rank wants none
};

struct ExchangeArgs {
  SharedGroup* group;
  std::array<int64_t, kMaxRanks + 1> firsts;  // begins[firsts[r]] to begins[firsts[r + 1]] are the rows of rank r
  const int32_t* begins;                      // read when it runs
  int64_t num_begins;
  int64_t rows, row_bytes;  // the rows of all ranks; the bytes of all columns
  // [own_rows, row_bytes], strides in bytes. It has all rows, and the rows of other ranks are not read; or it has only
  // the rows of this rank.
  StridedRows<const char> own;
  int64_t own_rows;
  int64_t first_byte;  // the place of the columns that this rank gets
  int64_t num_columns_bytes;
  StridedRows<char> out;  // [rows, num_columns_bytes], strides in bytes
};

}  // namespace quire
