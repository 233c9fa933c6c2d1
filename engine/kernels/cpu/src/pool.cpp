// The worker threads.
//
// Not OpenMP: its join waits for every thread of the team, also for one that has not begun because another
// process holds its core; on a machine that shares its cores each op then costs a scheduler's time slice. Here
// the caller works too, closes the job when nothing is left to hand out, and waits only for workers inside it.
#include "parallel.h"

#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {
namespace {

// Long enough to bridge the gap between two ops of a step, short enough to leave the core to others after it.
constexpr auto kSpin = std::chrono::microseconds(60);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether done() came true within kSpin.
template <class Done>
bool spin(const Done& done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

class Pool {
   public:
    void run(int threads, void (*job)(void*), void* context) {
        std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
        if (!lock) {  // another thread's op has the workers
            job(context);
            return;
        }
        try {
            for (; workers_ < threads - 1; ++workers_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
        }
        job_ = job;
        context_ = context;
        const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        gate_.store(static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(threads - 1) * kSeat);
        epoch_.store(epoch);
        if (sleepers_.load()) epoch_.notify_all();
        job(context);
        gate_.fetch_and(~kSeats);  // closed: who has not entered stays out
        const auto empty = [this] { return (gate_.load(std::memory_order_acquire) & kInside) == 0; };
        if (spin(empty)) return;
        while (!empty()) std::this_thread::yield();
    }

   private:
    // gate_: epoch of the job (32 bits), free seats (16), workers inside (16).
    static constexpr uint64_t kInside = 0xffff, kSeat = 0x10000, kSeats = 0xffff0000;

    void work() {
        uint32_t seen = 0;
        for (;;) {
            uint64_t gate = gate_.load();
            if ((gate >> 32) != seen && (gate & kSeats)) {
                if (gate_.compare_exchange_weak(gate, gate - kSeat + 1)) {
                    seen = static_cast<uint32_t>(gate >> 32);
                    job_(context_);
                    gate_.fetch_sub(1, std::memory_order_release);
                }
                continue;
            }
            const uint32_t epoch = static_cast<uint32_t>(gate >> 32);
            if (spin([&] { return epoch_.load(std::memory_order_relaxed) != epoch; })) continue;
            sleepers_.fetch_add(1);
            epoch_.wait(epoch);
            sleepers_.fetch_sub(1);
        }
    }

    std::mutex busy_;
    int workers_ = 0;
    void (*job_)(void*) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace

void run_on_workers(int threads, void (*job)(void*), void* context) {
    static Pool* pool = new Pool;  // never destroyed: its threads may outlive main
    pool->run(threads, job, context);
}

}  // namespace sluice
