// Multi-head self-attention among the tokens of each text: softmax(Q·Kᵀ/√d)·V, in single precision.
//
// A block takes one head of one text, and 16 of its queries at a time (or keys, for their gradients): their rows of
// attention lie in shared memory, four rows a warp. What they meet is copied 32 tokens at a time, a token a thread. As on the
// CPU attention is not kept: the backward pass computes it again from three numbers a row.

constexpr int TILE = 16, PARTNERS = 32;
extern __shared__ float attention_memory[];

// One head of one text.
struct Head {
    int lane, unit, n, d, pitch;  // tokens; numbers of the head in each, and between the rows of a copy
    long long first, at;          // the text's first row, and the head's first column
    float scale;

    __device__ Head(const int* lanes, const Texts& texts, int heads, int width) {
        lane = lanes[blockIdx.z], unit = blockIdx.x;
        const int* start = texts.start(lane) + unit / heads;
        first = start[0], n = start[1] - start[0];
        d = width / heads, at = unit % heads * d;
        pitch = d | 1;  // odd, so that threads at one column of neighbouring rows are in different banks
        scale = 1.f / sqrtf(float(d));
    }

    // Maximum, inverse sum and ⟨y, dy⟩ of a query: (tokens, heads, 3).
    __device__ __forceinline__ float* statistics(const Rows& rows, int heads, int query) const {
        return of(rows, lane) + 3 * ((first + query) * heads + unit % heads);
    }
};

// Copies `n` rows of `d` floats that lie `stride` apart, and zeros up to `all` rows.
__device__ __forceinline__ void copy_rows(float* to, int pitch, const float* from, long long stride, int n, int all, int d) {
    for (int i = threadIdx.x; i < all * d; i += blockDim.x) {
        const int row = i / d, e = i - row * d;
        to[row * pitch + e] = row < n ? from[row * stride + e] : 0.f;
    }
}

// out[k] = ⟨row 4·warp + k of a, row `thread` of b⟩
__device__ __forceinline__ void inner_products(float (&out)[4], const float* a, const float* b, int pitch, int d) {
    a += threadIdx.x / 32 * 4 * pitch, b += threadIdx.x % 32 * pitch;
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = 0;
    for (int e = 0; e < d; e++) {
        const float v = b[e];
#pragma unroll
        for (int k = 0; k < 4; k++) out[k] += a[k * pitch + e] * v;
    }
}

// to[row] ← (to +) Σ_j weights[row][j]·from[j], for the four rows of the warp that are below `m`; neighbouring threads have
// neighbouring columns.
__device__ __forceinline__ void weighted_rows(const float* weights, int n, const float* from, long long stride, float* to, long long to_stride,
                                              int m, int d, bool fresh) {
    const int row = threadIdx.x / 32 * 4;
    for (int e = threadIdx.x % 32; e < d; e += 32) {
        float sums[4] = {};
        for (int j = 0; j < n; j++) {
            const float v = from[j * stride + e];
#pragma unroll
            for (int k = 0; k < 4; k++) sums[k] += weights[(row + k) * n + j] * v;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float* const out = to + (row + k) * to_stride + e;
            if (row + k < m) *out = fresh ? sums[k] : *out + sums[k];
        }
    }
}

// What dropout multiplies attention by: the masks of the CPU, which draws them for 64 queries of a head at a time.
struct Mask {
    uint2 key;
    u32 threshold;
    float scale;
    bool is_on;

    __device__ Mask(const Drop& drop, int lane) : key(), threshold(drop.threshold()), scale(drop.scale()), is_on(drop.rate > 0.f) {
        if (is_on) key = drop.key(lane);
    }

    __device__ __forceinline__ float operator()(const Head& head, int query, int partner) const {
        if (!is_on) return 1.f;
        const int element = query % 64 * head.n + partner, place = element % 128;
        u32 words[4] = {u32(element / 128 * 16 + place % 16), u32(query / 64), u32(head.unit), 0};
        philox(words, key.x, key.y);
        const int word = place / 16 % 4;
        const u32 chosen = word == 0 ? words[0] : word == 1 ? words[1] : word == 2 ? words[2] : words[3];
        return (chosen >> (place / 64 * 16) & 0xffffu) >= threshold ? scale : 0.f;
    }
};

// y (tokens, C) from x (tokens, 3C), which holds queries, keys and values side by side.
extern "C" __global__ void __launch_bounds__(128) attention(const int* lanes, Texts texts, int heads, int width, Rows x_rows, Rows y_rows,
                                                            Rows statistics, Drop drop) {
    const Head h(lanes, texts, heads, width);
    const Mask mask(drop, h.lane);
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const long long stride = 3ll * width;
    const float* x = of(x_rows, h.lane) + h.first * stride + h.at;
    float* const y = of(y_rows, h.lane) + h.first * width + h.at;
    float* const queries = attention_memory;
    float* const keys = queries + TILE * h.pitch;
    float* const scores = keys + PARTNERS * h.pitch;  // (TILE, n)
    for (int q0 = blockIdx.y * TILE; q0 < h.n; q0 += gridDim.y * TILE) {
        const int m = min(TILE, h.n - q0);
        __syncthreads();
        copy_rows(queries, h.pitch, x + q0 * stride, stride, m, TILE, h.d);
        for (int j0 = 0; j0 < h.n; j0 += PARTNERS) {
            __syncthreads();
            copy_rows(keys, h.pitch, x + j0 * stride + width, stride, min(PARTNERS, h.n - j0), PARTNERS, h.d);
            __syncthreads();
            float s[4];
            inner_products(s, queries, keys, h.pitch, h.d);
            for (int k = 0; k < 4 && j0 + thread < h.n; k++) scores[(4 * warp + k) * h.n + j0 + thread] = s[k];
        }
        __syncwarp();
        for (int i = 4 * warp; i < min(4 * warp + 4, m); i++) {
            float* const row = scores + i * h.n;
            float top = MINUS_INFINITY, sum = 0;
            for (int j = thread; j < h.n; j += 32) top = fmaxf(top, row[j]);
            top = h.scale * warp_max(top);
            for (int j = thread; j < h.n; j += 32) sum += row[j] = expf(h.scale * row[j] - top);
            const float inverse = 1.f / warp_sum(sum);
            for (int j = thread; j < h.n; j += 32) row[j] *= inverse * mask(h, q0 + i, j);
            if (thread == 0) {
                float* const kept = h.statistics(statistics, heads, q0 + i);
                kept[0] = top, kept[1] = inverse;
            }
        }
        __syncwarp();
        weighted_rows(scores, h.n, x + 2 * width, stride, y + (long long)q0 * width, width, m, h.d, true);
    }
}

// The queries' part of dx, and ⟨y, dy⟩ of every query.
extern "C" __global__ void __launch_bounds__(128) attention_backward_queries(const int* lanes, Texts texts, int heads, int width, Rows x_rows,
                                                                             Rows y_rows, Rows statistics, Drop drop, Rows dy_rows,
                                                                             Rows dx_rows, int fresh) {
    const Head h(lanes, texts, heads, width);
    const Mask mask(drop, h.lane);
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const long long stride = 3ll * width;
    const float* x = of(x_rows, h.lane) + h.first * stride + h.at;
    const float* y = of(y_rows, h.lane) + h.first * width + h.at;
    const float* dy = of(dy_rows, h.lane) + h.first * width + h.at;
    float* const dx = of(dx_rows, h.lane) + h.first * stride + h.at;
    float* const queries = attention_memory;
    float* const slopes = queries + TILE * h.pitch;
    float* const keys = slopes + TILE * h.pitch;
    float* const values = keys + PARTNERS * h.pitch;
    float* const dscores = values + PARTNERS * h.pitch;  // (TILE, n)
    for (int q0 = blockIdx.y * TILE; q0 < h.n; q0 += gridDim.y * TILE) {
        const int m = min(TILE, h.n - q0);
        __syncthreads();
        copy_rows(queries, h.pitch, x + q0 * stride, stride, m, TILE, h.d);
        copy_rows(slopes, h.pitch, dy + (long long)q0 * width, width, m, TILE, h.d);
        float top[4] = {}, inverse[4] = {}, inner[4] = {};
        for (int k = 0; k < 4 && 4 * warp + k < m; k++) {
            const int query = q0 + 4 * warp + k;
            for (int e = thread; e < h.d; e += 32) inner[k] += y[(long long)query * width + e] * dy[(long long)query * width + e];
            inner[k] = warp_sum(inner[k]);
            float* const kept = h.statistics(statistics, heads, query);
            top[k] = kept[0], inverse[k] = kept[1];
            if (thread == 0) kept[2] = inner[k];
        }
        for (int j0 = 0; j0 < h.n; j0 += PARTNERS) {
            const int n = min(PARTNERS, h.n - j0);
            __syncthreads();
            copy_rows(keys, h.pitch, x + j0 * stride + width, stride, n, PARTNERS, h.d);
            copy_rows(values, h.pitch, x + j0 * stride + 2 * width, stride, n, PARTNERS, h.d);
            __syncthreads();
            float s[4], dp[4];
            inner_products(s, queries, keys, h.pitch, h.d);
            inner_products(dp, slopes, values, h.pitch, h.d);
            for (int k = 0; k < 4 && thread < n; k++) {
                const int i = 4 * warp + k, j = j0 + thread;
                const float p = expf(h.scale * s[k] - top[k]) * inverse[k];
                dscores[i * h.n + j] = i < m ? h.scale * p * (dp[k] * mask(h, q0 + i, j) - inner[k]) : 0.f;
            }
        }
        __syncwarp();
        weighted_rows(dscores, h.n, x + width, stride, dx + q0 * stride, stride, m, h.d, fresh);
    }
}

// The keys' and the values' parts of dx.
extern "C" __global__ void __launch_bounds__(128) attention_backward_keys(const int* lanes, Texts texts, int heads, int width, Rows x_rows,
                                                                          Rows statistics, Drop drop, Rows dy_rows, Rows dx_rows, int fresh) {
    const Head h(lanes, texts, heads, width);
    const Mask mask(drop, h.lane);
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const long long stride = 3ll * width;
    const float* x = of(x_rows, h.lane) + h.first * stride + h.at;
    const float* dy = of(dy_rows, h.lane) + h.first * width + h.at;
    float* const dx = of(dx_rows, h.lane) + h.first * stride + h.at;
    float* const keys = attention_memory;
    float* const values = keys + TILE * h.pitch;
    float* const queries = values + TILE * h.pitch;
    float* const slopes = queries + PARTNERS * h.pitch;
    float* const kept_attention = slopes + PARTNERS * h.pitch;  // (TILE, n), of a key with every query
    float* const dscores = kept_attention + TILE * h.n;         // the same
    for (int j0 = blockIdx.y * TILE; j0 < h.n; j0 += gridDim.y * TILE) {
        const int m = min(TILE, h.n - j0);
        __syncthreads();
        copy_rows(keys, h.pitch, x + j0 * stride + width, stride, m, TILE, h.d);
        copy_rows(values, h.pitch, x + j0 * stride + 2 * width, stride, m, TILE, h.d);
        for (int q0 = 0; q0 < h.n; q0 += PARTNERS) {
            const int n = min(PARTNERS, h.n - q0);
            __syncthreads();
            copy_rows(queries, h.pitch, x + q0 * stride, stride, n, PARTNERS, h.d);
            copy_rows(slopes, h.pitch, dy + (long long)q0 * width, width, n, PARTNERS, h.d);
            __syncthreads();
            float s[4], dp[4];
            inner_products(s, keys, queries, h.pitch, h.d);
            inner_products(dp, values, slopes, h.pitch, h.d);
            const float* const kept = h.statistics(statistics, heads, q0 + min(thread, n - 1));
            for (int k = 0; k < 4 && thread < n; k++) {
                const int i = 4 * warp + k, at = i * h.n + q0 + thread;
                const float p = i < m ? expf(h.scale * s[k] - kept[0]) * kept[1] : 0.f;
                const float factor = i < m ? mask(h, q0 + thread, j0 + i) : 0.f;
                kept_attention[at] = p * factor;
                dscores[at] = h.scale * p * (dp[k] * factor - kept[2]);
            }
        }
        __syncwarp();
        float* const to = dx + j0 * stride;
        weighted_rows(dscores, h.n, x, stride, to + width, stride, m, h.d, fresh);
        weighted_rows(kept_attention, h.n, dy, width, to + 2 * width, stride, m, h.d, fresh);
    }
}
