// The first layer: 3×3 convolutions of stride 1 on images with up to four channels, in tf32. There is little to compute
// and much to write. So a block keeps the weights of 64 channels in registers, 32 per warp, and processes one image, or
// half of one, after another. It is in shared memory, with four floats per pixel and its margin.

constexpr int STEM_STEPS = 5;  // of eight: two taps of four channels each; the tenth tap is empty

struct Stem {
    const Conv& s;
    const float* x;
    float4* images;  // two, with margins
    int parts, height, width, padded, pixels;  // of a part of an image
    u32 b[STEM_STEPS][4][2];

    // The first of a warp's 32 channels, and of its sixteen pixels among 64.
    static __device__ __forceinline__ int channel() { return threadIdx.x / 32 % 2 * 32; }
    static __device__ __forceinline__ int pixel() { return threadIdx.x / 64 * 16; }

    __device__ __forceinline__ Stem(const Conv& s, const float* x, const float* w, int n0, float4* images, int parts)
        : s(s), x(x), images(images), parts(parts) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        height = s.h / parts, width = s.w + 2, padded = width * (height + 2), pixels = height * s.w;
        for (int i = threadIdx.x; i < 2 * padded; i += 256) images[i] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 2 * STEM_STEPS; k++) {
#pragma unroll
            for (int ni = 0; ni < 4; ni++) {
                // The order of channels is free: a thread's results are four neighbours.
                const int o = n0 + channel() + ni / 2 * 16 + g / 2 * 4 + ni % 2 * 2 + g % 2;
                b[k / 2][ni][k % 2] = k < 9 && t < s.ci ? to_tf32(w[(o * 9 + k) * s.ci + t]) : 0;
            }
        }
        __syncthreads();
    }

    // A part with the rows above and below it.
    __device__ __forceinline__ void fetch(int part, int buffer) const {
        const u32 to = u32(__cvta_generic_to_shared(images + buffer * padded));
        const int top = part % parts * height - 1;
        for (int i = threadIdx.x; i < pixels + 2 * s.w; i += 256) {
            const int row = i / s.by_wo;
            const bool in = u32(top + row) < u32(s.h);
            copy_async<4>(to + 16 * (row * width + i - row * s.w + 1), x + 4ll * (in ? part * pixels - s.w + i : 0), in);
        }
    }

    // Calls body(part, image) for the parts of images of this block while the next one is being copied.
    template <class Body>
    __device__ __forceinline__ void for_each_part(Body body) const {
        fetch(blockIdx.x, 0);
        asm volatile("cp.async.commit_group;");
        int buffer = 0;
        for (int part = blockIdx.x; part < s.batch * parts; part += gridDim.x, buffer ^= 1) {
            if (part + gridDim.x < s.batch * parts) fetch(part + gridDim.x, buffer ^ 1);
            asm volatile("cp.async.commit_group;");
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            __syncthreads();
            body(part, reinterpret_cast<const float*>(images + buffer * padded));
            __syncthreads();
        }
    }

    // Calls result(pixel, pair, four channels) for sixteen pixels from m0 and 32 channels: two times sixteen, of which a thread
    // has four neighbours. The warp's threads share them.
    template <class Result>
    __device__ __forceinline__ void products(const float* image, int m0, Result result) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float acc[4][4] = {};
        const float* from[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pixel = min(m0 + g + 8 * half, pixels - 1), row = pixel / s.by_wo;
            from[half] = image + t + 4 * (row * width + pixel - row * s.w);
        }
#pragma unroll
        for (int k = 0; k < STEM_STEPS; k++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int tap = min(2 * k + i / 2, 8);
                a[i] = to_tf32(from[i % 2][4 * (tap / 3 * width + tap % 3)]);
            }
#pragma unroll
            for (int ni = 0; ni < 4; ni++) mma_tf32(acc[ni], a, b[k][ni]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pixel = m0 + g + 8 * half;
            if (pixel >= pixels) continue;
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const float *left = acc[2 * pair] + 2 * half, *right = acc[2 * pair + 1] + 2 * half;
                result(pixel, pair, Pack<4>{left[0], left[1], right[0], right[1]});
            }
        }
    }
};

// Sums of a part's results for `batch_norm_statistics`, as in `After::sum_moments`: a thread has eight channels.
struct StemMoments {
    float mean[2][4], sums[2][2][4];

    __device__ __forceinline__ StemMoments(const float* means, int c) {
#pragma unroll
        for (int i = 0; i < 8; i++) mean[i / 4][i % 4] = means[c + i / 4 * 16 + i % 4];
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 16; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
    }

    __device__ __forceinline__ void add(int pair, const Pack<4>& v) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float d = v.v[k] - mean[pair][k];
            sums[0][pair][k] += d, sums[1][pair][k] += d * d;
        }
    }

    // Writes the sums of 64 channels over all pixels of a block; zeros for padding.
    __device__ __forceinline__ void put(float* to, int columns, int c, bool padding) {
        __shared__ float parts[4][2][64];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float v = sums[i / 8][i / 4 % 2][i % 4];
            for (int o = 4; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
            if (threadIdx.x % 32 < 4) parts[threadIdx.x / 64][i / 8][c + i / 4 % 2 * 16 + i % 4] = v;
        }
        __syncthreads();
        const int kind = threadIdx.x / 64, o = threadIdx.x % 64;
        if (kind < 2) to[kind * columns + o] = padding ? 0.f : parts[0][kind][o] + parts[1][kind][o] + parts[2][kind][o] + parts[3][kind][o];
    }
};

extern "C" __global__ void __launch_bounds__(256, 2)
    stem(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    extern __shared__ float4 images[];
    const int lane = lanes[blockIdx.z], n0 = blockIdx.y * 64, c = Stem::channel() + threadIdx.x % 4 * 4;
    const Stem stem(s, of(x_rows, lane), of(w_rows, lane), n0, images, s.h % 2 ? 1 : 2);
    float* const y = of(y_rows, lane) + n0;
    const bool with_relu = flags & 2, plain = !after.norm.at && !after.bias.at && !after.residual.at, sums = after.moments.at;
    StemMoments moments(sums ? of(after.mean, lane) + n0 : of(w_rows, lane), c);
    stem.for_each_part([&](int part, const float* image) {
        moments.clear();
        for (int m0 = Stem::pixel(); m0 < stem.pixels; m0 += 64) {
            stem.products(image, m0, [&](int pixel, int pair, Pack<4> v) {
                const long long at = (long long)(part * stem.pixels + pixel) * s.co + c + 16 * pair;
                if (sums) moments.add(pair, v);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (!plain) {
                        v.v[k] = after(v.v[k], lane, n0 + c + 16 * pair + k, s.co, n0 + at + k, with_relu);
                    } else if (with_relu) {
                        v.v[k] = relu(v.v[k]);
                    }
                }
                store<4>(y + at, v);
            });
        }
        if (sums) moments.put(of(after.moments, lane) + 2ll * part * s.co + n0, s.co, c, part / stem.parts >= after.valid[lane]);
    });
}

constexpr int POOL_PITCH = 64 + 8;  // floats between the pixels of a row in shared memory: a warp's eight pixels are in different banks
constexpr int RING_PITCH = 64 + 16;  // the same for vectors of four

// The same, fused with a max-pool of 3×3 and stride 2 (`pool.cu`), for passes without a backward pass. The output of
// the first layer is then neither written nor read. A block computes 128 pixels, an even number of rows, at a time. The
// row before them stays in the ring. Together they suffice for half as many rows of the result.
extern "C" __global__ void __launch_bounds__(256, 2)
    stem_pool(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    extern __shared__ float4 images[];
    const int tid = threadIdx.x, lane = lanes[blockIdx.z], n0 = blockIdx.y * 64;
    const Stem stem(s, of(x_rows, lane), of(w_rows, lane), n0, images, 1);
    float* const rows = reinterpret_cast<float*>(images + 2 * stem.padded);
    const int n_rows = 128 / s.w, ring = n_rows + 1, ho = s.h / 2, wo = s.w / 2;
    float* const y = of(y_rows, lane) + n0;
    const bool with_relu = flags & 2;
    stem.for_each_part([&](int n, const float* image) {
        int start = 0;  // the ring's slot of the row before `first`
        for (int first = 0; first < s.h; first += n_rows, start = start ? start - 1 : n_rows) {
            auto at = [&](int row, int col) {
                const int place = start + row - first + 1;
                return rows + ((place < ring ? place : place - ring) * s.w + col) * RING_PITCH;
            };
            for (int m0 = Stem::pixel(); m0 < 128; m0 += 64) {
                stem.products(image, first * s.w + m0, [&](int pixel, int pair, const Pack<4>& v) {
                    const int row = pixel / s.by_wo;
                    store<4>(at(row, pixel - row * s.w) + Stem::channel() + tid % 4 * 4 + 16 * pair, v);
                });
            }
            __syncthreads();
            // The epilogue runs here: a thread has four channels, and there are registers for their coefficients.
            const int c = tid % 16 * 4;
            const Pair p = after.pair(lane, n0 + c, s.co), q = after.pair(lane, n0 + c + 2, s.co);
            auto load_scaled = [&](int row, int col) {
                Pack<4> v = load<4>(at(row, col) + c);
                v.v[0] = norm_of(p.a0, v.v[0], p.b0), v.v[1] = norm_of(p.a1, v.v[1], p.b1);
                v.v[2] = norm_of(q.a0, v.v[2], q.b0), v.v[3] = norm_of(q.a1, v.v[3], q.b1);
                return v;
            };
            for (int i = tid / 16; i < n_rows / 2 * wo; i += 16) {
                const int oy = first / 2 + i / wo, ox = i % wo;
                Pack<4> best = {MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
                for (int k = 0; k < 9; k++) {
                    // Outside the image: repeats a pixel of the window.
                    const Pack<4> v = load_scaled(max(2 * oy + k / 3 - 1, 0), max(2 * ox + k % 3 - 1, 0));
#pragma unroll
                    for (int j = 0; j < 4; j++) best.v[j] = max_or_nan(best.v[j], v.v[j]);
                }
                if (with_relu) {
#pragma unroll
                    for (int j = 0; j < 4; j++) best.v[j] = relu(best.v[j]);
                }
                store<4>(y + ((long long)(n * ho + oy) * wo + ox) * s.co + c, best);
            }
            __syncthreads();
        }
    });
}

// The winners of a max-pool of 3×3 and stride 2 (`pool.cu`), and their gradients.
struct Won {
    const u8* places;
    long long places_stride;
    Rows dy;
};

// The gradient of the first layer's weights from that of a max-pool behind its batch-norm and ReLU. What is between,
// the largest arrays of a network, is neither written nor read.
//   dz[pixel, o]  = Σ dy of the windows that the pixel has won
//   dY            = a·dz + b·Y + c                                    the batch-norm's backward pass, as in `pool.cu`
//   dW[o, tap, i] = Σ_pixel X[pixel moved by tap, i] · dY[pixel, o]
// The sum is split and added as in `conv.cu`, so results are the same to the last bit. While 128 pixels, an even number
// of rows, are multiplied, the next ones are copied to shared memory: their image, their Y, which dY replaces, and the
// windows that cover them.
extern "C" __global__ void __launch_bounds__(256, 2)
    stem_weight(Conv s, const int* lanes, const int* valid, Rows x_rows, Rows y_rows, Rows coefficients, Won won, Rows dw_rows,
                int splits, float* partial) {
    extern __shared__ float4 shared_memory[];
    const int tid = threadIdx.x, lane = lanes[blockIdx.z], n0 = blockIdx.x * 64;
    const int n_rows = 128 / s.w, ho = s.h / 2, wo = s.w / 2, width = s.w + 2, n_windows = (n_rows / 2 + 1) * wo;
    const int image_len = 4 * (n_rows + 2) * width, place_len = 16 * n_windows;  // floats
    const int buffer_len = 128 * POOL_PITCH + image_len + 64 * n_windows + place_len;
    float* const buffers = reinterpret_cast<float*>(shared_memory);
    const float* const x = of(x_rows, lane);
    const float* const y = of(y_rows, lane) + n0;
    const float* const dy = of(won.dy, lane) + n0;
    const u8* const places = won.places + won.places_stride * lane + n0;
    const int c = tid % 16 * 4;  // the first of four channels that a thread copies and turns into dY

    auto fetch = [&](int band, float* buffer) {
        const int n = band / (s.h / n_rows), first = band % (s.h / n_rows) * n_rows;
        const u32 y_to = u32(__cvta_generic_to_shared(buffer)), image_to = y_to + 4 * 128 * POOL_PITCH;
        const u32 dy_to = image_to + 4 * image_len, place_to = dy_to + 4 * 64 * n_windows;
        const float* from = y + (128ll * band + tid / 16) * s.co + c;
#pragma unroll
        for (int j = 0; j < 8; j++, from += 16 * s.co) copy_async<4>(y_to + 4 * ((tid / 16 + 16 * j) * POOL_PITCH + c), from, true);
        for (int i = tid; i < (n_rows + 2) * s.w; i += 256) {
            const int row = i / s.by_wo, col = i - row * s.w, at = first + row - 1;
            const bool in = u32(at) < u32(s.h);
            copy_async<4>(image_to + 16 * (row * width + col + 1), x + 4ll * (in ? (n * s.h + at) * s.w + col : 0), in);
        }
        for (int i = tid / 16; i < n_windows; i += 16) {
            const int at = first / 2 * wo + i;
            const bool in = at < ho * wo;
            const long long from = in ? (long long)(n * ho * wo + at) * s.co + c : 0;
            copy_async<4>(dy_to + 4 * (64 * i + c), dy + from, in);
            copy_async<1>(place_to + 64 * i + c, reinterpret_cast<const float*>(places + from), in);
        }
    };

    const float* const q = of(coefficients, lane) + n0 + c;
    const Pack<4> qa = load<4>(q), qb = load<4>(q + s.co), qc = load<4>(q + 2 * s.co);
    // Replaces Y by dY, and converts both factors for the product.
    auto turn = [&](int band, float* buffer) {
        const int n = band / (s.h / n_rows);
        float* const image = buffer + 128 * POOL_PITCH;
        const float* const windows = image + image_len;
        const u8* const winners = reinterpret_cast<const u8*>(windows + 64 * n_windows);
        const bool padding = n >= valid[lane];
        // Two neighbouring pixels at a time: windows m and m + 1 of each row of windows cover them.
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int k = 16 * j + tid / 16, row = 2 * k / s.by_wo, m = k - row * wo;
            Pack<4> left = {}, right = {};
            auto add = [&](Pack<4>& total, int at, int number) {
                const Places<4> here = *reinterpret_cast<const Places<4>*>(winners + at);
                const Pack<4> d = load<4>(windows + at);
#pragma unroll
                for (int i = 0; i < 4; i++) total.v[i] += here.v[i] == number ? d.v[i] : 0.f;
            };
            // From last window to first, as in `pool.cu`. Windows below the image are zeros.
            auto add_row = [&](int wy, int kr) {
                const int at = 64 * (wy * wo + m) + c;
                if (m + 1 < wo) add(right, at + 64, 3 * kr);
                add(right, at, 3 * kr + 2);
                add(left, at, 3 * kr + 1);
            };
            if (row % 2) add_row(row / 2 + 1, 0);
            add_row(row / 2, row % 2 ? 2 : 1);
            float* const at = buffer + 2 * k * POOL_PITCH + c;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const Pack<4>& total = side ? right : left;
                Pack<4> v = load<4>(at + side * POOL_PITCH);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v.v[i] = __uint_as_float(to_tf32(padding ? 0.f : through_norm(qa.v[i], total.v[i], qb.v[i], v.v[i], qc.v[i])));
                }
                store<4>(at + side * POOL_PITCH, v);
            }
        }
        for (int i = 4 * tid; i < image_len; i += 4 * 256) {
            Pack<4> v = load<4>(image + i);
#pragma unroll
            for (int j = 0; j < 4; j++) v.v[j] = __uint_as_float(to_tf32(v.v[j]));
            store<4>(image + i, v);
        }
    };

    // Four warps share the channels, sixteen each. The first four compute rows 0 to 31 of (tap, i), the others the
    // rest. The eight pixels of a product are in one row of the image. Numbers are read two at a time: rows g and g + 8 of a
    // product are neighbouring channels of one tap, and columns g of two products are neighbouring channels.
    const int warp = tid / 32, g = tid % 32 / 4, t = tid % 4, m0 = warp / 4 * 32, o0 = warp % 4 * 16;
    float acc[2][2][4] = {};
    auto multiply = [&](const float* buffer, int begin, int end) {
        const float* dy_from = buffer + (begin + t) * POOL_PITCH + o0 + 2 * g;
        const float* x_from[2];
#pragma unroll
        for (int mi = 0; mi < 2; mi++) {
            const int tap = min(m0 / 4 + 4 * mi + g / 2, 8);
            const int at = begin + 2 * (begin / s.by_wo) + t + tap / 3 * width + tap % 3;
            x_from[mi] = buffer + 128 * POOL_PITCH + 4 * at + g % 2 * 2;
        }
        auto load_two = [](const float* from, u32& first, u32& second) {
            const float2 v = *reinterpret_cast<const float2*>(from);
            first = __float_as_uint(v.x), second = __float_as_uint(v.y);
        };
#pragma unroll 2
        for (int k = begin; k < end; k += 8) {
            u32 b[2][2];
#pragma unroll
            for (int later = 0; later < 2; later++) load_two(dy_from + later * 4 * POOL_PITCH, b[0][later], b[1][later]);
            dy_from += 8 * POOL_PITCH;
            const int step = k + 8 & s.w - 1 ? 4 * 8 : 4 * 10;  // skips the margins at a row's end
#pragma unroll
            for (int mi = 0; mi < 2; mi++) {
                if (m0 + 16 * mi >= 36) break;
                u32 a[4];
#pragma unroll
                for (int later = 0; later < 2; later++) load_two(x_from[mi] + later * 4 * 4, a[2 * later], a[2 * later + 1]);
#pragma unroll
                for (int ni = 0; ni < 2; ni++) mma_tf32(acc[mi][ni], a, b[ni]);
                x_from[mi] += step;
            }
        }
    };

    // The left and right margins are never copied.
    for (int i = tid; i < 2 * 2 * (n_rows + 2); i += 256) {
        float* const image = buffers + i % 2 * buffer_len + 128 * POOL_PITCH;
        reinterpret_cast<float4*>(image)[i / 4 * width + i / 2 % 2 * (width - 1)] = make_float4(0, 0, 0, 0);
    }
    const int n_steps = s.batch * s.h * s.w / BK;
    const int begin = int((long long)n_steps * blockIdx.y / splits), end = int((long long)n_steps * (blockIdx.y + 1) / splits);
    const int last = (end - 1) / 8;
    fetch(begin / 8, buffers);
    asm volatile("cp.async.commit_group;");
    for (int band = begin / 8, which = 0; band <= last; band++, which ^= 1) {
        float* const buffer = buffers + which * buffer_len;
        if (band < last) fetch(band + 1, buffers + (which ^ 1) * buffer_len);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        turn(band, buffer);
        __syncthreads();
        multiply(buffer, BK * max(begin - 8 * band, 0), BK * min(end - 8 * band, 8));
        __syncthreads();
    }

    float* const to = splits > 1 ? partial + (long long)(blockIdx.z * splits + blockIdx.y) * s.co * 9 * s.ci : of(dw_rows, lane);
#pragma unroll
    for (int mi = 0; mi < 2; mi++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tap = m0 / 4 + 4 * mi + g / 2, i = g % 2 * 2 + half;
            if (tap >= 9 || i >= s.ci) continue;
#pragma unroll
            for (int ni = 0; ni < 2; ni++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int o = n0 + o0 + 2 * (2 * t + j) + ni;
                    to[(o * 9 + tap) * s.ci + i] = acc[mi][ni][2 * half + j];
                }
            }
        }
    }
}
