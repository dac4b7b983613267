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

const char* const NAMES[] = {"avx512", "avx2", "baseline"};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Changed with every change of a structure or a function; the Python side refuses other versions.
EXPORT int32_t shoal_abi_version() { return 1; }

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
