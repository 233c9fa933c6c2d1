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

#if defined(__AVX2__) && defined(__FMA__)
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
    for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
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
inline V load(const float* p) {
    V r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
template <class T>
inline V load(const T* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i]);
    return load(lanes);
}
inline void store(float* p, V a) { std::memcpy(p, &a, sizeof a); }
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

inline I splat_int(int32_t x) { SLUICE_PARTS(I, IntPart{} + x); }
inline I load_int(const uint8_t* p) {
    I r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
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
inline void store_int(void* p, const I& a) { std::memcpy(p, &a, sizeof a); }
inline I join_bfloat16(V low, V high) {  // of floats that need no rounding
    constexpr int32_t upper = static_cast<int32_t>(0xffff0000u);
    SLUICE_PARTS(I, (((IntPart)low.part[i] >> 16) & 0xffff) | ((IntPart)high.part[i] & upper));
}
inline V low_bfloat16(I a) { SLUICE_PARTS(V, (FloatPart)(a.part[i] << 16)); }  // of every 32-bit lane
inline V high_bfloat16(I a) { SLUICE_PARTS(V, (FloatPart)(a.part[i] & static_cast<int32_t>(0xffff0000u))); }
#undef SLUICE_PARTS

}  // namespace sluice
