// Multi-head self-attention among the tokens of each text: softmax(Q·Kᵀ/√d)·V, in single precision.
//
// A block computes one head of one text, with tiles of 32 queries × 32 keys: four queries per warp, one key per thread.
// Most texts are one tile. The attention matrix is not kept, so a block needs little memory for texts of any length.
// Longer texts read their keys twice: for the sums of the softmax and for the result. As on the CPU, the backward pass
// recomputes attention from two numbers per query.

constexpr int TILE = 32, ATTENDING = 256;  // threads per block
constexpr int PITCH = TILE + 4;            // distance between rows of an attention tile: whole vectors of four
extern __shared__ __align__(16) float attention_memory[];

// One head of one text. Rows are copied VEC floats at a time.
template <int VEC>
struct Head {
    int lane, unit, n, d, at, pitch;  // n: tokens; d: numbers per token; at: first column; pitch: between rows of a copy
    long long first;                  // the text's first row
    float scale;

    __device__ Head(const int* lanes, const Texts& texts, int heads, int width) {
        lane = lanes[blockIdx.z], unit = blockIdx.x;
        const int* start = texts.start(lane) + unit / heads;
        first = start[0], n = start[1] - start[0];
        d = width / heads, at = unit % heads * d;
        pitch = VEC * (d / VEC | 1);  // odd, so that one column of neighbouring rows is in different banks
        scale = 1.f / sqrtf(float(d));
    }

    // Begins to copy `rows` rows that are `stride` apart, with zeros up to a whole tile.
    __device__ __forceinline__ void copy(float* to, const float* from, int stride, int rows) const {
        const int packs = d / VEC, at_once = ATTENDING / packs, e = threadIdx.x % packs * VEC;
        for (int row = threadIdx.x / packs; row < TILE && threadIdx.x < at_once * packs; row += at_once) {
            const u32 place = u32(__cvta_generic_to_shared(to + row * pitch + e));
            copy_async<VEC>(place, from + (row < rows ? row : 0) * stride + e, row < rows);
        }
    }

    // out[k] = ⟨row 4·warp + k of a, row `thread` of b⟩
    __device__ __forceinline__ void inner_products(float (&out)[4], const float* a, const float* b) const {
        a += threadIdx.x / 32 * 4 * pitch, b += threadIdx.x % 32 * pitch;
#pragma unroll
        for (int k = 0; k < 4; k++) out[k] = 0;
        for (int e = 0; e < d; e += VEC) {
            const Pack<VEC> v = load<VEC>(b + e);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const Pack<VEC> w = load<VEC>(a + k * pitch + e);
#pragma unroll
                for (int i = 0; i < VEC; i++) out[k] += w.v[i] * v.v[i];
            }
        }
    }

    // to[row] ← (to +) Σ_j weights[row][j]·from[j] over j < n, for the warp's four rows below m; TURNED:
    // weights[j][row]. Neighbouring threads have neighbouring columns. From n to the next multiple of four, `weights`
    // must be finite and `from` zero.
    template <bool TURNED>
    __device__ __forceinline__ void weighted_rows(const float* weights, const float* from, int n, float* to, int stride, int m,
                                                  bool fresh) const {
        const int row = threadIdx.x / 32 * 4;
        if (row >= m) return;
        for (int e = threadIdx.x % 32; e < d; e += 32) {
            float sums[4] = {};
            for (int j = 0; j < n; j += 4) {
                Pack<4> w[4];
#pragma unroll
                for (int k = 0; k < 4; k++) w[k] = load<4>(weights + (TURNED ? (j + k) * PITCH + row : (row + k) * PITCH + j));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float v = from[(j + i) * pitch + e];
#pragma unroll
                    for (int k = 0; k < 4; k++) sums[k] += (TURNED ? w[i].v[k] : w[k].v[i]) * v;
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float* const out = to + (row + k) * stride + e;
                if (row + k < m) *out = fresh ? sums[k] : *out + sums[k];
            }
        }
    }

    // Maximum and inverse sum per query: (tokens, heads, 2).
    __device__ __forceinline__ float* statistics(const Rows& rows, int heads, int query) const {
        return of(rows, lane) + 2 * ((first + query) * heads + unit % heads);
    }
};

// Waits until the copies of all threads of the block are complete.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Dropout's factors on attention: the same masks as on the CPU, which draws them for 64 queries of a head at a time.
struct Mask {
    uint2 seed;
    u32 threshold;
    float scale;
    bool is_on;

    __device__ Mask(const Drop& drop, int lane) : seed(), threshold(drop.threshold()), scale(drop.scale()), is_on(drop.rate > 0.f) {
        if (is_on) seed = drop.key(lane);
    }

    // For a text of n tokens. `unit` is the text's index times the heads, plus the head.
    __device__ __forceinline__ float operator()(int unit, int n, int query, int key) const {
        if (!is_on) return 1.f;
        const int element = query % 64 * n + key, place = element % 128;
        u32 words[4] = {u32(element / 128 * 16 + place % 16), u32(query / 64), u32(unit), 0};
        philox(words, seed.x, seed.y);
        const int word = place / 16 % 4;
        const u32 chosen = word == 0 ? words[0] : word == 1 ? words[1] : word == 2 ? words[2] : words[3];
        return (chosen >> (place / 64 * 16) & 0xffffu) >= threshold ? scale : 0.f;
    }
};

// y (tokens, C) from x (tokens, 3C), which holds queries, keys and values side by side.
template <int VEC>
__device__ __forceinline__ void attend(const int* lanes, const Texts& texts, int heads, int width, const Rows& x_rows, const Rows& y_rows,
                                       const Rows& statistics, const Drop& drop) {
    const Head<VEC> h(lanes, texts, heads, width);
    if (blockIdx.y * TILE >= h.n) return;
    const Mask mask(drop, h.lane);
    const int row = threadIdx.x / 32 * 4, thread = threadIdx.x % 32;
    const int stride = 3 * width;
    const float* x = of(x_rows, h.lane) + h.first * stride + h.at;
    float* const y = of(y_rows, h.lane) + h.first * width + h.at;
    float* const queries = attention_memory;
    float* const keys = queries + TILE * h.pitch;
    float* const values = keys + TILE * h.pitch;
    float* const weights = values + TILE * h.pitch;  // (TILE, TILE); one warp writes and reads a row
    const bool is_one_tile = h.n <= TILE;
    for (int q0 = blockIdx.y * TILE; q0 < h.n; q0 += gridDim.y * TILE) {
        const int m = min(TILE, h.n - q0);
        float s[4], top[4], sum[4];
#pragma unroll
        for (int k = 0; k < 4; k++) top[k] = MINUS_INFINITY, sum[k] = 0;
        // The scaled scores of the warp's queries and the thread's key.
        const auto score = [&](int n) {
            h.inner_products(s, queries, keys);
#pragma unroll
            for (int k = 0; k < 4; k++) s[k] = thread < n ? h.scale * s[k] : MINUS_INFINITY;
        };
        for (int j0 = 0; j0 < h.n; j0 += TILE) {
            const int n = min(TILE, h.n - j0);
            __syncthreads();  // the previous tiles have been read
            if (j0 == 0) h.copy(queries, x + q0 * stride, stride, m);
            h.copy(keys, x + j0 * stride + width, stride, n);
            if (is_one_tile) h.copy(values, x + 2 * width, stride, n);
            wait_for_copies();
            if (row >= m) continue;
            score(n);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float before = top[k];
                top[k] = fmaxf(before, warp_max(s[k]));
                sum[k] = sum[k] * expf(before - top[k]) + expf(s[k] - top[k]);
            }
        }
        float inverse[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            inverse[k] = 1.f / warp_sum(sum[k]);
            if (thread == 0 && row + k < m) {
                float* const kept = h.statistics(statistics, heads, q0 + row + k);
                kept[0] = top[k], kept[1] = inverse[k];
            }
        }
        for (int j0 = 0; j0 < h.n; j0 += TILE) {
            const int n = min(TILE, h.n - j0);
            if (!is_one_tile) {
                __syncthreads();
                h.copy(keys, x + j0 * stride + width, stride, n);
                h.copy(values, x + j0 * stride + 2 * width, stride, n);
                wait_for_copies();
            }
            if (row >= m) continue;
            if (!is_one_tile) score(n);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                weights[(row + k) * PITCH + thread] = expf(s[k] - top[k]) * inverse[k] * mask(h.unit, h.n, q0 + row + k, j0 + thread);
            }
            __syncwarp();
            h.template weighted_rows<false>(weights, values, n, y + q0 * width, width, m, j0 == 0);
        }
    }
}

// dx of queries, keys and values. If a text has several tiles, each part accumulates in place: always in the same
// thread and order.
template <int VEC>
__device__ __forceinline__ void attend_backward(const int* lanes, const Texts& texts, int heads, int width, const Rows& x_rows,
                                                const Rows& y_rows, const Rows& statistics, const Drop& drop, const Rows& dy_rows,
                                                const Rows& dx_rows, bool fresh) {
    const Head<VEC> h(lanes, texts, heads, width);
    const Mask mask(drop, h.lane);
    const int row = threadIdx.x / 32 * 4, thread = threadIdx.x % 32;
    const int stride = 3 * width;
    const float* x = of(x_rows, h.lane) + h.first * stride + h.at;
    const float* y = of(y_rows, h.lane) + h.first * width + h.at;
    const float* dy = of(dy_rows, h.lane) + h.first * width + h.at;
    float* const dx = of(dx_rows, h.lane) + h.first * stride + h.at;
    float* const queries = attention_memory;
    float* const slopes = queries + TILE * h.pitch;
    float* const keys = slopes + TILE * h.pitch;
    float* const values = keys + TILE * h.pitch;
    float* const kept_attention = values + TILE * h.pitch;  // (TILE, TILE), of every query with every key
    float* const dscores = kept_attention + TILE * PITCH;   // the same
    for (int q0 = 0; q0 < h.n; q0 += TILE) {
        const int m = min(TILE, h.n - q0);
        float top[4], inverse[4], inner[4] = {};
        for (int j0 = 0; j0 < h.n; j0 += TILE) {
            const int n = min(TILE, h.n - j0);
            __syncthreads();  // the previous tiles have been read
            if (j0 == 0) {
                h.copy(queries, x + q0 * stride, stride, m);
                h.copy(slopes, dy + q0 * width, width, m);
            }
            h.copy(keys, x + j0 * stride + width, stride, n);
            h.copy(values, x + j0 * stride + 2 * width, stride, n);
            if (j0 == 0) {
                // Repeats the last query if the warp has fewer than four.
                const auto query = [&](int k) { return q0 + min(row + k, m - 1); };
                for (int e = thread; e < h.d; e += 32) {
#pragma unroll
                    for (int k = 0; k < 4; k++) inner[k] += y[query(k) * width + e] * dy[query(k) * width + e];
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    inner[k] = warp_sum(inner[k]);
                    const float* const kept = h.statistics(statistics, heads, query(k));
                    top[k] = kept[0], inverse[k] = kept[1];
                }
            }
            wait_for_copies();
            if (row < m) {
                float s[4], dp[4];
                h.inner_products(s, queries, keys);
                h.inner_products(dp, slopes, values);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int at = (row + k) * PITCH + thread;
                    const bool is_there = row + k < m && thread < n;
                    const float p = is_there ? expf(h.scale * s[k] - top[k]) * inverse[k] : 0.f;
                    const float factor = is_there ? mask(h.unit, h.n, q0 + row + k, j0 + thread) : 0.f;
                    kept_attention[at] = p * factor;
                    dscores[at] = is_there ? h.scale * p * (dp[k] * factor - inner[k]) : 0.f;
                }
            }
            __syncthreads();
            h.template weighted_rows<false>(dscores, keys, n, dx + q0 * stride, stride, m, fresh && j0 == 0);
            float* const to = dx + j0 * stride;
            h.template weighted_rows<true>(dscores, queries, m, to + width, stride, n, fresh && q0 == 0);
            h.template weighted_rows<true>(kept_attention, slopes, m, to + 2 * width, stride, n, fresh && q0 == 0);
        }
    }
}

#define ATTENTION_KERNELS(vec)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(ATTENDING, 4) attention_##vec(const int* lanes, Texts texts, int heads, int width, \
                                                                               Rows x, Rows y, Rows statistics, Drop drop) {       \
        attend<vec>(lanes, texts, heads, width, x, y, statistics, drop);                                                           \
    }                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(ATTENDING, 4) attention_backward_##vec(const int* lanes, Texts texts, int heads,  \
                                                                                        int width, Rows x, Rows y, Rows statistics, \
                                                                                        Drop drop, Rows dy, Rows dx, int fresh) {  \
        attend_backward<vec>(lanes, texts, heads, width, x, y, statistics, drop, dy, dx, fresh);                                   \
    }
ATTENTION_KERNELS(1)
ATTENTION_KERNELS(4)
