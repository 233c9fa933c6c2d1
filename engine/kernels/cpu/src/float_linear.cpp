// y = x W^T + bias with W as float_weight.h has it, sums in float.
#include <array>
#include <utility>

#include "float_tile.h"
#include "parallel.h"
#include "tiles.h"

namespace sluice {
namespace {

#if SLUICE_AVX512
constexpr int kMostRows = 12;  // of a register tile
#else
constexpr int kMostRows = 3;
#endif
constexpr int64_t kBlockRows = 132;  // about so many rows' activations should stay in L2 while panels stream by
constexpr int64_t kSerialInput = 1 << 14;  // activations

enum Product : int64_t { kExact, kRounded, kTiled };  // the last two: x becomes bfloat16 first

struct FloatLinear {
    const float* x;
    int64_t x_row, rows;
    FloatWeight w;
    const float* bias;  // null: none
    float* y;
    int64_t y_row;
    int64_t product;
    int64_t threads;
};

void put(float x, bool round, float* out) {
    BFloat16 rounded;
    from_float(x, &rounded);
    *out = round ? to_float(rounded) : x;
}
void put(float x, bool, BFloat16* out) { from_float(x, out); }

// One row of x as row r of a tile [steps][height][kFeatureStep], zeros behind its last feature.
template <class Input>
void prepare(const FloatLinear& a, const float* x, Input* tile, int64_t height, int64_t r) {
    Input* out = tile + r * kFeatureStep;
    for (int64_t at = 0; at < a.w.in; at += kFeatureStep, out += height * kFeatureStep) {
        const int64_t count = std::min<int64_t>(kFeatureStep, a.w.in - at);
        for (int64_t i = 0; i < count; ++i) put(x[at + i], a.product != kExact, out + i);
        std::fill(out + count, out + kFeatureStep, Input{});
    }
}

// How the rows are cut, and a cut times one panel. In registers: tiles of at most kMostRows, of like heights.
template <class Form>
struct InRegisters {
    using Input = typename Form::Input;

    explicit InRegisters(int64_t row_count) : rows(row_count), tiles((rows + kMostRows - 1) / kMostRows) {}
    int64_t begin(int64_t t) const { return t * rows / tiles; }
    int64_t height(int64_t t) const { return begin(t + 1) - begin(t); }  // as it is stored
    static constexpr int64_t kBlock = kBlockRows / kMostRows;            // tiles

    struct Worker {
        void operator()(const InRegisters& cut, const FloatLinear& a, int64_t panel, const Input* x, int64_t first,
                        int64_t last) {
            static constexpr auto tiles = all(std::make_index_sequence<kMostRows>());
            const int64_t steps = a.w.steps(), column = panel * kFloatPanel;
            const int columns = static_cast<int>(std::min<int64_t>(kFloatPanel, a.w.out - column));
            const float* bias = a.bias ? a.bias + column : nullptr;
            for (int64_t t = first; t < last; ++t) {
                const int64_t r = cut.begin(t);
                const uint8_t* w = a.w.panel(panel);
                const Ahead ahead(w, a.w.panel(1) - a.w.panel(0), Form::kBlock, t - first, last - first);
                tiles[cut.height(t) - 1](w, ahead, steps, x + r * steps * kFeatureStep, bias,
                                         a.y + r * a.y_row + column, a.y_row, columns);
            }
        }

        template <size_t... Index>
        static constexpr auto all(std::index_sequence<Index...>) {
            return std::array{&float_tile<Form, static_cast<int>(Index) + 1>...};
        }
    };

    int64_t rows, tiles;
};

// By matrix tiles. Rows that the last one lacks are what the memory held, and are not stored.
struct InTiles {
    using Input = BFloat16;

    explicit InTiles(int64_t row_count) : rows(row_count), tiles((rows + kTileRows - 1) / kTileRows) {}
    int64_t begin(int64_t t) const { return t * kTileRows; }
    int64_t height(int64_t) const { return kTileRows; }
    static constexpr int64_t kBlock = kBlockRows / kTileRows;

    struct Worker {
        void operator()(const InTiles& cut, const FloatLinear& a, int64_t panel, const BFloat16* x, int64_t first,
                        int64_t last) {
            constexpr int kSize = kTileRows * kFeatureStep;
            const int64_t steps = a.w.steps(), column = panel * kFloatPanel;
            const int columns = static_cast<int>(std::min<int64_t>(kFloatPanel, a.w.out - column));
            for (int64_t t = first; t < last; t += 2) {
                const BFloat16 *x0 = x + t * steps * kSize, *x1 = x0 + steps * kSize;
                const uint8_t* block = a.w.panel(panel);
                tiles.clear();
                for (int64_t s = 0; s < steps; ++s, block += kFeatureStep * kFloatPanel * 2) {
                    fetch(block + 4096, kFeatureStep * kFloatPanel * 2);
                    const auto* w = reinterpret_cast<const BFloat16*>(block);
                    if (t + 1 < last)
                        tiles.multiply(x0 + s * kSize, x1 + s * kSize, kFeatureStep, w);
                    else
                        tiles.multiply(x0 + s * kSize, kFeatureStep, w);
                }
                alignas(64) float c[2 * kTileRows * kFloatPanel];
                tiles.store(c);
                const int64_t row = cut.begin(t), count = std::min(cut.rows, cut.begin(std::min(t + 2, last))) - row;
                for (int64_t i = 0; i < count; ++i)
                    for (int j = 0; j < columns; j += kLanes) {
                        const int some = std::min(kLanes, columns - j);
                        V sum = load(c + i * kFloatPanel + j);
                        if (a.bias) sum = add(sum, load_first(a.bias + column + j, some));
                        store_first(a.y + (row + i) * a.y_row + column + j, sum, some);
                    }
            }
        }

        Tiles tiles;
    };

    int64_t rows, tiles;
};

template <class Cut>
void multiply(const FloatLinear& a) {
    using Input = typename Cut::Input;
    thread_local Scratch scratch;
    const Cut cut(a.rows);
    const int64_t width = a.w.steps() * kFeatureStep, panels = a.w.panels();
    Input* x = scratch.get<Input>(cut.begin(cut.tiles) * width);
    const int threads = a.rows * width * a.w.out < 1 << 17 ? 1 : static_cast<int>(a.threads);
    const int64_t blocks = row_blocks(cut.tiles, Cut::kBlock, threads);
    split_homes(a.rows * width <= kSerialInput ? 1 : threads, cut.tiles, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = cut.begin(t), height = cut.height(t);
            for (int64_t r = 0; r < std::min(height, a.rows - row); ++r)
                prepare(a, a.x + (row + r) * a.x_row, x + row * width, height, r);
        }
    });
    split_blocks(threads, panels, blocks, [&](int64_t begin, int64_t end) {
        typename Cut::Worker worker;
        for (int64_t item = begin; item < end; ++item) {  // of a block of rows all panels, then the next block
            const int64_t block = item / panels;
            worker(cut, a, item % panels, x, block * cut.tiles / blocks, (block + 1) * cut.tiles / blocks);
        }
    });
}

}  // namespace
}  // namespace sluice

extern "C" void sluice_float_linear(const void* arguments) {
    using namespace sluice;
    const auto* a = static_cast<const FloatLinear*>(arguments);
    if (!a->rows) return;
    if (a->w.type == 0) return multiply<InRegisters<Widened<float>>>(*a);
    if (a->w.type == 1) return multiply<InRegisters<Widened<Half>>>(*a);
    if (a->product == kTiled) return multiply<InTiles>(*a);
#if SLUICE_BFLOAT16_DOT
    if (a->product == kRounded) return multiply<InRegisters<Paired>>(*a);
#endif
    multiply<InRegisters<Widened<BFloat16>>>(*a);
}
