// The first layer: convolutions of 3×3 and stride 1 of images with at most four channels, in tf32. There is little to compute
// and much to write, so a block keeps the weights of 64 channels in registers and goes from image to image; an image, four
// floats a pixel, lies in shared memory with its margin.

constexpr int STEM_STEPS = 5;  // of eight: two taps of four channels each; the tenth tap is none

struct Stem {
    const Conv& s;
    const float* x;
    float4* images;  // two, with margins
    int width, padded, pixels;
    u32 b[STEM_STEPS][8][2];

    __device__ __forceinline__ Stem(const Conv& s, const float* x, const float* w, int n0, float4* images) : s(s), x(x), images(images) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        width = s.w + 2, padded = width * (s.h + 2), pixels = s.h * s.w;
        for (int i = threadIdx.x; i < 2 * padded; i += 256) images[i] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 2 * STEM_STEPS; k++) {
#pragma unroll
            for (int ni = 0; ni < 8; ni++) {
                const bool in = k < 9 && t < s.ci;
                b[k / 2][ni][k % 2] = in ? to_tf32(w[((n0 + 8 * ni + g) * 9 + k) * s.ci + t]) : 0;
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ void fetch(int n, int buffer) const {
        const u32 to = u32(__cvta_generic_to_shared(images + buffer * padded));
        for (int i = threadIdx.x; i < pixels; i += 256) {
            const int row = i / s.by_wo;
            copy_async<4>(to + 16 * ((row + 1) * width + i - row * s.w + 1), x + 4ll * (n * pixels + i), true);
        }
    }

    // body(n, image) for the images of this block, the next one on its way.
    template <class Body>
    __device__ __forceinline__ void for_each_image(Body body) const {
        fetch(blockIdx.x, 0);
        asm volatile("cp.async.commit_group;");
        int buffer = 0;
        for (int n = blockIdx.x; n < s.batch; n += gridDim.x, buffer ^= 1) {
            if (n + gridDim.x < s.batch) fetch(n + gridDim.x, buffer ^ 1);
            asm volatile("cp.async.commit_group;");
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            __syncthreads();
            body(n, reinterpret_cast<const float*>(images + buffer * padded));
            __syncthreads();
        }
    }

    // result(pixel, channel, v0, v1) for sixteen pixels from m0 on; the warp's threads share them and the 64 channels.
    template <class Result>
    __device__ __forceinline__ void products(const float* image, int m0, Result result) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float acc[8][4] = {};
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
            for (int ni = 0; ni < 8; ni++) mma_tf32(acc[ni], a, b[k][ni]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pixel = m0 + g + 8 * half;
            if (pixel >= pixels) continue;
#pragma unroll
            for (int ni = 0; ni < 8; ni++) result(pixel, 8 * ni + 2 * t, acc[ni][2 * half], acc[ni][2 * half + 1]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 2)
    stem(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    extern __shared__ float4 images[];
    const int lane = lanes[blockIdx.z], n0 = blockIdx.y * 64;
    const Stem stem(s, of(x_rows, lane), of(w_rows, lane), n0, images);
    float* const y = of(y_rows, lane);
    const bool with_relu = flags & 2, plain = !after.norm.at && !after.bias.at && !after.residual.at;
    stem.for_each_image([&](int n, const float* image) {
        for (int m0 = threadIdx.x / 32 * 16; m0 < stem.pixels; m0 += 128) {
            stem.products(image, m0, [&](int pixel, int o, float v0, float v1) {
                const long long row = (long long)(n * stem.pixels + pixel) * s.co;
                o += n0;
                if (!plain) {
                    v0 = after(v0, lane, o, s.co, row + o, with_relu);
                    v1 = after(v1, lane, o + 1, s.co, row + o + 1, with_relu);
                } else if (with_relu) {
                    v0 = relu(v0), v1 = relu(v1);
                }
                *reinterpret_cast<float2*>(y + row + o) = make_float2(v0, v1);
            });
        }
    });
}

constexpr int POOL_PITCH = 64 + 8;  // floats between the pixels of a row in shared memory: a warp's eight are in different banks

// The same, followed by a max-pool of 3×3 and stride 2 (`pool.cu`), for passes without a backward pass: the image of the first layer is
// then neither written nor read. 128 pixels, an even number of rows, are computed at a time; with the row before them, which stays in the
// ring, they hold all that half as many rows of the result need.
extern "C" __global__ void __launch_bounds__(256, 2)
    stem_pool(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    extern __shared__ float4 images[];
    const int tid = threadIdx.x, lane = lanes[blockIdx.z], n0 = blockIdx.y * 64;
    const Stem stem(s, of(x_rows, lane), of(w_rows, lane), n0, images);
    float* const rows = reinterpret_cast<float*>(images + 2 * stem.padded);
    const int n_rows = 128 / s.w, ring = n_rows + 1, ho = s.h / 2, wo = s.w / 2;
    float* const y = of(y_rows, lane) + n0;
    const bool with_relu = flags & 2;
    stem.for_each_image([&](int n, const float* image) {
        int start = 0;  // where the row before `first` lies in the ring
        for (int first = 0; first < s.h; first += n_rows, start = start ? start - 1 : n_rows) {
            auto at = [&](int row, int col) {
                const int place = start + row - first + 1;
                return rows + ((place < ring ? place : place - ring) * s.w + col) * POOL_PITCH;
            };
            stem.products(image, first * s.w + tid / 32 * 16, [&](int pixel, int o, float v0, float v1) {
                v0 = after(v0, lane, n0 + o, s.co, 0, with_relu);
                v1 = after(v1, lane, n0 + o + 1, s.co, 0, with_relu);
                const int row = pixel / s.by_wo;
                *reinterpret_cast<float2*>(at(row, pixel - row * s.w) + o) = make_float2(v0, v1);
            });
            __syncthreads();
            const int c = tid % 16 * 4;
            for (int i = tid / 16; i < n_rows / 2 * wo; i += 16) {
                const int oy = first / 2 + i / wo, ox = i % wo;
                Pack<4> best;
                bool found = false;
                for (int row = max(2 * oy - 1, 0); row <= 2 * oy + 1; row++) {
                    for (int col = max(2 * ox - 1, 0); col <= 2 * ox + 1; col++) {
                        const Pack<4> v = load<4>(at(row, col) + c);
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            if (!found || v.v[k] > best.v[k] || (v.v[k] != v.v[k] && best.v[k] == best.v[k])) best.v[k] = v.v[k];
                        }
                        found = true;
                    }
                }
                store<4>(y + ((long long)(n * ho + oy) * wo + ox) * s.co + c, best);
            }
            __syncthreads();
        }
    });
}
