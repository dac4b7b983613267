// Streaming decoder of the codec: a list of causal layers that Python fills in (shoal/native/codec.py), and its state.
#pragma once

#include "context.h"

namespace shoal {

enum LayerKind : int32_t {
    SNAKE = 0,        // alpha, inverse
    CONV = 1,         // a: convolution with `taps` taps, `dilation` apart
    UPSAMPLE = 2,     // a: transposed convolution, `stride` outputs per input from the last `taps` inputs
    RESIDUAL = 3,     // x + conv(snake(conv(snake(x)))): alpha, inverse, a; alpha2, inverse2, b
    CONVNEXT = 4,     // depthwise weights and bias in alpha and inverse, norm in alpha2 and inverse2, a, b
    ATTENTION = 5,    // norm in alpha, a = wqkv, b = wo; `heads`, `head_dim`, `window`, rotary table in inverse
    FEED_FORWARD = 6, // norm in alpha, a = gate and up, b = down
    RMS_NORM = 7,     // weight in alpha
    TANH = 8,
};

struct Layer {
    int32_t kind, channels, taps, dilation, stride, heads, head_dim, window;
    int64_t state;  // offset of this layer's left context in the state of a slot, in floats
    Matrix a, b;
    const float *alpha, *inverse, *alpha2, *inverse2;
    float eps;
    int32_t reserved;
};

// Entries [size, dim] of one codebook, and their projection into the latent space.
struct Codebook {
    const float* entries;
    Matrix projection;
    int32_t size, dim;
};

struct Codec {
    const Layer* layers;
    const Codebook* books;
    int64_t state_size;  // floats per slot
    int32_t count, codebooks, dim, frame_length, max_steps;
};

// Chunks of several streams. Row i holds frames[i] frames: codes[i] is [codebooks, stride], samples go to out[i].
struct Chunks {
    const int64_t* codes;
    const int32_t* frames;
    const int32_t* slots;
    float* state;          // [slots, state_size]
    int64_t* positions;    // frames decoded so far, per slot
    float* out;            // [count, out_stride]
    int64_t out_stride;
    int32_t count, code_stride;
};

int32_t decode_chunks(Context& context, const Codec& codec, const Chunks& chunks);

}  // namespace shoal
