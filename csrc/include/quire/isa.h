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

// clang-format off
#ifdef QUIRE_HAVE_avx2
#define QUIRE_DECLARE_avx2(type, table) namespace avx2 { extern const type table; }
#define QUIRE_VARIANT_avx2(table) &avx2::table
#else
#define QUIRE_DECLARE_avx2(type, table)
#define QUIRE_VARIANT_avx2(table) nullptr
#endif
#ifdef QUIRE_HAVE_avx_vnni
#define QUIRE_DECLARE_avx_vnni(type, table) namespace avx_vnni { extern const type table; }
#define QUIRE_VARIANT_avx_vnni(table) &avx_vnni::table
#else
#define QUIRE_DECLARE_avx_vnni(type, table)
#define QUIRE_VARIANT_avx_vnni(table) nullptr
#endif
#ifdef QUIRE_HAVE_avx512
#define QUIRE_DECLARE_avx512(type, table) namespace avx512 { extern const type table; }
#define QUIRE_VARIANT_avx512(table) &avx512::table
#else
#define QUIRE_DECLARE_avx512(type, table)
#define QUIRE_VARIANT_avx512(table) nullptr
#endif
#ifdef QUIRE_HAVE_avx512_vnni
#define QUIRE_DECLARE_avx512_vnni(type, table) namespace avx512_vnni { extern const type table; }
#define QUIRE_VARIANT_avx512_vnni(table) &avx512_vnni::table
#else
#define QUIRE_DECLARE_avx512_vnni(type, table)
#define QUIRE_VARIANT_avx512_vnni(table) nullptr
#endif
#ifdef QUIRE_HAVE_avx512_bf16
#define QUIRE_DECLARE_avx512_bf16(type, table) namespace avx512_bf16 { extern const type table; }
#define QUIRE_VARIANT_avx512_bf16(table) &avx512_bf16::table
#else
#define QUIRE_DECLARE_avx512_bf16(type, table)
#define QUIRE_VARIANT_avx512_bf16(table) nullptr
#endif
#ifdef QUIRE_HAVE_amx
#define QUIRE_DECLARE_amx(type, table) namespace amx { extern const type table; }
#define QUIRE_VARIANT_amx(table) &amx::table
#else
#define QUIRE_DECLARE_amx(type, table)
#define QUIRE_VARIANT_amx(table) nullptr
#endif
#ifdef QUIRE_HAVE_neon
#define QUIRE_DECLARE_neon(type, table) namespace neon { extern const type table; }
#define QUIRE_VARIANT_neon(table) &neon::table
#else
#define QUIRE_DECLARE_neon(type, table)
#define QUIRE_VARIANT_neon(table) nullptr
#endif
#ifdef QUIRE_HAVE_neon_dotprod
#define QUIRE_DECLARE_neon_dotprod(type, table) namespace neon_dotprod { extern const type table; }
#define QUIRE_VARIANT_neon_dotprod(table) &neon_dotprod::table
#else
#define QUIRE_DECLARE_neon_dotprod(type, table)
#define QUIRE_VARIANT_neon_dotprod(table) nullptr
#endif
#ifdef QUIRE_HAVE_neon_i8mm
#define QUIRE_DECLARE_neon_i8mm(type, table) namespace neon_i8mm { extern const type table; }
#define QUIRE_VARIANT_neon_i8mm(table) &neon_i8mm::table
#else
#define QUIRE_DECLARE_neon_i8mm(type, table)
#define QUIRE_VARIANT_neon_i8mm(table) nullptr
#endif
// Applies a macro to all steps above scalar, in the order of the ladder.
#if defined(__aarch64__)
#define QUIRE_DECLARE_VARIANTS(type, table) \
  QUIRE_DECLARE_neon(type, table) QUIRE_DECLARE_neon_dotprod(type, table) QUIRE_DECLARE_neon_i8mm(type, table)
#define QUIRE_VARIANTS(table) QUIRE_VARIANT_neon(table), QUIRE_VARIANT_neon_dotprod(table), QUIRE_VARIANT_neon_i8mm(table)
#else
#define QUIRE_DECLARE_VARIANTS(type, table) \
  QUIRE_DECLARE_avx2(type, table) QUIRE_DECLARE_avx_vnni(type, table) QUIRE_DECLARE_avx512(type, table) \
  QUIRE_DECLARE_avx512_vnni(type, table) QUIRE_DECLARE_avx512_bf16(type, table) QUIRE_DECLARE_amx(type, table)
#define QUIRE_VARIANTS(table) \
  QUIRE_VARIANT_avx2(table), QUIRE_VARIANT_avx_vnni(table), QUIRE_VARIANT_avx512(table), \
  QUIRE_VARIANT_avx512_vnni(table), QUIRE_VARIANT_avx512_bf16(table), QUIRE_VARIANT_amx(table)
#endif
// clang-format on

// Defines `const type& function()` once: in the translation unit of the scalar variant, which every build has.
#if defined(QUIRE_ISA_LEVEL) && QUIRE_ISA_LEVEL == QUIRE_LEVEL_SCALAR
#define QUIRE_DEFINE_DISPATCH(type, function, table)                                           \
  namespace quire {                                                                            \
  QUIRE_DECLARE_VARIANTS(type, table)                                                          \
  const type& function() {                                                                     \
    static constexpr const type* variants[kNumIsas] = {&scalar::table, QUIRE_VARIANTS(table)}; \
    return select_variant(variants);                                                           \
  }                                                                                            \
  }
#else
#define QUIRE_DEFINE_DISPATCH(type, function, table)
#endif
