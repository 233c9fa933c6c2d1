// Storage formats of a float.
#pragma once

#include <cstdint>
#include <cstring>

namespace sluice {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

inline uint32_t bits_of(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline float to_float(float f) { return f; }
inline float to_float(BFloat16 h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }
inline float to_float(Half h) {
    const uint32_t magnitude = h.bits & 0x7fffu;
    // Scaling by 2^112 moves the exponent bias and normalises subnormals.
    uint32_t u = bits_of(float_of(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00u) u = (magnitude << 13) | 0x7f800000u;
    return float_of(u | (static_cast<uint32_t>(h.bits & 0x8000u) << 16));
}

inline void from_float(float f, float* out) { *out = f; }
inline void from_float(float f, BFloat16* out) {
    const uint32_t u = bits_of(f);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    out->bits = static_cast<uint16_t>(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline void from_float(float f, Half* out) {
    uint32_t u = bits_of(f);
    const uint32_t sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u >= 0x47800000u) {  // 2^16 and up, infinity, NaN
        u = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (u < 0x38800000u) {  // subnormal: adding 0.5 makes the hardware round at 2^-24
        u = bits_of(float_of(u) + 0.5f) - 0x3f000000u;
    } else {
        u = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13;  // rebias, round half to even
    }
    out->bits = static_cast<uint16_t>(u | sign);
}

}  // namespace sluice
