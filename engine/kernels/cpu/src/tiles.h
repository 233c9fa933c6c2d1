// A 32 x 32 product by the processor's matrix tiles (AMX): a machine's own, or the same in plain C++, so that
// everything around it runs and is tested anywhere.
#pragma once

#include <algorithm>

#include "simd.h"

namespace sluice {

constexpr int kTileRows = 16, kTileColumns = 16, kTileFeatures = 32;  // of one

// c[2][2] of 16 x 16 floats, c[i][j] += x_i w_j. x_i is [16][32], its rows x_row apart. w holds both w_j as
// float_weight.h's blocks of bfloat16 do: [16 pairs][32 outputs][2], w_0 being the first 16 outputs.
class EmulatedTiles {
   public:
    void clear() { std::fill(&c_[0][0], &c_[0][0] + 2 * kTileRows * 2 * kTileColumns, 0.0f); }

    void multiply(const BFloat16* x0, const BFloat16* x1, int64_t x_row, const BFloat16* w) {
        add(c_, x0, x_row, w);
        add(c_ + kTileRows, x1, x_row, w);
    }
    // The same for x_0 alone.
    void multiply(const BFloat16* x0, int64_t x_row, const BFloat16* w) { add(c_, x0, x_row, w); }

    // Rows of x_0, then of x_1, each of 32.
    void store(float* out) const { std::memcpy(out, c_, sizeof c_); }

   private:
    static void add(float (*c)[2 * kTileColumns], const BFloat16* x, int64_t x_row, const BFloat16* w) {
        for (int r = 0; r < kTileRows; ++r)
            for (int j = 0; j < 2 * kTileColumns; ++j) {
                float even = 0.0f, odd = 0.0f;
                for (int k = 0; k < kTileFeatures; k += 2) {
                    const BFloat16* pair = w + k * 2 * kTileColumns + 2 * j;
                    even += to_float(x[r * x_row + k]) * to_float(pair[0]);
                    odd += to_float(x[r * x_row + k + 1]) * to_float(pair[1]);
                }
                c[r][j] += even + odd;
            }
    }

    float c_[2 * kTileRows][2 * kTileColumns];
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && SLUICE_AVX512 && !defined(SLUICE_EMULATE_TILES)
#define SLUICE_AMX 1

// One at a time per thread. sluice_tiles_allow() must have succeeded.
class MachineTiles {
   public:
    MachineTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        fence();
        _tile_loadconfig(&shapes);
    }
    ~MachineTiles() { _tile_release(); }
    MachineTiles(const MachineTiles&) = delete;

    void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    void multiply(const BFloat16* x0, const BFloat16* x1, int64_t x_row, const BFloat16* w) {
        multiply(x0, x_row, w);  // has fenced
        _tile_loadd(5, x1, 2 * x_row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    void multiply(const BFloat16* x0, int64_t x_row, const BFloat16* w) {
        fence();
        _tile_loadd(4, x0, 2 * x_row);
        _tile_loadd(6, w, 128);
        _tile_loadd(7, w + 2 * kTileColumns, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    void store(float* out) const {
        _tile_stored(0, out, 128);
        _tile_stored(1, out + kTileColumns, 128);
        _tile_stored(2, out + 2 * kTileRows * kTileColumns, 128);
        _tile_stored(3, out + 2 * kTileRows * kTileColumns + kTileColumns, 128);
        fence();
    }

   private:
    // The compilers' intrinsics do not say what memory they read.
    static void fence() { asm volatile("" ::: "memory"); }
};

using Tiles = MachineTiles;
#else
using Tiles = EmulatedTiles;
#endif

}  // namespace sluice
