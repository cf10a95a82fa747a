// Growing thread-local buffers.
#include "quire/scratch.h"

#include <cstdlib>
#include <new>

namespace quire {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t capacity = 0;

  ~Buffer() { std::free(data); }

  void* at_least(size_t bytes) {
    if (bytes > capacity) {
      constexpr size_t kGranule = 4096;
      std::free(data);
      capacity = (bytes + kGranule - 1) / kGranule * kGranule;
      data = std::aligned_alloc(64, capacity);
      if (data == nullptr) throw std::bad_alloc();
    }
    return data;
  }
};

thread_local Buffer buffers[static_cast<int>(Scratch::count)];

}  // namespace

void* scratch(Scratch use, size_t bytes) { return buffers[static_cast<int>(use)].at_least(bytes); }

}  // namespace quire
