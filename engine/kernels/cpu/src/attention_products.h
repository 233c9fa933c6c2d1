// The two products of attention for one tile of the cache: queries with keys, weights with values. Few rows read the
// cache as it is; for many a copy pays that need not be converted again and again.
#pragma once

#include "attention_cache.h"
#include "attention_pairs.h"

namespace sluice {

constexpr int kMaxDim = 256;

template <class T>
class Products {
   public:
    // `rounded`: q and the weights may be rounded to bfloat16 if K and V are such.
    Products(const Cache<T>& keys, int64_t dim, bool rounded) : kc_(keys), dim_(dim), rounded_(rounded) {}

    // A query's features and a row's weights as the products take them: where they would be as floats, or before that.
    void put_query(float* q, int64_t at, V value) const {
#if SLUICE_BFLOAT16_DOT
        if (paired()) return store_rounded(reinterpret_cast<BFloat16*>(q) + at, value);
#endif
        store(q + at, value);
    }
    void put_weight(float* row, int at, V weight) const {
#if SLUICE_BFLOAT16_DOT
        if (paired()) return store_rounded(reinterpret_cast<BFloat16*>(row) + at, weight);
#endif
        store(row + at, weight);
    }

    // The scores of `rows` rows over a tile. `ahead`: what to ask for meanwhile; `memory`: for dim x 64 floats.
    void score(const Tile<T>& tile, int rows, const float* q, const Lines<T>& ahead, float* memory,
               float* scores) const {
#if SLUICE_BFLOAT16_DOT
        if constexpr (std::is_same_v<T, BFloat16>)
            if (paired()) return score_tile_pairs(tile, rows, q, ahead, memory, scores);
#endif
        if ((few(rows) || std::is_same_v<T, float>) && kc_.by_feature())
            return score_groups(tile, rows, q, tile.keys, ahead.at, kc_.strides.feature, scores);
        const float* copy[kKeys];
        copy_keys(tile, memory, copy);
        score_groups(tile, rows, q, copy, copy, kKeys, scores);
    }

    // `weights` are those of a span, of which this is tile number `index`.
    void weigh(const Tile<T>& tile, int index, int rows, const float* weights, const Lines<T>& ahead, float* memory,
               float* acc) const {
#if SLUICE_BFLOAT16_DOT
        if constexpr (std::is_same_v<T, BFloat16>)
            if (paired()) {
                const auto* rounded = reinterpret_cast<const BFloat16*>(weights) + index * kKeys;
                return weigh_tile_pairs(tile, rows, rounded, ahead, memory, acc);
            }
#endif
        weights += index * kKeys;
        if (few(rows) || std::is_same_v<T, float>) return weigh_all(tile, rows, weights, tile.values, ahead.at, acc);
        const float* copy[kKeys];
        for (int j = tile.from; j < tile.to; ++j) {
            float* row = memory + j * dim_;
            for (int64_t d = 0; d < dim_; d += kLanes) store(row + d, load(tile.values[j] + d));
            copy[j] = row;
        }
        weigh_all(tile, rows, weights, copy, copy, acc);
    }

   private:
    // Whether products are of pairs of bfloat16.
    bool paired() const {
#if SLUICE_BFLOAT16_DOT
        return std::is_same_v<T, BFloat16> && rounded_;
#else
        return false;
#endif
    }
    static bool few(int rows) { return rows <= kMaxRows; }

    template <class S>
    void score_groups(const Tile<T>& tile, int rows, const float* q, const S* const* keys, const S* const* ahead,
                      int64_t stride, float* scores) const {
        const int first = tile.from / kLanes, count = (tile.to + kLanes - 1) / kLanes - first;
        for_tiles(rows, count, [&](int r, int i, auto height, auto width) {
            const int group = first + i;
            const S *columns[width()], *next[width()];
            for (int g = 0; g < width(); ++g) {
                columns[g] = keys[(group + g) * kLanes];
                next[g] = ahead[(group + g) * kLanes];
            }
            float* out = scores + r * kSpan + group * kLanes;
            sluice::score<height(), width()>(q + r * dim_, dim_, columns, next, stride, out);
        });
    }

    template <class S>
    void weigh_all(const Tile<T>& tile, int rows, const float* weights, const S* const* values, const S* const* ahead,
                   float* acc) const {
        for_tiles(rows, static_cast<int>(dim_ / kLanes), [&](int r, int i, auto height, auto width) {
            float* out = acc + r * dim_ + i * kLanes;
            sluice::weigh<height(), width()>(weights + r * kSpan, values, ahead, tile.from, tile.to, i * kLanes, out,
                                             dim_);
        });
    }

    // The keys by feature as floats, [dim][64]; copy[j] is where the group of key j begins.
    void copy_keys(const Tile<T>& tile, float* out, const float** copy) const {
        for (int j = tile.from / kLanes * kLanes; j < tile.to; j += kLanes) {
            copy[j] = out + j;
            if (kc_.by_feature())
                for (int64_t d = 0; d < dim_; ++d)
                    store(out + d * kKeys + j, load(tile.keys[j] + d * kc_.strides.feature));
            else
                for (int64_t d = 0; d < dim_; d += kLanes) transpose(tile.keys + j, d, out + d * kKeys + j, kKeys);
        }
    }

#if SLUICE_BFLOAT16_DOT
    void score_tile_pairs(const Tile<BFloat16>& tile, int rows, const float* q, const Lines<BFloat16>& ahead,
                          float* memory, float* scores) const {
        auto* copy = reinterpret_cast<BFloat16*>(memory);  // [pair of features][64 keys][2]
        const int first = tile.from / kLanes, count = (tile.to + kLanes - 1) / kLanes - first;
        const bool direct = few(rows) && kc_.by_feature();
        if (!direct) copy_key_pairs(tile, copy);
        for_tiles(rows, count, [&](int r, int i, auto height, auto width) {
            const int at = (first + i) * kLanes;
            const BFloat16 *columns[width()], *next[width()];
            for (int g = 0; g < width(); ++g) {
                columns[g] = direct ? tile.keys[at + g * kLanes] : copy + 2 * (at + g * kLanes);
                next[g] = ahead.at[at + g * kLanes];
            }
            const auto* rounded = reinterpret_cast<const BFloat16*>(q) + r * dim_;
            float* out = scores + r * kSpan + at;
            if (direct)
                score_pairs<height(), width(), false>(rounded, dim_, columns, next, kc_.strides.feature, out);
            else
                score_pairs<height(), width(), true>(rounded, dim_, columns, next, kKeys, out);
        });
    }

    void copy_key_pairs(const Tile<BFloat16>& tile, BFloat16* out) const {
        for (int j = tile.from / kLanes * kLanes; j < tile.to; j += kLanes) {
            if (kc_.by_feature()) {
                const BFloat16* keys = tile.keys[j];
                for (int64_t d = 0; d < dim_; d += 2, keys += 2 * kc_.strides.feature)
                    store_int(out + d * kKeys + 2 * j, join_pairs(keys, keys + kc_.strides.feature));
            } else {
                for (int i = j; i < j + kLanes; ++i)
                    for (int64_t d = 0; d < dim_; d += 2)
                        for (int h = 0; h < 2; ++h)
                            out[d * kKeys + 2 * i + h] = tile.keys[i] ? tile.keys[i][d + h] : BFloat16{};
            }
        }
    }

    void weigh_tile_pairs(const Tile<BFloat16>& tile, int rows, const BFloat16* weights, const Lines<BFloat16>& ahead,
                          float* memory, float* acc) const {
        auto* copy = reinterpret_cast<BFloat16*>(memory);  // [pair of keys][dim][2]
        static constexpr BFloat16 kZeros[kMaxDim] = {};    // the values that a pair lacks
        const int from = tile.from / 2 * 2, to = (tile.to + 1) / 2 * 2;
        const bool direct = few(rows);
        const BFloat16* values[kKeys];
        for (int j = from; j < to; ++j) values[j] = j < tile.from || j >= tile.to ? kZeros : tile.values[j];
        for (int j = from; j < to && !direct; j += 2) {
            for (int64_t d = 0; d < dim_; d += kLanes)
                store_int(copy + j * dim_ + 2 * d, join_pairs(values[j] + d, values[j + 1] + d));
            values[j] = copy + j * dim_;
        }
        for_tiles(rows, static_cast<int>(dim_ / kLanes), [&](int r, int i, auto height, auto width) {
            const BFloat16* row = weights + r * 2 * kSpan;
            float* out = acc + r * dim_ + i * kLanes;
            if (direct)
                weigh_pairs<height(), width(), false>(row, values, ahead.at, from, to, i * kLanes, out, dim_);
            else
                weigh_pairs<height(), width(), true>(row, values, ahead.at, from, to, i * kLanes, out, dim_);
        });
    }
#endif

    const Cache<T> kc_;
    const int64_t dim_;
    const bool rounded_;
};

}  // namespace sluice
