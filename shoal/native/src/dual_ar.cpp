// One step of the dual autoregressive model: the slow transformer over all rows, then one frame per sampled row.
#include "dual_ar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace shoal {

namespace {

enum Buffer { X, NORMED, QKV, MIXED, GATE, HIDDEN, LOGITS, SCORES, FAST_X, FAST_KEYS, FAST_VALUES, TEXT };

constexpr float RAS_TEMPERATURE = 1.0f, RAS_TOP_P = 0.9f;

// Rows of a pass and their place in the KV cache: row i is position positions[i] of the sequence with block table
// tables[i].
struct Rows {
    int count;
    const int32_t* positions;
    const int32_t* const* tables;
};

struct Runner {
    Context& context;
    const Model& model;
    const State& state;
    const Step& step;
    const int width;  // entries of a token: id and codes

    Runner(Context& c, const Model& m, const State& s, const Step& t)
        : context(c), model(m), state(s), step(t), width(1 + m.codebooks) {}

    float* buffer(Buffer which, size_t count) { return context.scratch(0).get(which, count); }

    Status check() const {
        for (int i = 0; i < step.rows; i++) {
            const int64_t* token = step.tokens + static_cast<ptrdiff_t>(i) * width;
            if (token[0] < 0 || token[0] >= model.vocab_size) return OUT_OF_RANGE;
            for (int c = 1; c < width; c++)
                if (token[c] < 0 || token[c] >= model.codebook_size) return OUT_OF_RANGE;
            const int position = step.positions[i], slot = step.slots[i];
            if (slot < 0 || slot >= state.slots || position < 0 || position >= model.slow.positions) return OUT_OF_RANGE;
            if (position / state.block_size >= state.table_width) return OUT_OF_RANGE;
        }
        return check_texts();
    }

    Status check_texts() const {
        for (int i = 0; i < step.head_count; i++) {
            const int layer = step.heads[2 * i], head = step.heads[2 * i + 1];
            if (layer < 0 || layer >= model.slow.layers || head < 0 || head >= model.slow.heads) return OUT_OF_RANGE;
        }
        for (int i = 0; i < step.texts; i++) {
            const int sample = step.text_samples[i], begin = step.text_begins[i], length = step.text_lengths[i];
            if (sample < 0 || sample >= step.samples || begin < 0 || length < 1 || length > step.text_width) return OUT_OF_RANGE;
            if (begin > step.positions[step.sampled[sample]] + 1 - length) return OUT_OF_RANGE;
        }
        return OK;
    }

    void embed(float* x) {
        const int dim = model.slow.dim;
        const float factor = 1.0f / std::sqrt(static_cast<float>(width));
        for (int i = 0; i < step.rows; i++, x += dim) {
            const int64_t* token = step.tokens + static_cast<ptrdiff_t>(i) * width;
            std::memcpy(x, model.embeddings + token[0] * dim, sizeof(float) * static_cast<size_t>(dim));
            if (token[0] < model.semantic_begin || token[0] >= model.semantic_begin + model.semantic_count) continue;
            for (int c = 0; c < model.codebooks; c++)
                context.k.add(model.codebook_embeddings + (c * static_cast<int64_t>(model.codebook_size) + token[1 + c]) * dim, x, dim);
            if (model.scale_codebook_embeddings)
                for (int d = 0; d < dim; d++) x[d] *= factor;
        }
    }

    void norm(const float* x, const float* weight, float eps, float* out, int rows, int dim) {
        for (int i = 0; i < rows; i++) context.k.rms_norm(x + i * dim, weight, eps, out + i * dim, dim);
    }

    void multiply(const Matrix& w, const float* a, float* c, int rows, const float* residual = nullptr) {
        context.product({&w, a, w.cols, 1, 0, c, w.rows, residual, w.rows}, rows);
    }

    // Norm and rotate queries and keys, and store keys and values.
    void rope_and_cache(const Stack& s, const Block& block, float* qkv, const PagedCache& kv, const Rows& rows, int i) {
        const int d = s.head_dim, heads = s.heads, kv_heads = s.kv_heads;
        float* row = qkv + static_cast<ptrdiff_t>(i) * (heads + 2 * kv_heads) * d;
        const float* table = s.rope + static_cast<ptrdiff_t>(rows.positions[i]) * d;
        for (int h = 0; h < heads + kv_heads; h++) {
            const float* weight = h < heads ? block.q_norm : block.k_norm;
            if (weight) context.k.rms_norm(row + h * d, weight, s.eps, row + h * d, d);
            context.k.rotate(row + h * d, table, d);
        }
        const int position = rows.positions[i];
        const ptrdiff_t at = (static_cast<ptrdiff_t>(rows.tables[i][position / kv.block_size]) * kv.block_size +
                              position % kv.block_size) * kv_heads * d;
        const size_t bytes = sizeof(float) * static_cast<size_t>(kv_heads * d);
        std::memcpy(kv.keys + at, row + heads * d, bytes);
        std::memcpy(kv.values + at, row + (heads + kv_heads) * d, bytes);
    }

    void attend(const Stack& s, const float* qkv, const PagedCache& kv, const Rows& rows, const int32_t* kept, int count,
                float* mixed) {
        const int d = s.head_dim, group = s.heads / s.kv_heads, stride = (s.heads + 2 * s.kv_heads) * d;
        int longest = 0;
        int64_t total = 0;
        for (int i = 0; i < count; i++) {
            longest = std::max(longest, rows.positions[kept[i]] + 1);
            total += rows.positions[kept[i]] + 1;
        }
        const auto one = [&](int unit, int thread) {
            const int i = unit / s.kv_heads, head = unit % s.kv_heads, row = kept[i];
            float* scores = context.scratch(thread).get(SCORES, static_cast<size_t>(group) * static_cast<size_t>(longest));
            context.k.attention(qkv + static_cast<ptrdiff_t>(row) * stride + head * group * d, kv, rows.tables[row], head,
                                group, 0, rows.positions[row] + 1, scores,
                                mixed + static_cast<ptrdiff_t>(i) * s.heads * d + head * group * d);
        };
        const int units = count * s.kv_heads;
        if (total * s.heads * d < 50000)
            for (int unit = 0; unit < units; unit++) one(unit, 0);
        else
            context.parallel(units, {Work::ATTENTION, static_cast<double>(total * s.heads * d)}, one);
    }

    // Write the attention weights of the chosen heads of a layer over the texts. Changes neither activations nor cache.
    void read_texts(const Stack& s, int layer, const float* qkv, const PagedCache& kv, const Rows& rows) {
        const int d = s.head_dim, group = s.heads / s.kv_heads, stride = (s.heads + 2 * s.kv_heads) * d;
        float* out = buffer(TEXT, static_cast<size_t>(d));
        for (int h = 0; h < step.head_count; h++) {
            if (step.heads[2 * h] != layer) continue;
            const int head = step.heads[2 * h + 1];
            for (int i = 0; i < step.texts; i++) {
                const int row = step.sampled[step.text_samples[i]], begin = step.text_begins[i], length = step.text_lengths[i];
                float* weights = step.weights + (static_cast<ptrdiff_t>(i) * step.head_count + h) * step.text_width;
                // The kernel stores the exponentials of the scores in its scratch memory, here `weights`.
                context.k.attention(qkv + static_cast<ptrdiff_t>(row) * stride + head * d, kv, rows.tables[row], head / group,
                                    1, begin, begin + length, weights, out);
                const float sum = std::accumulate(weights, weights + length, 0.0f);
                for (int t = 0; t < length; t++) weights[t] /= sum;
            }
        }
    }

    // Run all blocks over x [rows, dim] in place. Of the last block only the rows `kept` are computed; they end up
    // first in x, in that order.
    void blocks(const Stack& s, float* x, const PagedCache& cache, ptrdiff_t layer_stride, const Rows& rows,
                const std::vector<int32_t>& kept) {
        const size_t n = static_cast<size_t>(rows.count), dim = static_cast<size_t>(s.dim);
        const size_t inner = static_cast<size_t>(s.heads) * static_cast<size_t>(s.head_dim);
        float* normed = buffer(NORMED, n * dim);
        float* qkv = buffer(QKV, n * static_cast<size_t>(s.blocks[0].wqkv.rows));
        float* mixed = buffer(MIXED, n * inner);
        float* gate = buffer(GATE, n * 2 * static_cast<size_t>(s.intermediate));
        float* hidden = buffer(HIDDEN, n * static_cast<size_t>(s.intermediate));
        std::vector<int32_t> all(n);
        std::iota(all.begin(), all.end(), 0);
        for (int layer = 0; layer < s.layers; layer++) {
            const Block& block = s.blocks[layer];
            const PagedCache kv = {cache.keys + layer * layer_stride, cache.values + layer * layer_stride,
                                   cache.block_size, cache.kv_heads, cache.head_dim};
            norm(x, block.attention_norm, s.eps, normed, rows.count, s.dim);
            multiply(block.wqkv, normed, qkv, rows.count);
            for (int i = 0; i < rows.count; i++) rope_and_cache(s, block, qkv, kv, rows, i);
            const bool last = layer == s.layers - 1;
            const std::vector<int32_t>& active = last ? kept : all;
            const int count = static_cast<int>(active.size());
            if (count == 0) return;
            attend(s, qkv, kv, rows, active.data(), count, mixed);
            if (step.texts && &s == &model.slow) read_texts(s, layer, qkv, kv, rows);
            if (last && count < rows.count)
                for (int i = 0; i < count; i++) std::memmove(x + i * s.dim, x + active[static_cast<size_t>(i)] * s.dim, dim * sizeof(float));
            multiply(block.wo, mixed, x, count, x);
            norm(x, block.ffn_norm, s.eps, normed, count, s.dim);
            multiply(block.w13, normed, gate, count);
            for (int i = 0; i < count; i++) {
                const float* g = gate + static_cast<ptrdiff_t>(i) * 2 * s.intermediate;
                context.k.silu_mul(g, g + s.intermediate, hidden + static_cast<ptrdiff_t>(i) * s.intermediate, s.intermediate);
            }
            multiply(block.w2, hidden, x, count, x);
        }
    }

    int slot_of(int sample) const { return step.slots[step.sampled[sample]]; }
    int64_t* recent(int slot) const { return state.recent + static_cast<ptrdiff_t>(slot) * width * model.window; }
    int64_t* out(int sample) const { return step.out + static_cast<ptrdiff_t>(sample) * width; }

    SampleSettings settings(int slot, int lane) const {
        return {state.temperature[slot], state.top_p[slot], state.top_k[slot], static_cast<uint32_t>(state.seed[slot]),
                state.frame[slot], lane};
    }

    // Make some tokens less likely, each once. The first frame directly follows the prompt and is never penalized.
    void penalize(float* logits, int size, std::vector<int>& tokens, int slot) const {
        const float penalty = state.penalty[slot];
        if (penalty == 1.0f || state.frame[slot] == 0) return;
        std::sort(tokens.begin(), tokens.end());
        tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
        for (int token : tokens)
            if (token >= 0 && token < size) logits[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
    }

    // Index of a vocabulary id in the head's outputs; -1 for ids that it does not have.
    int head_index(int64_t id) const {
        if (id == model.stop_id) return model.semantic_count;
        const int64_t code = id - model.semantic_begin;
        return code >= 0 && code < model.semantic_count ? static_cast<int>(code) : -1;
    }

    int sample_semantic(float* logits, int slot, float* scratch) const {
        const int size = model.semantic_count + 1, window = model.window;
        const int64_t* entries = recent(slot);
        if (model.uses_ras) {
            const int first = sample_token(logits, size, settings(slot, 0), scratch);
            const int64_t id = first + model.semantic_begin;
            const bool repeated = first < model.semantic_count && std::find(entries, entries + window, id) != entries + window;
            if (!repeated || state.frame[slot] == 0) return first;
            SampleSettings flat = settings(slot, model.codebooks);
            flat.temperature = RAS_TEMPERATURE;
            flat.top_p = RAS_TOP_P;
            return sample_token(logits, size, flat, scratch);
        }
        std::vector<int> tokens;
        if (state.whole_window[slot]) {
            const int64_t filled = std::min<int64_t>(window, state.frame[slot] - 1);
            for (int64_t w = 0; w < filled; w++) tokens.push_back(head_index(entries[w]));
        } else {
            // The released code indexes the wrong axis: it takes all entries of the oldest token in the window as ids.
            for (int c = 0; c < width; c++) tokens.push_back(head_index(entries[c * window]));
        }
        penalize(logits, size, tokens, slot);
        return sample_token(logits, size, settings(slot, 0), scratch);
    }

    int sample_code(float* logits, int slot, int codebook, float* scratch) const {
        const int size = model.output.rows, window = model.window;
        if (!model.uses_ras) {
            const int64_t* entries = recent(slot) + (1 + codebook) * window;
            // The released window counts its empty entries as code 0.
            const int64_t filled = state.whole_window[slot] ? std::min<int64_t>(window, std::max<int64_t>(0, state.frame[slot] - 1)) : window;
            std::vector<int> tokens(entries, entries + filled);
            penalize(logits, size, tokens, slot);
        }
        return sample_token(logits, size, settings(slot, codebook), scratch);
    }

    // Append the frame to the repetition window and count it. As upstream, frame 0 is not in the window.
    void advance(int sample) const {
        const int slot = slot_of(sample), window = model.window;
        const int64_t frame = state.frame[slot];
        for (int c = 0; c < width; c++) {
            int64_t* entries = recent(slot) + c * window;
            if (frame > window) std::memmove(entries, entries + 1, sizeof(int64_t) * static_cast<size_t>(window - 1));
            if (frame > 0) entries[std::min<int64_t>(frame - 1, window - 1)] = out(sample)[c];
            state.last_tokens[static_cast<ptrdiff_t>(slot) * width + c] = out(sample)[c];
        }
        state.frame[slot] = frame + 1;
    }

    // Sample the semantic tokens and write the first two inputs of the fast transformer for every sample.
    void open_frame(const float* x, float* fast_x) {
        const Stack& slow = model.slow;
        const int n = step.samples, dim = model.fast.dim, size = model.head.rows;
        float* normed = buffer(NORMED, static_cast<size_t>(n) * static_cast<size_t>(std::max(slow.dim, dim)));
        float* logits = buffer(LOGITS, static_cast<size_t>(n + 1) * static_cast<size_t>(std::max(size, model.output.rows)));
        norm(x, slow.norm, slow.eps, normed, n, slow.dim);
        multiply(model.head, normed, logits, n);
        const float* input = model.norm_fast_input ? normed : x;
        if (model.project_in.data) {
            float* projected = buffer(MIXED, static_cast<size_t>(n) * static_cast<size_t>(dim));
            multiply(model.project_in, input, projected, n);
            input = projected;
        }
        for (int i = 0; i < n; i++) {
            const int index = sample_semantic(logits + static_cast<ptrdiff_t>(i) * size, slot_of(i), logits + static_cast<ptrdiff_t>(n) * size);
            const int64_t id = index < model.semantic_count ? model.semantic_begin + index : model.stop_id;
            const int64_t code = std::clamp<int64_t>(id - model.semantic_begin, 0, model.codebook_size - 1);
            out(i)[0] = id;
            out(i)[1] = code;
            const size_t bytes = sizeof(float) * static_cast<size_t>(dim);
            std::memcpy(fast_x + static_cast<ptrdiff_t>(2 * i) * dim, input + static_cast<ptrdiff_t>(i) * dim, bytes);
            std::memcpy(fast_x + static_cast<ptrdiff_t>(2 * i + 1) * dim, model.fast_embeddings + code * dim, bytes);
        }
    }

    void sample_frames(const float* x) {
        const Stack& fast = model.fast;
        const int n = step.samples, dim = fast.dim, books = model.codebooks;
        const size_t rows = static_cast<size_t>(n);
        const ptrdiff_t layer_stride = static_cast<ptrdiff_t>(n) * books * fast.kv_heads * fast.head_dim;
        float* fast_x = buffer(FAST_X, 2 * rows * static_cast<size_t>(dim));
        const PagedCache cache = {buffer(FAST_KEYS, static_cast<size_t>(layer_stride * fast.layers)),
                                  buffer(FAST_VALUES, static_cast<size_t>(layer_stride * fast.layers)), books, fast.kv_heads,
                                  fast.head_dim};
        open_frame(x, fast_x);
        // One block per sample holds all positions of its frame.
        std::vector<int32_t> block(rows), positions(2 * rows), second(rows), each(rows);
        std::vector<const int32_t*> tables(2 * rows);
        for (size_t i = 0; i < rows; i++) {
            block[i] = each[i] = static_cast<int32_t>(i);
            second[i] = static_cast<int32_t>(2 * i + 1);
            positions[2 * i] = 0;
            positions[2 * i + 1] = 1;
            tables[2 * i] = tables[2 * i + 1] = &block[i];
        }
        if (books > 1) blocks(fast, fast_x, cache, layer_stride, {2 * n, positions.data(), tables.data()}, second);
        for (size_t i = 0; i < rows; i++) tables[i] = &block[i];
        for (int codebook = 1; codebook < books; codebook++) {
            if (codebook > 1) {
                std::fill(positions.begin(), positions.end(), codebook);
                blocks(fast, fast_x, cache, layer_stride, {n, positions.data(), tables.data()}, each);
            }
            sample_codes(fast_x, codebook);
        }
        for (int i = 0; i < n; i++) advance(i);
    }

    // Sample the codes of one codebook from x [samples, dim], which become the embeddings of these codes.
    void sample_codes(float* x, int codebook) {
        const int n = step.samples, dim = model.fast.dim, size = model.output.rows;
        float* normed = buffer(NORMED, static_cast<size_t>(n) * static_cast<size_t>(dim));
        float* logits = buffer(LOGITS, static_cast<size_t>(n + 1) * static_cast<size_t>(size));
        norm(x, model.fast.norm, model.fast.eps, normed, n, dim);
        multiply(model.output, normed, logits, n);
        for (int i = 0; i < n; i++) {
            const int code = sample_code(logits + static_cast<ptrdiff_t>(i) * size, slot_of(i), codebook, logits + static_cast<ptrdiff_t>(n) * size);
            out(i)[1 + codebook] = code;
            std::memcpy(x + static_cast<ptrdiff_t>(i) * dim, model.fast_embeddings + static_cast<ptrdiff_t>(code) * dim, sizeof(float) * static_cast<size_t>(dim));
        }
    }

    Status run() {
        if (const Status status = check(); status != OK) return status;
        const Stack& slow = model.slow;
        const size_t n = static_cast<size_t>(step.rows);
        float* x = buffer(X, n * static_cast<size_t>(slow.dim));
        embed(x);
        std::vector<const int32_t*> tables(n);
        for (size_t i = 0; i < n; i++) tables[i] = state.tables + static_cast<ptrdiff_t>(step.slots[i]) * state.table_width;
        const PagedCache cache = {state.keys, state.values, state.block_size, slow.kv_heads, slow.head_dim};
        const std::vector<int32_t> sampled(step.sampled, step.sampled + step.samples);
        blocks(slow, x, cache, state.layer_stride, {step.rows, step.positions, tables.data()}, sampled);
        if (step.samples > 0) sample_frames(x);
        return OK;
    }
};

}  // namespace

Status run_step(Context& context, const Model& model, const State& state, const Step& step) {
    return Runner(context, model, state, step).run();
}

}  // namespace shoal
