// Mathematical functions by the names that they have in glibc 2.28 too: see QUIRE_PORTABLE. Newer ones differ in errno
// alone.
#pragma once

#ifdef __x86_64__
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif
