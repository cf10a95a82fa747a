// The worker threads of parallel_for. Each thread has a range of consecutive tasks and takes them in order, so that it
// uses the data that it has prefetched for the next task. A thread without tasks takes half of another thread's range.
// A range is one atomic word, which contains the number of its job. As long as it holds tasks, it changes only by
// compare-and-swap. So a worker that wakes up late can never touch the next job by mistake.
#include "quire/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#if defined(__APPLE__)
#include <pthread/qos.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "quire/round_up.h"

namespace quire {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 64;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// macOS may run threads of a lower class on efficiency cores, and a job waits for its slowest thread.
inline void ask_for_fast_core() {
#if defined(__APPLE__)
  pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#endif
}

thread_local int tls_thread_index = -1;  // >= 0 while this thread runs a task

// Claims [begin, end) of a job that no thread has taken yet.
struct Range {
  static constexpr uint32_t kMaxEnd = 0xffff;

  uint32_t generation, begin, end;

  static Range unpack(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word >> 16 & kMaxEnd),
            static_cast<uint32_t>(word & kMaxEnd)};
  }
  uint64_t packed() const { return static_cast<uint64_t>(generation) << 32 | begin << 16 | end; }
  uint32_t size() const { return end - begin; }
};

struct alignas(64) Slot {
  std::atomic<uint64_t> range{0};
};

class Pool {
 public:
  std::mutex mutex;  // lets one job run at a time, and guards the members that are used outside of jobs

  int num_threads() const { return num_threads_; }

  void set_num_threads(int n) {
    stop_workers();
    num_threads_ = n;
    slots_ = std::make_unique<Slot[]>(n);
  }

  void run_job(int num_tasks, void (*run)(void*, int, int), void* context) {
    start_workers();
    const uint32_t generation = static_cast<uint32_t>(epoch_.load(std::memory_order_relaxed)) + 1;
    const int tasks_per_claim = ceil_div(num_tasks, static_cast<int>(Range::kMaxEnd));
    const int num_claims = ceil_div(num_tasks, tasks_per_claim);
    job_ = {run, context, num_tasks, tasks_per_claim};
    unfinished_.store(num_claims, std::memory_order_relaxed);
    for (int64_t t = 0; t < num_threads_; ++t) {
      const auto begin = static_cast<uint32_t>(num_claims * t / num_threads_);
      const auto end = static_cast<uint32_t>(num_claims * (t + 1) / num_threads_);
      slots_[t].range.store(Range{generation, begin, end}.packed(), std::memory_order_release);
    }
    // This store comes before the check for sleepers, so that a worker that is about to sleep does not miss it.
    epoch_.store(static_cast<int>(generation), std::memory_order_seq_cst);
    epoch_.notify_all();
    work(generation, 0);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0;) {
      if (++spins < 4096) {
        pause_cpu();
      } else {
        sched_yield();  // a worker has lost its core in the middle of a task
      }
    }
  }

 private:
  struct Job {
    void (*run)(void*, int, int) = nullptr;
    void* context = nullptr;
    int num_tasks = 0, tasks_per_claim = 1;
  };

  void start_workers() {
    while (static_cast<int>(workers_.size()) < num_threads_ - 1) {
      const int index = static_cast<int>(workers_.size()) + 1;
      const int seen = epoch_.load(std::memory_order_relaxed);
      workers_.emplace_back([this, index, seen] { worker_loop(index, seen); });
    }
  }

  void stop_workers() {
    stopping_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_relaxed);
  }

  void worker_loop(int index, int seen) {
    ask_for_fast_core();
    for (;;) {
      seen = wait_for_job(seen);
      if (stopping_.load(std::memory_order_relaxed)) return;
      work(static_cast<uint32_t>(seen), index);
    }
  }

  int wait_for_job(int seen) {
    const auto spin_until = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        const int now = epoch_.load(std::memory_order_acquire);
        if (now != seen) return now;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < spin_until);
    epoch_.wait(seen, std::memory_order_acquire);
    return epoch_.load(std::memory_order_acquire);
  }

  // The job is read after a claim succeeded. Until that claim is counted as finished, the caller waits and cannot write
  // the next job.
  void work(uint32_t generation, int index) {
    tls_thread_index = index;
    for (int claim; (claim = take(generation, index)) >= 0;) {
      const Job& job = job_;
      const int begin = claim * job.tasks_per_claim, end = std::min(begin + job.tasks_per_claim, job.num_tasks);
      for (int task = begin; task < end; ++task) job.run(job.context, task, index);
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
    }
    tls_thread_index = -1;
  }

  // The next claim of the thread's own range, or of another thread's; -1: the job has none left.
  int take(uint32_t generation, int index) {
    std::atomic<uint64_t>& own = slots_[index].range;
    uint64_t word = own.load(std::memory_order_acquire);
    for (;;) {
      const Range range = Range::unpack(word);
      if (range.generation != generation) return -1;
      if (range.size() == 0) return take_over_half(generation, own);
      const Range rest{generation, range.begin + 1, range.end};
      if (own.compare_exchange_weak(word, rest.packed(), std::memory_order_acq_rel, std::memory_order_acquire))
        return static_cast<int>(range.begin);
    }
  }

  // The later half of the largest range becomes `own`, except its first claim, which is returned.
  int take_over_half(uint32_t generation, std::atomic<uint64_t>& own) {
    for (;;) {
      int largest = 0;
      uint64_t word = 0;
      Range range{generation, 0, 0};
      for (int t = 0; t < num_threads_; ++t) {
        const uint64_t other_word = slots_[t].range.load(std::memory_order_acquire);
        const Range other = Range::unpack(other_word);
        if (other.generation == generation && other.size() > range.size()) {
          largest = t;
          word = other_word;
          range = other;
        }
      }
      if (range.size() == 0) return -1;
      const uint32_t middle = range.begin + range.size() / 2;
      if (slots_[largest].range.compare_exchange_strong(word, Range{generation, range.begin, middle}.packed(),
                                                        std::memory_order_acq_rel, std::memory_order_relaxed)) {
        own.store(Range{generation, middle + 1, range.end}.packed(), std::memory_order_release);
        return static_cast<int>(middle);
      }
    }
  }

  int num_threads_ = default_num_threads();
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(num_threads_);
  Job job_;
  alignas(64) std::atomic<int> epoch_{0};
  alignas(64) std::atomic<int> unfinished_{0};
};

std::atomic<Pool*> g_pool{nullptr};

// The child of a fork has none of the parent's threads, and its mutex may be locked. So it gets a new pool. No pool is
// ever destroyed, neither the old one after a fork nor any pool at the end of the process. So workers never outlive the
// data that they read.
void replace_pool_after_fork() {
  const Pool* parent = g_pool.load(std::memory_order_relaxed);
  Pool* child = new Pool;
  child->set_num_threads(parent->num_threads());
  g_pool.store(child, std::memory_order_relaxed);
  tls_thread_index = -1;
}

Pool& pool() {
  static const bool created = [] {
    g_pool.store(new Pool, std::memory_order_relaxed);
    pthread_atfork(nullptr, nullptr, replace_pool_after_fork);
    return true;
  }();
  static_cast<void>(created);
  return *g_pool.load(std::memory_order_relaxed);
}

}  // namespace

int num_threads() { return pool().num_threads(); }

void set_num_threads(int n) {
  Pool& p = pool();
  std::lock_guard lock(p.mutex);
  if (n != p.num_threads()) p.set_num_threads(std::max(n, 1));
}

void parallel_run(int num_tasks, void (*run)(void*, int, int), void* context) {
  if (num_tasks <= 0) return;
  if (tls_thread_index >= 0) {  // inside a task already
    for (int task = 0; task < num_tasks; ++task) run(context, task, tls_thread_index);
    return;
  }
  Pool& p = pool();
  std::lock_guard lock(p.mutex);
  if (num_tasks == 1 || p.num_threads() == 1) {
    tls_thread_index = 0;
    for (int task = 0; task < num_tasks; ++task) run(context, task, 0);
    tls_thread_index = -1;
    return;
  }
  p.run_job(num_tasks, run, context);
}

}  // namespace quire
