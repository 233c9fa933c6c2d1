// Paged causal attention: write this step's K and V to their slots, then attend every query row to its context.
//
// A context is walked in spans of 256 keys at fixed absolute positions, each in tiles of 64; a span has a softmax of
// its own and spans are put together in order. So a long context can be shared out among threads, and chunking,
// neighbours and threads do not change a bit.
#include "attention_products.h"
#include "parallel.h"

namespace sluice {
namespace {

constexpr int kTiles = kSpan / kKeys;
constexpr int kRows = 48;  // query rows (positions x heads of one group) that share a tile of K and V

struct Attention {
    const float *q, *k, *v;  // rows q_row, k_row, v_row floats apart, heads dense
    int64_t q_row, k_row, v_row;
    void *k_cache, *v_cache;
    int64_t kv_type;  // 0 float, 1 half, 2 bfloat16, 3 int8, 4 e4m3, 5 e5m2
    Strides k_strides, v_strides;
    BFloat16 *k_scales, *v_scales;  // of the types of one byte
    ScaleStrides scale_strides;
    int64_t block_size;
    const int64_t* slots;
    const int32_t *query_starts, *seq_lens, *block_table;
    int64_t max_blocks, num_seqs, heads, kv_heads, head_dim;
    int64_t window, sinks;  // window < 0: none, and so no sinks: the first keys, which every row sees
    double scale;
    double softcap;  // 0: none; else a score s counts as softcap * tanh(s / softcap)
    float* out;      // [T, heads * head_dim] dense
    int64_t rounded;  // q and the weights may be rounded to bfloat16 if K and V are such
    int64_t threads;
};

// Some positions of one sequence's queries, all heads of one KV head.
struct Item {
    int64_t seq, kv_head;
    int64_t row, count;  // the first position's row in the batch, and how many there are
    int64_t position;    // of the first
    int64_t oldest;      // key that any of them sees behind the sinks
    int64_t sinks;       // keys before those that any of them sees

    int64_t end() const { return position + count; }  // of the keys
    int64_t sink_spans() const { return (sinks + kSpan - 1) / kSpan; }
    int64_t spans() const {
        const int64_t behind = end() > oldest ? (end() - 1) / kSpan + 1 - oldest / kSpan : 0;
        return sink_spans() + behind;
    }
};

// Keys that are walked together: [begin, end), those before `oldest` being seen by none.
struct Span {
    int64_t begin, end, oldest;

    Span(const Item& item, int64_t index) {
        if (index < item.sink_spans()) {
            begin = index * kSpan, end = std::min(begin + kSpan, item.sinks), oldest = 0;
        } else {
            begin = (item.oldest / kSpan + index - item.sink_spans()) * kSpan;
            end = std::min(begin + kSpan, item.end()), oldest = item.oldest;
        }
    }
};

template <class T>
class Kernel {
   public:
    Kernel(const Attention& a, const Cache<T>& kc, const Cache<T>& vc)
        : a_(a),
          kc_(kc),
          vc_(vc),
          dim_(a.head_dim),
          group_(a.heads / a.kv_heads),
          products_(kc, a.head_dim, a.rounded != 0) {}

    void run() {
        const int64_t positions = std::max<int64_t>(1, kRows / group_);
        thread_local Scratch scratch;
        int64_t* offsets = scratch.get<int64_t>(a_.num_seqs + 1);  // of each sequence's first item, per KV head
        int64_t work = 0, most_spans = 1;
        offsets[0] = 0;
        for (int64_t b = 0; b < a_.num_seqs; ++b) {
            const int64_t rows = a_.query_starts[b + 1] - a_.query_starts[b];
            offsets[b + 1] = offsets[b] + (rows + positions - 1) / positions;
            work += rows * a_.seq_lens[b];
            most_spans = std::max<int64_t>(most_spans, (a_.seq_lens[b] - 1) / kSpan + 1);
        }
        most_spans += (a_.sinks + kSpan - 1) / kSpan;
        const int64_t items = offsets[a_.num_seqs] * a_.kv_heads;
        const int threads = work * a_.heads * dim_ < 1 << 15 ? 1 : static_cast<int>(a_.threads);
        // Later query tiles see more context: handing them out first keeps the threads level at the end.
        const auto item = [&](int64_t i) {
            const int64_t tile = (items - 1 - i) / a_.kv_heads;
            const int64_t seq = std::upper_bound(offsets, offsets + a_.num_seqs + 1, tile) - offsets - 1;
            return make_item(seq, i % a_.kv_heads, (tile - offsets[seq]) * positions, positions);
        };
        if (threads > 1 && most_spans > 1 && items < 4 * threads) {
            write_all();
            share_spans(item, items, most_spans, threads);
            return;
        }
        // Where no other item reads what an item's rows write, it writes that itself, into lines already asked for.
        const bool own = offsets[a_.num_seqs] == a_.num_seqs;
        if (!own) write_all();
        const int64_t chunk = items < 16 * threads ? 1 : a_.kv_heads;
        split(threads, items, chunk, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const Item it = item(i);
                if (own)
                    for (int64_t r = 0; r < it.count; ++r) write(it.row + r, it.kv_head);
                const int64_t after = i + 1 < end ? i + 1 : end + (threads - 1) * chunk;  // if the threads take turns
                const Item following = item(std::min(after, items - 1));
                attend(it, following);
            }
        });
    }

   private:
    void write_all() const {
        const int64_t tokens = a_.query_starts[a_.num_seqs];
        const bool small = tokens * a_.kv_heads * dim_ < 1 << 14;
        split(small ? 1 : static_cast<int>(a_.threads), tokens, 16, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                for (int64_t h = 0; h < a_.kv_heads; ++h) write(t, h);
        });
    }

    // Token t's K and V of head h.
    void write(int64_t t, int64_t h) const {
        const int64_t block = a_.slots[t] / a_.block_size, offset = a_.slots[t] % a_.block_size;
        T* k = kc_.data + kc_.slot(block, offset) + h * kc_.strides.head;
        T* v = vc_.data + vc_.slot(block, offset) + h * vc_.strides.head;
        const float* new_k = a_.k + t * a_.k_row + h * dim_;
        const float* new_v = a_.v + t * a_.v_row + h * dim_;
        if constexpr (kScaled<T>) {
            const int64_t at = a_.scale_strides.at(block, offset, h);
            if (!a_.scale_strides.fixed()) {
                kc_.scales[at] = scale_for<T>(new_k, dim_);
                vc_.scales[at] = scale_for<T>(new_v, dim_);
            }
            encode(new_k, dim_, kc_.scales[at], k, kc_.strides.feature);
            encode(new_v, dim_, vc_.scales[at], v, 1);
        } else {
            for (int64_t d = 0; d < dim_; ++d) from_float(new_k[d], k + d * kc_.strides.feature);
            for (int64_t d = 0; d < dim_; ++d) from_float(new_v[d], v + d);
        }
    }

    Item make_item(int64_t seq, int64_t kv_head, int64_t begin, int64_t positions) const {
        const int64_t first = a_.query_starts[seq], rows = a_.query_starts[seq + 1] - first;
        const int64_t position = a_.seq_lens[seq] - rows + begin;
        const int64_t count = std::min(positions, rows - begin);
        const int64_t oldest = a_.window < 0 ? 0 : std::max<int64_t>(a_.sinks, position - a_.window + 1);
        return {seq, kv_head, first + begin, count, position, oldest, std::min(a_.sinks, position + count)};
    }

    // All spans of an item, one after the other. Its thread goes on with `following`.
    void attend(const Item& item, const Item& following) const {
        const int64_t rows = item.count * group_, size = Partial::floats(rows, dim_);
        thread_local Scratch scratch;
        float* memory = scratch.get<float>(2 * size);
        Partial whole(memory, rows, dim_), part(memory + size, rows, dim_);
        attend_span(item, 0, following, whole);
        for (int64_t s = 1; s < item.spans(); ++s) {
            attend_span(item, s, following, part);
            whole.merge(part, rows, dim_);
        }
        finish(item, whole);
    }

    // Few items with long contexts: the threads share their spans.
    template <class ItemAt>
    void share_spans(const ItemAt& item, int64_t items, int64_t most_spans, int threads) const {
        const int64_t size = Partial::floats(std::max<int64_t>(kRows, group_), dim_);
        thread_local Scratch scratch;
        float* memory = scratch.get<float>(items * most_spans * size);
        const auto part = [&](int64_t i, int64_t s, const Item& it) {
            return Partial(memory + (i * most_spans + s) * size, it.count * group_, dim_);
        };
        split(threads, items * most_spans, 1, [&](int64_t begin, int64_t end) {
            for (int64_t at = begin; at < end; ++at) {
                const Item it = item(at / most_spans);
                if (at % most_spans < it.spans()) {
                    Partial p = part(at / most_spans, at % most_spans, it);
                    attend_span(it, at % most_spans, it, p);
                }
            }
        });
        for (int64_t i = 0; i < items; ++i) {
            const Item it = item(i);
            Partial whole = part(i, 0, it);
            for (int64_t s = 1; s < it.spans(); ++s) whole.merge(part(i, s, it), it.count * group_, dim_);
            finish(it, whole);
        }
    }

    // Attends the item's rows to one of its spans.
    void attend_span(const Item& item, int64_t span, const Item& following, Partial& out) const {
        const int rows = static_cast<int>(item.count * group_);
        const Span keys(item, span);
        const bool sinks = span < item.sink_spans();
        const int32_t* table = a_.block_table + item.seq * a_.max_blocks;
        const int64_t begin = std::max(keys.begin, keys.oldest / kKeys * kKeys);
        const int count = static_cast<int>((std::max(keys.end - begin, int64_t{0}) + kKeys - 1) / kKeys);
        // Blocks lie apart, which the hardware does not foresee: a tile's are asked for while the one before it is
        // worked on; after the last one's keys come the first one's values, after its values the next keys.
        Tile<T> tiles[kTiles], after;
        for (int t = 0; t < count; ++t)
            tiles[t].find(kc_, vc_, table, item.kv_head, begin + t * kKeys, keys.end, keys.oldest);
        if (!sinks && keys.end < item.end())
            after.find(kc_, vc_, table, item.kv_head, keys.end, item.end(), keys.oldest);
        else
            begin_of(following, after);

        thread_local Scratch scratch;
        float* q = scratch.get<float>(rows * (dim_ + kSpan) + dim_ * kKeys);
        float* scores = q + rows * dim_;        // [rows][256]
        float* memory = scores + rows * kSpan;  // for a copy of a tile
        const V scale = splat(static_cast<float>(a_.scale));
        for (int r = 0; r < rows; ++r) {  // row r: position r / group, head r % group
            const float* source = a_.q + (item.row + r / group_) * a_.q_row + head(item, r) * dim_;
            for (int64_t d = 0; d < dim_; d += kLanes)
                products_.put_query(q, r * dim_ + d, mul(load(source + d), scale));
        }
        out.clear(rows, dim_);

        float key_scales[kSpan], value_scales[kSpan];
        for (int t = 0; t < count; ++t) {
            const T* const* next = t + 1 < count ? tiles[t + 1].keys : tiles[0].values;
            products_.score(tiles[t], rows, q, Lines<T>(next, tiles[t].keys), memory, scores + t * kKeys);
            if constexpr (kScaled<T>)
                find_scales(tiles[t], table, item.kv_head, begin + t * kKeys, key_scales + t * kKeys,
                            value_scales + t * kKeys);
        }
        const int width = count * kKeys;
        if constexpr (kScaled<T>) scale_rows(rows, width, key_scales, scores);
        if (a_.softcap > 0) cap_rows(rows, width, scores);
        for (int r = 0; r < rows; ++r) {
            const int64_t at = item.position + r / group_;
            const int high = static_cast<int>(std::min(keys.end, at + 1) - begin);
            const int64_t oldest = a_.window < 0 || sinks ? 0 : std::max(a_.sinks, at - a_.window + 1);
            const int low = static_cast<int>(std::max<int64_t>(0, oldest - begin));
            soften(scores + r * kSpan, width, low, high, out.peak[r], out.total[r],
                   [&](float* row, int i, V weight) { products_.put_weight(row, i, weight); });
        }
        if constexpr (kScaled<T>) scale_rows(rows, width, value_scales, scores);
        for (int t = 0; t < count; ++t) {
            const bool last = t + 1 == count;
            Lines<T> next(last ? after.keys : tiles[t + 1].values, tiles[t].values);
            if (last && kc_.by_feature())  // sixteen keys take as much memory as sixteen values
                for (int j = 0; j < kKeys; ++j)
                    if (const T* group = after.keys[j / kLanes * kLanes]) next.at[j] = group + j % kLanes * dim_;
            products_.weigh(tiles[t], t, rows, scores, next, memory, out.acc);
        }
    }

    // The first tile that an item walks, but for sinks.
    void begin_of(const Item& item, Tile<T>& out) const {
        const int32_t* table = a_.block_table + item.seq * a_.max_blocks;
        const int64_t start = item.oldest / kKeys * kKeys;
        out.find(kc_, vc_, table, item.kv_head, start, item.end(), item.oldest);
    }

    // The scales of a tile's keys and values; zero for those that are not known.
    void find_scales(const Tile<T>& tile, const int32_t* table, int64_t head, int64_t start, float* keys,
                     float* values) const {
        std::fill(keys, keys + kKeys, 0.0f);
        std::fill(values, values + kKeys, 0.0f);
        int64_t block = (start + tile.from) / kc_.block_size, offset = (start + tile.from) % kc_.block_size;
        for (int j = tile.from; j < tile.to; ++block, offset = 0) {
            const int count = static_cast<int>(std::min<int64_t>(tile.to - j, kc_.block_size - offset));
            const int64_t at = a_.scale_strides.at(table[block], offset, head);
            for (int i = 0; i < count; ++i, ++j) {
                keys[j] = to_float(kc_.scales[at + i * a_.scale_strides.slot]);
                values[j] = to_float(vc_.scales[at + i * a_.scale_strides.slot]);
            }
        }
    }

    static void scale_rows(int rows, int width, const float* scales, float* scores) {
        for (int r = 0; r < rows; ++r, scores += kSpan)
            for (int j = 0; j < width; j += kLanes) store(scores + j, mul(load(scores + j), load(scales + j)));
    }

    void cap_rows(int rows, int width, float* scores) const {
        for (int r = 0; r < rows; ++r, scores += kSpan)
            for (int j = 0; j < width; j += kLanes)
                store(scores + j, soft_cap(load(scores + j), static_cast<float>(a_.softcap)));
    }

    int64_t head(const Item& item, int64_t r) const { return item.kv_head * group_ + r % group_; }

    void finish(const Item& item, const Partial& whole) const {
        for (int64_t r = 0; r < item.count * group_; ++r) {
            float* target = a_.out + ((item.row + r / group_) * a_.heads + head(item, r)) * dim_;
            for (int64_t d = 0; d < dim_; d += kLanes)
                store(target + d, div(load(whole.acc + r * dim_ + d), splat(whole.total[r])));
        }
    }

    const Attention& a_;
    const Cache<T> kc_, vc_;
    const int64_t dim_, group_;
    const Products<T> products_;
};

}  // namespace
}  // namespace sluice

extern "C" void sluice_attention(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const Attention*>(arguments);
    const auto go = [&](auto* kc, auto* vc) {
        using T = std::remove_pointer_t<decltype(kc)>;
        Kernel<T>(*a, {kc, a->k_strides, a->block_size, a->k_scales}, {vc, a->v_strides, a->block_size, a->v_scales})
            .run();
    };
    if (a->kv_type == 0) go(static_cast<float*>(a->k_cache), static_cast<float*>(a->v_cache));
    if (a->kv_type == 1) go(static_cast<Half*>(a->k_cache), static_cast<Half*>(a->v_cache));
    if (a->kv_type == 2) go(static_cast<BFloat16*>(a->k_cache), static_cast<BFloat16*>(a->v_cache));
    if (a->kv_type == 3) go(static_cast<Int8*>(a->k_cache), static_cast<Int8*>(a->v_cache));
    if (a->kv_type == 4) go(static_cast<E4M3*>(a->k_cache), static_cast<E4M3*>(a->v_cache));
    if (a->kv_type == 5) go(static_cast<E5M2*>(a->k_cache), static_cast<E5M2*>(a->v_cache));
}
