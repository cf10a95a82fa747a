// Instruction sets: their detection, the choice of one at run time, and the choice of a variant in each kernel family.
//
// Every file of csrc/kernels is compiled once per instruction set with QUIRE_ISA (the name) and QUIRE_ISA_LEVEL (its
// place on the ladder) defined. A family is written like this:
//
//   // csrc/include/quire/kernels/norm.h
//   namespace quire {
//   struct NormKernels { void (*rms_norm)(...); };
//   const NormKernels& norm_kernels();                      // variant of the active ISA
//   }
//
//   // csrc/kernels/norm.cpp
//   namespace quire::QUIRE_ISA {
//   namespace { void rms_norm(...) {...} }                  // internal linkage: variants never mix
//   extern const NormKernels norm_table;
//   const NormKernels norm_table = {rms_norm};
//   }
//   QUIRE_DEFINE_DISPATCH(NormKernels, norm_kernels, norm_table)
#pragma once

namespace quire {

// The ladder of this architecture. Each step includes the steps before it, except that avx512 does not include
// avx_vnni.
#if defined(__aarch64__)
enum class Isa : int { scalar = 0, neon = 1, neon_dotprod = 2, neon_i8mm = 3 };
inline constexpr int kNumIsas = 4;
#else
enum class Isa : int { scalar = 0, avx2 = 1, avx_vnni = 2, avx512 = 3, avx512_vnni = 4, avx512_bf16 = 5, amx = 6 };
inline constexpr int kNumIsas = 7;
#endif

const char* isa_name(Isa isa);
bool has_isa(Isa isa);         // this CPU and operating system can run it
Isa best_isa();                // the best instruction set that this CPU and operating system can run
Isa active_isa();              // best_isa() until set_active_isa
bool set_active_isa(Isa isa);  // returns false and changes nothing if the CPU cannot run it
// Whether the CPU prefetches as fast as memory delivers when a thread reads memory in order. Then instructions that
// prefetch only cost time. It is true for Zen 4 (benchmarks/NOTES.md, 2026-11-23), and for no other CPU that was
// measured.
bool follows_streams();
// Whether the L1 data cache has 48 KiB or more, as on Zen 5 and on Intel's performance cores since Ice Lake. Cores of
// one CPU may differ: the core that asks first answers for all.
bool has_large_l1();
// Whether prefetching 2 KiB ahead is faster than prefetching a whole block ahead when a thread reads memory in order.
// It is true for CPUs with AMX (benchmarks/NOTES.md, 2026-11-28), and was not measured on others.
bool fetches_close();

template <class Kernels>
inline const Kernels& select_variant(const Kernels* const (&variants)[kNumIsas]) {
  int level = static_cast<int>(active_isa());
  while (level > 0 && variants[level] == nullptr) --level;
  return *variants[level];
}

}  // namespace quire

// The steps of the ladder, for `#if QUIRE_ISA_LEVEL >= ...` in kernels. No level reaches a step of another
// architecture.
#define QUIRE_LEVEL_SCALAR 0
#if defined(__aarch64__)
#define QUIRE_LEVEL_NEON 1
#define QUIRE_LEVEL_NEON_DOTPROD 2
#define QUIRE_LEVEL_NEON_I8MM 3
#define QUIRE_LEVEL_AVX2 100
#define QUIRE_LEVEL_AVX_VNNI 100
#define QUIRE_LEVEL_AVX512 100
#define QUIRE_LEVEL_AVX512_VNNI 100
#define QUIRE_LEVEL_AVX512_BF16 100
#define QUIRE_LEVEL_AMX 100
#else
#define QUIRE_LEVEL_AVX2 1
#define QUIRE_LEVEL_AVX_VNNI 2
#define QUIRE_LEVEL_AVX512 3
#define QUIRE_LEVEL_AVX512_VNNI 4
#define QUIRE_LEVEL_AVX512_BF16 5
#define QUIRE_LEVEL_AMX 6
#define QUIRE_LEVEL_NEON 100
#define QUIRE_LEVEL_NEON_DOTPROD 100
#define QUIRE_LEVEL_NEON_I8MM 100
#endif

// The steps above scalar, in the order of the ladder: step(name, arguments of `step`).
#if defined(__aarch64__)
#define QUIRE_STEPS(step, ...) step(neon, __VA_ARGS__) step(neon_dotprod, __VA_ARGS__) step(neon_i8mm, __VA_ARGS__)
#else
#define QUIRE_STEPS(step, ...)                                                                                 \
  step(avx2, __VA_ARGS__) step(avx_vnni, __VA_ARGS__) step(avx512, __VA_ARGS__) step(avx512_vnni, __VA_ARGS__) \
      step(avx512_bf16, __VA_ARGS__) step(amx, __VA_ARGS__)
#endif
// CMakeLists.txt defines QUIRE_HAVE_<step> as 1 if the family is compiled for the step, else as 0.
#define QUIRE_DECLARE_TABLE_0(step, type, table)
#define QUIRE_DECLARE_TABLE_1(step, type, table) \
  namespace step {                               \
  extern const type table;                       \
  }
#define QUIRE_AND_TABLE_0(step, table) , nullptr
#define QUIRE_AND_TABLE_1(step, table) , &step::table
#define QUIRE_CONCATENATE(x, y) x##y
#define QUIRE_CHOOSE(macro, have) QUIRE_CONCATENATE(macro, have)
#define QUIRE_DECLARE_TABLE(step, type, table) QUIRE_CHOOSE(QUIRE_DECLARE_TABLE_, QUIRE_HAVE_##step)(step, type, table)
#define QUIRE_AND_TABLE(step, table) QUIRE_CHOOSE(QUIRE_AND_TABLE_, QUIRE_HAVE_##step)(step, table)

// Defines `const type& function()` once: in the translation unit of the scalar variant, which every build has.
#if defined(QUIRE_ISA_LEVEL) && QUIRE_ISA_LEVEL == QUIRE_LEVEL_SCALAR
#define QUIRE_DEFINE_DISPATCH(type, function, table)                                                        \
  namespace quire {                                                                                         \
  QUIRE_STEPS(QUIRE_DECLARE_TABLE, type, table)                                                             \
  const type& function() {                                                                                  \
    static constexpr const type* variants[kNumIsas] = {&scalar::table QUIRE_STEPS(QUIRE_AND_TABLE, table)}; \
    return select_variant(variants);                                                                        \
  }                                                                                                         \
  }
#else
#define QUIRE_DEFINE_DISPATCH(type, function, table)
#endif
