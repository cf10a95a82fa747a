# The ladder of ARM64 and the variants of each family, in place of the lists of x86-64 in CMakeLists.txt.
#
#   neon          what every ARM64 CPU has                            Fujitsu A64FX
#   neon_dotprod  dot products of 8-bit integers (sdot)               Apple M1, Graviton 2, Ampere Altra, Raspberry Pi 5
#   neon_i8mm     8-bit matrix products (usdot, usmmla) and bfloat16  Apple M2, Graviton 3 and 4
get_directory_property(variables VARIABLES)
list(FILTER variables INCLUDE REGEX "^QUIRE_ISAS_")
foreach(variable IN LISTS variables)
  unset(${variable})
endforeach()

set(QUIRE_ISA_LADDER scalar neon neon_dotprod neon_i8mm)
set(QUIRE_STEPS ${QUIRE_ISA_LADDER})
set(QUIRE_FLAGS_neon "")
set(QUIRE_FLAGS_neon_dotprod -march=armv8.2-a+dotprod)
set(QUIRE_FLAGS_neon_i8mm -march=armv8.2-a+dotprod+i8mm+bf16)

# Scheduling before registers are given out puts so many loads ahead that g++ 12 keeps sums on the stack: 32 of 107
# instructions in the loop of gemm_f32 for 6 rows of bfloat16.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND QUIRE_COMMON_FLAGS -fno-schedule-insns)
endif()

set(QUIRE_ISAS_gemm_f32 scalar neon)
set(QUIRE_ISAS_gemm_bf16 scalar neon_i8mm)  # scalar: an empty table that says "not here"
set(QUIRE_ISAS_gemm_amx scalar)
set(QUIRE_ISAS_gemm_grouped scalar neon neon_dotprod neon_i8mm)
set(QUIRE_ISAS_gemm_grouped_amx scalar)
set(QUIRE_ISAS_gemm_fp8 scalar neon neon_i8mm)
set(QUIRE_ISAS_gemm_fp8_amx scalar)
set(QUIRE_ISAS_quantize scalar neon)
set(QUIRE_ISAS_fp8_quantize scalar neon)
set(QUIRE_ISAS_activation scalar neon neon_i8mm)
set(QUIRE_ISAS_attention scalar neon)
set(QUIRE_ISAS_attention_codes scalar neon)
set(QUIRE_ISAS_norm_rope scalar neon neon_i8mm)
set(QUIRE_ISAS_sampling scalar neon)
set(QUIRE_ISAS_latent scalar neon neon_i8mm)
set(QUIRE_ISAS_experts scalar neon neon_i8mm)
set(QUIRE_ISAS_lora scalar neon)
set(QUIRE_ISAS_limits scalar neon neon_dotprod neon_i8mm)
