// Weights W = d * code + m per group of 32 input features, codes of 4 or 8 bits.
//
// [panel of 32 outputs][group] blocks, each
//   codes  chunks of 64 bytes, two halves of 16 outputs each: 16-bit lane 2*j + h of a chunk holds, lowest bits
//          first, output j's codes for k = h, 2 + h, ... of the chunk's features (8 of them at 4 bits, 4 at 8)
//   d      32 scales, float or half
//   m      32 minima likewise; absent when m == -center * d for one integer center
#pragma once

#include <cstdint>

namespace sluice {

constexpr int kGroup = 32;
constexpr int kPanel = 32;

struct PackedWeight {
    const uint8_t* data;
    int64_t block_bytes, groups, out, bits, half;
    int64_t center;  // 0: the blocks hold minima
};

struct GroupScale {  // of one (row, group) of activations
    float scale;
    int32_t fold;  // of the sum of the integers: the float's bits, or times -center if the weight has one
};

}  // namespace sluice
