// The worker threads behind parallel_for. A job is one atomic word (generation, tasks not yet claimed) plus a few
// fields; workers claim tasks by compare-and-swap, so a worker that wakes up late can never touch the next job by
// mistake.
#include "quire/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

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

thread_local int tls_thread_index = -1;  // >= 0 while this thread runs a task

class Pool {
 public:
  std::mutex mutex;  // one job at a time, and guards the members used outside jobs

  int num_threads() const { return num_threads_; }

  void set_num_threads(int n) {
    stop_workers();
    num_threads_ = n;
  }

  void run_job(int num_tasks, void (*run)(void*, int, int), void* context) {
    start_workers();
    run_.store(run, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_relaxed);
    unfinished_.store(num_tasks, std::memory_order_relaxed);
    const uint32_t generation = static_cast<uint32_t>(epoch_.load(std::memory_order_relaxed)) + 1;
    state_.store(pack(generation, static_cast<uint32_t>(num_tasks)), std::memory_order_release);
    epoch_.store(static_cast<int>(generation), std::memory_order_release);
    epoch_.notify_all();
    work(generation, 0);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0;) {
      if (++spins < 4096) {
        pause_cpu();
      } else {
        sched_yield();  // a worker lost its core in the middle of a task
      }
    }
  }

 private:
  static constexpr uint64_t pack(uint32_t generation, uint32_t unclaimed) {
    return static_cast<uint64_t>(generation) << 32 | unclaimed;
  }

  void start_workers() {
    while (static_cast<int>(workers_.size()) < num_threads_ - 1) {
      const int index = static_cast<int>(workers_.size()) + 1;
      const int seen = epoch_.load(std::memory_order_relaxed);
      workers_.emplace_back([this, index, seen] { worker_loop(index, seen); });
    }
  }

  void stop_workers() {
    stopping_.store(true, std::memory_order_relaxed);
    const uint32_t generation = static_cast<uint32_t>(epoch_.load(std::memory_order_relaxed)) + 1;
    state_.store(pack(generation, 0), std::memory_order_release);
    epoch_.store(static_cast<int>(generation), std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_relaxed);
  }

  void worker_loop(int index, int seen) {
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

  // The job's fields are read between seeing the generation and a successful claim. A claim succeeds only while the job
  // has unclaimed tasks, hence before the caller may write the fields of the next one.
  void work(uint32_t generation, int index) {
    tls_thread_index = index;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state >> 32) == generation && static_cast<uint32_t>(state) != 0) {
      const auto run = run_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const int task = num_tasks_.load(std::memory_order_relaxed) - static_cast<int>(static_cast<uint32_t>(state));
      if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      run(context, task, index);
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
      state = state_.load(std::memory_order_acquire);
    }
    tls_thread_index = -1;
  }

  int num_threads_ = default_num_threads();
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};
  std::atomic<void (*)(void*, int, int)> run_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> num_tasks_{0};
  alignas(64) std::atomic<int> epoch_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> unfinished_{0};
};

std::atomic<Pool*> g_pool{nullptr};

// The child of a fork has none of the parent's threads and perhaps a locked mutex: it gets a new pool. The old one, and
// one at process exit, is never destroyed, so workers never outlive what they read.
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
