// Python names of the machine limits: each call measures once, over all threads of the pool.
#include <algorithm>
#include <atomic>
#include <chrono>

#include "bindings.h"
#include "quire/kernels/limits.h"
#include "quire/thread_pool.h"

namespace nb = nanobind;

namespace quire {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes per second of reading a buffer once.
double read_bandwidth(uintptr_t begin, int64_t bytes) {
  const LimitKernels& kernels = limit_kernels();
  constexpr int64_t kPiece = 1 << 20;
  std::atomic<uint32_t> checksum{0};
  const auto start = std::chrono::steady_clock::now();
  parallel_for(static_cast<int>((bytes + kPiece - 1) / kPiece), [&](int task, int) {
    checksum += kernels.read(pointer<const char>(begin) + task * kPiece, std::min(kPiece, bytes - task * kPiece));
  });
  return static_cast<double>(bytes) / seconds_since(start);
}

// Floating point operations per second of register-only multiply-adds.
double peak_flops(int dtype, int64_t rounds) {
  const LimitKernels& kernels = limit_kernels();
  std::atomic<int64_t> operations{0};
  const auto start = std::chrono::steady_clock::now();
  parallel_for(num_threads() * 8, [&](int, int) { operations += kernels.multiply(static_cast<DType>(dtype), rounds); });
  return static_cast<double>(operations.load()) / seconds_since(start);
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("read_bandwidth", read_bandwidth, nb::arg("begin"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second of reading a buffer once");
  m.def("peak_flops", peak_flops, nb::arg("dtype"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>(),
        "Floating point operations per second without memory");
}

}  // namespace quire
