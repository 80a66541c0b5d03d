// Shared by all kernels. A launch serves several lanes; each lane is a network with its own weights and batch.
// blockIdx.z selects the lane from a list, so lanes can pause, finish and differ without another launch.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// One array per lane. Stride 0: all lanes share one array.
struct Rows {
    float* at;
    long long stride;
};

__device__ __forceinline__ float* of(const Rows& rows, int lane) { return rows.at + rows.stride * lane; }

// The place of a block's lane in the list, from last to first. Kernels that read what products have just written begin with
// what was written last: that is still in the second-level cache.
__device__ __forceinline__ int backwards() { return gridDim.z - 1 - blockIdx.z; }

// The valid part of an array: all of its floats, or `width` floats per token of a lane's batch. Nothing after the last
// token is read.
struct Extent {
    int len, width;
    const int* tokens;
};

__device__ __forceinline__ int of(const Extent& extent, int lane) {
    return extent.tokens ? extent.tokens[lane] * extent.width : extent.len;
}

// Every element i of an extent, in a grid-stride loop.
#define FOR_EACH(i, extent, lane) \
    for (int i = blockIdx.x * blockDim.x + threadIdx.x, end = of(extent, lane); i < end; i += gridDim.x * blockDim.x)

// n / d for n < 2^31, by multiplication (Granlund and Montgomery 1994).
struct Div {
    u32 multiplier, shift;
};

__device__ __forceinline__ int operator/(int n, const Div& d) {
    return int((__umulhi(u32(n), d.multiplier) + u32(n)) >> d.shift);
}

#define MINUS_INFINITY __int_as_float(0xff800000)

// A batch-norm, a·x + b, and its backward pass, dx = a·dz + b·x + c. All kernels round them alike.
__device__ __forceinline__ float norm_of(float a, float x, float b) { return __fmaf_rn(a, x, b); }
__device__ __forceinline__ float through_norm(float a, float dz, float b, float x, float c) {
    return __fadd_rn(__fmaf_rn(a, dz, __fmul_rn(b, x)), c);
}

// NaN passes, so that a diverged network is noticed.
__device__ __forceinline__ float relu(float v) { return v < 0.f ? 0.f : v; }

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

__device__ __forceinline__ double warp_sum(double v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// The sum over a block of up to 1024 threads, in a fixed order. Every thread gets it.
__device__ double block_sum(double v) {
    __shared__ double parts[32];
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    double total = 0;
    for (int i = 0; i < (blockDim.x + 31) / 32; i++) total += parts[i];
    return total;
}

// A vector of VEC floats.
template <int VEC>
struct Pack {
    float v[VEC];
};

template <int VEC>
__device__ __forceinline__ Pack<VEC> load(const float* at) {
    Pack<VEC> p;
    if constexpr (VEC == 4) {
        float4 q = *reinterpret_cast<const float4*>(at);
        p.v[0] = q.x, p.v[1] = q.y, p.v[2] = q.z, p.v[3] = q.w;
    } else {
        p.v[0] = *at;
    }
    return p;
}

template <int VEC>
__device__ __forceinline__ void store(float* at, const Pack<VEC>& p) {
    if constexpr (VEC == 4) {
        *reinterpret_cast<float4*>(at) = make_float4(p.v[0], p.v[1], p.v[2], p.v[3]);
    } else {
        *at = p.v[0];
    }
}

// The positions of max-pool winners, for VEC channels.
template <int VEC>
struct Places {
    u8 v[VEC];
};

// Copies VEC floats, or writes zeros.
template <int VEC>
__device__ __forceinline__ void copy_async(u32 to, const float* from, bool valid) {
    const int bytes = valid ? 4 * VEC : 0;
    if constexpr (VEC == 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
    }
}

// Copies 16 bytes, or writes zeros, past the first-level cache: for what a block reads once. (Measured: on its way through
// that cache it costs the bandwidth of shared memory twice.)
__device__ __forceinline__ void copy_once(u32 to, const float* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// Coefficients of two neighbouring columns: v0 → a0·v0 + b0, v1 → a1·v1 + b1.
struct Pair {
    float a0, a1, b0, b1;
};

// The epilogue of a forward product: y = relu?(a·x + b + residual?). (a, b) is (1, bias) or a frozen batch-norm's scale
// and shift. If a batch-norm follows that is not frozen, `moments` takes its sums about `mean`, for `valid` samples.
struct After {
    Rows bias, norm, residual, moments, mean;
    const int* valid;

    __device__ __forceinline__ float operator()(float v, int lane, int column, int columns, long long at, bool with_relu) const {
        if (norm.at) v = norm_of(of(norm, lane)[2 * columns + column], v, of(norm, lane)[3 * columns + column]);
        if (bias.at) v += of(bias, lane)[column];
        if (residual.at) v += of(residual, lane)[at];
        return with_relu ? relu(v) : v;
    }

    // (a, b) of columns `column` and `column` + 1. A thread that computes many rows reads them once.
    __device__ __forceinline__ Pair pair(int lane, int column, int columns) const {
        Pair p = {1, 1, 0, 0};
        if (norm.at) {
            const float* q = of(norm, lane) + 2 * columns + column;
            p = {q[0], q[1], q[columns], q[columns + 1]};
        } else if (bias.at) {
            const float* q = of(bias, lane) + column;
            p.b0 = q[0], p.b1 = q[1];
        }
        return p;
    }

    // Leaves Σ(y − mean) and Σ(y − mean)² of a product's 128 rows for `batch_norm_statistics`. A thread has two columns of
    // 32 rows, as in `put`, and shares them with its three neighbours. end: the first element of padding.
    template <int LEN, class At>
    __device__ __forceinline__ void sum_moments(int lane, int chunk, int column, int columns, int end, const float (&acc)[LEN], At at) const {
        const float mean0 = of(mean, lane)[column], mean1 = of(mean, lane)[column + 1];
        float sums[4] = {};
#pragma unroll
        for (int v = 0; v < LEN / 2; v++) {
            if (u32(at(v)) >= u32(end)) continue;
            const float d0 = acc[v / 2 * 4 + v % 2] - mean0, d1 = acc[v / 2 * 4 + 2 + v % 2] - mean1;
            sums[0] += d0, sums[1] += d1, sums[2] += d0 * d0, sums[3] += d1 * d1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
            sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
        }
        if (threadIdx.x % 4 != 0) return;
        float* const to = of(moments, lane) + 2 * chunk * columns + column;
        *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
        *reinterpret_cast<float2*>(to + columns) = make_float2(sums[2], sums[3]);
    }

    // Writes or adds what a thread of a warp group has computed, pairs of neighbouring columns: numbers 4j + i and 4j + 2
    // + i of `acc` are elements at(2j + i) and the next of y; none if that is negative. flags: 1 write, 2 apply a ReLU.
    // Only a forward pass has a residual, and it writes. What is added is read eight pairs at a time before any of them is
    // written, so a thread waits for memory a few times, not 32 times.
    template <int LEN, class At>
    __device__ __forceinline__ void put(float* y, int lane, const Pair& p, const float (&acc)[LEN], int flags, At at) const {
        const float* const added = residual.at ? of(residual, lane) : flags & 1 ? nullptr : y;
#pragma unroll
        for (int first = 0; first < LEN / 2; first += 8) {
            int to[8];
            float2 before[8];
#pragma unroll
            for (int i = 0; i < 8; i++) to[i] = at(first + i), before[i] = make_float2(0, 0);
            if (added) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (to[i] >= 0) before[i] = *reinterpret_cast<const float2*>(added + to[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int v = first + i;
                float v0 = acc[v / 2 * 4 + v % 2], v1 = acc[v / 2 * 4 + 2 + v % 2];
                if (norm.at || bias.at) v0 = norm_of(p.a0, v0, p.b0), v1 = norm_of(p.a1, v1, p.b1);
                if (added) v0 += before[i].x, v1 += before[i].y;
                if (flags & 2) v0 = relu(v0), v1 = relu(v1);
                if (to[i] >= 0) *reinterpret_cast<float2*>(y + to[i]) = make_float2(v0, v1);
            }
        }
    }
};
