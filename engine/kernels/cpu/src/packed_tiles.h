// A row block times one panel of packed weights by matrix tiles, bit for bit what the register tiles give.
//
// A 16-bit activation is 256 high + low, both whole numbers of at most 8 bits, which bfloat16 holds; so it holds a
// code. A group's two sums stay below 2^22, exact in float, and 256 times the one plus the other is rounded once, as
// the int32 of the register tiles is when it becomes a float.
#pragma once

#include "packed.h"
#include "parallel.h"
#include "tiles.h"

namespace sluice {

static_assert(kGroup == kTileFeatures && kPanel == 2 * kTileColumns);

inline void split_row(const int16_t* q, int64_t features, BFloat16* high, BFloat16* low) {
    for (int64_t i = 0; i < features; ++i) {
        from_float(static_cast<float>(q[i] >> 8), high + i);
        from_float(static_cast<float>(q[i] & 255), low + i);
    }
}

// The panel's codes, less the center if there is one, as float_weight.h has weights: [feature pair][32 outputs][2].
template <int Bits>
void unpack_panel(const PackedWeight& w, const uint8_t* block, BFloat16* out) {
    constexpr int kPairs = 16 / Bits;
    constexpr int kChunks = kGroup / 2 / kPairs;
    const V center = splat(static_cast<float>(w.center));
    for (int64_t g = 0; g < w.groups; ++g, block += w.block_bytes)
        for (int c = 0; c < kChunks; ++c)
#pragma GCC unroll 4
            for (int i = 0; i < kPairs; ++i, out += 2 * kPanel)
                for (int half = 0; half < 2; ++half) {
                    const I codes = field<Bits>(load_int(block + c * 128 + half * 64), i);
                    const V first = sub(to_floats(low_halves(codes)), center);
                    const V second = sub(to_floats(high_halves(codes)), center);
                    store_int(out + half * kPanel, join_bfloat16(first, second));
                }
}

// `rows` of high, low and scales, padded to whole tiles, times the unpacked panel w; block has its scales.
template <class Scale, bool Centered>
void multiply_tiles(Tiles& tiles, const PackedWeight& weight, const uint8_t* block, int64_t scales_at,
                    const BFloat16* w, int64_t rows, const BFloat16* high, const BFloat16* low,
                    const GroupScale* scales, const float* bias, float* y, int64_t y_row, int columns) {
    const int64_t groups = weight.groups, features = groups * kGroup;
    for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t height = std::min<int64_t>(kTileRows, rows - r);
        alignas(64) float total[kTileRows * kPanel] = {};
        for (int64_t g = 0; g < groups; ++g) {
            alignas(64) float sums[2][kTileRows * kPanel];  // of the high parts, of the low ones
            const int64_t at = r * features + g * kGroup;
            tiles.clear();
            tiles.multiply(high + at, low + at, features, w + g * kGroup * kPanel);
            tiles.store(sums[0]);
            const Scale* d = reinterpret_cast<const Scale*>(block + g * weight.block_bytes + scales_at);
            for (int j = 0; j < kPanel; j += kLanes) {
                const V dv = load(d + j), mv = Centered ? zero() : load(d + kPanel + j);
                for (int64_t i = 0; i < height; ++i) {
                    const GroupScale& s = scales[(r + i) * groups + g];
                    const int64_t cell = i * kPanel + j;
                    V t = mul(dv, fma(splat(256.0f), load(sums[0] + cell), load(sums[1] + cell)));
                    if (!Centered) t = fma(mv, splat(float_of(s.fold)), t);
                    store(total + cell, fma(splat(s.scale), t, load(total + cell)));
                }
            }
        }
        for (int j = 0; j < columns; j += kLanes) {
            const int count = std::min(kLanes, columns - j);
            for (int64_t i = 0; i < height; ++i) {
                V sum = load(total + i * kPanel + j);
                if (bias) sum = add(sum, load_first(bias + j, count));
                store_first(y + (r + i) * y_row + j, sum, count);
            }
        }
    }
}

}  // namespace sluice
