// Shared by the convolutions of the codec: copies of rows, tensor core products, Snake.
//
// Operands of wgmma lie in shared memory without swizzling: a column of eight channels (16 bytes) is contiguous over
// rows. A tile of inputs can therefore be read at any row offset, once per tap, although it is loaded only once.

constexpr int MAX_STEPS = TAPS == 7 ? 54 : TAPS - 1;  // left context, for dilations up to 9 of seven taps
constexpr int LOADERS = 128;   // threads of the producer warpgroup

// Copies rows of CHUNKS 16-byte columns with THREADS threads: the first `steps` rows from `head`, the others from `rest`.
// Every thread arrives at the barrier once its copies have completed.
template <int THREADS, int CHUNKS, int PITCH>
__device__ __forceinline__ void copy_rows(u32 to, const u16* head, const u16* rest, int steps, int rows, int width, int thread, u32 barrier) {
    int row = thread / CHUNKS, chunk = thread % CHUNKS;
#pragma unroll 4
    while (row < rows) {
        const u16* from = (row < steps ? head : rest) + row * width + chunk * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + (chunk * PITCH + row) * 16), "l"(from) : "memory");
        row += THREADS / CHUNKS;
        if constexpr (THREADS % CHUNKS != 0) {
            chunk += THREADS % CHUNKS;
            if (chunk >= CHUNKS) chunk -= CHUNKS, ++row;
        }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes copied rows visible to wgmma. Call it after the wait for their barrier.
__device__ __forceinline__ void copies_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// First row of a tile's inputs, which are its left context and then the tile. The context of a stream's first tile is
// stored in `past`; that of the others is the rows before them.
__device__ __forceinline__ const u16* context_rows(const u16* rest, const u16* past, const int* slots, const int* starts, int m, int rate, int size) {
    const int frame = m / rate;
    return m == starts[frame] * rate ? past + (long long)slots[frame] * size : rest;
}

// Descriptor of an operand: `leading` bytes from one 16-byte column to the next; eight rows are 128 bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(128 >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accumulators across this point.
template <int N> __device__ __forceinline__ void hold(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 unpack(u32 packed) {
    float2 r;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}" : "=f"(r.x), "=f"(r.y) : "r"(packed));
    return r;
}

// The order of operations, and so the bits, are those of `snake` in codec_decoder/conv.py.
__device__ __forceinline__ float snake(float y, float frequency, float inverse) {
    const float t = __fmaf_rn(y, frequency, __fsub_rn(12582912.0f, __fmaf_rn(y, frequency, 12582912.0f)));
    const float square = __fmul_rn(t, t);
    const float last = __fmaf_rn(square, __fmaf_rn(square, -3.26512228f, 12.98722362f), -30.08575227f);
    const float series = __fmaf_rn(square, last, 42.72547886f);
    const float sine_squared = __fmul_rn(square, __fmaf_rn(square, __fmaf_rn(square, series, -32.46959462f), 9.86960336f));
    return __fmaf_rn(sine_squared, inverse, y);
}

// Stores the parameters of an epilogue in shared memory: bias, frequency of Snake, 1 / alpha; `width` of each. Values
// of alpha repeat after `period`: an upsampling convolution has the same channels in every phase.
__device__ __forceinline__ void store_params(float* params, const float* bias, const float* alpha, int width, int period, int threads) {
    for (int c = threadIdx.x; c < width; c += threads) {
        const float a = alpha[c % period];
        float inverse;
        asm("div.full.f32 %0, 0f3F800000, %1;" : "=f"(inverse) : "f"(__fadd_rn(a, 1e-9f)));
        params[c] = bias[c], params[width + c] = __fmul_rn(a, 0.3183098861837907f), params[2 * width + c] = inverse;
    }
}

// Snake of two accumulators in neighbouring channels, as half.
__device__ __forceinline__ u32 activate(float low, float high, float2 bias, float2 frequency, float2 inverse) {
    return pack(snake(__fadd_rn(low, bias.x), frequency.x, inverse.x), snake(__fadd_rn(high, bias.y), frequency.y, inverse.y));
}

// Four registers as one vector, which a thread stores with a single 16-byte access.
__device__ __forceinline__ uint4 words(const u32 (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }
