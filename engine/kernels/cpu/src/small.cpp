// The element-wise ops of a decoder layer. A row's result depends on that row alone.
#include "parallel.h"
#include "simd.h"

namespace sluice {
namespace {

constexpr int64_t kSerial = 1 << 14;  // elements below which a second thread costs more than it saves

template <class Body>
void rows_in_parallel(int64_t threads, int64_t rows, int64_t elements_per_row, const Body& body) {
    if (rows * elements_per_row < kSerial) threads = 1;
    split_homes(static_cast<int>(threads), rows, std::max<int64_t>(1, kSerial / 4 / elements_per_row),
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

struct RmsNorm {
    const float* x;
    int64_t x_row, heads, n;  // a row is `heads` vectors of n side by side
    float* residual;          // null: out = norm(x); else residual += x, out = norm(residual)
    int64_t residual_row;
    const float* weight;
    double eps;
    float* out;  // [rows, heads * n] dense
    int64_t rows, threads;
};

struct Rope {  // q and k in place; heads are dense within a row
    float* q;
    int64_t q_row, heads;
    float* k;
    int64_t k_row, kv_heads, head_dim;
    const float *cos, *sin;  // [max_position, half]
    int64_t half;
    const int64_t* positions;
    int64_t rows, threads;
};

struct Gated {  // x [rows, 2 n] -> out [rows, n] dense: f(first half) * second half
    const float* x;
    int64_t x_row, n;
    float* out;
    int64_t rows, threads;
};

struct InPlace {  // each of x [rows, n], given a number
    float* x;
    int64_t x_row, n;
    double number;
    int64_t rows, threads;
};

struct CopyColumns {  // x [rows, n] -> out, whose rows are out_row apart
    const float* x;
    int64_t x_row, n;
    float* out;
    int64_t out_row, rows, threads;
};

template <class F>
void gated(const Gated& a, const F& f) {
    const int64_t n = a.n;
    rows_in_parallel(a.threads, a.rows, n, [&](int64_t r) {
        const float *gate = a.x + r * a.x_row, *up = gate + n;
        for (int64_t i = 0; i < n; i += kLanes) {
            const int count = static_cast<int>(std::min<int64_t>(kLanes, n - i));
            store_first(a.out + r * n + i, mul(f(load_first(gate + i, count)), load_first(up + i, count)), count);
        }
    });
}

template <class F>
void in_place(const InPlace& a, const F& f) {
    rows_in_parallel(a.threads, a.rows, a.n, [&](int64_t r) {
        for (int64_t i = 0; i < a.n; i += kLanes) {
            const int count = static_cast<int>(std::min<int64_t>(kLanes, a.n - i));
            float* at = a.x + r * a.x_row + i;
            store_first(at, f(load_first(at, count)), count);
        }
    });
}

}  // namespace
}  // namespace sluice

extern "C" void sluice_copy_columns(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const CopyColumns*>(arguments);
    rows_in_parallel(a->threads, a->rows, a->n, [&](int64_t r) {
        std::copy_n(a->x + r * a->x_row, a->n, a->out + r * a->out_row);
    });
}

extern "C" void sluice_rms_norm(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const RmsNorm*>(arguments);
    const int64_t width = a->heads * a->n;
    rows_in_parallel(a->threads, a->rows, width, [&](int64_t r) {
        const float* row = a->x + r * a->x_row;
        if (a->residual) {
            float* sum = a->residual + r * a->residual_row;
            for (int64_t i = 0; i < width; ++i) sum[i] += row[i];
            row = sum;
        }
        for (int64_t at = 0; at < width; at += a->n)
            normalize(row + at, a->weight, a->n, static_cast<float>(a->eps), a->out + r * width + at);
    });
}

extern "C" void sluice_rope(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const Rope*>(arguments);
    const int64_t dim = a->head_dim, half = a->half;
    rows_in_parallel(a->threads, a->rows, (a->heads + a->kv_heads) * dim, [&](int64_t r) {
        const float *cos = a->cos + a->positions[r] * half, *sin = a->sin + a->positions[r] * half;
        for (int64_t h = 0; h < a->heads; ++h) rotate(a->q + r * a->q_row + h * dim, cos, sin, half);
        for (int64_t h = 0; h < a->kv_heads; ++h) rotate(a->k + r * a->k_row + h * dim, cos, sin, half);
    });
}

extern "C" void sluice_silu_mul(const void* arguments) {
    using namespace sluice;
    gated(*static_cast<const Gated*>(arguments),
          [](V x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); });
}

extern "C" void sluice_gelu_mul(const void* arguments) {  // x / (1 + e^-2u) is x (1 + tanh u) / 2
    using namespace sluice;
    gated(*static_cast<const Gated*>(arguments), [](V x) {
        const V cube = mul(mul(x, x), x);
        const V twice_u = mul(splat(1.5957691216f), fma(splat(0.044715f), cube, x));  // 2 sqrt(2 / pi)
        return div(x, add(splat(1.0f), exp(sub(zero(), twice_u))));
    });
}

extern "C" void sluice_scale(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const InPlace*>(arguments);
    in_place(*a, [factor = splat(static_cast<float>(a->number))](V x) { return mul(x, factor); });
}

extern "C" void sluice_softcap(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const InPlace*>(arguments);
    in_place(*a, [cap = static_cast<float>(a->number)](V x) { return soft_cap(x, cap); });
}
