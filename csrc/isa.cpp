// Detects the features that CPU and operating system allow. On x86-64 it reads CPUID and XCR0, and asks Linux for the
// permission to use AMX tile data. On ARM64 it asks Linux or macOS.
#include "quire/isa.h"

#include <atomic>
#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {
namespace {

using IsaSet = unsigned;  // a bit for each step of the ladder

constexpr IsaSet only(Isa isa) { return 1u << static_cast<int>(isa); }

#if defined(__x86_64__)

constexpr bool has_bits(unsigned long long value, unsigned long long bits) { return (value & bits) == bits; }
constexpr unsigned bit(int n) { return 1u << n; }

// Linux grants the 8 KiB of tile state only on request, once per process (Documentation/arch/x86/xstate.rst).
bool request_amx() {
#if defined(__linux__)
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0;
#else
  return false;
#endif
}

IsaSet detect() {
  IsaSet found = only(Isa::scalar);
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  constexpr unsigned kFma = bit(12), kOsxsave = bit(27), kAvx = bit(28), kF16c = bit(29);
  if (!has_bits(ecx, kFma | kOsxsave | kAvx | kF16c)) return found;
  unsigned xcr0_low, xcr0_high;
  __asm__ volatile("xgetbv" : "=a"(xcr0_low), "=d"(xcr0_high) : "c"(0));
  constexpr unsigned kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
  if (!has_bits(xcr0_low, kYmmState)) return found;

  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  constexpr unsigned kBmi1 = bit(3), kAvx2 = bit(5), kBmi2 = bit(8);
  if (!has_bits(ebx, kBmi1 | kAvx2 | kBmi2)) return found;
  found |= only(Isa::avx2);
  constexpr unsigned kF = bit(16), kDq = bit(17), kCd = bit(28), kBw = bit(30), kVl = bit(31);
  const bool has_avx512 = has_bits(ebx, kF | kDq | kCd | kBw | kVl) && has_bits(xcr0_low, kZmmState);
  constexpr unsigned kVbmi = bit(1), kVnni = bit(11);                             // in ecx
  constexpr unsigned kAmxBf16 = bit(22), kAmxTile = bit(24), kAmxInt8 = bit(25);  // in edx
  const bool has_vbmi = has_bits(ecx, kVbmi), has_vnni = has_avx512 && has_bits(ecx, kVnni);
  const bool has_amx = has_bits(edx, kAmxBf16 | kAmxTile | kAmxInt8) && has_bits(xcr0_low, kTileState);
  if (has_avx512) found |= only(Isa::avx512);
  if (has_vnni) found |= only(Isa::avx512_vnni);

  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) eax = 0;
#ifdef QUIRE_EVEX_VNNI
  const bool has_avx_vnni = has_vnni;
#else
  const bool has_avx_vnni = has_bits(eax, bit(4));
#endif
  if (has_avx_vnni) found |= only(Isa::avx_vnni);
  constexpr unsigned kAvx512Bf16 = bit(5);  // in eax
  // Among CPUs with bfloat16, only Cooper Lake lacks VBMI (lookups in tables of 128 bytes).
  if (!has_vnni || !has_vbmi || !has_bits(eax, kAvx512Bf16)) return found;
  found |= only(Isa::avx512_bf16);
  if (has_amx && request_amx()) found |= only(Isa::amx);
  return found;
}

bool is_zen4() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kAmd = 0x68747541, kZen3And4 = 0x19;  // "Auth"enticAMD
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != kAmd) return false;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  return family == kZen3And4 && best_isa() >= Isa::avx512;
}

// Bytes of the L1 data cache of the core that asks; 0 if the CPU does not say. Intel and AMD describe caches in two
// leaves of CPUID of the same form.
int64_t l1_bytes() {
  constexpr unsigned kIntel = 4, kAmd = 0x8000001d, kData = 1;
  for (const unsigned leaf : {kIntel, kAmd}) {
    unsigned eax, ebx, ecx, edx;
    for (unsigned cache = 0; __get_cpuid_count(leaf, cache, &eax, &ebx, &ecx, &edx) && (eax & 0x1f) != 0; ++cache) {
      const unsigned kind = eax & 0x1f, level = eax >> 5 & 0x7;
      const int64_t ways = (ebx >> 22) + 1, parts = (ebx >> 12 & 0x3ff) + 1, line = (ebx & 0xfff) + 1;
      if (kind == kData && level == 1) return ways * parts * line * (int64_t{ecx} + 1);
    }
  }
  return 0;
}

#elif defined(__aarch64__)

#if defined(__linux__)

bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_i8mm() { return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
bool has_bf16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }

#elif defined(__APPLE__)

// Apple takes the names of features from Arm's manual. If an older macOS does not know a name, the feature is missing.
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
bool has_bf16() { return has_feature("hw.optional.arm.FEAT_BF16"); }

#else

bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
bool has_bf16() { return false; }

#endif

IsaSet detect() {
  IsaSet found = only(Isa::scalar) | only(Isa::neon);  // every ARM64 CPU has it
  if (!has_dotprod()) return found;
  found |= only(Isa::neon_dotprod);
  // Both are mandatory from Armv8.6 on, and no CPU so far has only one of them.
  return has_i8mm() && has_bf16() ? found | only(Isa::neon_i8mm) : found;
}

#else

IsaSet detect() { return only(Isa::scalar); }

#endif

IsaSet runnable() {
  static const IsaSet found = detect();
  return found;
}

std::atomic<int>& active() {
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
#if defined(__aarch64__)
  constexpr const char* kNames[kNumIsas] = {"scalar", "neon", "neon_dotprod", "neon_i8mm"};
#else
  constexpr const char* kNames[kNumIsas] = {"scalar",      "avx2",        "avx_vnni", "avx512",
                                            "avx512_vnni", "avx512_bf16", "amx"};
#endif
  return kNames[static_cast<int>(isa)];
}

bool has_isa(Isa isa) { return (runnable() & only(isa)) != 0; }

Isa best_isa() { return static_cast<Isa>(std::bit_width(runnable()) - 1); }

bool follows_streams() {
#if defined(__x86_64__)
  static const bool follows = is_zen4();
  return follows;
#else
  return false;
#endif
}

bool has_large_l1() {
#if defined(__x86_64__)
  static const bool is_large = l1_bytes() >= 48 * 1024;
  return is_large;
#else
  return false;
#endif
}

bool fetches_close() {
#if defined(__x86_64__)
  return has_isa(Isa::amx);
#else
  return false;
#endif
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

bool set_active_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  active().store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

}  // namespace quire
