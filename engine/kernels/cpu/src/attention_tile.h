// Attention of a few query rows to a span of keys, tile by tile: scores, then their softmax, then weighted values.
//
// Every sum runs in one order (over features, over keys, over spans), whatever the number of rows and the
// storage of the cache: what a row gets depends on its own position and context alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace sluice {

constexpr int kKeys = 64;   // per tile
constexpr int kSpan = 256;  // keys of which a row has all scores before it weighs values: so many lie side by side
static_assert(kSpan % kKeys == 0);
constexpr float kLowest = -1e30f;  // below every score, yet kLowest - kLowest is 0

// Covers rows x columns (registers of sixteen) with register tiles: calls tile(row, column, height, width), the
// last two as integral constants.
template <class Tile>
void for_tiles(int rows, int columns, const Tile& tile) {
    int i = 0;
    const auto across = [&](auto width) {
        for (; i + width() <= columns; i += width()) {
            int r = 0;
            const auto down = [&](auto height) {
                for (; r + height() <= rows; r += height()) tile(r, i, height, width);
            };
            if constexpr (kMaxRows >= 6) down(std::integral_constant<int, 6>{});
            down(std::integral_constant<int, 3>{});
            down(std::integral_constant<int, 1>{});
        }
    };
    across(std::integral_constant<int, kMaxColumns>{});
    across(std::integral_constant<int, 1>{});
}

// scores[R][16 N] = q[R][dim] times keys: feature d of group i's sixteen keys lies at keys[i] + d * stride.
template <int R, int N, class T>
void score(const float* q, int64_t dim, const T* const* keys, const T* const* ahead, int64_t stride, float* scores) {
    V acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = zero();
    for (int64_t d = 0; d < dim; ++d) {
        V k[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            k[i] = load(keys[i] + d * stride);
            __builtin_prefetch(ahead[i] + d * stride, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const V s = splat(q[r * dim + d]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = fma(s, k[i], acc[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(scores + r * kSpan + i * kLanes, acc[r][i]);
}

// out[R][16 N] += weights[R][from .. to] times values[from .. to], `offset` features into each.
template <int R, int N, class T>
void weigh(const float* weights, const T* const* values, const T* const* ahead, int from, int to, int64_t offset,
           float* out, int64_t dim) {
    V acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = load(out + r * dim + i * kLanes);
    for (int j = from; j < to; ++j) {
        V v[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            v[i] = load(values[j] + offset + i * kLanes);
            __builtin_prefetch(ahead[j] + offset + i * kLanes, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const V s = splat(weights[r * kSpan + j]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = fma(s, v[i], acc[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(out + r * dim + i * kLanes, acc[r][i]);
}

// out[i][lane j] = rows[j][i] for 16 rows of 16; a null row reads as zeros.
template <class T>
void transpose(const T* const* rows, int64_t offset, float* out, int64_t ldo) {
#if SLUICE_AVX512
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = rows[i] ? load(rows[i] + offset) : zero();
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            r[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    // r[4 g + c]: 128-bit lane l holds column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512 even = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        store(out + c * ldo, _mm512_shuffle_f32x4(even, even2, 0x88));
        store(out + (8 + c) * ldo, _mm512_shuffle_f32x4(even, even2, 0xdd));
        store(out + (4 + c) * ldo, _mm512_shuffle_f32x4(odd, odd2, 0x88));
        store(out + (12 + c) * ldo, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
    }
#else
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) out[i * ldo + j] = rows[j] ? to_float(rows[j][offset + i]) : 0.0f;
#endif
}

// e^(a - b) for a <= b, and exactly 1 or 0 at the ends.
inline float decay(float a, float b) {
    if (a == b) return 1.0f;
    const V x = splat(a - b);
    float lanes[kLanes];
    store(lanes, zero_below(exp(x), x, -87.0f));
    return lanes[0];
}

// The first `width` scores of one row -> weights e^(score - max), outside [low, high) zero; their maximum and sum.
// `put` stores sixteen weights where the scores were.
template <class Put>
void soften(float* scores, int width, int low, int high, float& peak, float& total, const Put& put) {
    V top = splat(kLowest);
    for (int i = 0; i < width; i += kLanes) {
        const V s = keep_range(load(scores + i), low - i, high - i, -INFINITY);
        store(scores + i, s);
        top = max(top, s);
    }
    peak = maximum(top);
    V sums = zero();
    for (int i = 0; i < width; i += kLanes) {
        const V x = sub(load(scores + i), splat(peak));
        const V weight = zero_below(exp(x), x, -87.0f);
        put(scores, i, weight);
        sums = add(sums, weight);
    }
    total = sum(sums);
}

// The softmax of some rows over the keys so far, not yet divided: acc [rows][dim], peak and total [rows].
struct Partial {
    float *acc, *peak, *total;

    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
    Partial(float* memory, int64_t rows, int64_t dim)
        : acc(memory), peak(memory + rows * dim), total(memory + rows * (dim + 1)) {}

    void clear(int64_t rows, int64_t dim) {
        std::fill(acc, acc + rows * dim, 0.0f);
        std::fill(peak, peak + rows, kLowest);
        std::fill(total, total + rows, 0.0f);
    }

    // Take in what other keys gave. A row that saw none of them stays as it is, to the bit.
    void merge(const Partial& other, int64_t rows, int64_t dim) {
        for (int64_t r = 0; r < rows; ++r) {
            const float top = std::max(peak[r], other.peak[r]);
            const float mine = decay(peak[r], top), theirs = decay(other.peak[r], top);
            for (int64_t d = r * dim; d < (r + 1) * dim; d += kLanes)
                store(acc + d, fma(load(other.acc + d), splat(theirs), mul(load(acc + d), splat(mine))));
            total[r] = total[r] * mine + other.total[r] * theirs;
            peak[r] = top;
        }
    }
};

}  // namespace sluice
