// Structures that Python fills, mirrored with ctypes in shoal/native/dual_ar.py, and one step of the model.
#pragma once

#include "context.h"

namespace shoal {

struct Block {
    Matrix wqkv, wo, w13, w2;
    const float* attention_norm;
    const float* ffn_norm;
    const float* q_norm;  // q_norm and k_norm are null without norms of queries and keys
    const float* k_norm;
};

struct Stack {
    const Block* blocks;
    const float* norm;
    const float* rope;  // [positions, head_dim / 2, 2]
    int32_t layers, dim, heads, kv_heads, head_dim, intermediate, positions;
    float eps;
};

struct Model {
    Stack slow, fast;
    Matrix head;        // the semantic tokens, then the stop token
    Matrix project_in;  // data is null when both transformers have the same width
    Matrix output;      // first residual_size rows of the fast head
    const float* embeddings;           // [vocab_size, slow dim]
    const float* codebook_embeddings;  // [codebooks * codebook_size, slow dim]
    const float* fast_embeddings;      // [codebook_size, fast dim]
    int32_t vocab_size, codebook_size, codebooks, semantic_begin, semantic_count, stop_id, window;
    int32_t scale_codebook_embeddings, norm_fast_input, uses_ras;
};

// KV cache and per-slot sampling state; the tensors belong to Python.
struct State {
    float* keys;  // [layers, blocks, block_size, kv_heads, head_dim]
    float* values;
    const int32_t* tables;  // [slots, table_width]
    const float* temperature;
    const float* top_p;
    const int64_t* top_k;
    const float* penalty;
    const uint8_t* whole_window;
    const int64_t* seed;
    int64_t* frame;
    int64_t* recent;       // [slots, 1 + codebooks, window]
    int64_t* last_tokens;  // [slots, 1 + codebooks]
    int64_t layer_stride;  // floats per layer of the KV cache
    int32_t block_size, table_width, slots, blocks;
};

// Rows of one step: known tokens of prompts and newest tokens of running sequences.
struct Step {
    const int64_t* tokens;  // [rows, 1 + codebooks]
    const int32_t* slots;
    const int32_t* positions;
    const int32_t* sampled;  // rows after which a frame is sampled
    int64_t* out;            // [samples, 1 + codebooks]
    int32_t rows, samples;
    // Attention weights over texts that are read with this step, if head_count and texts are not 0.
    const int32_t* heads;         // [head_count, 2]: layer and head
    const int32_t* text_samples;  // [texts]: index of the sampled row
    const int32_t* text_begins;   // [texts]: position of the first token
    const int32_t* text_lengths;
    float* weights;  // [texts, head_count, text_width]; every text adds up to one
    int32_t head_count, texts, text_width;
};

enum Status : int32_t { OK = 0, OUT_OF_RANGE = 1, OUT_OF_MEMORY = 2 };

Status run_step(Context& context, const Model& model, const State& state, const Step& step);

// Sample one frame entry from logits [size], as shoal/kernels/sampling/sample.py does.
struct SampleSettings {
    float temperature, top_p;
    int64_t top_k;
    uint32_t seed;
    int64_t frame;
    int lane;
};
int sample_token(const float* logits, int size, const SampleSettings& settings, float* scratch);

}  // namespace shoal
