// One pool of worker threads for all kernels. parallel_for runs over task numbers, and the caller takes part.
//
// After a job, workers spin for about 50 microseconds before they sleep, because the gaps between the kernels of one
// forward pass are shorter. Jobs of different callers run one after the other. A parallel_for inside a task runs in the
// thread of this task. After a fork, the child starts workers of its own at the first use.
#pragma once

#include <string>

namespace quire {

// The number of physical cores that this process may use: its CPU affinity without hyper-thread siblings, limited by
// the cgroup CPU quota. On CPUs with two kinds of cores, only performance cores count (Intel and ARM64 on Linux;
// macOS).
int default_num_threads();
// The same number, but /proc and /sys are read under `root`. Tests describe other machines there.
int num_threads_described_in(const std::string& root);

int num_threads();
void set_num_threads(int n);  // n >= 1, the caller included

// Calls run(context, task_index, thread_index) for every task_index in [0, num_tasks). thread_index is in [0,
// num_threads()). Two tasks that run at the same time have different thread indices.
void parallel_run(int num_tasks, void (*run)(void*, int, int), void* context);

namespace {

// fn(int task_index, int thread_index) must not throw. Internal linkage is needed: see dtype.h.
template <class Fn>
inline void parallel_for(int num_tasks, const Fn& fn) {
  auto run = [](void* context, int task, int thread) { (*static_cast<const Fn*>(context))(task, thread); };
  parallel_run(num_tasks, run, const_cast<Fn*>(&fn));
}

}  // namespace
}  // namespace quire
