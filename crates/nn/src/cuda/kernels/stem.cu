// The first layer: convolutions of 3×3 and stride 1 of images with at most four channels, in tf32. There is little to compute
// and much to write, so a block keeps the weights of 64 channels in registers and goes from image to image; an image, four
// floats a pixel, lies in shared memory with its margin.

constexpr int STEM_STEPS = 5;  // of eight: two taps of four channels each; the tenth tap is none

extern "C" __global__ void __launch_bounds__(256, 2)
    stem(Conv s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, After after, int flags) {
    extern __shared__ float4 images[];  // two, with margins
    const int tid = threadIdx.x, warp = tid / 32, g = tid % 32 / 4, t = tid % 4;
    const int lane = lanes[blockIdx.z], n0 = blockIdx.y * 64;
    const int width = s.w + 2, padded = width * (s.h + 2), pixels = s.h * s.w;
    const float* x = of(x_rows, lane);
    const float* w = of(w_rows, lane);
    float* const y = of(y_rows, lane);

    auto fetch = [&](int n, int buffer) {
        const u32 to = u32(__cvta_generic_to_shared(images + buffer * padded));
        for (int i = tid; i < pixels; i += 256) {
            const int row = i / s.by_wo;
            copy_async<4>(to + 16 * ((row + 1) * width + i - row * s.w + 1), x + 4ll * (n * pixels + i), true);
        }
    };
    for (int i = tid; i < 2 * padded; i += 256) images[i] = make_float4(0, 0, 0, 0);
    u32 b[STEM_STEPS][8][2];
#pragma unroll
    for (int k = 0; k < 2 * STEM_STEPS; k++) {
#pragma unroll
        for (int ni = 0; ni < 8; ni++) {
            const bool in = k < 9 && t < s.ci;
            b[k / 2][ni][k % 2] = in ? to_tf32(w[((n0 + 8 * ni + g) * 9 + k) * s.ci + t]) : 0;
        }
    }
    __syncthreads();
    fetch(blockIdx.x, 0);
    asm volatile("cp.async.commit_group;");

    const bool with_relu = flags & 2, plain = !after.norm.at && !after.bias.at && !after.residual.at;
    int buffer = 0;
    for (int n = blockIdx.x; n < s.batch; n += gridDim.x, buffer ^= 1) {
        if (n + gridDim.x < s.batch) fetch(n + gridDim.x, buffer ^ 1);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        const float* const image = reinterpret_cast<const float*>(images + buffer * padded) + t;
        for (int m0 = 16 * warp; m0 < pixels; m0 += 128) {
            float acc[8][4] = {};
            const float* from[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int pixel = min(m0 + g + 8 * half, pixels - 1), row = pixel / s.by_wo;
                from[half] = image + 4 * (row * width + pixel - row * s.w);
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
                const long long row = (long long)(n * pixels + pixel) * s.co;
#pragma unroll
                for (int ni = 0; ni < 8; ni++) {
                    const int o = n0 + 8 * ni + 2 * t;
                    float v0 = acc[ni][2 * half], v1 = acc[ni][2 * half + 1];
                    if (!plain) {
                        v0 = after(v0, lane, o, s.co, row + o, with_relu);
                        v1 = after(v1, lane, o + 1, s.co, row + o + 1, with_relu);
                    } else if (with_relu) {
                        v0 = relu(v0), v1 = relu(v1);
                    }
                    *reinterpret_cast<float2*>(y + row + o) = make_float2(v0, v1);
                }
            }
        }
        __syncthreads();
    }
}
