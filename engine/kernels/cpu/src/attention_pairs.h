// The products of attention_tile.h where the cache holds bfloat16 and the machine multiplies pairs of them, twice as
// fast: q and the weights are rounded to bfloat16 too. Sums run over pairs of features and of keys in order.
#pragma once

#include "attention_tile.h"

namespace sluice {

#if SLUICE_BFLOAT16_DOT
// As score(). Copied: a pair of features of sixteen keys lies in one register, else in two rows of the cache.
template <int R, int N, bool Copied>
void score_pairs(const BFloat16* q, int64_t dim, const BFloat16* const* keys, const BFloat16* const* ahead,
                 int64_t stride, float* scores) {
    V acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = zero();
    for (int64_t d = 0; d < dim; d += 2) {
        I k[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            const BFloat16* pair = keys[i] + d * stride;
            if constexpr (Copied) {
                k[i] = load_int(reinterpret_cast<const uint8_t*>(pair));
            } else {
                k[i] = join_pairs(pair, pair + stride);
                __builtin_prefetch(ahead[i] + d * stride, 0, 2);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I s = splat_pair(q + r * dim + d);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = dot_bfloat16(acc[r][i], k[i], s);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(scores + r * kSpan + i * kLanes, acc[r][i]);
}

// As weigh(), from and to being even. Copied: a pair of values lies feature by feature.
template <int R, int N, bool Copied>
void weigh_pairs(const BFloat16* weights, const BFloat16* const* values, const BFloat16* const* ahead, int from, int to,
                 int64_t offset, float* out, int64_t dim) {
    V acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = load(out + r * dim + i * kLanes);
    for (int j = from; j < to; j += 2) {
        I v[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            const int64_t at = offset + i * kLanes;
            if constexpr (Copied) {
                v[i] = load_int(reinterpret_cast<const uint8_t*>(values[j] + 2 * at));
            } else {
                v[i] = join_pairs(values[j] + at, values[j + 1] + at);
                if (i % 2 == 0) __builtin_prefetch(ahead[j] + at, 0, 2), __builtin_prefetch(ahead[j + 1] + at, 0, 2);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I s = splat_pair(weights + r * 2 * kSpan + j);  // where the scores were, which are twice as large
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = dot_bfloat16(acc[r][i], v[i], s);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(out + r * dim + i * kLanes, acc[r][i]);
}
#endif

}  // namespace sluice
