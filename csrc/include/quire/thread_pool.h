// One pool of worker threads for all kernels: parallel_for over task numbers. The caller takes part.
//
// Workers spin for about 50 microseconds after a job, because the gaps between the kernels of one forward pass are
// shorter, and then sleep. Jobs from different callers run one after the other. A parallel_for inside a task runs in
// place. After a fork the child starts its own workers on first use.
#pragma once

#include <string>

namespace quire {

// Physical cores this process may use: CPU affinity without hyper-thread siblings, limited by the cgroup CPU quota.
// Performance cores where there are two kinds (Intel's CPUs on Linux, macOS).
int default_num_threads();
// The same with /proc and /sys under `root`, where tests describe other machines.
int num_threads_described_in(const std::string& root);

int num_threads();
void set_num_threads(int n);  // n >= 1, the caller included

// Calls run(context, task_index, thread_index) for every task_index in [0, num_tasks). thread_index is in [0,
// num_threads()). Two tasks that run at the same time have different thread indices.
void parallel_run(int num_tasks, void (*run)(void*, int, int), void* context);

namespace {

// fn(int task_index, int thread_index) must not throw. Internal linkage, see dtype.h.
template <class Fn>
inline void parallel_for(int num_tasks, const Fn& fn) {
  auto run = [](void* context, int task, int thread) { (*static_cast<const Fn*>(context))(task, thread); };
  parallel_run(num_tasks, run, const_cast<Fn*>(&fn));
}

}  // namespace
}  // namespace quire
