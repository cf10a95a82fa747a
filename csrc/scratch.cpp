// The growing thread-local buffers.
#include "quire/scratch.h"

#include <cstdlib>
#include <new>

#include "quire/huge_pages.h"
#include "quire/round_up.h"

namespace quire {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t capacity = 0;

  ~Buffer() { std::free(data); }

  void* at_least(size_t bytes) {
    if (bytes > capacity) {
      const size_t granule = bytes >= kHugePageBytes ? kHugePageBytes : 4096;
      std::free(data);
      capacity = 0;
      const size_t wanted = round_up(bytes, granule);
      data = std::aligned_alloc(granule, wanted);
      if (data == nullptr) throw std::bad_alloc();
      capacity = wanted;
      advise_huge_pages(data, capacity);
    }
    return data;
  }
};

thread_local Buffer buffers[static_cast<int>(Scratch::count)];

}  // namespace

void* scratch(Scratch use, size_t bytes) { return buffers[static_cast<int>(use)].at_least(bytes); }

}  // namespace quire
