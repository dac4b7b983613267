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

    const Kernels& k;

  private:
    const int threads_;
    bool nested_ = false;
    std::vector<Scratch> scratch_;
    std::unique_ptr<Pool> pool_;
};

}  // namespace shoal
