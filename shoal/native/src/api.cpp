// C interface of the library, called through ctypes (shoal/native/library.py).
#include <cstring>
#include <new>
#include <system_error>

#include "codec.h"
#include "context.h"
#include "dual_ar.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#endif

using namespace shoal;

namespace {

struct InstructionSet {
    const char* name;
    const Kernels& kernels;
    const Int8Kernels& int8;
    bool (*supported)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// CPUID leaf 7, because __builtin_cpu_supports of older compilers does not know the newer features.
struct Features {
    unsigned a = 0, b = 0, c = 0, d = 0;
    explicit Features(unsigned subleaf) { __get_cpuid_count(7, subleaf, &a, &b, &c, &d); }
};

bool has_vnni256() { return has_avx2() && (Features(1).a >> 4 & 1); }
bool has_vnni512() { return has_avx512() && (Features(0).c >> 11 & 1); }

// On Linux a process has to request permission to use the tile registers.
bool has_amx() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return has_vnni512() && (Features(0).d >> 24 & 3) == 3 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
#elif defined(SHOAL_HAS_INT8_DOTPROD)
bool has_dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;  // every arm64 processor of Apple has it
#endif
}
#endif

// Widest first. Sets that the compiler does not know are not built (build.py).
const InstructionSet SETS[] = {
#if defined(__x86_64__)
#if defined(SHOAL_HAS_INT8_AMX)
    {"amx", kernels_avx512, int8_amx, has_amx},
#endif
#if defined(SHOAL_HAS_INT8_VNNI512)
    {"avx512_vnni", kernels_avx512, int8_vnni512, has_vnni512},
#endif
    {"avx512", kernels_avx512, int8_avx2, has_avx512},
#if defined(SHOAL_HAS_INT8_VNNI256)
    {"avx2_vnni", kernels_avx2, int8_vnni256, has_vnni256},
#endif
    {"avx2", kernels_avx2, int8_avx2, has_avx2},
#elif defined(SHOAL_HAS_INT8_DOTPROD)
    {"dotprod", kernels_baseline, int8_dotprod, has_dotprod},
#endif
    {"baseline", kernels_baseline, int8_baseline, always},
};

const InstructionSet* find(const char* name) {
    for (const InstructionSet& each : SETS)
        if (!std::strcmp(each.name, name) && each.supported()) return &each;
    return nullptr;
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

// Copy int8 weights [rows, cols] with any strides into panels of four columns at a time, filled with zeros.
void pack_w8a8(const int8_t* source, const int64_t* sizes, const int64_t* strides, int8_t* target) {
    const int64_t rows = sizes[0], cols = sizes[2], padded = padded_columns(static_cast<int>(cols));
    for (int64_t panel = 0; panel < rows; panel += PANEL)
        for (int64_t k = 0; k < padded; k += 4)
            for (int64_t r = panel; r < panel + PANEL; r++)
                for (int64_t i = k; i < k + 4; i++)
                    *target++ = r < rows && i < cols ? source[r * strides[0] + i * strides[2]] : int8_t{0};
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Increment it with every change of a structure or a function; library.py refuses other versions (ABI_VERSION).
EXPORT int32_t shoal_abi_version() { return 5; }

// Return whether this library and this CPU have an instruction set, such as avx512_vnni.
EXPORT int32_t shoal_supports(const char* name) { return find(name) != nullptr; }

// Return a context, or null for an unsupported instruction set or when memory or threads run out.
EXPORT void* shoal_context_new(const char* name, int32_t threads) {
    const InstructionSet* set = find(name);
    if (!set) return nullptr;
    try {
        return new Context(set->kernels, set->int8, threads < 1 ? 1 : threads);
    } catch (const std::exception&) {
        return nullptr;
    }
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

// Pack a weight [rows, outer, inner] (outer is 1 for W8A8) of floats or int8 into the form of a WeightType.
EXPORT void shoal_pack(const void* source, int32_t type, const int64_t* sizes, const int64_t* strides, void* target) {
    if (type == WEIGHT_W8A8)
        pack_w8a8(static_cast<const int8_t*>(source), sizes, strides, static_cast<int8_t*>(target));
    else if (type == WEIGHT_I8)
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
// `threaded` seconds if it is allowed threads, else `alone` seconds.
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
