#include "context.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace shoal {

float* Scratch::get(int number, size_t count) {
    auto& buffer = buffers_[number];
    if (buffer.size() < count) buffer = std::vector<float>(count + count / 4);
    return buffer.data();
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ThreadGovernor::Speed& ThreadGovernor::speed(Work work) {
    int size = 0;
    std::frexp(work.amount, &size);
    return speeds_[work.kind * SIZES + std::clamp(size, 0, SIZES - 1)];
}

bool ThreadGovernor::allows(double now, Work work) {
    Speed& found = speed(work);
    if (now < found.alone_until) return false;
    if (found.alone > 0 && ++found.calls < ALONE_EVERY) return true;
    found.calls = 0;
    return false;
}

void ThreadGovernor::record(double now, Work work, double seconds, bool threaded) {
    Speed& found = speed(work);
    if (!threaded) {
        // Capped, because the caller itself may have been suspended during the call.
        const double each = seconds / work.amount;
        found.alone = found.alone > 0 ? 0.75 * found.alone + 0.25 * std::min(each, 2 * found.alone) : each;
        return;
    }
    found.threaded_seconds += seconds;
    found.alone_seconds += work.amount * found.alone;
    if (found.threaded_seconds < WINDOW) return;
    if (found.alone_seconds < MIN_GAIN * found.threaded_seconds) {
        found.alone_until = now + found.pause;
        found.pause = std::min(2 * found.pause, LONGEST_PAUSE);
    } else {
        found.pause = FIRST_PAUSE;
    }
    found.threaded_seconds = found.alone_seconds = 0;
}

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Workers make this many checks, some tens of microseconds, for the next call before they sleep; so does the caller
// for units that workers have begun. A thread that spins longer takes the core from the thread it waits for.
constexpr int SPIN = 2000;

// Index of the calling thread within the call that it works for.
static thread_local int current_thread = 0;

// Worker threads. Units are claimed one by one, so the caller alone finishes all of them when the cores are busy
// elsewhere; it waits only for units that a worker has begun.
class Pool {
  public:
    // Throws std::system_error if the system refuses another thread.
    explicit Pool(int workers) : pid_(getpid()), sleepers_(static_cast<size_t>(workers)) {
        for (int i = 0; i < workers; i++) threads_.emplace_back([this, i] { serve(i + 1); });
    }

    ~Pool() {
        if (getpid() != pid_) {  // a forked child has no workers to join
            for (auto& thread : threads_) thread.detach();
            return;
        }
        stop_.store(true);
        for (auto& sleeper : sleepers_) sleeper.wake();
        for (auto& thread : threads_) thread.join();
    }

    bool usable() const { return getpid() == pid_; }

    // Run all units. Returns false, with nothing run, while a worker that was suspended has not left the previous call.
    bool run(int units, const std::function<void(int, int)>& work) {
        if (!vacant()) return false;
        work_ = &work;
        units_ = units;
        done_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        open_.store(true, std::memory_order_release);
        const int workers = std::min(units - 1, static_cast<int>(threads_.size()));
        expect(workers);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        for (int i = 0; i < workers; i++)
            if (sleepers_[static_cast<size_t>(i)].asleep.load(std::memory_order_seq_cst)) sleepers_[static_cast<size_t>(i)].wake();
        claim(0);
        await_units(units);
        open_.store(false, std::memory_order_seq_cst);
        return true;
    }

    int sleeping() const {
        return static_cast<int>(std::count_if(sleepers_.begin(), sleepers_.end(), [](const Sleeper& each) { return each.asleep.load(); }));
    }
    bool caller_sleeps() const { return caller_.asleep.load(std::memory_order_seq_cst); }

  private:
    // A thread that may sleep. It sets `asleep` before it checks its condition, and the waker reads it after a change.
    struct Sleeper {
        std::mutex mutex;
        std::condition_variable condition;
        std::atomic<bool> asleep{false};

        template <typename Condition>
        void sleep(const Condition& until) {
            std::unique_lock<std::mutex> lock(mutex);
            asleep.store(true, std::memory_order_seq_cst);
            condition.wait(lock, until);
            asleep.store(false, std::memory_order_seq_cst);
        }
        void wake() {
            std::lock_guard<std::mutex> lock(mutex);
            condition.notify_one();
        }
    };

    // Remember how many workers the last CALLS calls had units for: only those spin until the next call, others sleep.
    void expect(int workers) {
        recent_max_ = std::max(recent_max_, workers);
        if (++calls_ < CALLS && workers <= expected_.load(std::memory_order_relaxed)) return;
        expected_.store(recent_max_, std::memory_order_seq_cst);
        calls_ = recent_max_ = 0;
    }

    void claim(int thread) {
        for (int unit; (unit = next_.fetch_add(1, std::memory_order_acq_rel)) < units_;) {
            (*work_)(unit, thread);
            if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == units_ && caller_sleeps()) caller_.wake();
        }
    }

    // Wait briefly until all workers have left the previous call, and return whether they have: a worker that is still
    // inside would read a half-written next call.
    bool vacant() const {
        for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; spins++) {
            if (spins == SPIN) return false;
            relax();
        }
        return true;
    }

    // Wait until every unit is done: spin for short units, then sleep, since a worker may have been suspended.
    void await_units(int units) {
        for (int spins = 0; spins < SPIN; spins++) {
            if (done_.load(std::memory_order_acquire) == units) return;
            relax();
        }
        caller_.sleep([&] { return done_.load(std::memory_order_seq_cst) == units; });
    }

    void serve(int thread) {
        uint64_t seen = 0;
        current_thread = thread;
        for (;;) {
            if (!await(seen, thread)) return;
            inside_.fetch_add(1, std::memory_order_seq_cst);
            if (open_.load(std::memory_order_seq_cst)) claim(thread);
            inside_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Wait for the next call; false when the pool ends.
    bool await(uint64_t& seen, int thread) {
        for (int spins = 0; spins < SPIN && thread <= expected_.load(std::memory_order_relaxed); spins++) {
            if (stop_.load(std::memory_order_relaxed)) return false;
            const uint64_t now = generation_.load(std::memory_order_acquire);
            if (now != seen) return seen = now, true;
            relax();
        }
        sleepers_[static_cast<size_t>(thread - 1)].sleep([&] {
            const bool called = generation_.load(std::memory_order_seq_cst) != seen;
            return stop_.load() || (called && thread <= expected_.load(std::memory_order_seq_cst));
        });
        seen = generation_.load();
        return !stop_.load();
    }

    static constexpr int CALLS = 1000;  // after which the number of expected workers may fall
    const pid_t pid_;
    std::vector<Sleeper> sleepers_;  // of the workers
    std::vector<std::thread> threads_;
    Sleeper caller_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> expected_{0}, next_{0}, done_{0}, inside_{0};
    std::atomic<bool> stop_{false}, open_{false};
    const std::function<void(int, int)>* work_ = nullptr;
    int units_ = 0, calls_ = 0, recent_max_ = 0;
};

Context::Context(const Kernels& kernels, const Int8Kernels& int8, int threads)
    : k(kernels), int8_(int8), threads_(threads), scratch_(static_cast<size_t>(threads)) {
    if (threads > 1) pool_ = std::make_unique<Pool>(threads - 1);
}

Context::~Context() = default;

void Context::parallel(int units, Work work, const std::function<void(int, int)>& unit) {
    const auto alone = [&] {
        for (int number = 0; number < units; number++) unit(number, current_thread);
    };
    if (units < 2 || !pool_ || nested_ || !pool_->usable()) return alone();
    const double begun = seconds();
    const bool threaded = governor_.allows(begun, work);
    nested_ = true;
    if (threaded) {
        if (!pool_->run(units, unit)) alone();  // recorded as threaded: it waited for a suspended worker
    } else {
        alone();
    }
    nested_ = false;
    const double now = seconds();
    governor_.record(now, work, now - begun, threaded);
}

int Context::sleeping_workers() const { return pool_ ? pool_->sleeping() : 0; }

bool Context::caller_sleeps() const { return pool_ && pool_->caller_sleeps(); }

// Products with fewer multiplications take about as long as handing units to another thread.
constexpr double MIN_PARALLEL = 1e5;

void Context::product(const Product& p, int rows) {
    const double work = static_cast<double>(rows) * p.w->cols * p.w->rows;
    if (p.w->type == WEIGHT_W8A8) {
        const Int8Rows x = quantize(p, rows);
        return split(p, rows, {Work::PRODUCT_W8A8, work}, [&](int row_begin, int row_end, int panel_begin, int panel_end) {
            int8_.product(p, x, row_begin, row_end, panel_begin, panel_end);
        });
    }
    split(p, rows, {p.w->type == WEIGHT_I8 ? Work::PRODUCT_I8 : Work::PRODUCT_F32, work},
          [&](int row_begin, int row_end, int panel_begin, int panel_end) { k.product(p, row_begin, row_end, panel_begin, panel_end); });
}

// Quantize the inputs of a product into scratch memory of the calling thread.
Int8Rows Context::quantize(const Product& p, int rows) {
    const int cols = p.w->cols, stride = padded_columns(cols);
    Scratch& memory = scratch(current_thread);
    float* scales = memory.get(Scratch::INT8_SCALES, static_cast<size_t>(rows));
    auto* data = reinterpret_cast<uint8_t*>(memory.get(Scratch::INT8_ROWS, static_cast<size_t>(rows) * static_cast<size_t>(stride) / sizeof(float)));
    const double amount = static_cast<double>(rows) * cols;
    const int units = threads_ == 1 || nested_ || amount < MIN_PARALLEL ? 1 : std::min(rows, 2 * threads_);
    parallel(units, {Work::ROWS, amount}, [&](int unit, int) {
        const auto at = [&](int u) { return static_cast<int>(static_cast<int64_t>(rows) * u / units); };
        for (int i = at(unit); i < at(unit + 1); i++)
            scales[i] = int8_.quantize(p.a + i * p.lda, cols, stride, data + static_cast<ptrdiff_t>(i) * stride);
    });
    return {data, scales, stride};
}

void Context::split(const Product& p, int rows, Work work, const Part& part) {
    const int panels = (p.w->rows + PANEL - 1) / PANEL;
    if (threads_ == 1 || nested_ || work.amount < MIN_PARALLEL) return part(0, rows, 0, panels);
    // Split the rows if there are enough of them, else the panels. Large products have four units per thread, so that a
    // slow thread does not hold up the others; small ones have at most one.
    const int useful = std::min(threads_, std::max(2, static_cast<int>(work.amount / (2 * MIN_PARALLEL)) + 1));
    const int row_units = rows / (2 * k.row_tile), wanted = work.amount < 20 * MIN_PARALLEL ? useful : 4 * threads_;
    if (row_units >= wanted) {
        parallel(wanted, work, [&](int unit, int) {
            const auto at = [&](int u) { return static_cast<int>(static_cast<int64_t>(rows) * u / wanted); };
            part(at(unit), at(unit + 1), 0, panels);
        });
        return;
    }
    const int units = panels < wanted ? panels : wanted;
    parallel(units, work, [&](int unit, int) { part(0, rows, panels * unit / units, panels * (unit + 1) / units); });
}

}  // namespace shoal
