// Paged causal attention: write this step's K and V to their slots, then attend every query row to its context.
//
// The context is walked in tiles of 64 keys at fixed absolute positions, with an online softmax. What a row
// computes depends only on its own position and context: chunking, neighbours and threads do not change a bit.
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace sluice {
namespace {

constexpr int kKeys = 64;         // keys per tile
constexpr int kRows = 48;         // query rows (positions x heads of one group) that share a tile of K and V
constexpr float kLowest = -1e30f;  // below every score, yet kLowest - kLowest is 0

struct Strides {  // of a cache, in elements; the head's features are dense
    int64_t block, slot, head;
};

template <class T>
struct Cache {
    T* data;
    Strides strides;
    int64_t block_size;

    // Where a slot's heads begin, from `data`.
    int64_t slot(int64_t block, int64_t offset) const { return block * strides.block + offset * strides.slot; }
};

// c[R][16 N] (+)= a[R][n] b[n][16 N], summed in order of n.
template <int R, int N>
void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int n, float* c, int64_t ldc, bool add_c) {
    V acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = add_c ? load(c + r * ldc + i * kLanes) : zero();
    for (int j = 0; j < n; ++j) {
        V row[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) row[i] = load(b + j * ldb + i * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const V s = splat(a[r * lda + j]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = fma(s, row[i], acc[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(c + r * ldc + i * kLanes, acc[r][i]);
}

template <int N>
void multiply_columns(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, int n, float* c, int64_t ldc,
                      bool add_c) {
    int r = 0;
    const auto run = [&](auto tile, int count) {
        for (; r + count <= rows; r += count) tile(a + r * lda, lda, b, ldb, n, c + r * ldc, ldc, add_c);
    };
    if constexpr (kMaxRows >= 6) run(multiply_tile<6, N>, 6);
    run(multiply_tile<3, N>, 3);
    run(multiply_tile<1, N>, 1);
}

// c[rows][columns] (+)= a[rows][n] b[n][columns]; columns is a multiple of 16.
void multiply(int rows, int columns, const float* a, int64_t lda, const float* b, int64_t ldb, int n, float* c,
              int64_t ldc, bool add_c) {
    int i = 0;
    for (; i + kMaxColumns * kLanes <= columns; i += kMaxColumns * kLanes)
        multiply_columns<kMaxColumns>(rows, a, lda, b + i, ldb, n, c + i, ldc, add_c);
    for (; i < columns; i += kLanes) multiply_columns<1>(rows, a, lda, b + i, ldb, n, c + i, ldc, add_c);
}

// out[i][lane j] = rows[j][i] for 16 rows of 16; a null row reads as zeros.
template <class T>
void transpose(const T* const* rows, int64_t offset, float* out, int64_t ldo) {
#if SLUICE_AVX512
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = rows[i] ? load(rows[i] + offset) : zero();
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            r[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    // r[4 g + c]: 128-bit lane l holds column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512 even = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        store(out + c * ldo, _mm512_shuffle_f32x4(even, even2, 0x88));
        store(out + (8 + c) * ldo, _mm512_shuffle_f32x4(even, even2, 0xdd));
        store(out + (4 + c) * ldo, _mm512_shuffle_f32x4(odd, odd2, 0x88));
        store(out + (12 + c) * ldo, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
    }
#else
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) out[i * ldo + j] = rows[j] ? to_float(rows[j][offset + i]) : 0.0f;
#endif
}

// The slots of `n` positions from `start`. Before `oldest` -1: what the window has passed is never read, its
// blocks may be another's by now.
template <class T>
void find_slots(const Cache<T>& cache, const int32_t* table, int64_t start, int n, int64_t oldest, int64_t* slots) {
    int64_t block = start / cache.block_size, offset = start % cache.block_size;
    for (int j = 0; j < n; ++j) {
        slots[j] = start + j < oldest ? -1 : cache.slot(table[block], offset);
        if (++offset == cache.block_size) {
            offset = 0;
            ++block;
        }
    }
}

template <class T>
void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
}

struct Request {
    const float *q, *k, *v;  // rows q_row, k_row, v_row floats apart, heads dense
    int64_t q_row, k_row, v_row;
    const int64_t* slots;
    const int32_t *query_starts, *seq_lens, *block_table;
    int64_t max_blocks, num_seqs, heads, kv_heads, head_dim, window;  // window < 0: none
    float scale;
    float* out;
};

// Scores of one row over a tile -> weights e^(score - max), outside [low, high) zero; updates the row's running
// maximum and sum. Returns what the row's accumulator must be multiplied by.
float soften(float* scores, int low, int high, float& peak, float& total) {
    V s[kKeys / kLanes];
    V top = splat(kLowest);
    for (int i = 0; i < kKeys / kLanes; ++i) {
        s[i] = keep_range(load(scores + i * kLanes), low - i * kLanes, high - i * kLanes, -INFINITY);
        top = max(top, s[i]);
    }
    const float new_peak = std::max(peak, maximum(top));
    V sums = zero();
    for (int i = 0; i < kKeys / kLanes; ++i) {
        const V x = sub(s[i], splat(new_peak));
        const V weight = zero_below(exp(x), x, -87.0f);
        store(scores + i * kLanes, weight);
        sums = add(sums, weight);
    }
    float alpha = 1.0f;
    if (new_peak != peak) {
        const V x = splat(peak - new_peak);
        float lanes[kLanes];
        store(lanes, zero_below(exp(x), x, -87.0f));
        alpha = lanes[0];
    }
    peak = new_peak;
    total = total * alpha + sum(sums);
    return alpha;
}

// Positions [begin, begin + count) of sequence `seq`'s query rows, all heads of one KV head.
template <class T>
void attend(const Request& w, const Cache<T>& kc, const Cache<T>& vc, int64_t seq, int64_t begin, int64_t count,
            int64_t kv_head, float* scratch) {
    const int64_t dim = w.head_dim, group = w.heads / w.kv_heads;
    const int rows = static_cast<int>(count * group);
    float* q = scratch;
    float* acc = q + rows * dim;
    float* scores = acc + rows * dim;
    float* keys = scores + rows * kKeys;    // [dim][64]
    float* values = keys + dim * kKeys;     // [64][dim]
    float* peak = values + kKeys * dim;
    float* total = peak + rows;

    const int64_t first_row = w.query_starts[seq] + begin;
    const int64_t position = w.seq_lens[seq] - (w.query_starts[seq + 1] - w.query_starts[seq]) + begin;
    for (int r = 0; r < rows; ++r) {  // row r: position r / group, head r % group
        const float* source = w.q + (first_row + r / group) * w.q_row + (kv_head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += kLanes) {
            store(q + r * dim + d, mul(load(source + d), splat(w.scale)));
            store(acc + r * dim + d, zero());
        }
        peak[r] = kLowest;
        total[r] = 0.0f;
    }

    const int64_t last = position + count - 1;
    const int64_t oldest = w.window < 0 ? 0 : std::max<int64_t>(0, position - w.window + 1);
    const int32_t* table = w.block_table + seq * w.max_blocks;
    const T* k_head = kc.data + kv_head * kc.strides.head;
    const T* v_head = vc.data + kv_head * vc.strides.head;
    int64_t slots[kKeys];
    const int64_t first = oldest / kKeys * kKeys;
    find_slots(kc, table, first, static_cast<int>(std::min<int64_t>(kKeys, last + 1 - first)), oldest, slots);
    for (int64_t start = first; start <= last; start += kKeys) {
        const int n = static_cast<int>(std::min<int64_t>(kKeys, last + 1 - start));
        const int columns = (n + kLanes - 1) / kLanes * kLanes;
        // One head's rows lie apart, which the hardware does not foresee: ask for the next tile during this one.
        const int next_n = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(kKeys, last + 1 - start - kKeys)));
        int64_t next[kKeys];
        find_slots(kc, table, start + kKeys, next_n, oldest, next);
        const T* key_rows[kKeys] = {};
        for (int j = 0; j < n; ++j) {
            float* value = values + j * dim;
            if (slots[j] >= 0) {
                key_rows[j] = k_head + slots[j];
                for (int64_t d = 0; d < dim; d += kLanes) store(value + d, load(v_head + slots[j] + d));
            } else {
                for (int64_t d = 0; d < dim; d += kLanes) store(value + d, zero());
            }
            if (j < next_n) {
                prefetch(k_head + next[j], dim);
                prefetch(v_head + next[j], dim);
            }
        }
        for (int j = 0; j < columns; j += kLanes)
            for (int64_t d = 0; d < dim; d += kLanes) transpose(key_rows + j, d, keys + d * kKeys + j, kKeys);

        multiply(rows, columns, q, dim, keys, kKeys, static_cast<int>(dim), scores, kKeys, false);
        for (int r = 0; r < rows; ++r) {
            const int64_t at = position + r / group;
            const int high = static_cast<int>(std::min<int64_t>(n, at + 1 - start));
            const int low = w.window < 0 ? 0 : static_cast<int>(std::max<int64_t>(0, at - w.window + 1 - start));
            const float alpha = soften(scores + r * kKeys, low, high, peak[r], total[r]);
            if (alpha != 1.0f)
                for (int64_t d = 0; d < dim; d += kLanes)
                    store(acc + r * dim + d, mul(load(acc + r * dim + d), splat(alpha)));
        }
        multiply(rows, static_cast<int>(dim), scores, kKeys, values, dim, n, acc, dim, true);
        std::copy(next, next + next_n, slots);
    }

    for (int r = 0; r < rows; ++r) {
        float* target = w.out + ((first_row + r / group) * w.heads + kv_head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += kLanes)
            store(target + d, div(load(acc + r * dim + d), splat(total[r])));
    }
}

template <class T>
void run(const Request& w, const Cache<T>& kc, const Cache<T>& vc, int threads) {
    const int64_t num_tokens = w.query_starts[w.num_seqs];
    const int64_t dim = w.head_dim, group = w.heads / w.kv_heads;
    const auto write = [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t slot = kc.slot(w.slots[t] / kc.block_size, w.slots[t] % kc.block_size);
            for (int64_t h = 0; h < w.kv_heads; ++h) {
                const float* k = w.k + t * w.k_row + h * dim;
                const float* v = w.v + t * w.v_row + h * dim;
                T* k_out = kc.data + slot + h * kc.strides.head;
                T* v_out = vc.data + slot + h * vc.strides.head;
                for (int64_t d = 0; d < dim; ++d) from_float(k[d], k_out + d);
                for (int64_t d = 0; d < dim; ++d) from_float(v[d], v_out + d);
            }
        }
    };
    const bool small = num_tokens * w.kv_heads * dim < 1 << 14;
    split(small ? 1 : threads, num_tokens, 16, write);

    // Later query tiles see more context: handing them out first keeps the threads level at the end.
    const int64_t positions = std::max<int64_t>(1, kRows / group);
    thread_local Scratch offsets_scratch;
    int64_t* offsets = offsets_scratch.get<int64_t>(w.num_seqs + 1);
    int64_t work = 0;
    offsets[0] = 0;
    for (int64_t b = 0; b < w.num_seqs; ++b) {
        const int64_t rows = w.query_starts[b + 1] - w.query_starts[b];
        offsets[b + 1] = offsets[b] + (rows + positions - 1) / positions;
        work += rows * w.seq_lens[b];
    }
    const int64_t items = offsets[w.num_seqs] * w.kv_heads;
    if (work * w.heads * dim < 1 << 15) threads = 1;
    split(threads, items, 1, [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        const int64_t rows = positions * group;
        float* memory = scratch.get<float>(rows * (2 * dim + kKeys + 2) + 2 * dim * kKeys);
        for (int64_t item = begin; item < end; ++item) {
            const int64_t tile = (items - 1 - item) / w.kv_heads;
            const int64_t seq = std::upper_bound(offsets, offsets + w.num_seqs + 1, tile) - offsets - 1;
            const int64_t from = (tile - offsets[seq]) * positions;
            const int64_t count = std::min(positions, w.query_starts[seq + 1] - w.query_starts[seq] - from);
            attend(w, kc, vc, seq, from, count, item % w.kv_heads, memory);
        }
    });
}

}  // namespace
}  // namespace sluice

// kv_type: 0 float, 1 half, 2 bfloat16. K and V caches share their strides. out is [T, heads * head_dim] dense.
extern "C" void sluice_attention(const float* q, int64_t q_row, const float* k, int64_t k_row, const float* v,
                                 int64_t v_row, void* k_cache, void* v_cache, int64_t kv_type, int64_t block_stride,
                                 int64_t slot_stride, int64_t head_stride, int64_t block_size, const int64_t* slots,
                                 const int32_t* query_starts, const int32_t* seq_lens, const int32_t* block_table,
                                 int64_t max_blocks, int64_t num_seqs, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim, int64_t window, float scale, float* out, int64_t threads) {
    using namespace sluice;
    const Request request{q,        k,        v,     q_row, k_row,    v_row,  slots, query_starts, seq_lens, block_table,
                          max_blocks, num_seqs, heads, kv_heads, head_dim, window, scale, out};
    const Strides strides{block_stride, slot_stride, head_stride};
    const auto go = [&](auto* kc, auto* vc) {
        using T = std::remove_pointer_t<decltype(kc)>;
        run<T>(request, {kc, strides, block_size}, {vc, strides, block_size}, static_cast<int>(threads));
    };
    if (kv_type == 0) go(static_cast<float*>(k_cache), static_cast<float*>(v_cache));
    if (kv_type == 1) go(static_cast<Half*>(k_cache), static_cast<Half*>(v_cache));
    if (kv_type == 2) go(static_cast<BFloat16*>(k_cache), static_cast<BFloat16*>(v_cache));
}
