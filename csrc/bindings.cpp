// The Python module quire._C. Python calls a kernel by making a struct: its fields are tensors and numbers, given by
// name. Shapes and strides of tensors are trusted, because kernels/ops.py checks them. Numbers in tensors that lead to
// memory are checked here (checks.h). The GIL is released while a kernel runs.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "checks.h"
#include "quire/isa.h"
#include "quire/thread_pool.h"

namespace nb = nanobind;

namespace {

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; i < quire::kNumIsas; ++i) {
    const auto isa = static_cast<quire::Isa>(i);
    if (quire::has_isa(isa)) names.emplace_back(quire::isa_name(isa));
  }
  return names;
}

void set_isa(const std::string& name) {
  for (int i = 0; i < quire::kNumIsas; ++i) {
    const auto isa = static_cast<quire::Isa>(i);
    if (name == quire::isa_name(isa) && quire::set_active_isa(isa)) return;
  }
  quire::refuse("instruction set \"", name, "\" is unknown, or this CPU does not have it");
}

void set_num_threads(int n) {
  constexpr int kMost = 4096;
  if (n < 1 || n > kMost) quire::refuse("the number of kernel threads is ", n, ", expected 1 to ", kMost);
  quire::set_num_threads(n);
}

// Runs empty tasks and says which thread took each, for tests of the pool. The first task of `held_thread` lasts until
// all other tasks have been taken, like a task on a core that is far slower than the others; at most 10 s, so that a
// pool where nobody takes them does not hang.
std::vector<int> thread_pool_probe(int num_tasks, int held_thread) {
  std::vector<int> thread_of_task(num_tasks, -1);
  std::atomic<int> untaken{num_tasks};
  nb::gil_scoped_release release;
  const auto give_up_at = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  quire::parallel_for(num_tasks, [&](int task, int thread) {
    thread_of_task[task] = thread;
    untaken.fetch_sub(1, std::memory_order_relaxed);
    if (thread != held_thread) return;
    while (untaken.load(std::memory_order_relaxed) > 0 && std::chrono::steady_clock::now() < give_up_at)
      std::this_thread::yield();
  });
  return thread_of_task;
}

}  // namespace

NB_MODULE(_C, m) {
  m.doc() = "CPU kernels of Quire";
  nb::set_leak_warnings(false);  // a model may live until the interpreter ends, and it keeps its weights and caches
  m.def("isas", isas, "Names of the instruction sets this CPU can run, worst first");
  m.def("isa", [] { return std::string(quire::isa_name(quire::active_isa())); }, "Name of the active instruction set");
  m.def("set_isa", set_isa, nb::arg("name"));
  m.def("num_threads", &quire::num_threads);
  m.def("set_num_threads", set_num_threads, nb::arg("n"), nb::call_guard<nb::gil_scoped_release>());
  m.def("default_num_threads", &quire::default_num_threads);
  m.def("num_threads_described_in", &quire::num_threads_described_in, nb::arg("root"));
  m.def("thread_pool_probe", thread_pool_probe, nb::arg("num_tasks"), nb::arg("held_thread") = -1,
        "Thread index that ran each of num_tasks empty tasks; a held thread's first task outlasts all others");
  nb::class_<quire::KernelCall>(m, "KernelCall")
      .def("run", &quire::KernelCall::run, nb::call_guard<nb::gil_scoped_release>());
  quire::bind_kv_cache(m);
  quire::bind_activation(m);
  quire::bind_attention(m);
  quire::bind_cost(m);
  quire::bind_experts(m);
  quire::bind_gemm(m);
  quire::bind_group(m);
  quire::bind_latent(m);
  quire::bind_limits(m);
  quire::bind_lora(m);
  quire::bind_norm_rope(m);
  quire::bind_sampling(m);
  quire::bind_spec_decode(m);
}
