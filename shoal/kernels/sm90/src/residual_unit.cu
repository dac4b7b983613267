// Residual unit of the codec decoder: dilated convolution, Snake, pointwise convolution, residual add, Snake.
//
// Blocks are persistent. A producer warpgroup loads inputs and weights; each consumer warpgroup multiplies 64 rows. The
// hidden rows stay in registers: accumulators of the first product are operand A of the second. With 96 channels all
// weights stay in shared memory and every warpgroup has tiles of its own; they take turns at the tensor cores, so that
// the epilogue of one overlaps with the products of another. With 192 channels two warpgroups share a tile and its
// weights, which pass through a ring.

constexpr int C = CHANNELS;
constexpr int CHUNKS = C / 8;
constexpr bool RESIDENT = C <= 96;
constexpr int GROUPS = RESIDENT ? 3 : 2;                 // consumer warpgroups
constexpr int BM = RESIDENT ? 64 : 128;                  // rows of a tile
constexpr int BUFFERS = RESIDENT ? GROUPS : 2;           // of inputs
constexpr int SHARING = RESIDENT ? 1 : GROUPS;           // warpgroups that use the same tile and weights
constexpr int PITCH = (BM + MAX_STEPS) | 1;              // odd: neighbouring columns start in other banks
constexpr int X_BYTES = CHUNKS * PITCH * 16;
constexpr int STAGE_K = RESIDENT ? C : 64;               // input channels of a stage of weights
constexpr int STAGE_BYTES = STAGE_K * C * 2;
constexpr int PER_TAP = C / STAGE_K;
constexpr int INNER = TAPS * PER_TAP;                    // stages of the dilated convolution
constexpr int STAGES = RESIDENT ? INNER + PER_TAP : 3;
constexpr int X_AT = STAGES * STAGE_BYTES;
constexpr int PARAMS_AT = X_AT + BUFFERS * X_BYTES;
constexpr int BARRIERS_AT = PARAMS_AT + 6 * C * 4;
constexpr int THREADS = 128 * (GROUPS + 1);
// Threads that load inputs; one warp loads the weights that pass through the ring.
constexpr int COPIERS = RESIDENT ? LOADERS : LOADERS - 32;

// Read by the host: shared memory in bytes, threads, rows of a tile.
extern "C" __device__ int launch_sizes[3] = {BARRIERS_AT + 8 * (2 * BUFFERS + 2 * STAGES + GROUPS), THREADS, BM};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    residual_unit(const u16* __restrict__ x, const u16* __restrict__ activated, const u16* __restrict__ weight,
                  const float* __restrict__ bias, const float* __restrict__ alpha, const float* __restrict__ outer_bias,
                  const float* __restrict__ outer_alpha, const u16* __restrict__ past, const int* __restrict__ slots,
                  const int* __restrict__ starts, u16* __restrict__ out, u16* __restrict__ out_activated, int rows, int rate,
                  int dilation) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    float* params = (float*)(memory + PARAMS_AT);
    const u32 full_x = base + BARRIERS_AT, empty_x = full_x + 8 * BUFFERS, full_w = empty_x + 8 * BUFFERS;
    const u32 empty_w = full_w + 8 * STAGES, turn = empty_w + 8 * STAGES;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, tiles = rows / BM, steps = (TAPS - 1) * dilation;
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; ++i) barrier_init(full_x + 8 * i, COPIERS), barrier_init(empty_x + 8 * i, 4 * SHARING);
        for (int i = 0; i < STAGES; ++i) barrier_init(full_w + 8 * i, 1), barrier_init(empty_w + 8 * i, 4 * SHARING);
        for (int i = 0; i < GROUPS; ++i) barrier_init(turn + 8 * i, 4);
        barriers_ready();
    }
    store_params(params, bias, alpha, C, C, THREADS);
    store_params(params + 3 * C, outer_bias, outer_alpha, C, C, THREADS);
    __syncthreads();
    launch_dependents();
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int thread = threadIdx.x % 128;
        if (thread == LOADERS - 32) {
            const char* from = (const char*)weight;
            if constexpr (RESIDENT) {
                for (int i = 0; i < STAGES; ++i) bulk_load(base + i * STAGE_BYTES, from + i * STAGE_BYTES, STAGE_BYTES, full_w + 8 * i);
            } else {
                u32 stage = 0, parity = 1;
                for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
                    for (int i = 0; i < INNER + PER_TAP; ++i) {
                        barrier_wait(empty_w + 8 * stage, parity);
                        bulk_load(base + stage * STAGE_BYTES, from + i * STAGE_BYTES, STAGE_BYTES, full_w + 8 * stage);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
            }
        }
        if (thread < COPIERS) {
            __syncwarp();
            grid_dependency_wait();
            u32 buffer = 0, parity = 1;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const u16* rest = activated + (long long)(tile * BM - steps) * C;
                const u16* head = context_rows(rest, past, slots, starts, tile * BM, rate, steps * C);
                barrier_wait(empty_x + 8 * buffer, parity);
                copy_rows<COPIERS, CHUNKS, PITCH>(base + X_AT + buffer * X_BYTES, head, rest, steps, steps + BM, C, thread, full_x + 8 * buffer);
                if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(RESIDENT ? 152 : 232));
        grid_dependency_wait();
        const int q = lane % 4, first = RESIDENT ? group : 0, stride = RESIDENT ? GROUPS : 1;
        const int own_row = (RESIDENT ? 0 : group * 64) + threadIdx.x % 128 / 32 * 16 + lane / 4;
        u32 buffer = first, stage = 0, parity = 0, stage_parity = 0;
        if constexpr (RESIDENT)
            for (int i = 0; i < STAGES; ++i) barrier_wait(full_w + 8 * i, 0);
        for (int i = first, tile = blockIdx.x + first * gridDim.x; tile < tiles; i += stride, tile += stride * gridDim.x) {
            // Output channels are permuted so that a thread has eight neighbours: 16 bytes per access.
            const long long at = (long long)(tile * BM + own_row) * C + q * 8;
            uint4 residual[2][C / 32];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < C / 32; ++n) residual[h][n] = *(const uint4*)(x + at + h * 8 * C + n * 32);
            const u32 rows_at = base + X_AT + buffer * X_BYTES + (RESIDENT ? 0 : group * 64 * 16);
            float acc[C / 2] = {};
            barrier_wait(full_x + 8 * buffer, parity);
            copies_visible();
            if constexpr (RESIDENT) {
                if (i > 0) barrier_wait(turn + 8 * group, parity ^ (group == 0));
                hold(acc);
                wgmma_fence();
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
                    for (int k = 0; k < C / 16; ++k)
                        wgmma(acc, descriptor(rows_at + (2 * k * PITCH + tap * dilation) * 16, PITCH * 16),
                              descriptor(base + tap * STAGE_BYTES + 2 * k * C * 16, C * 16), tap + k > 0);
                wgmma_commit();
                if (lane == 0) barrier_arrive(turn + 8 * ((group + 1) % GROUPS));
                wgmma_wait<0>();
            } else {
                u32 last = STAGES;
                for (int s = 0; s < INNER; ++s) {
                    const int tap = s / PER_TAP, part = s % PER_TAP;
                    barrier_wait(full_w + 8 * stage, stage_parity);
                    hold(acc);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < STAGE_K / 16; ++k)
                        wgmma(acc, descriptor(rows_at + ((part * (STAGE_K / 8) + 2 * k) * PITCH + tap * dilation) * 16, PITCH * 16),
                              descriptor(base + stage * STAGE_BYTES + 2 * k * C * 16, C * 16), s + k > 0);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (last < STAGES && lane == 0) barrier_arrive(empty_w + 8 * last);
                    last = stage;
                    if (++stage == STAGES) stage = 0, stage_parity ^= 1;
                }
                wgmma_wait<0>();
                if (lane == 0) barrier_arrive(empty_w + 8 * last);
            }
            hold(acc);
            if (lane == 0) barrier_arrive(empty_x + 8 * buffer);
            u32 hidden[C / 4];
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                const float* p = params + 8 * j + 2 * q;
                const float2 b = *(const float2*)p, f = *(const float2*)(p + C), v = *(const float2*)(p + 2 * C);
                hidden[2 * j] = activate(acc[4 * j], acc[4 * j + 1], b, f, v);
                hidden[2 * j + 1] = activate(acc[4 * j + 2], acc[4 * j + 3], b, f, v);
            }
#pragma unroll
            for (int j = 0; j < C / 4; ++j) asm volatile("" : "+r"(hidden[j])::"memory");
            float y[C / 2] = {};
#pragma unroll
            for (int part = 0; part < PER_TAP; ++part) {
                u32 at_weights = base + INNER * STAGE_BYTES;
                if constexpr (!RESIDENT) {
                    barrier_wait(full_w + 8 * stage, stage_parity);
                    at_weights = base + stage * STAGE_BYTES;
                }
                hold(y);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < STAGE_K / 16; ++k) {
                    const int h = 4 * (part * (STAGE_K / 16) + k);
                    wgmma(y, hidden[h], hidden[h + 1], hidden[h + 2], hidden[h + 3], descriptor(at_weights + 2 * k * C * 16, C * 16), part + k > 0);
                }
                wgmma_commit();
                wgmma_wait<0>();
                if constexpr (!RESIDENT) {
                    if (lane == 0) barrier_arrive(empty_w + 8 * stage);
                    if (++stage == STAGES) stage = 0, stage_parity ^= 1;
                }
            }
            hold(y);
#pragma unroll
            for (int n = 0; n < C / 32; ++n) {
                const float* p = params + 3 * C + 32 * n + 8 * q;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 add[4] = {residual[h][n].x, residual[h][n].y, residual[h][n].z, residual[h][n].w};
                    u32 plain[4], active[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 b = *(const float2*)(p + 2 * j), f = *(const float2*)(p + C + 2 * j), v = *(const float2*)(p + 2 * C + 2 * j);
                        const float2 r = unpack(add[j]);
                        const float* sum = y + 4 * (4 * n + j) + 2 * h;
                        const float low = __fadd_rn(__fadd_rn(sum[0], b.x), r.x), high = __fadd_rn(__fadd_rn(sum[1], b.y), r.y);
                        plain[j] = pack(low, high);
                        active[j] = pack(snake(low, f.x, v.x), snake(high, f.y, v.y));
                    }
                    *(uint4*)(out + at + h * 8 * C + n * 32) = words(plain);
                    *(uint4*)(out_activated + at + h * 8 * C + n * 32) = words(active);
                }
            }
            if constexpr (RESIDENT) parity ^= 1;
            else if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
        }
    }
}
