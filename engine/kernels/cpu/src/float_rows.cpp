// Rows of a float weight as floats: embedding look-up.
#include <cmath>

#include "float_weight.h"
#include "parallel.h"

namespace sluice {
namespace {

struct FloatRows {
    FloatWeight w;
    const int64_t* ids;
    float* out;  // [rows, in] dense
    int64_t rows, threads;
};

template <class T>
void read_row(const FloatWeight& w, int64_t id, float* out) {
    const int64_t column = id % kFloatPanel;
    const T* panel = reinterpret_cast<const T*>(w.panel(id / kFloatPanel));
    constexpr bool paired = std::is_same_v<T, BFloat16>;
    for (int64_t i = 0; i < w.in; ++i) {
        const int64_t at = paired ? i / 2 * 2 * kFloatPanel + column * 2 + i % 2 : i * kFloatPanel + column;
        out[i] = to_float(panel[at]);
    }
}

}  // namespace
}  // namespace sluice

extern "C" void sluice_float_rows(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const FloatRows*>(arguments);
    const auto read = a->w.type == 0 ? read_row<float> : a->w.type == 1 ? read_row<Half> : read_row<BFloat16>;
    split(static_cast<int>(a->threads), a->rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* out = a->out + r * a->w.in;
            if (a->ids[r] >= 0 && a->ids[r] < a->w.out)
                read(a->w, a->ids[r], out);
            else
                std::fill(out, out + a->w.in, NAN);
        }
    });
}
