// The pool behind `share`: one for the process, made at the first call that is worth more than one thread.

#include "cpu_threads.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace polyfleet {
namespace {

struct Job {
    Work work;
    int64_t step;
    std::atomic<int64_t> next{0};
    std::atomic<int> status{0}, took_part{0};

    void compute() {
        bool any = false;
        for (int64_t begin; (begin = next.fetch_add(step)) < work.count; any = true)
            if (const int told = work.call(work.context, begin, std::min(begin + step, work.count))) status = told;
        if (any) took_part++;
    }
};

constexpr int SPINS = 1000;  // some 20 microseconds of the caller's own time, once per call

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    // Only one call has the pool at a time; another computes alone meanwhile, on the thread that made it.
    std::mutex in_use;

    void run(Job& job, int helpers) {
        grow(helpers);
        {
            std::lock_guard<std::mutex> hold(lock_);
            job_ = &job;
            seats_ = helpers;
        }
        for (int i = 0; i < helpers; i++) wake_.notify_one();
        job.compute();
        {
            std::lock_guard<std::mutex> hold(lock_);
            job_ = nullptr;  // who wakes only now has nothing to do
        }
        // Others are at their last range: sleeping at once would cost more than most of them need.
        for (int i = 0; i < SPINS && running_.load(std::memory_order_acquire); i++) pause();
        std::unique_lock<std::mutex> hold(lock_);
        idle_.wait(hold, [&] { return running_ == 0; });
    }

private:
    std::mutex lock_;
    std::condition_variable wake_, idle_;
    Job* job_ = nullptr;
    int seats_ = 0, threads_ = 0;
    std::atomic<int> running_{0};  // changed under the lock

    void grow(int wanted) {
        if (threads_ >= wanted) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
        try {
            for (; threads_ < wanted; threads_++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // The system gives no more threads: fewer do the same work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    [[noreturn]] void serve() {
        std::unique_lock<std::mutex> hold(lock_);
        for (;;) {
            wake_.wait(hold, [&] { return job_ && seats_ > 0; });
            Job* job = job_;
            seats_--;
            running_++;
            hold.unlock();
            job->compute();
            hold.lock();
            if (running_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_one();
        }
    }
};

// Never destroyed: its threads may wait on it while the process ends.
Pool* pool = nullptr;
std::once_flag made;
std::atomic<int> last_took_part{1};

// Threads are not inherited, and the locks may be held by one that is not there: a child begins anew.
void after_fork() { pool = new Pool; }

void make_pool() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, after_fork);
}

}  // namespace

int run_work(const Work& work, int threads) {
    const int64_t shares = work.count / work.grain;
    const int helpers = int(std::min<int64_t>(threads, shares)) - 1;
    if (helpers > 0) {
        std::call_once(made, make_pool);
        std::unique_lock<std::mutex> mine(pool->in_use, std::try_to_lock);
        if (mine) {
            Job job;
            job.work = work;
            job.step = std::max<int64_t>(1, std::max(work.grain / 8, work.count / ((helpers + 1) * 8)));
            pool->run(job, helpers);
            last_took_part = job.took_part.load();
            return job.status;
        }
    }
    last_took_part = 1;
    return work.call(work.context, 0, work.count);
}

extern "C" int polyfleet_threads_of_last_call() { return last_took_part; }

}  // namespace polyfleet
