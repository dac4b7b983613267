// C interface of the library, called through ctypes (shoal/native/library.py).
#include <cstring>
#include <new>
#include <system_error>

#include "codec.h"
#include "context.h"
#include "dual_ar.h"

using namespace shoal;

namespace {

const Kernels* supported(int which) {
    switch (which) {
#if defined(__x86_64__)
        case 0:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                       ? &kernels_avx512
                       : nullptr;
        case 1:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2 : nullptr;
#endif
        case 2:
            return &kernels_baseline;
        default:
            return nullptr;
    }
}

// Copy weights [rows, outer, inner] with any strides (in elements) into panels; the last panel is filled with zeros.
template <typename T>
void pack(const T* source, const int64_t* sizes, const int64_t* strides, T* target) {
    const int64_t rows = sizes[0], outer = sizes[1], inner = sizes[2];
    for (int64_t panel = 0; panel < rows; panel += PANEL)
        for (int64_t o = 0; o < outer; o++)
            for (int64_t i = 0; i < inner; i++, target += PANEL) {
                const T* from = source + panel * strides[0] + o * strides[1] + i * strides[2];
                const int64_t count = rows - panel < PANEL ? rows - panel : PANEL;
                for (int64_t r = 0; r < count; r++) target[r] = from[r * strides[0]];
                for (int64_t r = count; r < PANEL; r++) target[r] = 0;
            }
}

const char* const NAMES[] = {"avx512", "avx2", "baseline"};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Changed with every change of a structure or a function; the Python side refuses other versions.
EXPORT int32_t shoal_abi_version() { return 4; }

// Return whether this CPU has an instruction set: avx512, avx2 or baseline.
EXPORT int32_t shoal_supports(const char* name) {
    for (int i = 0; i < 3; i++)
        if (!std::strcmp(NAMES[i], name)) return supported(i) != nullptr;
    return 0;
}

// Return a context, or null for an unsupported instruction set or when memory or threads run out.
EXPORT void* shoal_context_new(const char* name, int32_t threads) {
    for (int i = 0; i < 3; i++)
        if (const Kernels* kernels = supported(i); kernels && !std::strcmp(NAMES[i], name)) try {
                return new Context(*kernels, threads < 1 ? 1 : threads);
            } catch (const std::exception&) {
                return nullptr;
            }
    return nullptr;
}

EXPORT void shoal_context_free(void* context) { delete static_cast<Context*>(context); }

EXPORT int32_t shoal_step(void* context, const Model* model, const State* state, const Step* step) {
    try {
        return run_step(*static_cast<Context*>(context), *model, *state, *step);
    } catch (const std::exception&) {
        return OUT_OF_MEMORY;
    }
}

// Decode the next chunk of several streams.
EXPORT int32_t shoal_decode(void* context, const Codec* codec, const Chunks* chunks) {
    try {
        return decode_chunks(*static_cast<Context*>(context), *codec, *chunks);
    } catch (const std::exception&) {
        return OUT_OF_MEMORY;
    }
}

// Pack a weight [rows, outer, inner] of floats or int8 (WeightType) into `target`.
EXPORT void shoal_pack(const void* source, int32_t type, const int64_t* sizes, const int64_t* strides, void* target) {
    if (type == WEIGHT_I8)
        pack(static_cast<const int8_t*>(source), sizes, strides, static_cast<int8_t*>(target));
    else
        pack(static_cast<const float*>(source), sizes, strides, static_cast<float*>(target));
}

// Sample one token from logits [size]; for tests.
EXPORT int32_t shoal_sample(const float* logits, int32_t size, float temperature, float top_p, int64_t top_k, uint32_t seed,
                            int64_t frame, int32_t lane) {
    std::vector<float> scratch(static_cast<size_t>(size));
    return sample_token(logits, size, {temperature, top_p, top_k, seed, frame, lane}, scratch.data());
}

// Compute one product of x [rows, cols] with a packed matrix -> [rows, matrix rows]; for tests and measurements.
EXPORT void shoal_product(void* context, const Matrix* w, const float* x, int32_t rows, float* out) {
    static_cast<Context*>(context)->product({w, x, w->cols, 1, 0, out, w->rows, nullptr, 0}, rows);
}

// Run unit(number, thread) for all units on the threads of a context; for tests.
EXPORT void shoal_parallel(void* context, int32_t units, void (*unit)(int32_t, int32_t)) {
    static_cast<Context*>(context)->parallel(units, {Work::ROWS, 1.0}, [&](int number, int thread) { unit(number, thread); });
}

// Return how many workers sleep, and in `caller` whether the calling thread sleeps until they finish; for tests.
EXPORT int32_t shoal_sleeping(void* context, int32_t* caller) {
    *caller = static_cast<Context*>(context)->caller_sleeps();
    return static_cast<Context*>(context)->sleeping_workers();
}

// Feed calls to a new governor and write whether it allows threads for each; for tests. A call begins at `now` and takes
// `threaded` seconds with the threads it is allowed, else `alone` seconds.
EXPORT void shoal_govern(int32_t calls, const double* now, const double* amount, const double* alone, const double* threaded,
                         int32_t* allowed) {
    ThreadGovernor governor;
    for (int i = 0; i < calls; i++) {
        const Work work = {Work::PRODUCT_F32, amount[i]};
        allowed[i] = governor.allows(now[i], work);
        const double seconds = allowed[i] ? threaded[i] : alone[i];
        governor.record(now[i] + seconds, work, seconds, allowed[i]);
    }
}
