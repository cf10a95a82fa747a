// With QUIRE_PORTABLE, this file is included before everything else. It chooses the functions that glibc 2.28 has.
// glibc 2.29 has a new `log` that does not set errno; both compute the same.
#pragma once

#if defined(__x86_64__)
__asm__(".symver log,log@GLIBC_2.2.5");
#endif
