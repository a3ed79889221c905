// Threads that share the rows of one call. They sleep between calls, and wait for nothing but a lock and a signal.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

namespace polyfleet {

// What threads do: `call(context, begin, end)` for ranges of [0, count). A thread is woken for
// every `grain` of the count.
struct Work {
    int (*call)(void* context, int64_t begin, int64_t end);
    void* context;
    int64_t count, grain;
};

// The first status that is not DONE. Which thread computes what changes no result: ranges do not depend on each other.
int run_work(const Work& work, int threads);

// What f answers, or that memory ended.
template <class F> int guarded(F f) {
    try {
        return f();
    } catch (const std::exception&) {  // bad_alloc, or a length no array can have
        return 1;
    }
}

// f(begin, end) on ranges of [0, count), by at most `threads` threads with the caller's. An error of memory is a status.
template <class F> int share(int64_t count, int64_t grain, int threads, F f) {
    const Work work{
        [](void* context, int64_t begin, int64_t end) -> int {
            return guarded([&] {
                (*static_cast<F*>(context))(begin, end);
                return 0;
            });
        },
        &f, count, grain < 1 ? 1 : grain};
    return run_work(work, threads);
}

// Values read or written in some 15 microseconds, which is what it takes to wake a thread.
constexpr int64_t WORTH_A_THREAD = 65536;

// f(row) for each row, `weight` times as much work as a value that is read and written.
template <class F> int share_rows(int64_t rows, int64_t columns, int threads, F f, int64_t weight = 1) {
    const int64_t grain = WORTH_A_THREAD / (columns * weight < 1 ? 1 : columns * weight) + 1;
    return share(rows, grain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(row);
    });
}

// Memory that a thread keeps for its next call, WHICH tells several apart.
template <int WHICH> static inline float* scratch(int64_t count) {
    static thread_local std::vector<float> kept;
    if (int64_t(kept.size()) < count ) kept.resize(count );
    return kept.data();
}

}  // namespace polyfleet
