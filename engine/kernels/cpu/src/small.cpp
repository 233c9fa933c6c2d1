// The element-wise ops of a decoder layer. A row's result depends on that row alone.
#include "parallel.h"
#include "simd.h"

namespace sluice {
namespace {

constexpr int64_t kSerial = 1 << 14;  // elements below which a second thread costs more than it saves

template <class Body>
void rows_in_parallel(int64_t threads, int64_t rows, int64_t elements_per_row, const Body& body) {
    if (rows * elements_per_row < kSerial) threads = 1;
    split(static_cast<int>(threads), rows, std::max<int64_t>(1, kSerial / 4 / elements_per_row),
          [&](int64_t begin, int64_t end) {
              for (int64_t r = begin; r < end; ++r) body(r);
          });
}

void normalize(const float* x, const float* weight, int64_t n, float eps, float* out) {
    V squares[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < n; i += 4 * kLanes)
        for (int j = 0; j < 4 && i + j * kLanes < n; ++j) {
            const V a = load_first(x + i + j * kLanes, static_cast<int>(std::min<int64_t>(kLanes, n - i - j * kLanes)));
            squares[j] = fma(a, a, squares[j]);
        }
    const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(n);
    const V scale = splat(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < n; i += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, n - i));
        store_first(out + i, mul(mul(load_first(x + i, count), scale), load_first(weight + i, count)), count);
    }
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, half - i));
        const V a = load_first(x + i, count), b = load_first(x + half + i, count);
        const V c = load_first(cos + i, count), s = load_first(sin + i, count);
        store_first(x + i, fma(a, c, mul(b, sub(zero(), s))), count);
        store_first(x + half + i, fma(b, c, mul(a, s)), count);
    }
}

}  // namespace
}  // namespace sluice

// residual null: out = norm(x). Otherwise residual += x, out = norm(residual). out is dense.
extern "C" void sluice_rms_norm(const float* x, int64_t x_row, float* residual, int64_t residual_row,
                                const float* weight, int64_t rows, int64_t n, float eps, float* out, int64_t threads) {
    using namespace sluice;
    rows_in_parallel(threads, rows, n, [&](int64_t r) {
        const float* row = x + r * x_row;
        if (residual) {
            float* sum = residual + r * residual_row;
            for (int64_t i = 0; i < n; ++i) sum[i] += row[i];
            row = sum;
        }
        normalize(row, weight, n, eps, out + r * n);
    });
}

// q and k in place; heads are dense within a row. cos and sin are [max_position, half].
extern "C" void sluice_rope(float* q, int64_t q_row, int64_t heads, float* k, int64_t k_row, int64_t kv_heads,
                            int64_t head_dim, const float* cos, const float* sin, int64_t half,
                            const int64_t* positions, int64_t rows, int64_t threads) {
    using namespace sluice;
    rows_in_parallel(threads, rows, (heads + kv_heads) * head_dim, [&](int64_t r) {
        const int64_t at = positions[r] * half;
        for (int64_t h = 0; h < heads; ++h) rotate(q + r * q_row + h * head_dim, cos + at, sin + at, half);
        for (int64_t h = 0; h < kv_heads; ++h) rotate(k + r * k_row + h * head_dim, cos + at, sin + at, half);
    });
}

// x [rows, 2 n] -> out [rows, n] dense: silu(first half) * second half.
extern "C" void sluice_silu_mul(const float* x, int64_t x_row, int64_t rows, int64_t n, float* out, int64_t threads) {
    using namespace sluice;
    rows_in_parallel(threads, rows, n, [&](int64_t r) {
        const float *gate = x + r * x_row, *up = gate + n;
        for (int64_t i = 0; i < n; i += kLanes) {
            const int count = static_cast<int>(std::min<int64_t>(kLanes, n - i));
            const V g = load_first(gate + i, count);
            const V silu = div(g, add(splat(1.0f), exp(sub(zero(), g))));
            store_first(out + r * n + i, mul(silu, load_first(up + i, count)), count);
        }
    });
}
