// The lanes of simd.h as a few registers of whatever width the machine has, through the compilers' vector types.
#pragma once

#include <cmath>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "floats.h"

namespace sluice {

constexpr int kLanes = 16;
constexpr int kMaxRows = 6;     // of a register tile
constexpr int kMaxColumns = 2;  // of sixteen lanes

#if defined(__AVX2__) && defined(__FMA__)  // never one without the other
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;

typedef float FloatPart __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntPart __attribute__((vector_size(4 * kWidth)));

struct V {
    FloatPart part[kParts];
};
struct I {
    IntPart part[kParts];
};

inline FloatPart fma_part(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;  // rounded twice: the library's fused product takes a hundred times as long
#endif
}

// Applies an expression to each part: `i` is its index, `r` the result.
#define SLUICE_PARTS(Type, expression)                               \
    do {                                                             \
        Type r;                                                      \
        for (int i = 0; i < kParts; ++i) r.part[i] = (expression);   \
        return r;                                                    \
    } while (0)

inline V splat(float f) { SLUICE_PARTS(V, FloatPart{} + f); }
inline V zero() { SLUICE_PARTS(V, FloatPart{}); }

// Memory is read and written register by register: a copy of all of V at once goes through the stack (g++ 12), which
// makes the kernels 2 to 5 times as slow.
template <class Part, class T>
inline Part read_part(const T* p) {
    Part r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
inline V load(const float* p) { SLUICE_PARTS(V, read_part<FloatPart>(p + i * kWidth)); }
inline void store(float* p, V a) {
    for (int i = 0; i < kParts; ++i) std::memcpy(p + i * kWidth, &a.part[i], sizeof a.part[i]);
}
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline __m128i eight_pairs(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i eight_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m128i high_bytes(const void* p) {  // eight bytes, each the upper one of a pair
    return _mm_unpacklo_epi8(_mm_setzero_si128(), eight_bytes(p));
}
inline FloatPart widen(const Half* p) { return _mm256_cvtph_ps(eight_pairs(p)); }
inline FloatPart widen(const BFloat16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_pairs(p)), 16));
}
inline FloatPart widen(const Int8* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))); }
inline FloatPart widen(const E5M2* p) { return _mm256_cvtph_ps(high_bytes(p)); }
inline FloatPart widen(const E4M3* p) {  // as to_float in floats.h
    const __m128i high = high_bytes(p), sign = _mm_set1_epi16(static_cast<int16_t>(0x8000));
    const __m128i half = _mm_or_si128(_mm_and_si128(high, sign), _mm_srli_epi16(_mm_andnot_si128(sign, high), 1));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
#else
template <class T>
inline FloatPart widen(const T* p) {
    FloatPart r;
    for (int i = 0; i < kWidth; ++i) r[i] = to_float(p[i]);
    return r;
}
#endif
template <class T>
inline V load(const T* p) { SLUICE_PARTS(V, widen(p + i * kWidth)); }
inline V load_first(const float* p, int n) {
    if (n >= kLanes) return load(p);
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof *p);
    return load(lanes);
}
inline void store_first(float* p, V a, int n) {
    if (n >= kLanes) return store(p, a);
    float lanes[kLanes];
    store(lanes, a);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof *p);
}
inline V add(V a, V b) { SLUICE_PARTS(V, a.part[i] + b.part[i]); }
inline V sub(V a, V b) { SLUICE_PARTS(V, a.part[i] - b.part[i]); }
inline V mul(V a, V b) { SLUICE_PARTS(V, a.part[i] * b.part[i]); }
inline V div(V a, V b) { SLUICE_PARTS(V, a.part[i] / b.part[i]); }
inline V max(V a, V b) { SLUICE_PARTS(V, a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
inline V min(V a, V b) { SLUICE_PARTS(V, a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }
inline V fma(V a, V b, V c) { SLUICE_PARTS(V, fma_part(a.part[i], b.part[i], c.part[i])); }
inline V round(V a) { SLUICE_PARTS(V, (a.part[i] + 0x1.8p23f) - 0x1.8p23f); }  // for |a| < 2^22
inline V power_of_two(V n) {  // 2^n for whole n in [-126, 127]
    SLUICE_PARTS(V, (FloatPart)((__builtin_convertvector(n.part[i], IntPart) + 127) << 23));
}
inline V zero_below(V a, V x, float limit) {  // lanes of a where x >= limit, else 0
    SLUICE_PARTS(V, x.part[i] < limit ? FloatPart{} : a.part[i]);
}
inline V keep_range(V a, int low, int high, float other) {  // lanes [low, high) of a, `other` elsewhere
    if (low <= 0 && high >= kLanes) return a;
    float lanes[kLanes];
    store(lanes, a);
    for (int i = 0; i < kLanes; ++i) lanes[i] = i >= low && i < high ? lanes[i] : other;
    return load(lanes);
}
#if defined(__AVX2__) && defined(__FMA__)
inline float sum(V a) {
    const __m256 b = a.part[0] + a.part[1];
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float maximum(V a) {
    const __m256 b = _mm256_max_ps(a.part[0], a.part[1]);
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
#else
inline float sum(V a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}
inline float maximum(V a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}
#endif

inline I splat_int(int32_t x) { SLUICE_PARTS(I, IntPart{} + x); }
inline I load_int(const uint8_t* p) { SLUICE_PARTS(I, read_part<IntPart>(p + i * sizeof(IntPart))); }
inline V to_floats(I a) { SLUICE_PARTS(V, __builtin_convertvector(a.part[i], FloatPart)); }
template <int Bits>
inline I field(I a, int n) {  // bits [n Bits, n Bits + Bits) of every unsigned 16-bit lane
    constexpr int32_t mask = (1 << Bits) - 1;
    SLUICE_PARTS(I, (a.part[i] >> (n * Bits)) & (mask | mask << 16));
}
inline IntPart splat_pair(const void* p) {  // of two 16-bit numbers
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return IntPart{} + pair;
}
inline IntPart dot_part(IntPart a, IntPart b) {
#if defined(__AVX2__) && defined(__FMA__)
    return (IntPart)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (a & 0xffff) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
inline I dot_add(I acc, I a, IntPart b) {  // acc + a.even * b.even + a.odd * b.odd of 16-bit lanes, a not negative
    SLUICE_PARTS(I, acc.part[i] + dot_part(a.part[i], b));
}
inline I nibbles(I a, int n) {  // of every byte: the low four bits, or (n 1) the high ones
    SLUICE_PARTS(I, (a.part[i] >> (n * 4)) & 0x0f0f0f0f);
}
inline I dot_bytes(I acc, I a, IntPart b) {  // acc + the four products of bytes, those of a below 128, of b signed
    const IntPart even = ((b << 24 >> 24) & 0xffff) | (b << 8 >> 24 << 16);
    const IntPart odd = ((b << 16 >> 24) & 0xffff) | (b >> 24 << 16);
    constexpr int32_t low = 0x00ff00ff;
    SLUICE_PARTS(I, acc.part[i] + dot_part(a.part[i] & low, even) + dot_part((a.part[i] >> 8) & low, odd));
}
inline I low_halves(I a) { SLUICE_PARTS(I, a.part[i] & 0xffff); }  // of every 32-bit lane
inline I high_halves(I a) { SLUICE_PARTS(I, (a.part[i] >> 16) & 0xffff); }
inline void store_int(void* p, const I& a) {
    for (int i = 0; i < kParts; ++i)
        std::memcpy(static_cast<char*>(p) + i * sizeof(IntPart), &a.part[i], sizeof(IntPart));
}
inline I join_bfloat16(V low, V high) {  // of floats that need no rounding
    constexpr int32_t upper = static_cast<int32_t>(0xffff0000u);
    SLUICE_PARTS(I, (((IntPart)low.part[i] >> 16) & 0xffff) | ((IntPart)high.part[i] & upper));
}
inline V low_bfloat16(I a) { SLUICE_PARTS(V, (FloatPart)(a.part[i] << 16)); }  // of every 32-bit lane
inline V high_bfloat16(I a) { SLUICE_PARTS(V, (FloatPart)(a.part[i] & static_cast<int32_t>(0xffff0000u))); }
#undef SLUICE_PARTS

}  // namespace sluice
