// Sampling from logits with the noise, the top-k and top-p rules and the order of shoal/kernels/sampling/sample.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "dual_ar.h"

namespace shoal {

static uint32_t hash32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Exp(1) noise of one token, a pure function of (seed, frame, lane, token).
static float exponential_noise(uint32_t key, int token) {
    const uint32_t bits = hash32(key + static_cast<uint32_t>(token) * 0x9E3779B1u);
    return -std::log((static_cast<float>(bits >> 9) + 0.5f) * 1.1920928955078125e-07f);
}

int sample_token(const float* logits, int size, const SampleSettings& settings, float* weights) {
    const float top = *std::max_element(logits, logits + size);
    float sum = 0;
    for (int i = 0; i < size; i++) sum += weights[i] = std::exp(logits[i] - top);
    thread_local std::vector<int> order;
    order.resize(static_cast<size_t>(size));
    for (int i = 0; i < size; i++) order[static_cast<size_t>(i)] = i;
    const auto less = [&](int a, int b) { return logits[a] < logits[b] || (logits[a] == logits[b] && a > b); };
    const uint32_t counter = static_cast<uint32_t>(settings.frame * 64 + settings.lane + 1);
    const uint32_t key = hash32(settings.seed + hash32(counter));
    const float temperature = std::max(settings.temperature, 1e-5f);
    // Tokens from the most likely on, until the mass before and including one exceeds top-p; the first is always kept.
    // A heap instead of a sort, because few tokens are kept in most cases.
    std::make_heap(order.begin(), order.end(), less);
    double mass = 0;
    float best = -1;
    int chosen = order.front();
    auto end = order.end();
    for (int64_t rank = 0; rank < size; rank++) {
        std::pop_heap(order.begin(), end, less);
        const int token = *--end;
        mass += weights[token] / sum;
        if (rank > 0 && (static_cast<float>(mass) > settings.top_p || rank >= settings.top_k)) break;
        const float chance = std::exp(logits[token] / temperature - top / temperature) / exponential_noise(key, token);
        // As argmax does, the lowest index wins among equal chances.
        if (chance > best || (chance == best && token < chosen)) best = chance, chosen = token;
    }
    return chosen;
}

}  // namespace shoal
