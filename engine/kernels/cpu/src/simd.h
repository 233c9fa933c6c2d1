// Sixteen lanes of float (V) or int32 (I). Every form rounds alike: each multiply-add is an explicit fma, each
// reduction a fixed tree, so that a model gives the same bits on any of them. Build with -ffp-contract=off.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(SLUICE_PORTABLE)
#define SLUICE_AVX512 1
#include "simd_avx512.h"
#else
#include "simd_parts.h"
#endif

namespace sluice {

// e^x = (1 + p r) 2^n, with |r| at most ln(2) / 2.
struct ExpParts {
    V p, r, n;
};

inline ExpParts exp_parts(V x) {
    const V n = round(mul(x, splat(1.44269504f)));
    V r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    return {p, r, n};
}

// e^x for x in [-87, 88], clamped outside; exactly 1 at 0. Relative error below 2e-7.
inline V exp(V x) {
    const auto [p, r, n] = exp_parts(min(splat(88.0f), max(splat(-87.0f), x)));  // this order lets NaN through
    return mul(fma(p, r, splat(1.0f)), power_of_two(n));
}

// tanh(x), by way of e^2x - 1, which keeps its digits near 0. Relative error below 4e-7.
inline V tanh(V x) {
    x = min(splat(44.0f), max(splat(-43.5f), x));  // as exp(2x) needs it
    const auto [p, r, n] = exp_parts(add(x, x));
    const V whole = power_of_two(n), e = fma(mul(p, r), whole, sub(whole, splat(1.0f)));  // e^2x - 1
    return div(e, add(e, splat(2.0f)));
}

// cap * tanh(x / cap)
inline V soft_cap(V x, float cap) { return mul(splat(cap), tanh(div(x, splat(cap)))); }

}  // namespace sluice
