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

// Of a byte: these never hold NaN or an infinity, and stand beside a scale.
struct Int8 {
    static constexpr float kLargest = 127.0f;
    int8_t bits;
};
struct E4M3 {
    static constexpr float kLargest = 448.0f;
    uint8_t bits;
};
struct E5M2 {
    static constexpr float kLargest = 57344.0f;
    uint8_t bits;
};
template <class T>
constexpr bool kScaled = sizeof(T) == 1;

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

inline float to_float(Int8 i) { return static_cast<float>(i.bits); }
inline float to_float(E5M2 h) { return to_float(Half{static_cast<uint16_t>(h.bits << 8)}); }
inline float to_float(E4M3 h) {  // a half with the mantissa moved up is smaller by the difference of the biases
    return to_float(Half{static_cast<uint16_t>((h.bits & 0x80u) << 8 | (h.bits & 0x7fu) << 7)}) * 256.0f;
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

// To the nearest, ties to even, for magnitudes up to kLargest.
inline void from_float(float f, Int8* out) { out->bits = static_cast<int8_t>((f + 0x1.8p23f) - 0x1.8p23f); }
template <int Mantissa, int Bias>
uint8_t small_float(float f) {
    constexpr uint32_t kNormal = static_cast<uint32_t>(128 - Bias) << 23;  // the bits of the smallest normal number
    constexpr uint32_t kSteps = static_cast<uint32_t>(151 - Bias - Mantissa) << 23;  // its last bit: a subnormal step
    constexpr int kDropped = 23 - Mantissa;
    const uint32_t sign = (bits_of(f) >> 24) & 0x80u;
    uint32_t u = bits_of(f) & 0x7fffffffu;
    if (u < kNormal)
        u = bits_of(float_of(u) + float_of(kSteps)) - kSteps;
    else
        u = ((u + (1u << (kDropped - 1)) - 1 + ((u >> kDropped) & 1u)) >> kDropped) -
            (static_cast<uint32_t>(127 - Bias) << Mantissa);
    return static_cast<uint8_t>(u | sign);
}
inline void from_float(float f, E4M3* out) { out->bits = small_float<3, 7>(f); }
inline void from_float(float f, E5M2* out) { out->bits = small_float<2, 15>(f); }

}  // namespace sluice
