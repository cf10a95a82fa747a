// Included before everything with QUIRE_PORTABLE: names of functions as glibc 2.28 has them. glibc 2.29 has a `log`
// that leaves errno alone; both compute the same.
#pragma once

#if defined(__x86_64__)
__asm__(".symver log,log@GLIBC_2.2.5");
#endif
