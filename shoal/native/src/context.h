// Instruction-set dispatch, thread pool and scratch memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "kernels.h"

namespace shoal {

// Scratch memory of one thread: buffers by number, which grow and are kept between calls.
class Scratch {
  public:
    static constexpr int BUFFERS = 12;
    // Return an uninitialized buffer of at least `count` floats. Throws std::bad_alloc.
    float* get(int number, size_t count);

  private:
    std::vector<float> buffers_[BUFFERS];
};

class Pool;

// Decides whether a second thread is worth it, by how long callers wait for the others. On a core that other processes
// use, a thread can be suspended in the middle of its part; the caller then works alone for a while.
class ThreadGovernor {
  public:
    // Whether to use the other threads at `now`, in seconds.
    bool allows(double now) const { return now >= alone_until_; }
    // Account for a call in which the caller worked and then waited, in seconds.
    void record(double now, double worked, double waited);

  private:
    static constexpr double WINDOW = 0.005, FIRST_PAUSE = 0.1, LONGEST_PAUSE = 2.0;
    double worked_ = 0, waited_ = 0, alone_until_ = 0, pause_ = FIRST_PAUSE;
};

// Kernels of one instruction set and the threads that run them. One call at a time.
class Context {
  public:
    Context(const Kernels& kernels, int threads);
    ~Context();

    // Run work(unit, thread) for all units; a free thread takes the next unit. Serial within another call.
    void parallel(int units, const std::function<void(int unit, int thread)>& work);
    // Compute all rows of a product, on several threads when it is large enough.
    void product(const Product& p, int rows);

    Scratch& scratch(int thread) { return scratch_[static_cast<size_t>(thread)]; }
    int threads() const { return threads_; }
    // State of the pool, for tests: workers that sleep, and whether the caller sleeps until a worker's unit is done.
    int sleeping_workers() const;
    bool caller_sleeps() const;

    const Kernels& k;

  private:
    const int threads_;
    bool nested_ = false;
    ThreadGovernor governor_;
    std::vector<Scratch> scratch_;
    std::unique_ptr<Pool> pool_;
};

}  // namespace shoal
