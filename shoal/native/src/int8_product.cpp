// Products of int8 activations and int8 weights, compiled once per instruction set: -DSHOAL_INT8=int8_avx2 with the
// matching -m flags. Sums are integers, so every instruction set, tile and batch size gives the same bits.
#include "int8_product.h"
#include "tiles.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Internal linkage: the builds of this file must not share inline functions.
namespace {

using shoal::Int8Rows;
using shoal::K_STEP;
using shoal::Matrix;
using shoal::PANEL;
using shoal::Product;

// An instruction set: int32 vectors, vectors of weights (4 inputs of each lane) and the product of both with 4 inputs.
#if defined(SHOAL_INT8_VNNI512)
constexpr int LANES = 16, ACCUMULATORS = 24, ROW_TILE = 8;
constexpr uint8_t OFFSET = 128;  // activations are unsigned
typedef __m512i Ints;
typedef __m512i Weights;
inline Ints zero() { return _mm512_setzero_si512(); }
inline Weights load(const int8_t* p) { return _mm512_loadu_si512(p); }
inline Ints broadcast(int32_t four) { return _mm512_set1_epi32(four); }
// As assembly: compilers reload the weights for every row and copy the accumulators around the intrinsic.
inline Ints dot(Ints sum, Weights w, Ints a) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
    return sum;
}
#elif defined(SHOAL_INT8_VNNI256)
constexpr int LANES = 8, ACCUMULATORS = 12, ROW_TILE = 6;
constexpr uint8_t OFFSET = 128;
typedef __m256i Ints;
typedef __m256i Weights;
inline Ints zero() { return _mm256_setzero_si256(); }
inline Weights load(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints broadcast(int32_t four) { return _mm256_set1_epi32(four); }
inline Ints dot(Ints sum, Weights w, Ints a) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
    return sum;
}
#elif defined(__AVX2__)
constexpr int LANES = 8, ACCUMULATORS = 8, ROW_TILE = 4;
constexpr uint8_t OFFSET = 0;
typedef __m256i Ints;
struct Weights { __m256i value, magnitude; };
inline Ints zero() { return _mm256_setzero_si256(); }
inline Weights load(const int8_t* p) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {value, _mm256_abs_epi8(value)};
}
inline Ints broadcast(int32_t four) { return _mm256_set1_epi32(four); }
// |w| is at most 128 and |a| at most 127, so the 16-bit sums of two products do not saturate.
inline Ints dot(Ints sum, const Weights& w, Ints a) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(a, w.value));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 16, ROW_TILE = 4;
constexpr uint8_t OFFSET = 0;
typedef int32x4_t Ints;
typedef int8x16_t Weights;
inline Ints zero() { return vdupq_n_s32(0); }
inline Weights load(const int8_t* p) { return vld1q_s8(p); }
inline int8x16_t broadcast(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
#if defined(__ARM_FEATURE_DOTPROD)
inline Ints dot(Ints sum, Weights w, int8x16_t a) { return vdotq_s32(sum, w, a); }
#else
inline Ints dot(Ints sum, Weights w, int8x16_t a) {
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)));
    return vaddq_s32(sum, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(w, a))));
}
#endif
#else
constexpr int LANES = 4, ACCUMULATORS = 4, ROW_TILE = 1;
constexpr uint8_t OFFSET = 0;
struct Ints { int32_t v[4]; };
struct Weights { const int8_t* p; };
inline Ints zero() { return {}; }
inline Weights load(const int8_t* p) { return {p}; }
inline int32_t broadcast(int32_t four) { return four; }
inline Ints dot(Ints sum, Weights w, int32_t four) {
    int8_t a[4];
    std::memcpy(a, &four, 4);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum.v[i] += w.p[4 * i + j] * a[j];
    return sum;
}
#endif
constexpr int VECTORS = PANEL / LANES;  // per panel

// Nearest integer, ties to even, as the vector instructions round.
inline int32_t nearest(float x) {
#if defined(__x86_64__)
    return _mm_cvtss_si32(_mm_set_ss(x));
#else
    return static_cast<int32_t>(std::nearbyint(x));
#endif
}

// Store 16 floats, multiplied and rounded, as bytes.
inline void round16(const float* x, float factor, uint8_t* out) {
#if defined(__AVX2__)
    const __m256 f = _mm256_set1_ps(factor);
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), f));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), f));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(OFFSET))));
#elif defined(__aarch64__)
    int16x8_t half[2];
    for (int i = 0; i < 2; i++) {
        const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8 * i), factor));
        const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8 * i + 4), factor));
        half[i] = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
    }
    vst1q_s8(reinterpret_cast<int8_t*>(out), vcombine_s8(vqmovn_s16(half[0]), vqmovn_s16(half[1])));
#else
    for (int i = 0; i < 16; i++) out[i] = static_cast<uint8_t>(nearest(x[i] * factor));
#endif
}

inline float largest(const float* x, int n) {
    float top[PANEL] = {};
    int i = 0;
    for (; i + PANEL <= n; i += PANEL)
        for (int j = 0; j < PANEL; j++) top[j] = std::fabs(x[i + j]) > top[j] ? std::fabs(x[i + j]) : top[j];
    for (; i < n; i++) top[0] = std::fabs(x[i]) > top[0] ? std::fabs(x[i]) : top[0];
    for (int j = 1; j < PANEL; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
    return top[0];
}

// Quantizes a row and returns its scale. A row with an infinity becomes zeros with an infinite scale, so that its
// outputs are NaN.
float quantize(const float* x, int n, int padded, uint8_t* out) {
    const float top = largest(x, n), factor = top > 0 && std::isfinite(top) ? 127.0f / top : 0.0f;
    int i = 0;
    for (; i + PANEL <= n && factor > 0; i += PANEL) round16(x + i, factor, out + i);
    for (; i < n && factor > 0; i++) out[i] = static_cast<uint8_t>(nearest(x[i] * factor) ^ OFFSET);
    std::memset(out + i, OFFSET, static_cast<size_t>(padded - i));
    return top / 127.0f;
}

// Scale sums [PANEL] of a row and write the columns that exist.
__attribute__((noinline)) void finish(const Product& p, const int32_t* sums, float scale, int row, int column) {
    const int width = p.w->rows - column < PANEL ? p.w->rows - column : PANEL;
    float values[PANEL];
    for (int i = 0; i < PANEL; i++) {
        const int32_t sum = OFFSET ? sums[i] - p.w->sums[column + i] : sums[i];
        values[i] = static_cast<float>(sum) * scale * p.w->scales[column + i];
    }
    if (p.w->bias)
        for (int i = 0; i < PANEL; i++) values[i] += p.w->bias[column + i];
    float* out = p.c + row * p.ldc + column;
    if (!p.residual) {
        std::memcpy(out, values, sizeof(float) * static_cast<size_t>(width));
        return;
    }
    const float* residual = p.residual + row * p.ldr + column;
    for (int i = 0; i < width; i++) out[i] = values[i] + residual[i];
}

template <int MR, int P>
inline void tile(const Product& p, const Int8Rows& x, int row, int panel) {
    const ptrdiff_t panel_stride = static_cast<ptrdiff_t>(x.stride) * PANEL;
    const int8_t* weights = static_cast<const int8_t*>(p.w->data) + panel * panel_stride;
    const uint8_t* a = x.data + static_cast<ptrdiff_t>(row) * x.stride;
    Ints acc[MR][P * VECTORS];
    for (int m = 0; m < MR; m++)
        for (int v = 0; v < P * VECTORS; v++) acc[m][v] = zero();
    for (int k = 0; k < x.stride; k += 4, weights += 4 * PANEL) {
        Weights b[P * VECTORS];
#pragma GCC unroll 16
        for (int q = 0; q < P; q++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) b[q * VECTORS + v] = load(weights + q * panel_stride + v * 4 * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            int32_t four;
            std::memcpy(&four, a + static_cast<ptrdiff_t>(m) * x.stride + k, 4);
            const auto inputs = broadcast(four);
#pragma GCC unroll 16
            for (int v = 0; v < P * VECTORS; v++) acc[m][v] = dot(acc[m][v], b[v], inputs);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < P; q++)
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            int32_t sums[PANEL];
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) {
                const Ints some = acc[m][q * VECTORS + v];  // a copy: an accumulator whose address is taken is spilled
                std::memcpy(sums + v * LANES, &some, sizeof some);
            }
            finish(p, sums, x.scales[row + m], row + m, (panel + q) * PANEL);
        }
}

struct Int8Tiles {
    static constexpr int ROWS = ROW_TILE, PANELS = ACCUMULATORS / VECTORS;
    const Product& p;
    const Int8Rows& x;
    template <int MR, int P>
    void run(int row, int panel) const {
        tile<MR, P>(p, x, row, panel);
    }
};

void by_vectors(const Product& p, const Int8Rows& x, int row_begin, int row_end, int panel_begin, int panel_end) {
    shoal::for_each_tile(Int8Tiles{p, x}, row_begin, row_end, panel_begin, panel_end);
}

#if defined(__AMX_INT8__)
constexpr int TILE_ROWS = 16, MIN_TILE_ROWS = 6;  // fewer rows are faster by vectors

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// Computes at most 16 rows and P (one or two) panels. AMX tiles: 0 and 1 sums, 2 the rows, 3 and 4 the weights.
template <int P>
inline void matrix_tile(const Product& p, const Int8Rows& x, int row, int rows, int panel) {
    const ptrdiff_t panel_stride = static_cast<ptrdiff_t>(x.stride) * PANEL;
    const int8_t* weights = static_cast<const int8_t*>(p.w->data) + panel * panel_stride;
    const uint8_t* a = x.data + static_cast<ptrdiff_t>(row) * x.stride;
    _tile_zero(0);
    if (P > 1) _tile_zero(1);
    for (int k = 0; k < x.stride; k += K_STEP) {
        _tile_loadd(2, a + k, x.stride);
        _tile_loadd(3, weights + static_cast<ptrdiff_t>(k) * PANEL, 4 * PANEL);
        _tile_dpbusd(0, 2, 3);
        if (P == 1) continue;
        _tile_loadd(4, weights + panel_stride + static_cast<ptrdiff_t>(k) * PANEL, 4 * PANEL);
        _tile_dpbusd(1, 2, 4);
    }
    int32_t sums[2][TILE_ROWS][PANEL];
    _tile_stored(0, sums[0], sizeof sums[0][0]);
    if (P > 1) _tile_stored(1, sums[1], sizeof sums[1][0]);
    for (int q = 0; q < P; q++)
        for (int m = 0; m < rows; m++) finish(p, sums[q][m], x.scales[row + m], row + m, (panel + q) * PANEL);
}

void configure(int rows) {
    TileConfig config;
    for (int i = 0; i < 5; i++) {
        config.bytes_per_row[i] = 64;
        config.rows[i] = static_cast<uint8_t>(i < 3 ? rows : 16);
    }
    // GCC assumes that the instruction reads only eight bytes of the configuration, and could drop the other stores.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

void product(const Product& p, const Int8Rows& x, int row_begin, int row_end, int panel_begin, int panel_end) {
    const int rest = (row_end - row_begin) % TILE_ROWS, whole = row_end - rest;
    for (int part = 0; part < 2; part++) {
        const int from = part ? whole : row_begin, to = part ? row_end : whole, rows = part ? rest : TILE_ROWS;
        if (from == to) continue;
        if (rows < MIN_TILE_ROWS) {
            by_vectors(p, x, from, to, panel_begin, panel_end);
            continue;
        }
        configure(rows);
        for (int panel = panel_begin; panel < panel_end; panel += 2)
            for (int row = from; row < to; row += rows)
                if (panel + 1 < panel_end)
                    matrix_tile<2>(p, x, row, rows, panel);
                else
                    matrix_tile<1>(p, x, row, rows, panel);
        _tile_release();
    }
}
#else
constexpr auto product = by_vectors;
#endif

}  // namespace

namespace shoal {
extern const Int8Kernels SHOAL_INT8;
const Int8Kernels SHOAL_INT8 = {quantize, product, OFFSET};
}  // namespace shoal
