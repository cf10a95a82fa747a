// Python names of the machine limits, measured over all threads of the pool, and of the advice on huge pages.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "bindings.h"
#include "checks.h"
#include "quire/huge_pages.h"
#include "quire/kernels/limits.h"
#include "quire/thread_pool.h"

namespace nb = nanobind;

namespace quire {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

constexpr int64_t kPiece = 1 << 20;

// The best rate of reading some pieces of memory, in bytes per second. The first pass is not timed: it writes lines
// back that the caches still hold, and the processor learns the addresses.
double rate_of_reading(const char* data, int num_pieces, int repeats) {
  const LimitKernels& kernels = limit_kernels();
  std::atomic<uint32_t> checksum{0};
  double best = 0;
  for (int pass = 0; pass <= repeats; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(num_pieces, [&](int piece, int) { checksum += kernels.read(data + piece * kPiece, kPiece); });
    if (pass > 0) best = std::max(best, static_cast<double>(num_pieces * kPiece) / seconds_since(start));
  }
  return best;
}

double read_bandwidth(int64_t bytes, int repeats) {
  const int num_pieces = static_cast<int>(std::max<int64_t>(1, bytes / kPiece));
  const std::unique_ptr<char, decltype(&std::free)> buffer(
      static_cast<char*>(std::aligned_alloc(kHugePageBytes, (num_pieces + 1) / 2 * kHugePageBytes)), &std::free);
  if (buffer == nullptr) throw std::bad_alloc();
  advise_huge_pages(buffer.get(), num_pieces * kPiece);
  parallel_for(num_pieces, [&](int piece, int) { std::memset(buffer.get() + piece * kPiece, 1, kPiece); });
  return rate_of_reading(buffer.get(), num_pieces, repeats);
}

double bandwidth_over(TensorView x, int repeats) {
  if (x.bytes() < kPiece) refuse("x has ", x.bytes(), " bytes, expected 1 MiB or more");
  return rate_of_reading(x.data<char>(), static_cast<int>(x.bytes() / kPiece), repeats);
}

// The rate of multiply-adds on registers, in operations per second. run() does some on one thread and returns their
// number.
template <class Run>
double operations_per_second(const Run& run) {
  std::atomic<int64_t> operations{0};
  const auto start = std::chrono::steady_clock::now();
  parallel_for(num_threads() * 8, [&](int, int) { operations += run(); });
  return static_cast<double>(operations.load()) / seconds_since(start);
}

double peak_flops(int dtype, int64_t rounds) {
  const LimitKernels& kernels = limit_kernels();
  const DType type = enum_of("dtype", dtype, DType::f16);
  return operations_per_second([&] { return kernels.multiply(type, rounds); });
}

double peak_int8_ops(int bits, int64_t rounds) {
  const LimitKernels& kernels = limit_kernels();
  return operations_per_second([&] { return kernels.multiply_codes(bits, rounds); });
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("read_bandwidth", read_bandwidth, nb::arg("bytes"), nb::arg("repeats"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Best bytes per second of reading new memory in huge pages, rounded down to 1 MiB");
  m.def("bandwidth_over", bandwidth_over, nb::arg("x"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>(),
        "Best bytes per second of reading this memory, rounded down to 1 MiB");
  m.def(
      "advise_huge_pages", [](TensorView x) { advise_huge_pages(x.data<void>(), x.bytes()); }, nb::arg("x"),
      "Asks the operating system for huge pages; only a hint");
  m.def("peak_flops", peak_flops, nb::arg("dtype"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>(),
        "Floating point operations per second without memory");
  m.def("peak_int8_ops", peak_int8_ops, nb::arg("bits"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>(),
        "The same of codes with this number of bits times 8-bit integers");
}

}  // namespace quire
