// Convolution with Snake: the dilated convolutions of wide residual units, and upsampling convolutions of two taps, which
// have as many sets of outputs as they have phases.
//
// Blocks are persistent. A producer warpgroup loads inputs and weights. The inputs of a tile stay in shared memory for all
// taps and outputs. A unit is a tile and 192 of its outputs; two consumer warpgroups compute units in turn, so that the
// epilogue of one overlaps with the products of the other. Weights pass through a ring.

constexpr int C = CHANNELS;
constexpr int GROUPS = 2;
constexpr int BN = 192;                     // outputs of a unit
constexpr int UNITS = OUTPUTS / BN;         // units of a tile
constexpr int MI = 2;                       // products of 64 rows
constexpr int BM = 64 * MI;
constexpr int PITCH = (BM + MAX_STEPS) | 1;  // odd: neighbouring columns start in other banks
constexpr int STAGE_K = 64;                 // input channels of a stage of weights
constexpr int PER_TAP = C / STAGE_K;
constexpr int X_BYTES = STAGE_K / 8 * PITCH * 16;
constexpr int BUFFERS = UNITS == 1 ? 2 : 1;  // of inputs; with one unit per tile the warpgroups use different tiles
constexpr int PARTS = BUFFERS * PER_TAP;    // parts of inputs, each loaded with its own barriers
constexpr int STAGE_BYTES = STAGE_K * BN * 2;
constexpr int STAGES = TAPS == 2 ? 5 : 3;
constexpr int INNER = TAPS * PER_TAP;
constexpr bool PLAIN = TAPS == 2;           // upsampling also stores the values before Snake
constexpr int X_AT = STAGES * STAGE_BYTES;
constexpr int PARAMS_AT = X_AT + PARTS * X_BYTES;
constexpr int BARRIERS_AT = PARAMS_AT + 3 * OUTPUTS * 4;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COPIERS = LOADERS - 32;

// Read by the host: shared memory in bytes, threads, rows of a tile.
extern "C" __device__ int launch_sizes[3] = {BARRIERS_AT + 8 * (2 * PARTS + 2 * STAGES + GROUPS), THREADS, BM};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv(const u16* __restrict__ x, const u16* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ alpha,
         const u16* __restrict__ past, const int* __restrict__ slots, const int* __restrict__ starts, u16* __restrict__ out,
         u16* __restrict__ activated, int rows, int rate, int dilation, int alpha_channels) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    float* params = (float*)(memory + PARAMS_AT);
    const u32 full_x = base + BARRIERS_AT, empty_x = full_x + 8 * PARTS, full_w = empty_x + 8 * PARTS;
    const u32 empty_w = full_w + 8 * STAGES, turn = empty_w + 8 * STAGES;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, tiles = rows / BM, steps = (TAPS - 1) * dilation;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PARTS; ++i) barrier_init(full_x + 8 * i, COPIERS), barrier_init(empty_x + 8 * i, 4);
        for (int i = 0; i < STAGES; ++i) barrier_init(full_w + 8 * i, 1), barrier_init(empty_w + 8 * i, 4);
        for (int i = 0; i < GROUPS; ++i) barrier_init(turn + 8 * i, 4);
        barriers_ready();
    }
    store_params(params, bias, alpha, OUTPUTS, alpha_channels, THREADS);
    __syncthreads();
    launch_dependents();
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int thread = threadIdx.x % 128;
        if (thread < COPIERS) {
            grid_dependency_wait();
            for (int i = 0, tile = blockIdx.x; tile < tiles; ++i, tile += gridDim.x) {
                const u16* rest = x + (long long)(tile * BM - steps) * C;
                const u16* head = context_rows(rest, past, slots, starts, tile * BM, rate, steps * C);
                for (int part = 0; part < PER_TAP; ++part) {
                    const int channel = part * STAGE_K, place = i % BUFFERS * PER_TAP + part;
                    barrier_wait(empty_x + 8 * place, i / BUFFERS & 1 ^ 1);
                    copy_rows<COPIERS, STAGE_K / 8, PITCH>(base + X_AT + place * X_BYTES, head + channel, rest + channel, steps, steps + BM, C,
                                                           thread, full_x + 8 * place);
                }
            }
        } else if (thread == COPIERS) {
            u32 stage = 0, parity = 1;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
                for (int i = 0; i < UNITS * INNER; ++i) {
                    barrier_wait(empty_w + 8 * stage, parity);
                    bulk_load(base + stage * STAGE_BYTES, (const char*)weight + i * STAGE_BYTES, STAGE_BYTES, full_w + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        grid_dependency_wait();
        const int q = lane % 4, own_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        const int units = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * UNITS;
        for (int unit = group, own = 0; unit < units; unit += GROUPS, ++own) {
            const int i = unit / UNITS, column = unit % UNITS * BN, tile = blockIdx.x + i * gridDim.x;
            const int first_part = i % BUFFERS * PER_TAP;
            const bool last_use = unit % UNITS == UNITS - 1;  // of the inputs of this tile
            float acc[MI][BN / 2] = {};
            u32 last = STAGES;
            // A wait for a stage by its parity is valid only when all stages before it have arrived: take turns.
            if (unit > 0) barrier_wait(turn + 8 * group, (group == 0 ? own - 1 : own) & 1);
#pragma unroll 1
            for (int s = 0; s < INNER; ++s) {
                const int tap = s / PER_TAP, part = s % PER_TAP, count = unit * INNER + s;
                const u32 stage = count % STAGES;
                if (tap == 0) {
                    barrier_wait(full_x + 8 * (first_part + part), i / BUFFERS & 1);
                    copies_visible();
                }
                barrier_wait(full_w + 8 * stage, count / STAGES & 1);
#pragma unroll
                for (int m = 0; m < MI; ++m) hold(acc[m]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < STAGE_K / 16; ++k)
#pragma unroll
                    for (int m = 0; m < MI; ++m)
                        wgmma(acc[m], descriptor(base + X_AT + (first_part + part) * X_BYTES + (2 * k * PITCH + tap * dilation + 64 * m) * 16, PITCH * 16),
                              descriptor(base + stage * STAGE_BYTES + 2 * k * BN * 16, BN * 16), s + k > 0);
                wgmma_commit();
                if (s == INNER - 1 && lane == 0) barrier_arrive(turn + 8 * (group ^ 1));
                wgmma_wait<1>();
                if (last < STAGES && lane == 0) {
                    barrier_arrive(empty_w + 8 * last);
                    if (last_use && tap == TAPS - 1 && part > 0) barrier_arrive(empty_x + 8 * (first_part + part - 1));
                }
                last = stage;
            }
            wgmma_wait<0>();
            if (lane == 0) {
                barrier_arrive(empty_w + 8 * last);
                if (last_use) barrier_arrive(empty_x + 8 * (first_part + PER_TAP - 1));
            }
#pragma unroll
            for (int m = 0; m < MI; ++m) hold(acc[m]);
            // Output channels are permuted so that a thread has eight neighbours: 16 bytes per access.
            const float* own_params = params + column + 8 * q;
            const long long at = (long long)(tile * BM + own_row) * OUTPUTS + column + 8 * q;
            u16 *own_out = out + at, *own_activated = activated + at;
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int n = 0; n < BN / 32; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        u32 plain[4], active[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const float* p = own_params + 32 * n + 2 * j;
                            const float2 b = *(const float2*)p, f = *(const float2*)(p + OUTPUTS), v = *(const float2*)(p + 2 * OUTPUTS);
                            const float* sum = acc[m] + 4 * (4 * n + j) + 2 * h;
                            const float low = __fadd_rn(sum[0], b.x), high = __fadd_rn(sum[1], b.y);
                            plain[j] = pack(low, high);
                            active[j] = pack(snake(low, f.x, v.x), snake(high, f.y, v.y));
                        }
                        const int offset = (64 * m + 8 * h) * OUTPUTS + 32 * n;
                        if constexpr (PLAIN) *(uint4*)(own_out + offset) = words(plain);
                        *(uint4*)(own_activated + offset) = words(active);
                        asm volatile("" ::: "memory");  // keeps parameters from being loaded early: registers are full
                    }
        }
    }
}
