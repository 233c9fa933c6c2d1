// Float weights [panel of 32 outputs][pair of input features], both padded with zeros to whole panels and to a
// multiple of 32 features. A pair's block is
//   bfloat16        32 lanes of 32 bits: output j's weights for the pair, the first in the low half
//   float16, float  32 weights for the first feature, then 32 for the second
#pragma once

#include "floats.h"

namespace sluice {

constexpr int kFloatPanel = 32;
constexpr int kFeatureStep = 32;

struct FloatWeight {
    const uint8_t* data;
    int64_t in, out;
    int64_t type;  // 0 float, 1 half, 2 bfloat16

    int64_t steps() const { return (in + kFeatureStep - 1) / kFeatureStep; }
    int64_t panels() const { return (out + kFloatPanel - 1) / kFloatPanel; }
    const uint8_t* panel(int64_t p) const { return data + p * steps() * kFeatureStep * kFloatPanel * (type ? 2 : 4); }
};

}  // namespace sluice
