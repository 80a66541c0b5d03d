// 3×3 convolutions of stride 1 by Hopper's warp-group matrix products (wgmma), in tf32, for all lanes in one launch.
//
// A lane's images are one row of positions, with a column of zeros after each row of pixels and a row of zeros after
// each image. The zeros are never in global memory. A tap is then the same shift for every position, (kh − 1)(w + 1) +
// kw − 1, and the zeros between rows serve as margins on both sides. So a tile is copied to shared memory once and
// multiplied nine times, each time from another row (`conv.cu` copies it nine times). Results at the zeros are
// discarded: products grow by a factor of 1.13 at 16×16, 1.27 at 8×8, 1.56 at 4×4.
//   PRODUCT  Y[q, o]       = Σ_(tap, i)  X[q + shift(tap), i] · W[o, tap, i]
//            and dX, from dY, with the weights transposed and the taps in reverse (`turn_weights`)
//   WEIGHT   dW[o, tap, i] = Σ_q         X[q + shift(tap), i] · dY[q, o]

struct Strip {
    int h, w, ci, co, batch;
    Div by_image, by_pitch;  // (h + 1)(w + 1), w + 1

    __device__ int positions() const { return batch * (h + 1) * (w + 1); }

    // The pixel at a position, or -1 for a zero.
    __device__ int pixel(int q) const { return q < 0 || q >= positions() ? -1 : pixel_without_branch(q); }

    // The same, for copies between products. (Measured: a branch there costs a twentieth of `shifted_weight`. Ten in a row,
    // as for the tiles of a product, need registers instead.)
    __device__ __forceinline__ int pixel_without_branch(int q) const {
        const int n = q / by_image, r = q - n * ((h + 1) * (w + 1)), row = r / by_pitch, col = r - row * (w + 1);
        const bool in = (u32(q) < u32(positions())) & (row < h) & (col < w);
        return in ? (n * h + row) * w + col : -1;
    }
};

constexpr int MARGIN_MAX = 18;  // of images 16 wide

extern __shared__ __align__(1024) float4 shared_memory[];

template <int N>
__device__ __forceinline__ void products_pending() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// A matrix in shared memory, with 32 numbers of the sum per row. The row's number permutes its 16-byte parts
// (`swapped_to`), so that eight rows, from any row, are read at once.
__device__ __forceinline__ u64 matrix_of_rows(u32 at) { return u64(at >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62; }
__device__ __forceinline__ u32 swapped_to(int row, int part) { return 128 * row + 16 * (part ^ row & 7); }
// Another layout: blocks of 8 columns × 16 bytes, neighbours 128 bytes apart along the columns, `step` along the sum.
__device__ __forceinline__ u64 matrix_of_columns(u32 at, u32 step) { return u64(at >> 4) | u64(step / 16) << 16 | u64(8) << 32; }

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define REGISTERS_32                                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"    \
    "%30,%31"
#define REGISTERS_64                                                                                                  \
    REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"  \
                 "%57,%58,%59,%60,%61,%62,%63"

// d += a · b over eight numbers of the sum. a has 64 rows, b 128 or 64 columns.
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" REGISTERS_64 "}, %64, %65, p, 1, 1; }"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" REGISTERS_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1; }"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Makes the copies of all threads visible to the tensor cores. Up to N copies may still be in flight.
template <int N>
__device__ __forceinline__ void copies_pending() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Two warp groups compute tiles one after another: 64 channels × 128 positions each, of different channels (GROUPS = 2)
// or different positions (1). Copies for a tile begin while the previous one is computed. The sum runs over blocks of
// 32 channels and, inside, over taps. Weights stream through four stages, two steps ahead. The next block's image is
// copied during the taps of the current one. Reads of shared memory are the bottleneck, hence the products' shape: 64
// positions × 64 channels would read a third more. (256 positions would read less, but leave room for only one block
// per multiprocessor: slower.) Taps are unrolled: what a tap copies is then known, and a step has half the instructions.
template <int GROUPS>
__device__ __forceinline__ void shifted_product(const Strip& s, int n_lanes, const int* lanes, const Rows& x_rows, const Rows& w_rows,
                                                const Rows& y_rows, const After& after, int flags) {
    constexpr int N = 128, BM = 2 / GROUPS * N, BN = 64 * GROUPS;
    constexpr int A_ROWS = BM + 40, A_BYTES = 128 * A_ROWS, B_BYTES = 128 * BN;  // the permutation has a period of eight rows
    static_assert(A_ROWS >= BM + 2 * MARGIN_MAX && A_ROWS % 8 == 0, "");
    constexpr int A_PASSES = (BM + 2 * MARGIN_MAX + 31) / 32, B_PASSES = BN / 32;
    __shared__ int outputs[BM];
    const u32 a_shared = u32(__cvta_generic_to_shared(shared_memory)), b_shared = a_shared + 2 * A_BYTES;
    const int tid = threadIdx.x, part = tid % 8, line = tid / 8;
    const int pitch = s.w + 1, margin = pitch + 1;
    const int n_tiles_n = s.co / BN, n_tiles = (s.positions() + BM - 1) / BM * n_tiles_n, n_tiles_all = n_tiles * n_lanes;
    const int n_blocks = s.ci / 32;

    // ---- copies: the image one block ahead, weights two steps ahead; both may reach into the next tile ----
    const float* x;  // the block of channels to copy next
    int pixels[A_PASSES];
    auto turn_to_image = [&](int tile) {
        x = of(x_rows, lanes[tile / n_tiles]) + 4 * part;
        const int from = tile % n_tiles / n_tiles_n * BM - margin;
#pragma unroll
        for (int i = 0; i < A_PASSES; i++) {
            const int row = line + 32 * i, pixel = row < BM + 2 * margin ? s.pixel(from + row) : -1;
            pixels[i] = pixel < 0 ? -1 : pixel * s.ci;
        }
    };
    auto fetch_image = [&](int i, u32 buffer) {
        if (A_ROWS % 32 != 0 && line + 32 * i >= A_ROWS) return;
        copy_once(a_shared + buffer * A_BYTES + 128 * 32 * i + swapped_to(line, part), x + max(pixels[i], 0), pixels[i] >= 0);
    };
    auto weights_of = [&](int tile) -> const float* {
        // A thread's two rows of a product, eight apart, must be neighbouring channels.
        const int channel = line / 16 * 16 + line % 8 * 2 + line / 8 % 2;
        return of(w_rows, lanes[tile / n_tiles]) + (tile % n_tiles_n * BN + channel) * 9 * s.ci + 4 * part;
    };
    const u32 b_to = b_shared + swapped_to(line, part);
    auto fetch_weights = [&](const float* w, int tap, u32 place) {
#pragma unroll
        for (int i = 0; i < B_PASSES; i++) copy_once(b_to + place * B_BYTES + 128 * 32 * i, w + (32 * i * 9 + tap) * s.ci, true);
    };

    turn_to_image(blockIdx.x);
    const float* w = weights_of(blockIdx.x);
#pragma unroll
    for (int i = 0; i < A_PASSES; i++) fetch_image(i, 0);
    fetch_weights(w, 0, 0), copies_commit();
    fetch_weights(w, 1, 1), copies_commit();

    const int group = __shfl_sync(~0u, tid / 128, 0), g = tid % 32 / 4, t = tid % 4;
    const int first = GROUPS == 2 ? 0 : group * N;  // of this group's positions in a tile
    const u32 a_from = a_shared + 128 * (first + margin), b_from = b_shared + (GROUPS == 2 ? group * 128 * 64 : 0);
    u32 buffer = 0, place = 0;
    for (int tile = blockIdx.x; tile < n_tiles_all; tile += gridDim.x) {
        const int next_tile = tile + gridDim.x;
        float acc[N / 2] = {};
        for (int block = 0; block < n_blocks; block++) {
            const bool is_last = block + 1 == n_blocks, has_next = !is_last || next_tile < n_tiles_all;
            const float* w_next = w + 32;
            if (!is_last) {
                x += 32;
            } else if (has_next) {
                turn_to_image(next_tile), w_next = weights_of(next_tile);
            }
#pragma unroll
            for (int tap = 0; tap < 9; tap++) {
                // This step's copies are complete. So are the products of the step before the last; the next copy
                // reuses its stage.
                products_pending<1>();
                copies_pending<1>();
                const u64 a = matrix_of_rows(a_from + buffer * A_BYTES + 128 * ((tap / 3 - 1) * pitch + tap % 3 - 1));
                const u64 b = matrix_of_rows(b_from + place * B_BYTES);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) multiply(acc, b + 2 * k, a + 2 * k);
                products_commit();
                if (tap < 7) {
                    fetch_weights(w, tap + 2, place + 2 & 3);
                } else if (has_next) {
                    fetch_weights(w_next, tap - 7, place + 2 & 3);
                }
                // From the second tap on, the products of the previous block are complete.
                if (has_next) {
#pragma unroll
                    for (int i = 0; i < A_PASSES; i++) {
                        if (tap == 1 + i / 3) fetch_image(i, buffer ^ 1);
                    }
                }
                copies_commit();
                place = place + 1 & 3;
            }
            w = w_next, buffer ^= 1;
        }
        const int lane = lanes[tile / n_tiles], m0 = tile % n_tiles / n_tiles_n * BM;
        for (int i = tid; i < BM; i += 256) outputs[i] = s.pixel(m0 + i);
        products_pending<0>();
        __syncthreads();

        // Number 4j + 2h + i of a thread: channel 2g + h of its warp's sixteen, position 8j + 2t + i.
        const int n = tile % n_tiles_n * BN + (GROUPS == 2 ? group * 64 : 0) + tid / 32 % 4 * 16 + 2 * g;
        auto at = [&](int v) {
            const int pixel = outputs[first + v / 2 * 8 + 2 * t + v % 2];
            return pixel < 0 ? -1 : pixel * s.co + n;
        };
        if (after.moments.at && m0 + first < s.positions()) {
            after.sum_moments(lane, (m0 + first) / N, n, s.co, after.valid[lane] * s.h * s.w * s.co, acc, at);
        }
        after.put(of(y_rows, lane), lane, after.pair(lane, n, s.co), acc, flags, at);
    }
    asm volatile("cp.async.wait_all;");
}

#define SHIFTED(groups)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                              \
        shifted_##groups(Strip s, int n_lanes, const int* lanes, Rows x, Rows w, Rows y, After after, int flags) {      \
        shifted_product<groups>(s, n_lanes, lanes, x, w, y, after, flags);                                              \
    }
SHIFTED(1)
SHIFTED(2)

// W[o, tap, i] → W'[i, taps − 1 − tap, o], 32 × 32 at a time: the factor for the gradient of the input.
extern "C" __global__ void turn_weights(const int* lanes, int ci, int co, int taps, Rows w_rows, Rows turned_rows) {
    __shared__ float tile[32][33];
    const int lane = lanes[blockIdx.z], tap = blockIdx.y;
    const int i0 = blockIdx.x % (ci / 32) * 32, o0 = blockIdx.x / (ci / 32) * 32;
    const float* w = of(w_rows, lane);
    float* turned = of(turned_rows, lane);
    for (int r = threadIdx.y; r < 32; r += 8) tile[r][threadIdx.x] = w[((o0 + r) * taps + tap) * ci + i0 + threadIdx.x];
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += 8) turned[((i0 + r) * taps + taps - 1 - tap) * co + o0 + threadIdx.x] = tile[threadIdx.x][r];
}

// Writes, adds or leaves as a part for `sum_splits` what three warp groups have computed: 64 × 64 channels from (i0, o0)
// each, for the three taps of a kernel row. A thread's two rows of a product, eight apart, are neighbouring channels.
__device__ __forceinline__ void store_weights(int ci, int co, int i0, int o0, const float (&acc)[3][32], float* w, int flags, int splits,
                                              float* partial) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool is_part = splits > 1, fresh = is_part || flags & 1;
    float* const to = is_part ? partial + (blockIdx.z * splits + blockIdx.y) * 9ll * ci * co : w;
#pragma unroll
    for (int right = 0; right < 3; right++) {
#pragma unroll
        for (int v = 0; v < 16; v++) {
            const int o = o0 + v / 2 * 8 + 2 * t + v % 2;
            float2* const at = reinterpret_cast<float2*>(to + (o * 9 + warp / 4 * 3 + right) * ci + i0 + warp % 4 * 16 + 2 * g);
            float2 sum = make_float2(acc[right][v / 2 * 4 + v % 2], acc[right][v / 2 * 4 + 2 + v % 2]);
            if (!fresh) sum.x += at->x, sum.y += at->y;
            *at = sum;
        }
    }
}

__device__ __forceinline__ void load_two(u32& a, u32& b, u32 at) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}

// Four positions × four channels of dY, which a thread turns on their way to shared memory: it reads them by positions,
// 16 bytes each, and stores them by channels. They stay in registers while a chunk is multiplied. Threads of a warp have
// eight fours of positions, for the banks, and 16 channels, for whole sectors.
constexpr u32 FOUR_BYTES = 64 * 16 + 16;  // of 64 channels, and a little more: eight neighbours are in different banks

struct Four {
    float v[4][4];

    static __device__ __forceinline__ int positions() { return threadIdx.x % 8; }
    static __device__ __forceinline__ int channels() { return threadIdx.x / 8 % 4 * 4; }

    // The channels at position i; null stands for zeros.
    __device__ __forceinline__ void load(int i, const float* from) {
        const float4 q = from ? __ldg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
        v[i][0] = q.x, v[i][1] = q.y, v[i][2] = q.z, v[i][3] = q.w;
    }

    __device__ __forceinline__ void store(u32 at) const {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at + 16 * c), "f"(v[0][c]), "f"(v[1][c]), "f"(v[2][c]), "f"(v[3][c]));
        }
    }
};

// Three warp groups compute 64 × 64 channels each, for the three taps of a kernel row. The sum runs over positions, 96
// at a time. The tensor cores need both factors by positions: dY is turned on its way to shared memory (`Four`), X on its
// way to registers. The order of positions within a product is free: a thread's two are neighbours, 2t and 2t + 1, so
// that the three taps need four of them, not six. The tensor cores are busy half of the time, shared memory 43 %: a warp
// computes the addresses of copies between two products, and has no registers for a third in flight.
extern "C" __global__ void __launch_bounds__(384, 1)
    shifted_weight(Strip s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, int flags, int splits, float* partial) {
    constexpr int BK = 96, X_ROWS = BK + 2 * MARGIN_MAX, X_PITCH = 68;  // pitch: threads of a warp read different banks
    constexpr int X_BYTES = 4 * X_ROWS * X_PITCH, PLACE_BYTES = X_BYTES + BK / 4 * FOUR_BYTES;
    constexpr int X_PASSES = (X_ROWS + 23) / 24;
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, warp = tid / 32, thread = tid % 32;
    const int lane = lanes[blockIdx.z];
    const int n_tiles_i = s.ci / 64, i0 = blockIdx.x % n_tiles_i * 64, o0 = blockIdx.x / n_tiles_i * 64;
    const int pitch = s.w + 1, margin = pitch + 1;
    const int all = (s.positions() + BK - 1) / BK;
    const int begin = all * blockIdx.y / splits, end = all * (blockIdx.y + 1) / splits;
    const float* x = of(x_rows, lane) + i0 + tid % 16 * 4;

    auto fetch_image = [&](int chunk, u32 place, int i) {
        const int row = tid / 16 + 24 * i;
        if (row >= BK + 2 * margin) return;
        const int pixel = s.pixel_without_branch(chunk * BK - margin + row);
        copy_once(shared + place * PLACE_BYTES + 4 * (row * X_PITCH + tid % 16 * 4), x + (pixel < 0 ? 0 : pixel * s.ci), pixel >= 0);
    };
    // Of eight positions, the first four that a product takes are the even ones.
    Four four;
    const int number = warp % 3 * 8 + Four::positions(), o_of = warp / 3 * 16 + Four::channels();
    const float* const y = of(y_rows, lane) + o0 + o_of;
    const u32 y_to = shared + X_BYTES + number * FOUR_BYTES + 16 * o_of;
    auto load_gradient = [&](int chunk, int i) {
        const int pixel = s.pixel_without_branch(chunk * BK + number / 2 * 8 + 2 * i + number % 2);
        four.load(i, pixel < 0 ? nullptr : y + pixel * s.co);
    };

    float acc[3][32] = {};
    u32 factors[3][4][2];  // read two products ahead: they wait neither for shared memory nor for registers
    const int down = warp / 4, g = thread / 4, t = thread % 4;
    const u32 x_from = shared + 4 * ((margin + (down - 1) * pitch - 1 + 2 * t) * X_PITCH + warp % 4 * 16 + 2 * g);
    auto load = [&](u32 (&a)[4][2], u32 place, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) load_two(a[i][0], a[i][1], x_from + place * PLACE_BYTES + 4 * (8 * k + i) * X_PITCH);
    };

    for (int chunk = begin; chunk < min(begin + 2, end); chunk++) {
#pragma unroll
        for (int i = 0; i < 4; i++) load_gradient(chunk, i);
        for (int i = 0; i < X_PASSES; i++) fetch_image(chunk, chunk - begin, i);
        copies_commit();
        if (chunk == begin) four.store(y_to);
    }
    if (begin + 1 >= end) copies_commit();
    u32 place = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        copies_pending<1>();
        const u32 b = shared + place * PLACE_BYTES + X_BYTES;
        load(factors[0], place, 0), load(factors[1], place, 1);
#pragma unroll
        for (int k = 0; k < BK / 8; k++) {
            products_begin();
#pragma unroll
            for (int right = 0; right < 3; right++) {
                const u32(&a)[4][2] = factors[k % 3];
                const u32 two[4] = {a[right][0], a[right][1], a[right + 1][0], a[right + 1][1]};
                multiply(acc[right], two, matrix_of_columns(b + 2 * k * FOUR_BYTES, FOUR_BYTES));
            }
            products_commit();
            // The copies are spread over the products, which run meanwhile. (Measured: between them they took longer.)
            const u32 next = place == 2 ? 0 : place + 1, next_but_one = place == 0 ? 2 : place - 1;
            if (k == 0 && chunk + 1 < end) four.store(y_to + next * PLACE_BYTES);
            if (k >= 1 && k <= 4 && chunk + 2 < end) load_gradient(chunk + 2, k - 1);
            if (k >= 5 && k < 5 + X_PASSES && chunk + 2 < end) fetch_image(chunk + 2, next_but_one, k - 5);
            if (k + 2 < BK / 8) {
                products_pending<1>();
                load(factors[(k + 2) % 3], place, k + 2);
            }
        }
        copies_commit();
        products_pending<0>();
        place = place == 2 ? 0 : place + 1;
    }
    asm volatile("cp.async.wait_all;");

    store_weights(s.ci, s.co, i0, o0, acc, of(w_rows, lane), flags, splits, partial);
}
