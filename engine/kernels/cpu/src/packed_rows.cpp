// Rows of a packed weight as floats: embedding look-up.
#include <cmath>

#include "packed.h"
#include "parallel.h"
#include "simd.h"

namespace sluice {
namespace {

struct PackedRows {
    PackedWeight w;
    const int64_t* ids;
    float* out;  // [rows, in] dense
    int64_t rows, threads;
};

template <int Bits, class Scale>
void unpack_row(const PackedWeight& w, int64_t id, float* out) {
    constexpr int kPairs = 16 / Bits;
    constexpr int kChunks = kGroup / 2 / kPairs;
    const int64_t column = id % kPanel;
    const uint8_t* block = w.data + id / kPanel * w.groups * w.block_bytes;
    for (int64_t g = 0; g < w.groups; ++g, block += w.block_bytes) {
        const Scale* scale = reinterpret_cast<const Scale*>(block + kChunks * 128) + column;
        const float d = to_float(*scale);
        const float m = w.center ? -static_cast<float>(w.center) * d : to_float(scale[kPanel]);
        for (int c = 0; c < kChunks; ++c) {
            uint16_t lanes[2];
            std::memcpy(lanes, block + c * 128 + column * 4, sizeof lanes);
            for (int i = 0; i < kPairs; ++i)
                for (int h = 0; h < 2; ++h)
                    *out++ = d * static_cast<float>(lanes[h] >> (i * Bits) & ((1 << Bits) - 1)) + m;
        }
    }
}

}  // namespace
}  // namespace sluice

extern "C" void sluice_packed_rows(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const PackedRows*>(arguments);
    const PackedWeight& w = a->w;
    const int64_t features = w.groups * kGroup;
    const auto unpack = w.bits == 4 ? (w.half ? unpack_row<4, Half> : unpack_row<4, float>)
                                    : (w.half ? unpack_row<8, Half> : unpack_row<8, float>);
    split(static_cast<int>(a->threads), a->rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* out = a->out + r * features;
            if (a->ids[r] >= 0 && a->ids[r] < w.out)
                unpack(w, a->ids[r], out);
            else
                std::fill(out, out + features, NAN);
        }
    });
}
