// Linear layer of up to eight rows: x [R, K] times weight [N, K], with GATED [2 N, K] (gate, then up projection).
//
// With NORM, x is normalized first (RMSNorm); without, the product is added to the residual. INT8 quantizes the rows.
//
// Few rows are bound by memory bandwidth. There is one block per multiprocessor, which owns a range of outputs. A thread
// copies boxes of weights (TMA) into rings of shared memory: it starts before the grid dependency wait, so that the rings
// are full when x arrives. Groups of warps process the tiles of outputs in turn; each warp computes one split of K. A tile
// of four weight rows (LINES) fills only half of the N = 8 of an MMA, so there a warp computes two splits at once: operand
// B holds four weight rows of each, operand A the rows of x for both. Cross terms are discarded.
// A box is [split of K][block of 128 bytes][weight row][128 bytes], swizzled by the copy engine.
//
// Sums have the order of the Triton kernels, and so their bits: four splits of K, each from its first to its last
// element, added in order; squares as in rms_norm.py.

constexpr int SPLITS = 8 / LINES, GROUP_WARPS = 4 / SPLITS;  // splits of a warp
constexpr int CONSUMERS = 32 * GROUP_WARPS * GROUPS, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 32;
constexpr int ROW_BYTES = K * (INT8 ? 1 : 2), SPLIT_BYTES = ROW_BYTES / 4;
constexpr int SPLIT_BLOCKS = SPLIT_BYTES / 128;
constexpr int OUTPUTS = GATED ? LINES / 2 : LINES;  // of a tile
constexpr int TILES = N / OUTPUTS;
constexpr int MAX_TILES = (TILES + BLOCKS - 1) / BLOCKS;  // of a block
constexpr int BOXES = (SPLIT_BLOCKS + BOX_BLOCKS - 1) / BOX_BLOCKS;
constexpr int BOX_BYTES = 4 * BOX_BLOCKS * LINES * 128;
constexpr int X_PITCH = ROW_BYTES + (ROW_BYTES % 128 == 0 ? 64 : 0);  // two rows in different banks
constexpr int NORM_WARPS = 16;                                        // of Triton's norm kernel, 8 elements per thread
constexpr int OUTPUTS_PER_THREAD = (R * MAX_TILES * OUTPUTS + CONSUMERS - 1) / CONSUMERS;  // in all rows and tiles
constexpr int CHUNKS = K / 8, THREAD_CHUNKS = (CHUNKS + CONSUMERS - 1) / CONSUMERS;

constexpr int SUMS_BYTES = 4 * R * MAX_TILES * 8 * 4, REDUCE_BYTES = R * (NORM_WARPS + WARPS) * 4;
constexpr int MAX_STAGES = (SHARED_BYTES - R * X_PITCH - SUMS_BYTES - REDUCE_BYTES - 8) / (GROUPS * (BOX_BYTES + 16));
constexpr int BOXES_PER_GROUP = (MAX_TILES + GROUPS - 1) / GROUPS * BOXES;
constexpr int STAGES = MAX_STAGES < BOXES_PER_GROUP ? MAX_STAGES : BOXES_PER_GROUP;
constexpr bool REFILLED = STAGES < BOXES_PER_GROUP;  // whether a stage is used more than once
constexpr int X_AT = GROUPS * STAGES * BOX_BYTES, SUMS_AT = X_AT + R * X_PITCH, REDUCE_AT = SUMS_AT + SUMS_BYTES;
constexpr int BARRIERS_AT = (REDUCE_AT + REDUCE_BYTES + 7) / 8 * 8;
static_assert(STAGES >= 2, "the rings do not fit");
static_assert(SPLIT_BYTES % 128 == 0 && N % OUTPUTS == 0 && CHUNKS <= 32 * NORM_WARPS * (NORM ? 1 : 8), "unsupported size");

constexpr int USED_BYTES = BARRIERS_AT + 2 * GROUPS * STAGES * 8;

// Read by the host: shared memory in bytes, threads, rows.
extern "C" __device__ int launch_sizes[3] = {USED_BYTES > MIN_SHARED_BYTES ? USED_BYTES : MIN_SHARED_BYTES, THREADS, R};

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Chunk {
    u32 word[4];  // two bfloat16 each
};

// Loads past the L1 cache: another kernel, on other multiprocessors, has just written these values.
__device__ __forceinline__ Chunk load_chunk(const u16* from) {
    Chunk c;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "l"(from) : "memory");
    return c;
}

__device__ __forceinline__ u16 load_bf16(const u16* from) {
    u16 value;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ u32 to_bf16(float first, float second = 0.0f) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 word;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

__device__ __forceinline__ u32 add(u32 a, u32 b) {
    u32 word;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

__device__ __forceinline__ float sum_of_squares(const Chunk& c) {
    float sum = __fmul_rn(high(c.word[0]), high(c.word[0]));
    sum = __fmaf_rn(low(c.word[0]), low(c.word[0]), sum);
#pragma unroll
    for (int i = 1; i < 4; ++i) sum = __fmaf_rn(high(c.word[i]), high(c.word[i]), __fmaf_rn(low(c.word[i]), low(c.word[i]), sum));
    return sum;
}

__device__ __forceinline__ float largest(const Chunk& c) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(fabsf(low(c.word[i])), fabsf(high(c.word[i]))));
    return top;
}

// Rounds to the nearest integer, ties to even, as `quantize_row` in int8_rows.py.
__device__ __forceinline__ u32 to_int8(float value, float factor) {
    return (u32)(int)__fadd_rn(__fmaf_rn(factor, value, 12582912.0f), -12582912.0f) & 0xffu;
}

__device__ __forceinline__ u32 to_int8(u32 a, u32 b, float factor) {
    return to_int8(low(a), factor) | to_int8(high(a), factor) << 8 | to_int8(low(b), factor) << 16 | to_int8(high(b), factor) << 24;
}

// Offset in bytes of word w of a row of x in shared memory. Words are permuted so that the four that a thread needs for
// two MMAs are neighbours.
__device__ __forceinline__ int word_at(int w) { return w / 16 * 64 + w % 4 * 16 + w % 16 / 4 * 4; }

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Copies the weights of tiles [first, last) into the rings of the groups, box by box.
__device__ __forceinline__ void stream_weights(u32 base, u32 full, u32 empty, const TensorMap* map, int first, int last) {
    u64 policy;  // weights are read once
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 stage = 0, parity = 1;
    for (int tile = first; tile < last; tile += GROUPS)
        for (int box = 0; box < BOXES; ++box) {
            for (int group = 0; group < GROUPS && tile + group < last; ++group) {
                const u32 at = group * STAGES + stage;
                barrier_wait(empty + 8 * at, parity);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * at), "r"(BOX_BYTES) : "memory");
                asm volatile(
                    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(
                        base + at * BOX_BYTES),
                    "l"(map), "r"(full + 8 * at), "r"(0), "r"((tile + group) * OUTPUTS), "r"(0), "r"(box * BOX_BLOCKS), "r"(0), "l"(policy)
                    : "memory");
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
}

// Normalizes or quantizes rows [FIRST, LAST) as the layer needs and stores them in shared memory; returns the scales of
// int8 rows.
template <int FIRST, int LAST>
__device__ __forceinline__ void store_rows(unsigned char* memory, const u16* x, const Chunk (&norm)[THREAD_CHUNKS], float eps, float (&scales)[R]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* squares = (float*)(memory + REDUCE_AT);  // [R][NORM_WARPS]
    float* tops = squares + R * NORM_WARPS;         // [R][WARPS]
    Chunk chunks[LAST][THREAD_CHUNKS];  // entries below FIRST are unused and take no registers
#pragma unroll
    for (int r = FIRST; r < LAST; ++r)
#pragma unroll
        for (int i = 0; i < THREAD_CHUNKS; ++i) {
            const int c = threadIdx.x + i * CONSUMERS;
            chunks[r][i] = c < CHUNKS ? load_chunk(x + r * K + c * 8) : Chunk{};
        }
    if (NORM) {
        constexpr int USED = THREAD_CHUNKS * WARPS;  // in the norm kernel, the sums of the other warps are zero
        for (int i = threadIdx.x; i < R * NORM_WARPS; i += CONSUMERS)
            if (i % NORM_WARPS >= USED) squares[i] = 0.0f;
#pragma unroll
        for (int r = FIRST; r < LAST; ++r)
#pragma unroll
            for (int i = 0; i < THREAD_CHUNKS; ++i) {
                float sum = sum_of_squares(chunks[r][i]);
#pragma unroll
                for (int d = 16; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
                if (lane == 0 && warp + i * WARPS < NORM_WARPS) squares[r * NORM_WARPS + warp + i * WARPS] = sum;
            }
        sync_consumers();
#pragma unroll
        for (int r = FIRST; r < LAST; ++r) {
            float sum = squares[r * NORM_WARPS + lane % NORM_WARPS], factor;
#pragma unroll
            for (int d = NORM_WARPS / 2; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
            // An FMA, because ptxas fuses Triton's `sum / K + eps` into one.
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(__fmaf_rn(sum, 1.0f / K, eps)));
#pragma unroll
            for (int i = 0; i < THREAD_CHUNKS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32& word = chunks[r][i].word[j];
                    word = multiply(norm[i].word[j], to_bf16(__fmul_rn(low(word), factor), __fmul_rn(high(word), factor)));
                }
        }
    }
    if (INT8) {
#pragma unroll
        for (int r = FIRST; r < LAST; ++r) {
            float top = 0.0f;
#pragma unroll
            for (int i = 0; i < THREAD_CHUNKS; ++i) top = fmaxf(top, largest(chunks[r][i]));
#pragma unroll
            for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            if (lane == 0) tops[r * WARPS + warp] = top;
        }
        sync_consumers();
    }
#pragma unroll
    for (int r = FIRST; r < LAST; ++r) {
        unsigned char* row = memory + X_AT + r * X_PITCH;
        float factor = 0.0f;
        if (INT8) {
            float top = tops[r * WARPS];
            for (int i = 1; i < WARPS; ++i) top = fmaxf(top, tops[r * WARPS + i]);
            factor = top > 0.0f ? __fdiv_rn(127.0f, top) : 0.0f;
            scales[r] = __fdiv_rn(top, 127.0f);
        }
#pragma unroll
        for (int i = 0; i < THREAD_CHUNKS; ++i) {
            const int c = threadIdx.x + i * CONSUMERS;
            if (c >= CHUNKS) continue;
            const u32* words = chunks[r][i].word;
            if (INT8) {
                *(u32*)(row + word_at(2 * c)) = to_int8(words[0], words[1], factor);
                *(u32*)(row + word_at(2 * c + 1)) = to_int8(words[2], words[3], factor);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) *(u32*)(row + word_at(4 * c + j)) = words[j];
            }
        }
    }
    sync_consumers();
}

#if INT8
typedef int Sum;
#define MMA "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
#define SUM_REGISTER "+r"
#else
typedef float Sum;
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define SUM_REGISTER "+f"
#endif

// Operands of two MMAs: 64 bytes of each weight row (b) and of each row of x (a, rows 8 to 15 in `high`) of a split.
struct Pair {
    u32 b[4], a[4], high[4];
};

__device__ __forceinline__ void load_rows(u32 (&words)[4], u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_pair(Pair& pair, u32 weights, u32 x, bool has_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pair.b[0]), "=r"(pair.b[1]), "=r"(pair.b[2]), "=r"(pair.b[3])
                 : "r"(weights)
                 : "memory");
    if (has_row) load_rows(pair.a, x);
    if (SPLITS * R > 8) load_rows(pair.high, x + SPLIT_BYTES);
}

__device__ __forceinline__ void multiply_pair(Sum (&acc)[4], const Pair& pair) {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
        asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : SUM_REGISTER(acc[0]), SUM_REGISTER(acc[1]), SUM_REGISTER(acc[2]), SUM_REGISTER(acc[3])
                     : "r"(pair.a[i]), "r"(pair.high[i]), "r"(pair.a[i + 1]), "r"(pair.high[i + 1]), "r"(pair.b[i]), "r"(pair.b[i + 1]));
}

// Stores the sums of each split for the tiles of this group: [split][R][tile][8].
__device__ __forceinline__ void multiply_tiles(Sum* sums, u32 base, u32 full, u32 empty, int group, int tiles) {
    const int lane = threadIdx.x % 32, quad = lane % 4, first_split = threadIdx.x / 32 % GROUP_WARPS * SPLITS;
    // Rows of A: the rows of x for the first split of this warp, then, with two splits, the same rows for the second.
    const int row = lane / 4, x_row = row % R, x_split = first_split + (row < SPLITS * R ? row / R : 0);
    const u32 x_at = base + X_AT + x_row * X_PITCH + x_split * SPLIT_BYTES + quad * 16;
    const int own_line = lane % LINES, line_split = first_split + lane % 8 / LINES;
    u32 stage = group * STAGES, parity = 0;
    for (int tile = group; tile < tiles; tile += GROUPS) {
        Sum acc[4] = {};
        for (int box = 0; box < BOXES; ++box) {
            barrier_wait(full + 8 * stage, parity);
            const u32 lines = base + stage * BOX_BYTES;
            const int pairs = 2 * (SPLIT_BLOCKS - box * BOX_BLOCKS);  // of the split from here on
            Pair buffers[2] = {};
            auto load = [&](int pair) {
                const int line = (line_split * BOX_BLOCKS + pair / 2) * LINES + own_line;
                const u32 at = lines + line * 128 + ((pair % 2 * 4 + lane / 8) ^ line % 8) * 16;
                load_pair(buffers[pair % 2], at, x_at + (box * BOX_BLOCKS * 2 + pair) * 64, row < SPLITS * R);
            };
            load(0);
#pragma unroll
            for (int pair = 0; pair < 2 * BOX_BLOCKS; ++pair) {
                if (SPLIT_BLOCKS % BOX_BLOCKS && pair >= pairs) break;
                // The next operands are loaded while the tensor cores compute.
                if (pair + 1 < 2 * BOX_BLOCKS) load(pair + 1);
                multiply_pair(acc, buffers[pair % 2]);
            }
            if constexpr (REFILLED) {
                // Without the fence the copy engine may overwrite the box while its last words are still being read.
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * stage);
            }
            if (++stage == (group + 1) * STAGES) stage = group * STAGES, parity ^= 1;
        }
        // acc[0..1] is row `row` of A and acc[2..3] row `row` + 8, at columns 2 quad and 2 quad + 1. `half` is the
        // split of this warp that these columns (weight rows) belong to.
        const int half = 2 * quad / LINES;
        const bool upper = SPLITS * R > 8 && half == 1;  // whose rows are 8 to 15 of A
        if (upper || (row < SPLITS * R && row / R == half)) {
            Sum* to = sums + (((first_split + half) * R + x_row) * MAX_TILES + tile) * 8 + 2 * quad % LINES;
            to[0] = upper ? acc[2] : acc[0], to[1] = upper ? acc[3] : acc[1];
        }
    }
}

// Adds the splits of one output in order; with INT8 scales the sum.
__device__ __forceinline__ float total(const Sum* sums, float row_scale, float scale) {
    constexpr int SPLIT = R * MAX_TILES * 8;
#if INT8
    return __fmul_rn(__fmul_rn((float)(sums[0] + sums[SPLIT] + sums[2 * SPLIT] + sums[3 * SPLIT]), row_scale), scale);
#else
    return __fadd_rn(__fadd_rn(__fadd_rn(sums[0], sums[SPLIT]), sums[2 * SPLIT]), sums[3 * SPLIT]);
#endif
}

__device__ __forceinline__ u32 gated(float gate_sum, float up_sum) {
    const float gate = low(to_bf16(gate_sum));
    float power, silu;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950408889634f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(silu) : "f"(gate), "f"(__fadd_rn(power, 1.0f)));
    return multiply(to_bf16(silu), to_bf16(up_sum));
}

// x [R, K], norm [K] (with NORM), out [R, N]: bfloat16. Without NORM, out holds the residual. scales [N] or [2 N].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    few_rows_linear(const u16* x, const __grid_constant__ TensorMap map, const float* scales, const u16* norm, u16* out, float eps) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the pattern of the swizzle
    const u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * GROUPS * STAGES;
    const int first = (int)((long long)TILES * blockIdx.x / gridDim.x), last = (int)((long long)TILES * (blockIdx.x + 1) / gridDim.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, GROUP_WARPS);
        barriers_ready();
    }
    __syncthreads();
    launch_dependents();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) stream_weights(base, full, empty, &map, first, last);
        return;
    }
    // Norm weights and scales are constant: they are loaded before the grid dependency wait.
    const int outputs = (last - first) * OUTPUTS, own = threadIdx.x;
    Chunk norm_chunks[THREAD_CHUNKS] = {};
    if (NORM)
        for (int i = 0; i < THREAD_CHUNKS; ++i)
            if (own + i * CONSUMERS < CHUNKS) norm_chunks[i] = load_chunk(norm + (own + i * CONSUMERS) * 8);
    float own_scale[OUTPUTS_PER_THREAD], own_up_scale[OUTPUTS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
        const int at = own + i * CONSUMERS;
        own_scale[i] = own_up_scale[i] = 1.0f;
        if (INT8 && at < R * outputs) {
            own_scale[i] = scales[first * OUTPUTS + at % outputs];
            if (GATED) own_up_scale[i] = scales[N + first * OUTPUTS + at % outputs];
        }
    }
    grid_dependency_wait();
    u16* block_out = out + first * OUTPUTS;
    u16 residual[OUTPUTS_PER_THREAD] = {};
#pragma unroll
    for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
        const int at = own + i * CONSUMERS;
        if (!NORM && at < R * outputs) residual[i] = load_bf16(block_out + at / outputs * N + at % outputs);
    }
    float row_scales[R] = {};
    store_rows<0, (R < 4 ? R : 4)>(memory, x, norm_chunks, eps, row_scales);
    if constexpr (R > 4) store_rows<4, R>(memory, x, norm_chunks, eps, row_scales);
    Sum* sums = (Sum*)(memory + SUMS_AT);
    multiply_tiles(sums, base, full, empty, threadIdx.x / (32 * GROUP_WARPS), last - first);
    sync_consumers();
#pragma unroll
    for (int i = 0; i < OUTPUTS_PER_THREAD; ++i) {
        const int at = own + i * CONSUMERS;
        if (at >= R * outputs) break;
        const int row = at / outputs, output = at % outputs;
        const Sum* from = sums + (row * MAX_TILES + output / OUTPUTS) * 8 + output % OUTPUTS;
        float row_scale = row_scales[0];
#pragma unroll
        for (int r = 1; r < R; ++r)
            if (row == r) row_scale = row_scales[r];
        const float value = total(from, row_scale, own_scale[i]);
        u32 y = GATED ? gated(value, total(from + OUTPUTS, row_scale, own_up_scale[i])) : to_bf16(value);
        if (!NORM) y = add(residual[i], y);
        block_out[row * N + output] = (u16)y;
    }
}
