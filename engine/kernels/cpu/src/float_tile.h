// Some rows times one panel of float weights. A row's sum runs over the features in order, whatever the rows
// beside it.
#pragma once

#include "float_weight.h"
#include "simd.h"

namespace sluice {

// Asks the second-level cache for weights that are due later: the first level has too few requests under way at a
// time to keep memory busy.
inline void fetch(const uint8_t* block, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(block + b, 0, 2);
}

// What to ask for during a walk along a panel: `stride` bytes further at each of its blocks. Panels follow one another.
struct Ahead {
    const uint8_t* from;
    int64_t stride;

    // Of the walks along a panel (one for each tile of rows) only the first reads it from memory. If it is the only
    // one it asks for what is 4 kB away; else the first two ask for half of the next panel each, so that memory is
    // busy all the time and no walk waits for it.
    Ahead(const uint8_t* panel, int64_t panel_bytes, int64_t block_bytes, int64_t walk, int64_t walks)
        : from(panel + 4096), stride(block_bytes) {
        if (walks == 1) return;
        from = panel + panel_bytes + (walk == 1 ? panel_bytes / 2 : 0);
        stride = walk < 2 ? block_bytes / 2 : 0;
    }
};

// Weights widened to float, every product a float fma: the same bits on every machine.
template <class T>
struct Widened {
    using Input = float;  // of x, one per feature
    static constexpr int64_t kBlock = 2 * kFloatPanel * sizeof(T);

    template <int R>
    static void step(V (&acc)[R][2], const uint8_t* block, const float* x) {
        V w[2][2];  // [feature][half]
        for (int half = 0; half < 2; ++half) {
            if constexpr (std::is_same_v<T, BFloat16>) {
                const I lanes = load_int(block + half * 64);
                w[0][half] = low_bfloat16(lanes);
                w[1][half] = high_bfloat16(lanes);
            } else {
                const T* row = reinterpret_cast<const T*>(block) + half * kLanes;
                w[0][half] = load(row);
                w[1][half] = load(row + kFloatPanel);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 2; ++i) {
                const V s = splat(x[r * kFeatureStep + i]);
                acc[r][0] = fma(s, w[i][0], acc[r][0]);
                acc[r][1] = fma(s, w[i][1], acc[r][1]);
            }
    }
};

#if SLUICE_BFLOAT16_DOT
// The machine's own product of bfloat16 pairs, twice as fast; how it rounds the sum of two is its own.
struct Paired {
    using Input = BFloat16;
    static constexpr int64_t kBlock = 2 * kFloatPanel * sizeof(BFloat16);

    template <int R>
    static void step(V (&acc)[R][2], const uint8_t* block, const BFloat16* x) {
        const I w[2] = {load_int(block), load_int(block + 64)};
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const I pair = splat_pair(x + r * kFeatureStep);
            acc[r][0] = dot_bfloat16(acc[r][0], w[0], pair);
            acc[r][1] = dot_bfloat16(acc[r][1], w[1], pair);
        }
    }
};
#endif

// y[R][columns] = x times the panel, plus bias if there is one. x is [steps][R][kFeatureStep]: with the rows of a
// step at fixed distances, one register points to all of them.
template <class Form, int R>
void float_tile(const uint8_t* block, Ahead ahead, int64_t steps, const typename Form::Input* x, const float* bias,
                float* y, int64_t y_row, int columns) {
    V acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
    for (int64_t s = 0; s < steps; ++s, x += R * kFeatureStep)
        for (int k = 0; k < kFeatureStep; k += 2, block += Form::kBlock, ahead.from += ahead.stride) {
            fetch(ahead.from, Form::kBlock);
            Form::template step<R>(acc, block, x + k);
        }
    for (int half = 0; half < 2; ++half) {
        const int count = columns - half * kLanes;
        if (count <= 0) break;
        const V add_on = bias ? load_first(bias + half * kLanes, count) : zero();
        for (int r = 0; r < R; ++r)
            store_first(y + r * y_row + half * kLanes, bias ? add(acc[r][half], add_on) : acc[r][half], count);
    }
}

}  // namespace sluice
