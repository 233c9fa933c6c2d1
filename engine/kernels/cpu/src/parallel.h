// Loops over the worker threads, and memory for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace sluice {

// Calls job(context) on the caller and on up to threads - 1 workers; returns when all that began have ended.
// It may run on the caller alone, so a job must take its share from a common counter until nothing is left.
void run_on_workers(int threads, void (*job)(void*), void* context);

// Calls body(begin, end) for ranges of at most `chunk` that cover [0, count), each on one thread.
template <class Body>
inline void split(int threads, int64_t count, int64_t chunk, const Body& body) {
    chunk = std::max<int64_t>(1, chunk);
    threads = static_cast<int>(std::min<int64_t>(threads, (count + chunk - 1) / chunk));
    if (threads <= 1) {
        if (count > 0) body(0, count);
        return;
    }
    std::atomic<int64_t> next{0};
    auto job = [&] {
        for (;;) {
            const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= count) return;
            body(begin, std::min(count, begin + chunk));
        }
    };
    run_on_workers(threads, [](void* p) { (*static_cast<decltype(job)*>(p))(); }, &job);
}

// The same with shares that become smaller: large ones at first, that neighbours stay together, and single ones at
// last, that all threads end at once.
template <class Body>
inline void split_level(int threads, int64_t count, const Body& body) {
    threads = static_cast<int>(std::min<int64_t>(threads, count));
    if (threads <= 1) {
        if (count > 0) body(0, count);
        return;
    }
    std::atomic<int64_t> next{0};
    auto job = [&] {
        int64_t begin = next.load(std::memory_order_relaxed);
        while (begin < count) {
            const int64_t end = begin + std::max<int64_t>(1, (count - begin) / (2 * threads));
            if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            body(begin, end);
            begin = next.load(std::memory_order_relaxed);
        }
    };
    run_on_workers(threads, [](void* p) { (*static_cast<decltype(job)*>(p))(); }, &job);
}

// This thread's number among those that share work: 0 for the caller, 1 and more for workers.
int thread_number();

constexpr int kMostHomes = 64;

inline int homes(int threads) { return std::min(threads, kMostHomes); }

// As split(), but each thread begins with a home, the same part of the whole in every loop, and helps the others after
// that: what one loop over the rows wrote, the next one finds in its own core's cache.
template <class Body>
inline void split_homes(int threads, int64_t count, int64_t chunk, const Body& body) {
    chunk = std::max<int64_t>(1, chunk);
    threads = static_cast<int>(std::min<int64_t>(threads, (count + chunk - 1) / chunk));
    if (threads <= 1) {
        if (count > 0) body(0, count);
        return;
    }
    struct alignas(64) Home {
        std::atomic<int64_t> next;
        int64_t end;
    };
    Home all[kMostHomes];
    const int number = homes(threads);
    for (int h = 0; h < number; ++h) {
        all[h].next.store(count * h / number, std::memory_order_relaxed);
        all[h].end = count * (h + 1) / number;
    }
    auto job = [&] {
        const int own = thread_number();
        for (int i = 0; i < number; ++i) {
            Home& home = all[(own + i) % number];
            for (;;) {
                const int64_t begin = home.next.fetch_add(chunk, std::memory_order_relaxed);
                if (begin >= home.end) break;
                body(begin, std::min(home.end, begin + chunk));
            }
        }
    };
    run_on_workers(threads, [](void* p) { (*static_cast<decltype(job)*>(p))(); }, &job);
}

// Into how many blocks a product of `rows` by panels of weights is cut: of at most `most` rows, and if there are enough
// for it, so many that each thread has its own at home.
inline int64_t row_blocks(int64_t rows, int64_t most, int threads) {
    const int64_t blocks = (rows + most - 1) / most, number = homes(threads);
    return 2 * rows <= number * most ? blocks : (blocks + number - 1) / number * number;
}

// Calls body(begin, end) for the items of such a product: a block's panels, then the next block's.
template <class Body>
inline void split_blocks(int threads, int64_t panels, int64_t blocks, const Body& body) {
    if (blocks % homes(threads))
        split_level(threads, panels * blocks, body);
    else
        split_homes(threads, panels * blocks, 1, body);
}

// Uninitialised memory aligned to a cache line, kept by the thread for its next call.
class Scratch {
   public:
    ~Scratch() { std::free(data_); }

    template <class T>
    T* get(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            if (!data_) std::abort();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

   private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace sluice
