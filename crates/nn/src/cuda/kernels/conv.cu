// Convolutions and linear layers as implicit matrix products on the tensor cores, for all lanes in one launch.
//
// Images are (N, H, W, C), weights (O, H, W, I). The three passes differ in how tiles are gathered:
//   FORWARD  Y[pixel, o]   = Σ_(tap, i)  X[pixel moved by tap, i] · W[o, tap, i]
//   INPUT    dX[pixel, i]  = Σ_(tap, o)  dY[pixel moved back, o] · W[o, tap, i]      one residue class of a stride at a time
//   WEIGHT   dW[tap, i, o] = Σ_pixel     X[pixel moved by tap, i] · dY[pixel, o]
// A block of WM × WN warps computes 64·WM × 8·NI·WN outputs. Tiles of 16 along the sum stream through shared memory. If
// channels come in fours, the sum runs over blocks of 16 channels and, inside, over the taps. Neighbouring taps read
// the same pixels, which are then still in the first-level cache (measured: otherwise the second level is the
// bottleneck). The sum is cut into `splits` by shape alone and added in order, so results do not depend on the other
// lanes.

enum { FORWARD, INPUT, WEIGHT };
enum { FP32, TF32, BF16 };

struct Conv {
    int h, w, ci, ho, wo, co, kernel, stride, pad;
    int xc;  // floats between pixels of X: the channels, or more if the image is padded to a multiple of four
    int batch;
    Div by_out_pixels, by_wo, by_xc, by_kernel;
    const int* tokens;  // rows per lane if rows are tokens (`text.cu`); null: all rows
};

constexpr int BK = 16, STAGES = 4;

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void load_four(u32 (&r)[4], u32 at) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ u32 to_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 to_bf16x2(u32 low, u32 high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(__uint_as_float(high)), "f"(__uint_as_float(low)));
    return r;
}

__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A number as two tf32 halves: x ≈ high + low to 22 bits.
__device__ __forceinline__ void split(u32 x, u32& high, u32& low) {
    high = to_tf32(__uint_as_float(x));
    low = to_tf32(__uint_as_float(x) - __uint_as_float(high));
}

// The position of column `col` in a row of 16 floats. The row's number permutes its quarters. The two halves of a row
// then differ only by an exclusive or of the address with 32 bytes.
__device__ __forceinline__ int swapped(int row, int col) { return (col / 4 ^ (row / 2 & 3)) * 4 + col % 4; }

// A residue class of the input's rows and columns modulo the stride, and the taps that reach it.
struct Class {
    int ph, pw, rows, cols, kh0, kw0, nkh, nkw;

    __device__ Class(const Conv& s, int index) {
        ph = index / s.stride, pw = index % s.stride;
        rows = (s.h - ph + s.stride - 1) / s.stride, cols = (s.w - pw + s.stride - 1) / s.stride;
        kh0 = (ph + s.pad) % s.stride, kw0 = (pw + s.pad) % s.stride;
        nkh = max(0, (s.kernel - kh0 + s.stride - 1) / s.stride), nkw = max(0, (s.kernel - kw0 + s.stride - 1) / s.stride);
    }
};

template <int MODE, int PREC, int VEC_A, int VEC_B, int WM, int WN, int NI>
__device__ __forceinline__ void conv_tile(const Conv& s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows,
                                          const After& after, int flags, int splits, float* partial) {
    constexpr int BM = 64 * WM, BN = 8 * NI * WN, THREADS = 32 * WM * WN;
    // Tiles keep their order in shared memory: rows along the sum if that is contiguous, else columns. Threads of a
    // warp access different banks: the four quarters of a row are permuted (`swapped`), columns are padded.
    constexpr bool A_BY_ROWS = MODE != WEIGHT, B_BY_ROWS = MODE == FORWARD;
    constexpr int A_PITCH = A_BY_ROWS ? BK : BM + 8, B_PITCH = B_BY_ROWS ? BK : BN + 8;
    constexpr int A_BYTES = 4 * (A_BY_ROWS ? BM : BK) * A_PITCH, B_BYTES = 4 * (B_BY_ROWS ? BN : BK) * B_PITCH;
    constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    extern __shared__ float4 shared_memory[];
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, warp = tid / 32, thread = tid % 32;
    const int lane = lanes[blockIdx.z];
    const int taps = s.kernel * s.kernel;

    const float* image = of(MODE == INPUT ? y_rows : x_rows, lane);  // what is gathered
    const float* other = of(MODE == WEIGHT ? y_rows : w_rows, lane);
    float* out = of(MODE == FORWARD ? y_rows : MODE == INPUT ? x_rows : w_rows, lane);

    const int n_columns = MODE == INPUT ? s.ci : s.co;
    const int n_tiles_n = (n_columns + BN - 1) / BN;
    int tile = blockIdx.x;
    const int tile_n = tile % n_tiles_n;
    tile /= n_tiles_n;
    const Class cls(s, MODE == INPUT ? tile % (s.stride * s.stride) : 0);
    const int tile_m = MODE == INPUT ? tile / (s.stride * s.stride) : tile;
    const int n_rows = MODE == FORWARD ? s.batch * s.ho * s.wo : MODE == INPUT ? s.batch * cls.rows * cls.cols : taps * s.xc;
    const int n_taps = MODE == FORWARD ? taps : cls.nkh * cls.nkw;  // of the sum
    const int depth = MODE == FORWARD ? taps * s.xc : MODE == INPUT ? n_taps * s.co : s.tokens ? s.tokens[lane] : s.batch * s.ho * s.wo;
    constexpr bool BY_BLOCKS = MODE != WEIGHT && VEC_B == 4;  // the order of the sum: see above
    const int image_h = MODE == INPUT ? s.ho : s.h, image_w = MODE == INPUT ? s.wo : s.w;
    const int image_c = MODE == INPUT ? s.co : s.xc;
    const int m0 = tile_m * BM, n0 = tile_n * BN;
    if (m0 >= n_rows || (MODE != WEIGHT && s.tokens && m0 >= s.tokens[lane])) return;

    const int all_k = BY_BLOCKS ? (image_c + BK - 1) / BK * n_taps : (depth + BK - 1) / BK;
    const int k_begin = int((long long)all_k * blockIdx.y / splits), k_end = int((long long)all_k * (blockIdx.y + 1) / splits);

    // ---- copies of a thread: its positions in the tiles stay the same along the sum ----
    constexpr int A_ROW = A_BY_ROWS ? BK : BM, A_LINES = A_BY_ROWS ? BM : BK;
    constexpr int B_ROW = B_BY_ROWS ? BK : BN, B_LINES = B_BY_ROWS ? BN : BK;
    constexpr int A_STEP = THREADS * VEC_A / A_ROW, A_PASSES = A_LINES / A_STEP;
    constexpr int B_STEP = THREADS * VEC_B / B_ROW, B_PASSES = (B_LINES + B_STEP - 1) / B_STEP;
    const int a_col = tid * VEC_A % A_ROW, a_line = tid * VEC_A / A_ROW;
    const int b_col = tid * VEC_B % B_ROW, b_line = tid * VEC_B / B_ROW;
    const u32 a_to = shared + 4 * (a_line * A_PITCH + (A_BY_ROWS ? swapped(a_line, a_col) : a_col));
    const u32 b_to = shared + A_BYTES + 4 * (b_line * B_PITCH + (B_BY_ROWS ? swapped(b_line, b_col) : b_col));

    // Rows of the image's matrix, if they are pixels: FORWARD and INPUT.
    constexpr int PIXELS = A_BY_ROWS ? A_PASSES : 1;
    int at_pixel[PIXELS], top[PIXELS], left[PIXELS];
    u32 reached[PIXELS];  // taps that reach it; only if the sum goes by blocks
    // Columns of the image's matrix, if they are (tap, channel): WEIGHT. A thread copies one pixel and every
    // 4·COLUMN_STEP-th column.
    constexpr int THREADS_A_LINE = THREADS / BK, COLUMN_PASSES = A_BY_ROWS ? 1 : BM / (THREADS_A_LINE * VEC_A);
    const int w_line = tid / THREADS_A_LINE, w_col = tid % THREADS_A_LINE * VEC_A;
    int tap_row[COLUMN_PASSES], tap_col[COLUMN_PASSES], tap_at[COLUMN_PASSES];
    if constexpr (A_BY_ROWS) {
#pragma unroll
        for (int i = 0; i < A_PASSES; i++) {
            const int m = m0 + a_line + i * A_STEP;
            int n = 0;
            if (m >= n_rows) {
                top[i] = -(1 << 20), left[i] = 0;  // never inside the image
            } else if constexpr (MODE == FORWARD) {
                n = m / s.by_out_pixels;
                const int r = m - n * (s.ho * s.wo), oh = r / s.by_wo;
                top[i] = oh * s.stride - s.pad, left[i] = (r - oh * s.wo) * s.stride - s.pad;
            } else {
                n = m / (cls.rows * cls.cols);
                const int r = m - n * (cls.rows * cls.cols), row = r / cls.cols;
                // The output that tap kh0 connects with this input. Each further tap leads one back.
                top[i] = (row * s.stride + cls.ph + s.pad - cls.kh0) / s.stride;
                left[i] = ((r - row * cls.cols) * s.stride + cls.pw + s.pad - cls.kw0) / s.stride;
            }
            at_pixel[i] = n * image_h * image_w;
            if constexpr (BY_BLOCKS) {
                reached[i] = 0;
                const int width = MODE == FORWARD ? s.kernel : cls.nkw;
                for (int tap = 0; tap < n_taps; tap++) {
                    const int down = tap / width, right = tap - down * width;
                    const int row = MODE == FORWARD ? top[i] + down : top[i] - down;
                    const int col = MODE == FORWARD ? left[i] + right : left[i] - right;
                    if (u32(row) < u32(image_h) && u32(col) < u32(image_w)) reached[i] |= 1u << tap;
                }
                at_pixel[i] = (at_pixel[i] + top[i] * image_w + left[i]) * image_c + a_col;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < COLUMN_PASSES; j++) {
            const int m = m0 + w_col + j * THREADS_A_LINE * VEC_A;
            const int tap = m / s.by_xc, kh = tap / s.by_kernel;
            tap_row[j] = m < n_rows ? kh - s.pad : -(1 << 20);
            tap_col[j] = tap - kh * s.kernel - s.pad;
            tap_at[j] = (tap_row[j] * s.w + tap_col[j]) * s.xc + m - tap * s.xc;
        }
    }
    // The next tile to fetch, if the sum goes by blocks.
    int block = BY_BLOCKS && n_taps > 0 ? k_begin / n_taps : 0, tap_index = BY_BLOCKS ? k_begin - block * n_taps : 0;
    int stage_to = 0;

    auto fetch = [&](int kt) {
        const u32 to = stage_to * STAGE_BYTES;
        if (++stage_to == STAGES) stage_to = 0;
        const int k0 = kt * BK;
        int at_tap = 0;
        if constexpr (BY_BLOCKS) {
            int moved;
            if constexpr (MODE == FORWARD) {
                const int down = tap_index / s.by_kernel, right = tap_index - down * s.kernel;
                moved = (down * image_w + right) * image_c;
                at_tap = tap_index;
            } else {
                const int down = tap_index / cls.nkw, right = tap_index - down * cls.nkw;
                moved = -(down * image_w + right) * image_c;
                at_tap = (cls.kh0 + down * s.stride) * s.kernel + cls.kw0 + right * s.stride;
            }
            moved += block * BK;
            const bool deep = block * BK + a_col < image_c;
#pragma unroll
            for (int i = 0; i < A_PASSES; i++) {
                const bool in = deep && (reached[i] >> tap_index & 1);
                copy_async<VEC_A>(a_to + to + 4 * i * A_STEP * A_PITCH, image + (in ? at_pixel[i] + moved : 0), in);
            }
        } else if constexpr (A_BY_ROWS) {
            const int k = k0 + a_col;
            int tap, down, right;
            if constexpr (MODE == FORWARD) {
                tap = k / s.by_xc;
                down = tap / s.by_kernel, right = tap - down * s.kernel;
            } else {
                tap = k / s.co;
                down = -(cls.nkw > 0 ? tap / cls.nkw : 0), right = -(tap + down * cls.nkw);
            }
#pragma unroll
            for (int i = 0; i < A_PASSES; i++) {
                const int row = top[i] + down, col = left[i] + right;
                const bool in = k < depth && u32(row) < u32(image_h) && u32(col) < u32(image_w);
                const int at = in ? (at_pixel[i] + row * image_w + col) * image_c + k - tap * image_c : 0;
                copy_async<VEC_A>(a_to + to + 4 * i * A_STEP * A_PITCH, image + at, in);
            }
        } else {
            const int k = k0 + w_line;
            const int n = k / s.by_out_pixels, r = k - n * (s.ho * s.wo), oh = r / s.by_wo;
            const int row0 = oh * s.stride, col0 = (r - oh * s.wo) * s.stride;
            const int at_first = ((n * s.h + row0) * s.w + col0) * s.xc;
            const u32 line_to = shared + to + 4 * (w_line * A_PITCH + w_col);
#pragma unroll
            for (int j = 0; j < COLUMN_PASSES; j++) {
                const bool in = k < depth && u32(row0 + tap_row[j]) < u32(s.h) && u32(col0 + tap_col[j]) < u32(s.w);
                copy_async<VEC_A>(line_to + 4 * j * THREADS_A_LINE * VEC_A, image + (in ? at_first + tap_at[j] : 0), in);
            }
        }
#pragma unroll
        for (int i = 0; i < B_PASSES; i++) {
            const int line = b_line + i * B_STEP;
            if (B_LINES % B_STEP != 0 && line >= B_LINES) break;
            const int n = n0 + (B_BY_ROWS ? line : b_col);
            bool in;
            int at;
            if constexpr (MODE == FORWARD && BY_BLOCKS) {
                const int c = block * BK + b_col;
                in = n < n_columns && c < s.ci;
                at = (n * taps + at_tap) * s.ci + c;
            } else if constexpr (MODE == FORWARD) {
                const int k = k0 + b_col, tap = k / s.by_xc, c = k - tap * s.xc;
                in = n < n_columns && k < depth && c < s.ci;
                at = (n * taps + tap) * s.ci + c;
            } else if constexpr (MODE == INPUT && BY_BLOCKS) {
                const int o = block * BK + line;
                in = n < n_columns && o < s.co;
                at = (o * taps + at_tap) * s.ci + n;
            } else if constexpr (MODE == INPUT) {
                const int k = k0 + line, tap = k / s.co, o = k - tap * s.co;
                const int jh = cls.nkw > 0 ? tap / cls.nkw : 0, jw = tap - jh * cls.nkw;
                in = n < n_columns && k < depth;
                at = (o * taps + (cls.kh0 + jh * s.stride) * s.kernel + cls.kw0 + jw * s.stride) * s.ci + n;
            } else {
                const int k = k0 + line;
                in = n < n_columns && k < depth;
                at = k * s.co + n;
            }
            copy_async<VEC_B>(b_to + to + 4 * i * B_STEP * B_PITCH, other + (in ? at : 0), in);
        }
        if constexpr (BY_BLOCKS) {
            if (++tap_index == n_taps) tap_index = 0, block++;
        }
    };

    // ---- fragments. Row g of fragment mi, lower or upper half; column g of fragment ni. Tiles by columns are read
    // four neighbours at a time, so their fragments hold rows 32·(mi/2) + 4g + 2·(mi%2) + half and columns 32·(ni/4) +
    // 4g + ni%4. ----
    float acc[4][NI][4] = {};
    const int warp_m = warp / WN * 64, warp_n = warp % WN * 8 * NI;
    const int g = thread / 4, t = thread % 4;
    const int a_row = warp_m + thread % 16, b_row = warp_n + thread % 8 + thread / 16 * 8;
    const u32 a_from = shared + 4 * (A_BY_ROWS ? a_row * A_PITCH + swapped(a_row, thread / 16 * 4) : t * A_PITCH + warp_m + 4 * g);
    const u32 b_from = shared + A_BYTES + 4 * (B_BY_ROWS ? b_row * B_PITCH + swapped(b_row, thread / 8 % 2 * 4)
                                                         : t * B_PITCH + warp_n + 4 * g);
    // a[mi] = rows g and g + 8 at positions t, then at t + 4; b[ni] = column g at t and t + 4.
    auto load_a = [&](u32 stage, int k, u32(&a)[4][4]) {
        if constexpr (A_BY_ROWS) {
#pragma unroll
            for (int mi = 0; mi < 4; mi++) load_matrices(a[mi], (a_from ^ 4 * k) + stage + 4 * mi * 16 * A_PITCH);
        } else {
#pragma unroll
            for (int later = 0; later < 2; later++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 r[4];
                    load_four(r, a_from + stage + 4 * ((k + 4 * later) * A_PITCH + 32 * h));
#pragma unroll
                    for (int j = 0; j < 4; j++) a[2 * h + j / 2][2 * later + j % 2] = r[j];
                }
            }
        }
    };
    auto load_b = [&](u32 stage, int k, u32(&b)[NI][2]) {
        if constexpr (B_BY_ROWS) {
#pragma unroll
            for (int pair = 0; pair < NI / 2; pair++) {
                u32 r[4];
                load_matrices(r, (b_from ^ 4 * k) + stage + 4 * pair * 16 * B_PITCH);
#pragma unroll
                for (int j = 0; j < 4; j++) b[2 * pair + j / 2][j % 2] = r[j];
            }
        } else {
#pragma unroll
            for (int later = 0; later < 2; later++) {
#pragma unroll
                for (int group = 0; group < NI / 4; group++) {
                    u32 r[4];
                    load_four(r, b_from + stage + 4 * ((k + 4 * later) * B_PITCH + 32 * group));
#pragma unroll
                    for (int j = 0; j < 4; j++) b[4 * group + j][later] = r[j];
                }
            }
        }
    };

    struct Fragments {
        u32 a[4][4], b[NI][2];
    };
    auto load = [&](Fragments& f, u32 stage, int k) { load_b(stage, k, f.b), load_a(stage, k, f.a); };
    auto multiply = [&](Fragments& f) {
        u32 b_low[NI][2];
#pragma unroll
        for (int i = 0; i < 2 * NI; i++) split(f.b[i / 2][i % 2], f.b[i / 2][i % 2], b_low[i / 2][i % 2]);
#pragma unroll
        for (int mi = 0; mi < 4; mi++) {
            u32 a_low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) split(f.a[mi][i], f.a[mi][i], a_low[i]);
#pragma unroll
            for (int ni = 0; ni < NI; ni++) {
                if constexpr (PREC == FP32) {
                    // Tensor cores truncate what they add to a large sum, so they add only eight products.
                    float sum[4] = {};
                    mma_tf32(sum, a_low, f.b[ni]);
                    mma_tf32(sum, f.a[mi], b_low[ni]);
                    mma_tf32(sum, f.a[mi], f.b[ni]);
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[mi][ni][i] += sum[i];
                } else {
                    mma_tf32(acc[mi][ni], f.a[mi], f.b[ni]);
                }
            }
        }
    };
    // A product of depth 16 uses two of tf32's fragments. Both factors map numbers to the 16 positions alike, so the
    // sum is the same. The result is packed into the first fragment.
    auto pack = [&](Fragments& f, const Fragments& g) {
#pragma unroll
        for (int ni = 0; ni < NI; ni++) {
            const u32 first = to_bf16x2(f.b[ni][0], f.b[ni][1]), second = to_bf16x2(g.b[ni][0], g.b[ni][1]);
            f.b[ni][0] = first, f.b[ni][1] = second;
        }
#pragma unroll
        for (int mi = 0; mi < 4; mi++) {
            const u32 packed[4] = {to_bf16x2(f.a[mi][0], f.a[mi][2]), to_bf16x2(f.a[mi][1], f.a[mi][3]),
                                   to_bf16x2(g.a[mi][0], g.a[mi][2]), to_bf16x2(g.a[mi][1], g.a[mi][3])};
#pragma unroll
            for (int i = 0; i < 4; i++) f.a[mi][i] = packed[i];
        }
    };

#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (k_begin + i < k_end) fetch(k_begin + i);
        asm volatile("cp.async.commit_group;");
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    // One half of a tile is multiplied while the next half is read, so products never wait for shared memory.
    u32 stage = 0;
    Fragments first, second;
    if (k_begin < k_end) load(first, stage, 0);
    for (int kt = k_begin; kt < k_end; kt++) {
        load(second, stage, 8);
        Fragments packed;
        if constexpr (PREC == BF16) {
            packed = first;
            pack(packed, second);
        } else {
            multiply(first);
        }
        if (kt + STAGES - 1 < k_end) fetch(kt + STAGES - 1);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
        if (kt + 1 < k_end) load(first, stage, 0);
        if constexpr (PREC == BF16) {
#pragma unroll
            for (int mi = 0; mi < 4; mi++) {
#pragma unroll
                for (int ni = 0; ni < NI; ni++) mma_bf16(acc[mi][ni], packed.a[mi], packed.b[ni]);
            }
        } else {
            multiply(second);
        }
    }
    asm volatile("cp.async.wait_all;");

    // ---- results: numbers 2·half + j of a fragment are its row g + 8·half, column 2t + j ----
    const bool fresh = flags & 1, with_relu = flags & 2;
    const int row_len = MODE == WEIGHT ? taps * s.ci : n_columns;
    const long long out_len = (long long)(MODE == WEIGHT ? n_columns : n_rows) * row_len;
    float* const to = splits > 1 ? partial + (long long)(blockIdx.z * splits + blockIdx.y) * out_len : out;
    const bool plain = !after.norm.at && !after.bias.at && !after.residual.at;
    const bool is_part = splits > 1;  // `sum_splits` then applies bias, ReLU and sum
    if constexpr (MODE == WEIGHT) {
        // Four neighbouring rows of a column are neighbours in W, unless the image is padded. The tensor may start
        // anywhere in the flat vector: an odd bias before it breaks the 16-byte alignment that a store of four needs.
        const bool by_fours = s.xc == s.ci && row_len % 4 == 0 && (reinterpret_cast<u64>(to) & 15) == 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = m0 + warp_m + 32 * h + 4 * g;
#pragma unroll
            for (int ni = 0; ni < NI; ni++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int n = n0 + warp_n + 32 * (ni / 4) + 4 * (2 * t + j) + ni % 4;
                    if (n >= n_columns) continue;
                    const float v[4] = {acc[2 * h][ni][j], acc[2 * h][ni][2 + j], acc[2 * h + 1][ni][j], acc[2 * h + 1][ni][2 + j]};
                    if (by_fours && m + 3 < n_rows) {
                        *reinterpret_cast<float4*>(to + (long long)n * row_len + m) = make_float4(v[0], v[1], v[2], v[3]);
                    } else {
#pragma unroll
                        for (int q = 0; q < 4; q++) {
                            const int tap = (m + q) / s.by_xc, c = m + q - tap * s.xc;
                            if (m + q < n_rows && c < s.ci) to[(long long)n * row_len + tap * s.ci + c] = v[q];
                        }
                    }
                }
            }
        }
    } else {
#pragma unroll
        for (int mi = 0; mi < 4; mi++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = m0 + warp_m + mi * 16 + g + 8 * half;
                if (m >= n_rows) continue;
                int pixel = m;
                if constexpr (MODE == INPUT) {
                    if (s.stride > 1) {
                        const int pixels = cls.rows * cls.cols, n = m / pixels, r = m - n * pixels, row = r / cls.cols;
                        pixel = (n * s.h + row * s.stride + cls.ph) * s.w + (r - row * cls.cols) * s.stride + cls.pw;
                    }
                }
                float* const at = to + (long long)pixel * n_columns;
                constexpr int RUN = MODE == FORWARD ? 2 : 4;  // neighbouring columns that a thread holds
#pragma unroll
                for (int run = 0; run < 2 * NI / RUN; run++) {
                    const int n = n0 + warp_n + (MODE == FORWARD ? 8 * run + 2 * t : 32 * (run / 2) + 8 * t + 4 * (run % 2));
                    float v[RUN];
#pragma unroll
                    for (int j = 0; j < RUN; j++) {
                        v[j] = MODE == FORWARD ? acc[mi][MODE == FORWARD ? run : 0][2 * half + j % 2] : acc[mi][MODE == FORWARD ? 0 : run / 2 * 4 + j][2 * half + run % 2];
                        if (is_part || n + j >= n_columns) continue;
                        if (MODE == FORWARD && plain) {
                            if (with_relu) v[j] = relu(v[j]);
                        } else if (MODE == FORWARD) {
                            v[j] = after(v[j], lane, n + j, n_columns, (long long)pixel * n_columns + n + j, with_relu);
                        }
                        if (!fresh) v[j] += at[n + j];
                    }
                    if (n_columns % RUN == 0) {
                        if (n >= n_columns) continue;
                        if constexpr (RUN == 2) {
                            *reinterpret_cast<float2*>(at + n) = make_float2(v[0], v[1]);
                        } else {
                            *reinterpret_cast<float4*>(at + n) = make_float4(v[0], v[1], v[2], v[3]);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < RUN; j++) {
                            if (n + j < n_columns) at[n + j] = v[j];
                        }
                    }
                }
            }
        }
    }
}

// The program is compiled once per pass (CONV_MODE) and precision.
#ifdef CONV_MODE
#define CONV_KERNEL(vec_a, vec_b, wm, wn, ni)                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * wm * wn, (ni == 4 ? 3 : 2) - (PRECISION == FP32))               \
        conv_##vec_a##vec_b##_##wm##x##wn##x##ni(Conv s, const int* lanes, Rows x, Rows w, Rows y, After after,         \
                                                 int flags, int splits, float* partial) {                             \
        conv_tile<CONV_MODE, PRECISION, vec_a, vec_b, wm, wn, ni>(s, lanes, x, w, y, after, flags, splits, partial);   \
    }
CONV_KERNEL(1, 1, 2, 2, 4)
CONV_KERNEL(4, 1, 2, 2, 4)
CONV_KERNEL(4, 4, 2, 2, 4)
CONV_KERNEL(4, 4, 2, 2, 8)
#endif

// Adds the splits of a product in order, out ← (out +) Σ partial, and applies the epilogue.
extern "C" __global__ void sum_splits(const int* lanes, Rows out_rows, After after, int len, int columns, int splits, int flags,
                                      const float* partial) {
    const int lane = lanes[backwards()];
    const float* const p = partial + (long long)backwards() * splits * len;
    float* const out = of(out_rows, lane);
    auto finished = [&](int i, float v) {
        v = after(v, lane, i % columns, columns, i, flags & 2);
        return flags & 1 ? v : out[i] + v;
    };
    const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= len && len % 4 == 0 && (reinterpret_cast<u64>(out) & 15) == 0) {
        Pack<4> v = {};
#pragma unroll 8
        for (int k = 0; k < splits; k++) {
            const Pack<4> part = load<4>(p + (long long)k * len + i);
#pragma unroll
            for (int j = 0; j < 4; j++) v.v[j] += part.v[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) v.v[j] = finished(i + j, v.v[j]);
        store<4>(out + i, v);
    } else {
        for (int at = i; at < min(i + 4, len); at++) {
            float v = 0;
            for (int k = 0; k < splits; k++) v += p[(long long)k * len + at];
            out[at] = finished(at, v);
        }
    }
}
