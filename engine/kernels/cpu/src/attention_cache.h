// The cache as the attention kernels see it: where its keys and values lie, and how they are written.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_tile.h"

namespace sluice {

struct Strides {  // of a cache, in elements
    int64_t block, slot, head, feature;
};

// K has its features side by side, or (block_size a multiple of 16) a block's keys: then a feature of sixteen
// keys is one vector and no tile needs transposing. V has its features side by side.
template <class T>
struct Cache {
    T* data;
    Strides strides;
    int64_t block_size;
    BFloat16* scales;  // of a slot's heads, if T has any

    bool by_feature() const { return strides.feature != 1; }
    // Where a slot's heads begin, from `data`.
    int64_t slot(int64_t block, int64_t offset) const { return block * strides.block + offset * strides.slot; }
};

struct ScaleStrides {  // in elements
    int64_t block, slot, head;  // all 0: one scale for all, which is given

    bool fixed() const { return head == 0; }
    int64_t at(int64_t block_id, int64_t offset, int64_t head_id) const {
        return block_id * block + offset * slot + head_id * head;
    }
};

// Where the K and V of a tile's keys begin, for one head. Before `from` (and so before the oldest key that is
// seen) nothing is known: what the window has passed may be another's by now.
template <class T>
struct Tile {
    const T *keys[kKeys], *values[kKeys];
    int from, to;

    void find(const Cache<T>& kc, const Cache<T>& vc, const int32_t* table, int64_t head, int64_t start, int64_t end,
              int64_t oldest) {
        to = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(kKeys, end - start)));
        from = static_cast<int>(std::max<int64_t>(0, oldest - start));
        if (kc.by_feature()) from -= from % kLanes;  // a group begins in the block in which it ends
        int64_t block = (start + from) / kc.block_size, offset = (start + from) % kc.block_size;
        std::fill(keys, keys + from, nullptr);
        std::fill(values, values + from, nullptr);
        for (int j = from; j < to; ++block, offset = 0) {
            const T* key = kc.data + kc.slot(table[block], offset) + head * kc.strides.head;
            const T* value = vc.data + vc.slot(table[block], offset) + head * vc.strides.head;
            const int stop = static_cast<int>(std::min<int64_t>(to, j + kc.block_size - offset));
            for (; j < stop; ++j, key += kc.strides.slot, value += vc.strides.slot) keys[j] = key, values[j] = value;
        }
        std::fill(keys + to, keys + kKeys, nullptr);
        std::fill(values + to, values + kKeys, nullptr);
    }
};

// What a thread asks the second-level cache for while it works on a tile: where a piece of memory begins, for each
// of 64 keys or values. (The first level has too few requests under way at a time.)
template <class T>
struct Lines {
    const T* at[kKeys];

    // Those of `there` that are known; for the others those of `here`, which are at hand.
    Lines(const T* const* there, const T* const* here) {
        for (int j = 0; j < kKeys; ++j) at[j] = there[j] ? there[j] : here[j];
    }
};

inline float bounded(float f) {  // NaN is taken for 0
    return f != f ? 0.0f : std::min(0x1p127f, std::max(-0x1p127f, f));
}

// The largest magnitude of a head becomes the largest code. As engine.attention.kv_codec has it.
template <class T>
BFloat16 scale_for(const float* head, int64_t dim) {
    float largest = 0.0f;
    for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(bounded(head[d])));
    BFloat16 scale;
    from_float(largest / T::kLargest, &scale);
    return scale;
}

template <class T>
void encode(const float* head, int64_t dim, BFloat16 scale, T* out, int64_t stride) {
    const float divisor = to_float(scale);
    for (int64_t d = 0; d < dim; ++d) {
        const float code = divisor > 0.0f ? bounded(head[d]) / divisor : 0.0f;
        from_float(std::min(T::kLargest, std::max(-T::kLargest, code)), out + d * stride);
    }
}

}  // namespace sluice
