// y = x W^T + bias with W as packed.h has it.
//
// Activations become integers of 16 bits per (row, group), or of 8 where the call allows it, so a group's dot product
// is exact in int32 (32 * 255 * 32767 < 2^29) and only the sum over groups is rounded. A row's sum runs over groups in
// order whatever the tile, the thread or the neighbours.
#include <cmath>

#include "packed.h"
#include "packed_tiles.h"
#include "parallel.h"
#include "simd.h"

namespace sluice {
namespace {

constexpr int64_t kRowBlock = 128;  // rows whose activations should stay in L2 while panels stream by
// Blocks: so far ahead the second-level cache is asked for weights. Panels follow one another, so this runs into the
// next.
constexpr int kAhead = 8;
constexpr int kSerialQuantize = 1 << 14;  // activations

struct PackedLinear {
    const float* x;
    int64_t x_row, rows;
    PackedWeight w;
    const float* bias;  // null: none
    float* y;
    int64_t y_row;
    int64_t narrow;          // activations of 8 bits, beside codes of 4
    int64_t tiled, threads;  // tiled: many rows by matrix tiles, with the same result
};

// A group of activations; bytes in the order in which a chunk has its codes: even ones in the low halves of 16 bits.
#if SLUICE_AVX512
void put_group(__m512i a, __m512i b, int16_t* q) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_cvtsepi32_epi16(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16), _mm512_cvtsepi32_epi16(b));
}
void put_group(__m512i a, __m512i b, int8_t* q) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(a), order));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(b), order));
}
#endif
void put_one(int32_t code, int i, int16_t* q) { q[i] = static_cast<int16_t>(code); }
void put_one(int32_t code, int i, int8_t* q) {
    constexpr int kPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    q[i / 8 * 8 + kPlace[i % 8]] = static_cast<int8_t>(code);
}

// Codes have magnitudes up to `most`.
template <class Code>
void quantize_row(const float* x, const PackedWeight& w, float most, Code* q, GroupScale* scales) {
    for (int64_t g = 0; g < w.groups; ++g, x += kGroup, q += kGroup) {
        // The largest magnitude by its bits: infinity and NaN are larger than any number, so they reach the
        // scale and poison the result as they should.
#if SLUICE_AVX512
        const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        const float largest = float_of(_mm512_reduce_max_epu32(_mm512_max_epu32(
            _mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude))));
#else
        uint32_t bits = 0;
        for (int i = 0; i < kGroup; ++i) bits = std::max(bits, bits_of(x[i]) & 0x7fffffffu);
        const float largest = float_of(bits);
#endif
        const bool vanishes = largest < 1e-30f;  // most / largest would overflow
        const float inverse = vanishes ? 0.0f : most / largest;
        scales[g].scale = vanishes ? 0.0f : largest / most;
#if SLUICE_AVX512
        const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
        const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
        put_group(qa, qb, q);
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
#else
        int32_t sum = 0;
        for (int i = 0; i < kGroup; ++i) {
            const float r = __builtin_rintf(x[i] * inverse);
            const auto code = static_cast<int32_t>(std::fabs(r) <= most ? r : -most);
            put_one(code, i, q);
            sum += code;
        }
#endif
        scales[g].fold = w.center ? -static_cast<int32_t>(w.center) * sum
                                  : static_cast<int32_t>(bits_of(static_cast<float>(sum)));
    }
}

// R rows times one panel.
template <int R, int Bits, class Scale, bool Centered, class Code>
void tile(const PackedWeight& w, const uint8_t* block, const Code* q, const GroupScale* scales, const float* bias,
          float* y, int64_t y_row, int columns) {
    constexpr int kPairs = 16 / Bits;  // feature pairs in a chunk
    constexpr int kChunks = kGroup / 2 / kPairs;
    const int64_t features = w.groups * kGroup;
    V total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zero();
    for (int64_t g = 0; g < w.groups; ++g, block += w.block_bytes, q += kGroup, ++scales) {
        I acc[R][2];
        for (int r = 0; r < R; ++r)
            acc[r][0] = acc[r][1] = splat_int(Centered ? scales[r * w.groups].fold : 0);
        for (int64_t b = 0; b < w.block_bytes; b += 64) __builtin_prefetch(block + kAhead * w.block_bytes + b, 0, 2);
        for (int c = 0; c < kChunks; ++c) {
            const I chunk[2] = {load_int(block + c * 128), load_int(block + c * 128 + 64)};
            if constexpr (sizeof(Code) == 1) {
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const I left = nibbles(chunk[0], i), right = nibbles(chunk[1], i);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const auto four = splat_pair(q + r * features + (c * 2 + i) * 4);
                        acc[r][0] = dot_bytes(acc[r][0], left, four);
                        acc[r][1] = dot_bytes(acc[r][1], right, four);
                    }
                }
            } else {
#pragma GCC unroll 4
                for (int i = 0; i < kPairs; ++i) {
                    const I left = field<Bits>(chunk[0], i), right = field<Bits>(chunk[1], i);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const auto pair = splat_pair(q + r * features + (c * kPairs + i) * 2);
                        acc[r][0] = dot_add(acc[r][0], left, pair);
                        acc[r][1] = dot_add(acc[r][1], right, pair);
                    }
                }
            }
        }
        const Scale* d = reinterpret_cast<const Scale*>(block + kChunks * 128);
        for (int half = 0; half < 2; ++half) {
            const V dv = load(d + half * kLanes);
            const V mv = Centered ? zero() : load(d + kPanel + half * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const GroupScale& s = scales[r * w.groups];
                V t = mul(dv, to_floats(acc[r][half]));
                if (!Centered) t = fma(mv, splat(float_of(s.fold)), t);
                total[r][half] = fma(splat(s.scale), t, total[r][half]);
            }
        }
    }
    for (int half = 0; half < 2; ++half) {
        const int count = columns - half * kLanes;
        if (count <= 0) break;
        if (bias) {
            const V add_on = load_first(bias + half * kLanes, count);
            for (int r = 0; r < R; ++r) total[r][half] = add(total[r][half], add_on);
        }
        for (int r = 0; r < R; ++r) store_first(y + r * y_row + half * kLanes, total[r][half], count);
    }
}

// The activations of a call: as the register tiles read them, or the matrix tiles.
struct Input {
    const void* q;  // of Code
    const BFloat16 *high, *low;
    const GroupScale* scales;
};

// `count` rows from `row` on times one panel, by matrix tiles if there are any.
template <int Bits, class Scale, bool Centered, class Code>
void panel_rows(const PackedLinear& a, int64_t panel, int64_t row, int64_t count, const Input& x, Tiles* tiles) {
    const PackedWeight& w = a.w;
    const uint8_t* block = w.data + panel * w.groups * w.block_bytes;
    const int columns = static_cast<int>(std::min<int64_t>(kPanel, w.out - panel * kPanel));
    const float* bias = a.bias ? a.bias + panel * kPanel : nullptr;
    float* y = a.y + row * a.y_row + panel * kPanel;
    const int64_t at = row * w.groups * kGroup;
    const GroupScale* scales = x.scales + row * w.groups;
    if (tiles) {
        thread_local Scratch scratch;
        BFloat16* unpacked = scratch.get<BFloat16>(w.groups * kGroup * kPanel);
        unpack_panel<Bits>(w, block, unpacked);
        return multiply_tiles<Scale, Centered>(*tiles, w, block, kPanel * kGroup * Bits / 8, unpacked, count, x.high + at,
                                               x.low + at, scales, bias, y, a.y_row, columns);
    }
    const Code* q = static_cast<const Code*>(x.q) + at;
    int64_t r = 0;
    const auto run = [&](auto tile_function, int n) {
        for (; r + n <= count; r += n)
            tile_function(w, block, q + r * w.groups * kGroup, scales + r * w.groups, bias, y + r * a.y_row, a.y_row,
                          columns);
    };
    if constexpr (kMaxRows >= 6) run(tile<6, Bits, Scale, Centered, Code>, 6);
    if constexpr (kMaxRows >= 4) run(tile<4, Bits, Scale, Centered, Code>, 4);
    run(tile<2, Bits, Scale, Centered, Code>, 2);
    run(tile<1, Bits, Scale, Centered, Code>, 1);
}

using PanelRows = decltype(&panel_rows<4, float, true, int8_t>);

template <int Bits, class Code>
PanelRows select(const PackedWeight& w) {
    if (w.half) return w.center ? panel_rows<Bits, Half, true, Code> : panel_rows<Bits, Half, false, Code>;
    return w.center ? panel_rows<Bits, float, true, Code> : panel_rows<Bits, float, false, Code>;
}

}  // namespace
}  // namespace sluice

extern "C" void sluice_packed_linear(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const PackedLinear*>(arguments);
    thread_local Scratch codes_scratch, scales_scratch, halves_scratch;
    const PackedWeight& w = a->w;
    const int64_t rows = a->rows, groups = w.groups, features = groups * kGroup;
    int16_t* q = codes_scratch.get<int16_t>(rows * features);
    GroupScale* scales = scales_scratch.get<GroupScale>(rows * groups);
    BFloat16 *high = nullptr, *low = nullptr;
    if (a->tiled && rows >= kTileRows) {  // for fewer, unpacking costs more than it saves
        const int64_t size = (rows + kTileRows - 1) / kTileRows * kTileRows * features;
        high = halves_scratch.get<BFloat16>(2 * size);
        low = high + size;
        std::fill(high + rows * features, low, BFloat16{});
        std::fill(low + rows * features, low + size, BFloat16{});
    }
    const Input x = {q, high, low, scales};
    const bool bytes = a->narrow && !high;
    const float most = a->narrow ? 127.0f : 32767.0f;
    const PanelRows run = bytes         ? select<4, int8_t>(w)
                          : w.bits == 4 ? select<4, int16_t>(w)
                                        : select<8, int16_t>(w);

    const int64_t panels = (w.out + kPanel - 1) / kPanel;
    const int threads = rows * features * w.out < 1 << 17 ? 1 : static_cast<int>(a->threads);
    const int64_t blocks = row_blocks(rows, kRowBlock, threads);

    split_homes(rows * features <= kSerialQuantize ? 1 : threads, rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* row = a->x + r * a->x_row;
            if (bytes)
                quantize_row(row, w, most, reinterpret_cast<int8_t*>(q) + r * features, scales + r * groups);
            else
                quantize_row(row, w, most, q + r * features, scales + r * groups);
            if (high) split_row(q + r * features, features, high + r * features, low + r * features);
        }
    });
    const auto share = [&](int64_t begin, int64_t end, Tiles* tiles) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t block = item / panels, row = block * rows / blocks;
            run(*a, item % panels, row, (block + 1) * rows / blocks - row, x, tiles);
        }
    };
    split_blocks(threads, panels, blocks, [&](int64_t begin, int64_t end) {
        if (!high) return share(begin, end, nullptr);
        Tiles tiles;
        share(begin, end, &tiles);
    });
}
