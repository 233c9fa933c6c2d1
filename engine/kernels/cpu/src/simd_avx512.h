// The lanes of simd.h as one AVX-512 register.
#pragma once

#include <immintrin.h>

#include "floats.h"

namespace sluice {

constexpr int kLanes = 16;
constexpr int kMaxRows = 6;     // of a register tile
constexpr int kMaxColumns = 4;  // registers

using V = __m512;
using I = __m512i;

inline __mmask16 first(int n) { return static_cast<__mmask16>(n >= kLanes ? 0xffffu : (1u << n) - 1u); }
inline V zero() { return _mm512_setzero_ps(); }
inline V splat(float f) { return _mm512_set1_ps(f); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline V load(const Int8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m256i high_bytes(const void* p) {  // sixteen bytes, each the upper one of a pair
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))), 8);
}
inline V load(const E5M2* p) { return _mm512_cvtph_ps(high_bytes(p)); }
inline V load(const E4M3* p) {  // as to_float in floats.h
    const __m256i high = high_bytes(p), sign = _mm256_set1_epi16(static_cast<int16_t>(0x8000));
    const __m256i magnitude = _mm256_srli_epi16(_mm256_andnot_si256(sign, high), 1);
    const __m256i half = _mm256_or_si256(_mm256_and_si256(high, sign), magnitude);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
inline V load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
inline void store_first(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V power_of_two(V n) {  // 2^n for whole n in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline V zero_below(V a, V x, float limit) {  // lanes of a where x >= limit, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), a);
}
inline V keep_range(V a, int low, int high, float other) {  // lanes [low, high) of a, `other` elsewhere
    const int mask = (high > 0 ? first(high) : 0) & ~(low > 0 ? first(low) : 0);
    return _mm512_mask_mov_ps(splat(other), static_cast<__mmask16>(mask), a);
}
inline float sum(V a) {
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float maximum(V a) { return _mm512_reduce_max_ps(a); }

inline I splat_int(int32_t i) { return _mm512_set1_epi32(i); }
inline I load_int(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline V to_floats(I a) { return _mm512_cvtepi32_ps(a); }
template <int Bits>
inline I field(I a, int i) {  // bits [i Bits, i Bits + Bits) of every unsigned 16-bit lane
    if (i == 16 / Bits - 1) return _mm512_srli_epi16(a, 16 - Bits);
    return _mm512_and_si512(i ? _mm512_srli_epi16(a, i * Bits) : a, _mm512_set1_epi16((1 << Bits) - 1));
}
inline I splat_pair(const void* p) {  // of two 16-bit numbers
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}
inline I dot_add(I acc, I a, I b) {  // acc + a.even * b.even + a.odd * b.odd of 16-bit lanes
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(acc, a, b);
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
inline I nibbles(I a, int i) {  // of every byte: the low four bits, or (i 1) the high ones
    return _mm512_and_si512(i ? _mm512_srli_epi16(a, 4) : a, _mm512_set1_epi8(15));
}
inline I dot_bytes(I acc, I a, I b) {  // acc + the four products of bytes, those of a unsigned, of b signed
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, a, b);
#else
    const I low = _mm512_set1_epi16(255), even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8);
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_and_si512(a, low), even));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8)));
#endif
}
inline I low_halves(I a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }  // of every 32-bit lane
inline I high_halves(I a) { return _mm512_srli_epi32(a, 16); }
inline void store_int(void* p, I a) { _mm512_storeu_si512(p, a); }
inline I join_bfloat16(V low, V high) {  // of floats that need no rounding
    const I upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm512_or_si512(high_halves(_mm512_castps_si512(low)), _mm512_and_si512(_mm512_castps_si512(high), upper));
}
inline V low_bfloat16(I a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }  // of every 32-bit lane
inline V high_bfloat16(I a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
#if defined(__AVX512BF16__)
#define SLUICE_BFLOAT16_DOT 1
inline V dot_bfloat16(V acc, I a, I b) {  // acc + a.low * b.low + a.high * b.high
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline void store_rounded(BFloat16* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)));
}
inline I join_pairs(const BFloat16* low, const BFloat16* high) {  // sixteen of each
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const auto half = [](const BFloat16* p) {
        return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    return _mm512_permutex2var_epi16(half(low), _mm512_load_si512(kOrder), half(high));
}
#endif

}  // namespace sluice
