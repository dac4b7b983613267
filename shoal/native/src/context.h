// Instruction-set dispatch, thread pool and scratch memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "int8_product.h"
#include "kernels.h"

namespace shoal {

// Scratch memory of one thread: buffers by number, which grow and are kept between calls.
class Scratch {
  public:
    static constexpr int BUFFERS = 14, INT8_ROWS = 12, INT8_SCALES = 13;  // the last two buffers are for W8A8 products
    // Return an uninitialized buffer of at least `count` floats. Throws std::bad_alloc.
    float* get(int number, size_t count);

  private:
    std::vector<float> buffers_[BUFFERS];
};

class Pool;

// Amount of work of one call. Calls of one kind and about the same amount take about the same time.
struct Work {
    enum Kind { PRODUCT_F32, PRODUCT_I8, PRODUCT_W8A8, ATTENTION, ROWS, STREAMS, KINDS };
    Kind kind;
    double amount;  // in units of the kind, such as multiplications
};

// Decides by measurement whether several threads are faster than one, for every kind and size of work. On cores that
// other processes use, a worker may be suspended in the middle of its unit while the caller waits. Threads are then
// slower than the caller alone, which computes such calls alone for a while.
class ThreadGovernor {
  public:
    // Whether to use the other threads for a call at `now`, in seconds. A few calls are refused, to be measured alone.
    bool allows(double now, Work work);
    // Account for a call that took `seconds`, with the other threads or alone.
    void record(double now, Work work, double seconds, bool threaded);

  private:
    static constexpr double WINDOW = 0.01, FIRST_PAUSE = 0.1, LONGEST_PAUSE = 2.0;  // seconds
    static constexpr double MIN_GAIN = 1.05;
    static constexpr int SIZES = 48, ALONE_EVERY = 64;
    struct Speed {
        double alone = 0;  // seconds per amount of work with one thread; 0 before the first measurement
        int calls = 0;     // since the last call alone
        double threaded_seconds = 0, alone_seconds = 0;  // threaded calls of this window: measured, predicted alone
        double alone_until = 0, pause = FIRST_PAUSE;     // end of the current pause of threads, length of the next one
    };
    Speed& speed(Work work);

    Speed speeds_[Work::KINDS * SIZES];
};

// Kernels of one instruction set and the threads that run them. One call at a time.
class Context {
  public:
    Context(const Kernels& kernels, const Int8Kernels& int8, int threads);
    ~Context();

    // Run unit(number, thread) for all units; a free thread takes the next one. Serial within another call.
    void parallel(int units, Work work, const std::function<void(int unit, int thread)>& unit);
    // Compute all rows of a product, on several threads when it is large enough.
    void product(const Product& p, int rows);

    Scratch& scratch(int thread) { return scratch_[static_cast<size_t>(thread)]; }
    int threads() const { return threads_; }
    // State of the pool, for tests: workers that sleep, and whether the caller sleeps until a worker's unit is done.
    int sleeping_workers() const;
    bool caller_sleeps() const;

    const Kernels& k;

  private:
    // Part of a product: rows [row_begin, row_end) of panels [panel_begin, panel_end).
    using Part = std::function<void(int row_begin, int row_end, int panel_begin, int panel_end)>;
    void split(const Product& p, int rows, Work work, const Part& part);
    Int8Rows quantize(const Product& p, int rows);

    const Int8Kernels& int8_;
    const int threads_;
    bool nested_ = false;
    ThreadGovernor governor_;
    std::vector<Scratch> scratch_;
    std::unique_ptr<Pool> pool_;
};

}  // namespace shoal
