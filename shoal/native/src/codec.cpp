#include "codec.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "dual_ar.h"

namespace shoal {

namespace {

enum Buffer { X, Y, JOINED, GATE, HIDDEN, QKV, MIXED, SCORES };

size_t floats(int64_t count) { return static_cast<size_t>(count); }

// Decodes one chunk of one stream. Activations are [steps, channels], time first.
class Decoder {
  public:
    Decoder(Context& context, const Codec& codec, int thread) : context_(context), codec_(codec), thread_(thread) {}

    void run(const int64_t* codes, int code_stride, int frames, float* state, int64_t position, float* out) {
        state_ = state;
        position_ = position;
        steps_ = frames;
        x_ = lookup(codes, code_stride);
        for (int i = 0; i < codec_.count; i++) apply(codec_.layers[i]);
        std::memcpy(out, x_, sizeof(float) * floats(steps_));
    }

  private:
    float* buffer(Buffer which, int64_t count) { return context_.scratch(thread_).get(which, floats(count)); }

    // Return whichever of the buffers X and Y does not hold x_, for the next activations.
    float* other(int64_t count) {
        current_ = current_ == X ? Y : X;
        return buffer(current_, count);
    }

    float* lookup(const int64_t* codes, int code_stride) {
        float* x = buffer(current_ = X, static_cast<int64_t>(steps_) * codec_.dim);
        std::fill(x, x + static_cast<int64_t>(steps_) * codec_.dim, 0.0f);
        for (int number = 0; number < codec_.codebooks; number++) {
            const Codebook& book = codec_.books[number];
            float* entries = buffer(JOINED, static_cast<int64_t>(steps_) * book.dim);
            for (int t = 0; t < steps_; t++) {
                // Codes beyond a codebook's end are clamped.
                const int64_t code = std::clamp<int64_t>(codes[static_cast<ptrdiff_t>(number) * code_stride + t], 0, book.size - 1);
                std::memcpy(entries + static_cast<ptrdiff_t>(t) * book.dim, book.entries + code * book.dim, sizeof(float) * floats(book.dim));
            }
            context_.product({&book.projection, entries, book.dim, 1, 0, x, codec_.dim, x, codec_.dim}, steps_);
        }
        return x;
    }

    void apply(const Layer& layer) {
        switch (layer.kind) {
            case SNAKE: return snake(layer.alpha, layer.inverse, x_, x_, layer.channels);
            case CONV: return conv(layer);
            case UPSAMPLE: return upsample(layer);
            case RESIDUAL: return residual(layer);
            case CONVNEXT: return convnext(layer);
            case ATTENTION: return attention(layer);
            case FEED_FORWARD: return feed_forward(layer);
            case RMS_NORM: return norm(layer.alpha, layer.eps, x_, x_, layer.channels);
            default: return context_.k.tanh(x_, steps_);
        }
    }

    // Run part(begin, end) over all steps, in parallel if they are enough work. `cost` is the work per step.
    template <typename Part>
    void rows(int64_t cost, const Part& part) {
        const int units = cost * steps_ < 20000 ? 1 : std::min(steps_, 2 * context_.threads());
        context_.parallel(units, {Work::ROWS, static_cast<double>(cost * steps_)}, [&](int unit, int) {
            const auto at = [&](int u) { return static_cast<int>(static_cast<int64_t>(steps_) * u / units); };
            part(at(unit), at(unit + 1));
        });
    }

    void snake(const float* alpha, const float* inverse, const float* x, float* out, int channels) {
        rows(channels, [&](int begin, int end) {
            const ptrdiff_t from = static_cast<ptrdiff_t>(begin) * channels;
            context_.k.snake(x + from, alpha, inverse, out + from, end - begin, channels);
        });
    }

    void norm(const float* weight, float eps, const float* x, float* out, int channels) {
        for (int t = 0; t < steps_; t++) context_.k.rms_norm(x + static_cast<ptrdiff_t>(t) * channels, weight, eps, out + static_cast<ptrdiff_t>(t) * channels, channels);
    }

    // Return a buffer [context + steps, channels] that begins with the stored left context.
    float* joined(const Layer& layer, int context) {
        float* all = buffer(JOINED, static_cast<int64_t>(context + steps_) * layer.channels);
        std::memcpy(all, state_ + layer.state, sizeof(float) * floats(static_cast<int64_t>(context) * layer.channels));
        return all;
    }

    // Keep the last `context` inputs for the next chunk.
    void keep(const Layer& layer, int context, const float* all) {
        std::memcpy(state_ + layer.state, all + static_cast<ptrdiff_t>(steps_) * layer.channels,
                    sizeof(float) * floats(static_cast<int64_t>(context) * layer.channels));
    }

    float* joined_input(const Layer& layer, int context) {
        float* all = joined(layer, context);
        std::memcpy(all + static_cast<ptrdiff_t>(context) * layer.channels, x_, sizeof(float) * floats(static_cast<int64_t>(steps_) * layer.channels));
        return all;
    }

    void convolve(const Layer& layer, const float* all, float* out) {
        context_.product({&layer.a, all, layer.channels, layer.taps, static_cast<ptrdiff_t>(layer.dilation) * layer.channels,
                          out, layer.a.rows, nullptr, 0}, steps_);
    }

    void conv(const Layer& layer) {
        const int context = (layer.taps - 1) * layer.dilation;
        const float* all = joined_input(layer, context);
        float* out = other(static_cast<int64_t>(steps_) * layer.a.rows);
        convolve(layer, all, out);
        keep(layer, context, all);
        x_ = out;
    }

    // Output r of input t depends on inputs t - taps + 1 .. t, which are adjacent in memory: one plain product.
    void upsample(const Layer& layer) {
        const int context = layer.taps - 1;
        const float* all = joined_input(layer, context);
        float* out = other(static_cast<int64_t>(steps_) * layer.a.rows);
        context_.product({&layer.a, all, layer.channels, 1, 0, out, layer.a.rows, nullptr, 0}, steps_);
        keep(layer, context, all);
        x_ = out;
        steps_ *= layer.stride;
    }

    void residual(const Layer& layer) {
        const int context = (layer.taps - 1) * layer.dilation, channels = layer.channels;
        float* all = joined(layer, context);
        snake(layer.alpha, layer.inverse, x_, all + static_cast<ptrdiff_t>(context) * channels, channels);
        float* inner = buffer(HIDDEN, static_cast<int64_t>(steps_) * channels);
        convolve(layer, all, inner);
        keep(layer, context, all);
        snake(layer.alpha2, layer.inverse2, inner, inner, channels);
        context_.product({&layer.b, inner, channels, 1, 0, x_, channels, x_, channels}, steps_);
    }

    void convnext(const Layer& layer) {
        const int context = layer.taps - 1, channels = layer.channels;
        const float* all = joined_input(layer, context);
        float* normed = buffer(MIXED, static_cast<int64_t>(steps_) * channels);
        context_.k.depthwise(all, layer.alpha, layer.inverse, normed, steps_, channels, layer.taps);
        keep(layer, context, all);
        for (int t = 0; t < steps_; t++) {
            float* row = normed + static_cast<ptrdiff_t>(t) * channels;
            context_.k.layer_norm(row, layer.alpha2, layer.inverse2, layer.eps, row, channels);
        }
        const int inner = layer.a.rows;
        float* hidden = buffer(HIDDEN, static_cast<int64_t>(steps_) * inner);
        context_.product({&layer.a, normed, channels, 1, 0, hidden, inner, nullptr, 0}, steps_);
        context_.k.gelu(hidden, steps_ * inner);
        context_.product({&layer.b, hidden, inner, 1, 0, x_, channels, x_, channels}, steps_);
    }

    // Sliding-window attention. The state holds keys and values [window - 1, heads * head_dim] each.
    void attention(const Layer& layer) {
        const int d = layer.head_dim, inner = layer.heads * d, context = layer.window - 1, total = context + steps_;
        float* normed = buffer(MIXED, static_cast<int64_t>(steps_) * std::max(layer.channels, inner));
        norm(layer.alpha, layer.eps, x_, normed, layer.channels);
        float* qkv = buffer(QKV, static_cast<int64_t>(steps_) * 3 * inner);
        context_.product({&layer.a, normed, layer.channels, 1, 0, qkv, 3 * inner, nullptr, 0}, steps_);
        float* keys = buffer(JOINED, static_cast<int64_t>(2) * total * inner);
        float* values = keys + static_cast<ptrdiff_t>(total) * inner;
        const size_t old = sizeof(float) * floats(static_cast<int64_t>(context) * inner);
        std::memcpy(keys, state_ + layer.state, old);
        std::memcpy(values, state_ + layer.state + static_cast<ptrdiff_t>(context) * inner, old);
        for (int t = 0; t < steps_; t++) {
            float* row = qkv + static_cast<ptrdiff_t>(t) * 3 * inner;
            const float* table = layer.inverse + (position_ + t) * d;
            for (int h = 0; h < 2 * layer.heads; h++) context_.k.rotate(row + h * d, table, d);
            const ptrdiff_t at = static_cast<ptrdiff_t>(context + t) * inner;
            std::memcpy(keys + at, row + inner, sizeof(float) * floats(inner));
            std::memcpy(values + at, row + 2 * inner, sizeof(float) * floats(inner));
        }
        std::memcpy(state_ + layer.state, keys + static_cast<ptrdiff_t>(steps_) * inner, old);
        std::memcpy(state_ + layer.state + static_cast<ptrdiff_t>(context) * inner, values + static_cast<ptrdiff_t>(steps_) * inner, old);
        // The whole buffer is one block of the cache.
        const PagedCache cache = {keys, values, total, layer.heads, d};
        const int32_t table = 0;
        float* scores = buffer(SCORES, layer.window);
        for (int t = 0; t < steps_; t++) {
            // Keys from before the start of the stream are not visible.
            const int64_t seen = std::min<int64_t>(context, position_ + t);
            for (int h = 0; h < layer.heads; h++)
                context_.k.attention(qkv + static_cast<ptrdiff_t>(t) * 3 * inner + h * d, cache, &table, h, 1,
                                     static_cast<int>(context + t - seen), context + t + 1, scores,
                                     normed + static_cast<ptrdiff_t>(t) * inner + h * d);
        }
        context_.product({&layer.b, normed, inner, 1, 0, x_, layer.channels, x_, layer.channels}, steps_);
    }

    void feed_forward(const Layer& layer) {
        const int inner = layer.a.rows / 2;
        float* normed = buffer(MIXED, static_cast<int64_t>(steps_) * layer.channels);
        float* gate = buffer(GATE, static_cast<int64_t>(steps_) * 2 * inner);
        float* hidden = buffer(HIDDEN, static_cast<int64_t>(steps_) * inner);
        norm(layer.alpha, layer.eps, x_, normed, layer.channels);
        context_.product({&layer.a, normed, layer.channels, 1, 0, gate, 2 * inner, nullptr, 0}, steps_);
        for (int t = 0; t < steps_; t++) {
            const float* g = gate + static_cast<ptrdiff_t>(t) * 2 * inner;
            context_.k.silu_mul(g, g + inner, hidden + static_cast<ptrdiff_t>(t) * inner, inner);
        }
        context_.product({&layer.b, hidden, inner, 1, 0, x_, layer.channels, x_, layer.channels}, steps_);
    }

    Context& context_;
    const Codec& codec_;
    const int thread_;
    float* state_ = nullptr;
    int64_t position_ = 0;
    int steps_ = 0;
    float* x_ = nullptr;
    Buffer current_ = X;
};

}  // namespace

int32_t decode_chunks(Context& context, const Codec& codec, const Chunks& chunks) {
    for (int i = 0; i < chunks.count; i++)
        if (chunks.positions[chunks.slots[i]] + chunks.frames[i] > codec.max_steps) return OUT_OF_RANGE;
    const auto one = [&](int i, int thread) {
        const int slot = chunks.slots[i], frames = chunks.frames[i];
        Decoder(context, codec, thread)
            .run(chunks.codes + static_cast<ptrdiff_t>(i) * codec.codebooks * chunks.code_stride, chunks.code_stride, frames,
                 chunks.state + slot * codec.state_size, chunks.positions[slot], chunks.out + i * chunks.out_stride);
        chunks.positions[slot] += frames;
    };
    // Many streams: each is decoded by one thread. Few streams: one after the other, and the threads share each layer.
    if (chunks.count >= 2 * context.threads()) {
        const double frames = std::accumulate(chunks.frames, chunks.frames + chunks.count, 0.0);
        context.parallel(chunks.count, {Work::STREAMS, frames}, one);
    } else
        for (int i = 0; i < chunks.count; i++) one(i, 0);
    return OK;
}

}  // namespace shoal
