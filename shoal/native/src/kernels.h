// Arithmetic kernels, compiled once per instruction set, and the table through which the rest of the library calls them.
//
// Every output element is summed over k in ascending order, in one accumulator. A result therefore depends neither on
// the batch size nor on the tile shape, the number of threads or the vector width.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// Output columns per packed panel; weights are stored as [panels][cols][PANEL].
constexpr int PANEL = 16;

// W8A8 weights are int8 as well, in another order (int8_product.h): activations are quantized before the product.
enum WeightType : int32_t { WEIGHT_F32 = 0, WEIGHT_I8 = 1, WEIGHT_W8A8 = 2 };

// Packed weight [rows (outputs), cols (inputs)]. scales, bias and sums have panels * PANEL entries, or are null.
struct Matrix {
    const void* data;
    const float* scales;
    const float* bias;
    const int32_t* sums;  // W8A8: sum of each output's weights, times 128
    int32_t rows;
    int32_t cols;
    int32_t type;
    int32_t reserved;
};

// c[m, n] = (sum over k of a[m, k] * w[n, k]) * scale[n] + bias[n] + residual[m, n].
// The k axis is split into `taps` parts of equal length; part j of row m starts at a + m * lda + j * tap_stride.
struct Product {
    const Matrix* w;
    const float* a;
    ptrdiff_t lda;
    int32_t taps;
    ptrdiff_t tap_stride;
    float* c;
    ptrdiff_t ldc;
    const float* residual;
    ptrdiff_t ldr;
};

// Keys and values [blocks, block_size, kv_heads, head_dim] of one layer.
struct PagedCache {
    float* keys;
    float* values;
    int32_t block_size;
    int32_t kv_heads;
    int32_t head_dim;
};

struct Kernels {
    const char* name;
    int32_t row_tile;
    void (*product)(const Product& p, int row_begin, int row_end, int panel_begin, int panel_end);
    void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int n);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* out, int n);
    // Rotate pairs of x [n] in place by (cos, sin) pairs [n / 2].
    void (*rotate)(float* x, const float* table, int n);
    // Attention of the query heads of one KV head over tokens [begin, end); scores has room for group * (end - begin).
    void (*attention)(const float* q, const PagedCache& kv, const int32_t* table, int kv_head, int group, int begin,
                      int end, float* scores, float* out);
    // h[i] = silu(gate[i]) * up[i]
    void (*silu_mul)(const float* gate, const float* up, float* h, int n);
    void (*gelu)(float* x, int n);
    void (*tanh)(float* x, int n);
    // out = x + sin(alpha x)^2 * inverse, per channel, for rows [rows, channels]
    void (*snake)(const float* x, const float* alpha, const float* inverse, float* out, int rows, int channels);
    // Depthwise convolution: out[t, c] = bias[c] + sum over j of x[t + j, c] * weight[j, c]
    void (*depthwise)(const float* x, const float* weight, const float* bias, float* out, int rows, int channels,
                      int taps);
    void (*add)(const float* x, float* sum, int n);
};

extern const Kernels kernels_baseline;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

}  // namespace shoal
