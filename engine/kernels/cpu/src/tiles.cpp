// Whether the processor's matrix tiles may be used, and do what EmulatedTiles says.
#include "tiles.h"

#if SLUICE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sluice {
namespace {

#if SLUICE_AMX
// Small whole numbers, whose sums are exact: both must agree to the bit.
bool tiles_agree() {
    constexpr int kRow = 40;  // rows may lie apart
    BFloat16 x[2 * kTileRows * kRow], w[kTileFeatures * 2 * kTileColumns];
    for (int i = 0; i < 2 * kTileRows * kRow; ++i) from_float(static_cast<float>(i * 37 % 101 - 50), x + i);
    for (int i = 0; i < kTileFeatures * 2 * kTileColumns; ++i) from_float(static_cast<float>(i * 53 % 199 - 99), w + i);
    constexpr int kSize = 4 * kTileRows * kTileColumns;
    float got[kSize], want[kSize];
    MachineTiles tiles;
    EmulatedTiles emulated;
    const auto run = [&](auto& t, float* out) {
        t.clear();
        t.multiply(x, x + kTileRows * kRow, kRow, w);
        t.multiply(x + kTileRows * kRow, kRow, w);
        t.multiply(x + 3, x + 5, kRow, w);
        t.store(out);
    };
    run(tiles, got);
    run(emulated, want);
    return std::equal(got, got + kSize, want);
}
#endif

}  // namespace
}  // namespace sluice

// Asks the kernel for this process's tile registers. 0: granted. 1: refused. 2: this build has no use for them.
extern "C" int64_t sluice_tiles_allow() {
#if SLUICE_AMX
    constexpr long kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) ? 1 : 0;
#else
    return 2;
#endif
}

// For a process that may die of it. 0: the tiles work.
extern "C" int64_t sluice_tiles_check() {
#if SLUICE_AMX
    if (!sluice_tiles_allow()) return sluice::tiles_agree() ? 0 : 3;
#endif
    return sluice_tiles_allow();
}
