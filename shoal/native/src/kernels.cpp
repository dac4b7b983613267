// Compiled once per instruction set: -DSHOAL_KERNELS=kernels_avx2 with the matching -m flags.
#include "kernels.h"
#include "tiles.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Internal linkage: the three builds of this file must not share inline functions.
namespace {

using shoal::Matrix;
using shoal::PagedCache;
using shoal::PANEL;
using shoal::Product;

#if defined(__AVX512F__)
constexpr int LANES = 16, ACCUMULATORS = 24, ROW_TILE = 8;
#elif defined(__AVX2__)
constexpr int LANES = 8, ACCUMULATORS = 12, ROW_TILE = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 24, ROW_TILE = 6;
#else
constexpr int LANES = 4, ACCUMULATORS = 8, ROW_TILE = 2;
#endif
constexpr int VECTORS = PANEL / LANES;  // per panel

typedef float Vec __attribute__((vector_size(4 * LANES)));

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

#if defined(__AVX2__)
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}
#endif

// Load one row of a panel as floats.
template <typename T>
inline void load_panel(const T* p, Vec* out) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) out[v] = load(p + v * LANES);
}

// Vector conversions: from the generic version compilers make one conversion per byte, slower than reading floats.
#if defined(__aarch64__)
inline void load_panel(const int8_t* p, Vec* out) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        out[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[i])));
        out[2 * i + 1] = vcvtq_f32_s32(vmovl_high_s16(halves[i]));
    }
}
#elif defined(__x86_64__) && !defined(__AVX2__)
inline void load_panel(const int8_t* p, Vec* out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i halves[2] = {_mm_unpacklo_epi8(bytes, bytes), _mm_unpackhi_epi8(bytes, bytes)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(halves[i], halves[i]), 24));
        out[2 * i + 1] = _mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(halves[i], halves[i]), 24));
    }
}
#elif !defined(__x86_64__)
inline void load_panel(const int8_t* p, Vec* out) {
    for (int i = 0; i < PANEL; i++) out[i / LANES][i % LANES] = p[i];
}
#endif

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Sixteen partial sums, reduced in one fixed order on every instruction set.
struct Sum16 {
    Vec v[VECTORS];
    Sum16() : v{} {}
    void add(const float* a, const float* b) {
        for (int i = 0; i < VECTORS; i++) v[i] += load(a + i * LANES) * load(b + i * LANES);
    }
    float total() const {
        float s[PANEL];
        std::memcpy(s, v, sizeof s);
        for (int half = PANEL / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) s[i] += s[i + half];
        return s[0];
    }
};

inline float dot(const float* a, const float* b, int n) {
    Sum16 sum;
    int i = 0;
    for (; i + PANEL <= n; i += PANEL) sum.add(a + i, b + i);
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return sum.total() + rest;
}

template <int MR, int P, typename T>
inline void tile(const Product& p, int row, int panel) {
    const int cols = p.w->cols, part = cols / p.taps;
    const T* weights = static_cast<const T*>(p.w->data) + static_cast<ptrdiff_t>(panel) * cols * PANEL;
    const ptrdiff_t panel_stride = static_cast<ptrdiff_t>(cols) * PANEL;
    Vec acc[MR][P * VECTORS] = {};
    for (int j = 0; j < p.taps; j++) {
        const float* a = p.a + row * p.lda + j * p.tap_stride;
        for (int k = 0; k < part; k++) {
            Vec b[P * VECTORS];
#pragma GCC unroll 16
            for (int q = 0; q < P; q++) load_panel(weights + q * panel_stride, b + q * VECTORS);
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
                const float x = a[m * p.lda + k];
#pragma GCC unroll 16
                for (int v = 0; v < P * VECTORS; v++) acc[m][v] += b[v] * x;
            }
            weights += PANEL;
        }
    }
    for (int q = 0; q < P; q++) {
        const int column = (panel + q) * PANEL, width = p.w->rows - column;
        for (int m = 0; m < MR; m++) {
            float values[PANEL];
            for (int v = 0; v < VECTORS; v++) {
                Vec y = acc[m][q * VECTORS + v];
                if (p.w->scales) y *= load(p.w->scales + column + v * LANES);
                if (p.w->bias) y += load(p.w->bias + column + v * LANES);
                store(values + v * LANES, y);
            }
            float* out = p.c + (row + m) * p.ldc + column;
            const float* residual = p.residual ? p.residual + (row + m) * p.ldr + column : nullptr;
            if (width >= PANEL) {
                for (int i = 0; i < PANEL; i++) out[i] = residual ? values[i] + residual[i] : values[i];
            } else {
                for (int i = 0; i < width; i++) out[i] = residual ? values[i] + residual[i] : values[i];
            }
        }
    }
}

template <typename T>
struct FloatTiles {
    static constexpr int ROWS = ROW_TILE, PANELS = ACCUMULATORS / VECTORS;
    const Product& p;
    template <int MR, int P>
    void run(int row, int panel) const {
        tile<MR, P, T>(p, row, panel);
    }
};

void product(const Product& p, int row_begin, int row_end, int panel_begin, int panel_end) {
    if (p.w->type == shoal::WEIGHT_I8)
        shoal::for_each_tile(FloatTiles<int8_t>{p}, row_begin, row_end, panel_begin, panel_end);
    else
        shoal::for_each_tile(FloatTiles<float>{p}, row_begin, row_end, panel_begin, panel_end);
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int n) {
    const float factor = 1.0f / std::sqrt(dot(x, x, n) / n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* out, int n) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += x[i];
    mean /= n;
    for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    const float m = static_cast<float>(mean), factor = static_cast<float>(1.0 / std::sqrt(square / n + eps));
    for (int i = 0; i < n; i++) out[i] = (x[i] - m) * factor * weight[i] + bias[i];
}

void rotate(float* x, const float* table, int n) {
    for (int i = 0; i < n; i += 2) {
        const float even = x[i], odd = x[i + 1], c = table[i], s = table[i + 1];
        x[i] = even * c - odd * s;
        x[i + 1] = odd * c + even * s;
    }
}

// Adding this (1.5 * 2^23) rounds a float of magnitude at most 2^22 to an integer, which is then in the low bits.
constexpr float ROUND = 12582912.0f;

// exp within 2 ulp. Written without branches, so that loops over it are vectorized.
inline float exp_approx(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int32_t power = static_cast<int32_t>(static_cast<uint32_t>(bits + 127) << 23);
    float scale;
    std::memcpy(&scale, &power, 4);
    return y * scale;
}

// sin(x)^2 has period pi: x is reduced to [-pi/2, pi/2], with pi split into three parts.
inline float sin_squared(float x) {
    const float n = (x * 0.318309886f + ROUND) - ROUND;
    float r = x - n * 3.140625f;
    r = r - n * 9.67502593994140625e-4f;
    r = r - n * 1.509957990978376432e-7f;
    const float s = r * r;
    float y = 2.6083159809786593541503e-06f;
    y = y * s - 0.0001981069071916863322258f;
    y = y * s + 0.00833307858556509017944336f;
    y = y * s - 0.166666597127914428710938f;
    y = y * (s * r) + r;
    return y * y;
}

void attention(const float* q, const PagedCache& kv, const int32_t* table, int kv_head, int group, int begin, int end,
               float* scores, float* out) {
    const int size = kv.block_size, d = kv.head_dim, length = end - begin;
    const ptrdiff_t step = static_cast<ptrdiff_t>(kv.kv_heads) * d, head = static_cast<ptrdiff_t>(kv_head) * d;
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    for (int at = begin; at < end;) {
        const int block = at / size, last = end < (block + 1) * size ? end : (block + 1) * size;
        const float* key = kv.keys + (static_cast<ptrdiff_t>(table[block]) * size + at % size) * step + head;
        for (; at < last; at++, key += step)
            for (int h = 0; h < group; h++) scores[h * length + at - begin] = dot(q + h * d, key, d) * scale;
    }
    for (int h = 0; h < group; h++) {
        float* row = scores + h * length;
        float top = row[0], sum = 0;
        for (int i = 1; i < length; i++) top = row[i] > top ? row[i] : top;
        for (int i = 0; i < length; i++) row[i] = exp_approx(row[i] - top);
        for (int i = 0; i < length; i++) sum += row[i];
        const float inverse = 1.0f / sum;
        float* o = out + h * d;
        for (int c = 0; c < d; c++) o[c] = 0;
        for (int c = 0; c < d; c += 4 * PANEL) {
            const int width = d - c < 4 * PANEL ? d - c : 4 * PANEL;
            float acc[4 * PANEL] = {};
            for (int at = begin; at < end;) {
                const int block = at / size, last = end < (block + 1) * size ? end : (block + 1) * size;
                const float* value = kv.values + (static_cast<ptrdiff_t>(table[block]) * size + at % size) * step + head + c;
                if (width == 4 * PANEL) {
                    for (; at < last; at++, value += step) {
                        const float w = row[at - begin];
                        for (int i = 0; i < 4 * PANEL; i++) acc[i] += value[i] * w;
                    }
                } else {
                    for (; at < last; at++, value += step) {
                        const float w = row[at - begin];
                        for (int i = 0; i < width; i++) acc[i] += value[i] * w;
                    }
                }
            }
            for (int i = 0; i < width; i++) o[c + i] = acc[i] * inverse;
        }
    }
}

void silu_mul(const float* gate, const float* up, float* h, int n) {
    for (int i = 0; i < n; i++) h[i] = gate[i] / (1.0f + exp_approx(-gate[i])) * up[i];
}

// x * Phi(x), with erf within 2e-7 (Abramowitz and Stegun 7.1.26).
void gelu(float* x, int n) {
    for (int i = 0; i < n; i++) {
        const float z = x[i] * 0.70710678f, a = z < 0 ? -z : z, t = 1.0f / (1.0f + 0.3275911f * a);
        float y = 1.061405429f;
        y = y * t - 1.453152027f;
        y = y * t + 1.421413741f;
        y = y * t - 0.284496736f;
        y = y * t + 0.254829592f;
        const float tail = y * t * exp_approx(-a * a);  // 1 - erf(a)
        x[i] = x[i] * (z < 0 ? 0.5f * tail : 1.0f - 0.5f * tail);
    }
}

void tanh_rows(float* x, int n) {
    for (int i = 0; i < n; i++) x[i] = 1.0f - 2.0f / (exp_approx(2.0f * x[i]) + 1.0f);
}

void snake(const float* x, const float* alpha, const float* inverse, float* out, int rows, int channels) {
    for (int t = 0; t < rows; t++, x += channels, out += channels)
        for (int c = 0; c < channels; c++) out[c] = x[c] + sin_squared(alpha[c] * x[c]) * inverse[c];
}

void depthwise(const float* x, const float* weight, const float* bias, float* out, int rows, int channels, int taps) {
    for (int t = 0; t < rows; t++, x += channels, out += channels) {
        for (int c = 0; c < channels; c++) out[c] = 0;
        for (int j = 0; j < taps; j++)
            for (int c = 0; c < channels; c++) out[c] += x[j * channels + c] * weight[j * channels + c];
        for (int c = 0; c < channels; c++) out[c] += bias[c];
    }
}

void add(const float* x, float* sum, int n) {
    for (int i = 0; i < n; i++) sum[i] += x[i];
}

}  // namespace

#define TEXT_OF(name) #name
#define NAME_OF(name) TEXT_OF(name)

namespace shoal {
const Kernels SHOAL_KERNELS = {NAME_OF(SHOAL_KERNELS), ROW_TILE, product, rms_norm, layer_norm, rotate, attention,
                               silu_mul, gelu, tanh_rows, snake, depthwise, add};
}  // namespace shoal
