// Convolutions that `hopper.cu` cannot compute as shifts (stride 2, 1×1, images of 2×2), by warp-group products (wgmma)
// in tf32. For each tap the rows of the image are gathered into shared memory.
//   FORWARD  Y[pixel, o]   = Σ_(tap, i)  X[pixel moved by tap, i] · W[o, tap, i]
//   INPUT    dX[pixel, i]  = Σ_(tap, o)  dY[pixel moved back, o] · W[o, tap, i]      one residue class of the stride at a time,
//                                                                                    weights from `turn_weights`
//   WEIGHT   dW[o, tap, i] = Σ_pixel     X[pixel moved by tap, i] · dY[pixel, o]
// The image must be `stride` times as high and wide as the result.

constexpr int KERNEL_MAX = 3;

// A block of GROUPS warp groups computes 128 pixels × 64·GROUPS channels, each group its own channels. 32 numbers of the
// sum, of both factors, are copied to one of three stages, two steps ahead; products of a second block fill the gaps.
// Copies to shared memory and reads of it are the bottleneck: 1.25 times as long as the products of two groups.
// The sum runs over blocks of 32 channels and, inside, over taps.
template <int MODE, int GROUPS>
__device__ __forceinline__ void gathered_product(const Conv& s, const int* lanes, const Rows& image_rows, const Rows& w_rows,
                                                 const Rows& out_rows, const After& after, int flags, int splits, float* partial) {
    constexpr int N = 128, BN = 64 * GROUPS, LINES = 16 * GROUPS;  // rows that all threads copy at a time
    constexpr int IMAGE_BYTES = 128 * N, PLACE_BYTES = IMAGE_BYTES + 128 * BN;
    constexpr int PASSES = N / LINES;
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, part = tid % 8, line = tid / 8, lane = lanes[blockIdx.z];
    const int taps = s.kernel * s.kernel;
    const int n_columns = MODE == INPUT ? s.ci : s.co, n_tiles_n = n_columns / BN;
    const int n_rows = s.batch * s.ho * s.wo, n_tiles_m = (n_rows + N - 1) / N;
    const int n0 = blockIdx.x % n_tiles_n * BN, m0 = blockIdx.x / n_tiles_n % n_tiles_m * N;
    // The last class of a stride of two has the most taps. It begins first.
    const Class cls(s, MODE == INPUT ? s.stride * s.stride - 1 - blockIdx.x / (n_tiles_n * n_tiles_m) : 0);
    const int width = MODE == INPUT ? cls.nkw : s.kernel, n_taps = MODE == INPUT ? cls.nkh * cls.nkw : taps;
    const int image_h = MODE == INPUT ? s.ho : s.h, image_w = MODE == INPUT ? s.wo : s.w, image_c = MODE == INPUT ? s.co : s.ci;
    const int n_steps = image_c / 32 * n_taps;
    const int begin = int((long long)n_steps * blockIdx.y / splits), end = int((long long)n_steps * (blockIdx.y + 1) / splits);
    if (n_taps == 0 && !(flags & 1)) return;  // adds nothing

    // ---- copies: a thread's rows stay the same along the sum ----
    int at_pixel[PASSES];
    u32 reached[PASSES];  // taps that are inside the image
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int m = m0 + line + LINES * i, n = m / s.by_out_pixels, r = m - n * (s.ho * s.wo), row = r / s.by_wo, col = r - row * s.wo;
        // The pixel under the first tap. In a backward pass each further tap leads one back.
        const int top = MODE == FORWARD ? row * s.stride - s.pad : row + (cls.ph + s.pad - cls.kh0) / s.stride;
        const int left = MODE == FORWARD ? col * s.stride - s.pad : col + (cls.pw + s.pad - cls.kw0) / s.stride;
        at_pixel[i] = ((n * image_h + top) * image_w + left) * image_c + 4 * part;
        u32 columns = 0;
        reached[i] = 0;
#pragma unroll
        for (int j = 0; j < KERNEL_MAX; j++) {
            if (j < width && u32(MODE == FORWARD ? left + j : left - j) < u32(image_w)) columns |= 1u << j;
        }
#pragma unroll
        for (int j = 0; j < KERNEL_MAX; j++) {
            const bool in = u32(MODE == FORWARD ? top + j : top - j) < u32(image_h);
            if (j * width < n_taps && m < n_rows && in) reached[i] |= columns << j * width;
        }
    }
    const float* const image = of(image_rows, lane);
    // A thread's two rows of a product, eight apart, must be neighbouring channels.
    const int channel = n0 + line / 16 * 16 + line % 8 * 2 + line / 8 % 2;
    const float* const w = of(w_rows, lane) + channel * taps * image_c + 4 * part;
    // What is copied next. Counting on costs less than dividing.
    int step_ahead = begin, place_ahead = 0;
    int block = n_taps > 0 ? begin / n_taps : 0, tap = begin - block * n_taps, down = n_taps > 0 ? tap / width : 0, right = tap - down * width;
    auto fetch = [&] {
        if (step_ahead++ >= end) return;
        int moved = (down * image_w + right) * image_c, at_tap = tap;
        if constexpr (MODE == INPUT) {
            moved = -moved;
            at_tap = taps - 1 - (cls.kh0 + down * s.stride) * s.kernel - cls.kw0 - right * s.stride;
        }
        moved += 32 * block;
        const u32 to = shared + place_ahead * PLACE_BYTES + swapped_to(line, part), bit = 1u << tap;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const bool in = reached[i] & bit;
            copy_once(to + 128 * LINES * i, image + (in ? at_pixel[i] + moved : 0), in);
        }
        const float* const from = w + at_tap * image_c + 32 * block;
#pragma unroll
        for (int i = 0; i < BN / LINES; i++) copy_once(to + IMAGE_BYTES + 128 * LINES * i, from + LINES * i * taps * image_c, true);
        place_ahead = place_ahead == 2 ? 0 : place_ahead + 1;
        tap++;
        if (++right == width) right = 0, down++;
        if (tap == n_taps) tap = 0, down = 0, block++;
    };
    fetch(), copies_commit();
    fetch(), copies_commit();

    const int group = __shfl_sync(~0u, tid / 128, 0), g = tid % 32 / 4, t = tid % 4;
    const u32 w_from = shared + IMAGE_BYTES + group * 128 * 64;
    float acc[N / 2] = {};
    int place = 0;
    for (int step = begin; step < end; step++) {
        // The products of the last step are complete, so the next copy can reuse its stage. This step's copies are too.
        products_pending<0>();
        copies_pending<1>();
        const u64 a = matrix_of_rows(w_from + place * PLACE_BYTES), b = matrix_of_rows(shared + place * PLACE_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply(acc, a + 2 * k, b + 2 * k);
        products_commit();
        fetch(), copies_commit();
        place = place == 2 ? 0 : place + 1;
    }
    products_pending<0>();
    asm volatile("cp.async.wait_all;");

    // Number 4j + 2h + i of a thread: channel 2g + h of its warp's sixteen, pixel 8j + 2t + i.
    const int n = n0 + group * 64 + tid / 32 % 4 * 16 + 2 * g;
    auto at = [&](int v) {
        const int m = m0 + v / 2 * 8 + 2 * t + v % 2;
        int pixel = m;
        if (MODE == INPUT && s.stride > 1) {
            const int line = m / s.by_wo;
            pixel = (line * s.stride + cls.ph) * s.w + (m - line * s.wo) * s.stride + cls.pw;
        }
        return m < n_rows ? pixel * n_columns + n : -1;
    };
    if (splits > 1) {  // `sum_splits` applies the epilogue
        const long long out_len = (long long)n_rows * (MODE == INPUT ? s.stride * s.stride : 1) * n_columns;
        After{}.put(partial + (blockIdx.z * splits + blockIdx.y) * out_len, lane, Pair{}, acc, 1, at);
    } else {
        if (after.moments.at) after.sum_moments(lane, m0 / N, n, n_columns, after.valid[lane] * s.ho * s.wo * n_columns, acc, at);
        after.put(of(out_rows, lane), lane, after.pair(lane, n, n_columns), acc, flags, at);
    }
}

#define GATHERED(mode, groups, at_once)                                                                               \
    extern "C" __global__ void __launch_bounds__(128 * groups, at_once)                                               \
        gathered_##mode##_##groups(Conv s, const int* lanes, Rows image, Rows w, Rows out, After after, int flags,      \
                                   int splits, float* partial) {                                                      \
        gathered_product<mode, groups>(s, lanes, image, w, out, after, flags, splits, partial);                        \
    }
GATHERED(FORWARD, 1, 3)
GATHERED(FORWARD, 2, 2)
GATHERED(INPUT, 1, 3)
GATHERED(INPUT, 2, 2)

// dW of 3×3 convolutions. Three warp groups compute 64 × 64 channels each, for the three taps of a kernel row, as in
// `shifted_weight`. The sum runs over results, 32 at a time: some rows of one image, or several images. The pixels that
// they reach, with their margins, are copied once for all taps. The tensor cores need both factors by pixels: dY is
// transposed on its way to shared memory, X on its way to registers.
extern "C" __global__ void __launch_bounds__(384, 1)
    gathered_weight(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, int flags, int splits, float* partial) {
    constexpr int BK = 32, PITCH = 68, PASSES = 9;  // pitch: threads of a warp read different banks at stride 2
    const int n_rows = min(s.ho, BK / s.wo), n_images = BK / (n_rows * s.wo);
    const int width = s.stride * (s.wo - 1) + 3, height = s.stride * (n_rows - 1) + 3, x_lines = n_images * height * width;
    const int x_bytes = 4 * PITCH * x_lines, place_bytes = x_bytes + 4 * BK * 64;
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, warp = tid / 32, thread = tid % 32, lane = lanes[blockIdx.z];
    const int n_tiles_i = s.ci / 64, i0 = blockIdx.x % n_tiles_i * 64, o0 = blockIdx.x / n_tiles_i * 64;
    const int n_results = s.batch * s.ho * s.wo, all = (n_results + BK - 1) / BK;
    const int begin = all * blockIdx.y / splits, end = all * (blockIdx.y + 1) / splits;
    const float* const x = of(x_rows, lane) + i0 + tid % 16 * 4;
    const float* const y = of(y_rows, lane) + o0 + thread % 8;

    // The lines that a thread copies: their image and row (plus one) in the chunk, and their place in X.
    int line_of[PASSES], from[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int l = tid / 16 + 24 * i, n = l / (height * width), r = l - n * (height * width), row = r / width - 1;
        const int col = r - (row + 1) * width - 1;
        line_of[i] = u32(col) < u32(s.w) ? n << 8 | row + 1 : 1 << 30;  // outside: never in the batch
        from[i] = ((n * s.h + row) * s.w + col) * s.ci;
    }
    auto fetch = [&](int chunk, u32 place) {
        const int first = chunk * BK, n = first / s.by_out_pixels, row = (first - n * (s.ho * s.wo)) / s.by_wo * s.stride;
        const int at = (n * s.h + row) * s.w * s.ci;
        const u32 x_to = shared + place * place_bytes + 4 * (tid / 16 * PITCH + tid % 16 * 4);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (tid / 16 + 24 * i >= x_lines) break;
            const bool in = n + (line_of[i] >> 8) < s.batch && u32(row + (line_of[i] & 255) - 1) < u32(s.h);
            copy_once(x_to + 4 * 24 * i * PITCH, x + (in ? at + from[i] : 0), in);
        }
        if (warp >= BK / 4) return;
        // Eight channels × four results of a warp are 128 bytes in shared memory.
        const int q = first + 4 * warp + thread / 8;
        const u32 y_to = shared + place * place_bytes + x_bytes + 16 * (64 * warp + thread % 8) + 4 * (thread / 8);
#pragma unroll
        for (int o = 0; o < 64; o += 8) copy_async<1>(y_to + 16 * o, y + (q < n_results ? q * s.co + o : 0), q < n_results);
    };

    float acc[3][32] = {};
    u32 factors[2][3][4];
    const int down = warp / 4, g = thread / 4, t = thread % 4;
    u32 x_from[BK / 8][2];  // of results 8k + t and 8k + t + 4
#pragma unroll
    for (int i = 0; i < BK / 4; i++) {
        const int q = 4 * i + t, line = q / s.by_wo, n = line / n_rows, row = line - n * n_rows, col = q - line * s.wo;
        const int at = (n * height + row * s.stride + down) * width + col * s.stride;
        x_from[i / 2][i % 2] = shared + 4 * (at * PITCH + warp % 4 * 16 + 2 * g);
    }
    auto load = [&](u32 (&a)[3][4], u32 place, int k) {
#pragma unroll
        for (int right = 0; right < 3; right++) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {  // both rows at t, then at t + 4
                load_two(a[right][i], a[right][i + 1], x_from[k][i / 2] + place * place_bytes + 4 * right * PITCH);
            }
        }
    };

    if (begin < end) fetch(begin, 0);
    copies_commit();
    if (begin + 1 < end) fetch(begin + 1, 1);
    copies_commit();
    u32 place = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        copies_pending<1>();
        if (chunk + 2 < end) fetch(chunk + 2, place == 0 ? 2 : place - 1);
        copies_commit();
        const u32 b = shared + place * place_bytes + x_bytes;
        load(factors[0], place, 0);
#pragma unroll
        for (int k = 0; k < BK / 8; k++) {
            products_begin();
#pragma unroll
            for (int right = 0; right < 3; right++) multiply(acc[right], factors[k % 2][right], matrix_of_columns(b + 2 * k * 1024, 1024));
            products_commit();
            if (k + 1 < BK / 8) {
                products_pending<1>();
                load(factors[(k + 1) % 2], place, k + 1);
            }
        }
        products_pending<0>();
        place = place == 2 ? 0 : place + 1;
    }
    asm volatile("cp.async.wait_all;");
    store_weights(s.ci, s.co, i0, o0, acc, of(w_rows, lane), flags, splits, partial);
}
