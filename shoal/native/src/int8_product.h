// Products of activations that are quantized row by row to int8 with int8 weights. The weights are packed as
// [panels][cols / 4][PANEL][4], with zeros up to a multiple of K_STEP columns.
#pragma once

#include "kernels.h"

namespace shoal {

constexpr int K_STEP = 64;  // columns per step of the widest instructions

// Columns of a packed row of int8 activations and weights.
constexpr int padded_columns(int cols) { return (cols + K_STEP - 1) / K_STEP * K_STEP; }

// Quantized activations: x[m, k] = (data[m * stride + k] - offset) * scales[m].
struct Int8Rows {
    const uint8_t* data;
    const float* scales;
    int32_t stride;
};

struct Int8Kernels {
    // Quantize a row of n floats to `padded` bytes and return its scale.
    float (*quantize)(const float* x, int n, int padded, uint8_t* out);
    // Compute as Kernels::product does, with p.a replaced by x.
    void (*product)(const Product& p, const Int8Rows& x, int row_begin, int row_end, int panel_begin, int panel_end);
    int32_t offset;  // added to the activations; `product` subtracts offset times each output's sum of weights again
};

extern const Int8Kernels int8_baseline;
extern const Int8Kernels int8_dotprod;
extern const Int8Kernels int8_avx2;
extern const Int8Kernels int8_vnni256;
extern const Int8Kernels int8_vnni512;
extern const Int8Kernels int8_amx;

}  // namespace shoal
