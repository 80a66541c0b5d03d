// Linear layers of few outputs, such as a classifier's, in single precision. `conv.cu` would compute tiles of 128 × 64 by a
// few blocks. Here a launch is as long as its few reads: 5 to 10 µs instead of 9 to 27.
//   FORWARD  y[n, o]  = Σ_i x[n, i] · w[o, i]      one warp per sample
//   INPUT    dx[n, i] = Σ_o dy[n, o] · w[o, i]     one thread per four inputs
//   WEIGHT   dw[o, i] = Σ_n dy[n, o] · x[n, i]     one block per output and 128 inputs
// The inputs come in fours. Max 32 outputs.

struct Linear {
    int ci, co, batch;
};

extern "C" __global__ void __launch_bounds__(256) linear_FORWARD(Linear s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    const int lane = lanes[blockIdx.z], n = blockIdx.x * 8 + threadIdx.x / 32, thread = threadIdx.x % 32;
    if (n >= s.batch) return;
    const float* const x = of(x_rows, lane) + n * s.ci;
    const float* const w = of(w_rows, lane);
    constexpr int AT_ONCE = 8;  // outputs whose reads and sums overlap
    float mine = 0;             // of output `thread`
    for (int o0 = 0; o0 < s.co; o0 += AT_ONCE) {
        float totals[AT_ONCE] = {};
        for (int i = 4 * thread; i < s.ci; i += 128) {
            const Pack<4> a = load<4>(x + i);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const Pack<4> b = load<4>(w + min(o0 + j, s.co - 1) * s.ci + i);
#pragma unroll
                for (int k = 0; k < 4; k++) totals[j] = fmaf(a.v[k], b.v[k], totals[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            totals[j] = warp_sum(totals[j]);
            if (thread == o0 + j) mine = totals[j];
        }
    }
    if (thread < s.co) of(y_rows, lane)[n * s.co + thread] = after(mine, lane, thread, s.co, n * s.co + thread, flags & 2);
}

extern "C" __global__ void linear_INPUT(Linear s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    const int lane = lanes[blockIdx.z], at = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= s.batch * s.ci) return;
    const int n = at / s.ci;
    const float* const w = of(w_rows, lane) + at - n * s.ci;
    const float* const dy = of(y_rows, lane) + n * s.co;
    float* const dx = of(x_rows, lane) + at;
    Pack<4> total = {};
    if (!(flags & 1)) total = load<4>(dx);
#pragma unroll 8
    for (int o = 0; o < s.co; o++) {
        const Pack<4> b = load<4>(w + o * s.ci);
#pragma unroll
        for (int k = 0; k < 4; k++) total.v[k] = fmaf(dy[o], b.v[k], total.v[k]);
    }
    store<4>(dx, total);
}

extern "C" __global__ void __launch_bounds__(256) linear_WEIGHT(Linear s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    __shared__ Pack<4> parts[8][32];
    const int lane = lanes[blockIdx.z], o = blockIdx.y, warp = threadIdx.x / 32, thread = threadIdx.x % 32, i = blockIdx.x * 128 + 4 * thread;
    const float* const x = of(x_rows, lane) + i;
    const float* const dy = of(y_rows, lane) + o;
    Pack<4> total = {};
    if (i < s.ci) {
#pragma unroll 8
        for (int n = warp; n < s.batch; n += 8) {
            const Pack<4> a = load<4>(x + n * s.ci);
            const float d = dy[n * s.co];
#pragma unroll
            for (int k = 0; k < 4; k++) total.v[k] = fmaf(d, a.v[k], total.v[k]);
        }
    }
    parts[warp][thread] = total;
    __syncthreads();
    if (warp != 0 || i >= s.ci) return;
    float* const to = of(w_rows, lane) + o * s.ci + i;
    for (int k = 0; k < 4; k++) {
        float sum = flags & 1 ? 0.f : to[k];
        for (int j = 0; j < 8; j++) sum += parts[j][thread].v[k];
        to[k] = sum;
    }
}
