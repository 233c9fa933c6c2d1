// Native calls recorded once and run again in order, without a return to the caller in between.
#include <cstdint>

namespace sluice {
namespace {

struct Call {
    void (*function)(const void*);
    const void* arguments;
};

}  // namespace
}  // namespace sluice

extern "C" void sluice_replay(const sluice::Call* calls, int64_t count) {
    for (const sluice::Call* call = calls; call != calls + count; ++call) call->function(call->arguments);
}
