// The worker threads.
//
// Not OpenMP: its join waits for every thread of the team, also for one that has not begun because another
// process holds its core; on a machine that shares its cores each op then costs a scheduler's time slice. Here
// the caller works too, closes the job when nothing is left to hand out, and waits only for workers inside it; one that
// has lost its core to something else ends its part on the caller's.
#include "parallel.h"

#include <chrono>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to bridge the gap between two ops of a step, short enough to leave the core to others after it.
constexpr auto kSpin = std::chrono::microseconds(60);
// A worker that ends its part of an op so much later than the caller, and a quarter of the caller's own part, is taken
// for one whose core something else has.
constexpr auto kPatience = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether done() came true in time.
template <class Done>
bool spin(const Done& done, Clock::time_point end) {
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return done();
}

struct Worker {
    std::thread::native_handle_type thread{};
    alignas(64) std::atomic<bool> inside{false};  // a job
    std::atomic<bool> guest{false};               // on the caller's core, which it is to leave with the end of the job
};

// Which cores the workers may use: not the caller's. When the caller wakes while something short runs on its core,
// Linux may put it on a worker's, and leaves both there for whole time slices, because neither's cache is cold, while
// another core idles.
class Cores {
   public:
#if defined(__linux__)
    // Once the caller is on another core than before, or there are more workers.
    void keep_apart(std::deque<Worker>& workers) {
        const int core = sched_getcpu();
        if (core == core_ && workers.size() == placed_) return;
        core_ = core;
        placed_ = workers.size();
        if (find_others()) {
            for (Worker& worker : workers) move(worker, others_);
        }
    }

    // A worker's thread onto the caller's core, at once.
    void invite(Worker& worker) const {
        if (!apart_) return;
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(core_, &here);
        move(worker, here);
    }

    void send_back(Worker& worker) const {
        if (apart_) move(worker, others_);
    }

   private:
    bool find_others() {
        apart_ = getpid() == process_ && core_ >= 0 && core_ < CPU_SETSIZE &&  // a forked child has no workers
                 !sched_getaffinity(0, sizeof others_, &others_);
        if (apart_) CPU_CLR(core_, &others_);
        return apart_ = apart_ && static_cast<size_t>(CPU_COUNT(&others_)) >= placed_;  // else some must share one
    }

    static void move(Worker& worker, const cpu_set_t& cores) {
        pthread_setaffinity_np(worker.thread, sizeof cores, &cores);
    }

    const pid_t process_ = getpid();
    int core_ = -1;  // the caller's
    size_t placed_ = 0;
    bool apart_ = false;
    cpu_set_t others_;
#else
    void keep_apart(std::deque<Worker>&) {}
    void invite(Worker&) const {}
    void send_back(Worker&) const {}
#endif
};

thread_local int number = 0;  // see thread_number()

class Pool {
   public:
    void run(int threads, void (*job)(void*), void* context) {
        std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
        if (!lock) {  // another thread's op has the workers
            job(context);
            return;
        }
        try {
            while (workers_.size() + 1 < static_cast<size_t>(threads)) hire();
        } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
        }
        cores_.keep_apart(workers_);
        job_ = job;
        context_ = context;
        const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        gate_.store(static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(threads - 1) * kSeat);
        epoch_.store(epoch);
        if (sleepers_.load()) epoch_.notify_all();
        const auto began = Clock::now();
        job(context);
        gate_.fetch_and(~kSeats);  // closed: who has not entered stays out
        if (empty()) return;
        const auto now = Clock::now();
        if (!spin([this] { return empty(); }, now + kPatience + (now - began) / 4)) take_in();
    }

   private:
    // gate_: epoch of the job (32 bits), free seats (16), workers inside (16).
    static constexpr uint64_t kInside = 0xffff, kSeat = 0x10000, kSeats = 0xffff0000;

    bool empty() const { return (gate_.load(std::memory_order_acquire) & kInside) == 0; }

    void hire() {
        Worker& worker = workers_.emplace_back();
        try {
            std::thread thread([this, &worker, own = static_cast<int>(workers_.size())] {
                number = own;
                work(worker);
            });
            worker.thread = thread.native_handle();
            thread.detach();
        } catch (const std::system_error&) {
            workers_.pop_back();
            throw;
        }
    }

    // Workers that have been put aside in the middle of their part end it on the caller's core. The wait for theirs
    // would be as long as whatever runs there: for each of a stream's tokens a few processes want a core, for the time
    // of many ops each.
    void take_in() {
        for (Worker& worker : workers_) {
            if (!worker.inside.load()) continue;
            worker.guest.store(true);
            cores_.invite(worker);
        }
        while (!empty()) std::this_thread::yield();
        for (Worker& worker : workers_) {
            if (worker.guest.exchange(false)) cores_.send_back(worker);
        }
    }

    void work(Worker& self) {
        uint32_t seen = 0;
        for (;;) {
            uint64_t gate = gate_.load();
            if ((gate >> 32) != seen && (gate & kSeats)) {
                if (gate_.compare_exchange_weak(gate, gate - kSeat + 1)) {
                    seen = static_cast<uint32_t>(gate >> 32);
                    self.inside.store(true, std::memory_order_relaxed);
                    job_(context_);
                    self.inside.store(false, std::memory_order_relaxed);
                    gate_.fetch_sub(1, std::memory_order_release);
                    if (self.guest.load()) sleep(seen);
                }
                continue;
            }
            const uint32_t epoch = static_cast<uint32_t>(gate >> 32);
            const auto called = [&] { return epoch_.load(std::memory_order_relaxed) != epoch; };
            if (!spin(called, Clock::now() + kSpin)) sleep(epoch);
        }
    }

    // Until there is another job than that of `epoch`.
    void sleep(uint32_t epoch) {
        sleepers_.fetch_add(1);
        epoch_.wait(epoch);
        sleepers_.fetch_sub(1);
    }

    std::mutex busy_;
    std::deque<Worker> workers_;  // they never end
    Cores cores_;
    void (*job_)(void*) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace

int thread_number() { return number; }

void run_on_workers(int threads, void (*job)(void*), void* context) {
    static Pool* pool = new Pool;  // never destroyed: its threads may outlive main
    pool->run(threads, job, context);
}

}  // namespace sluice
