// Asks the system for pages of 2 MiB for large buffers. Fresh memory costs a page fault per page, and reads of many
// pages miss the TLB. Both cost less with large pages.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Asks for huge pages for all whole huge pages inside [begin, begin + bytes). The system may ignore this hint.
inline void advise_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) & ~(kHugePageBytes - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace quire
