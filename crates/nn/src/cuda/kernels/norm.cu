// Batch and group normalisation, fused with the residual and the ReLU that follow, and sums over the rows of a matrix.
//
// Sums run over a fixed number of row chunks in single precision, then over the chunks in double precision. Rows after
// a lane's valid samples are padding: they count nowhere, and their gradient is zero.

enum { MOMENTS, GRADIENT, COLUMNS };
enum { UPDATE, BATCH, FROZEN };

// Where a batch-norm's gradient comes from: everywhere, where the ReLU's output z is positive, or where the norm itself
// is. The last needs no z: z is computed again from x, which is read anyhow.
enum { ALL, BY_OUTPUT, BY_NORM };

// dz where `masked` lets it pass, else 0. saved: see `batch_norm_statistics`.
template <int VEC>
struct Gate {
    int masked;
    const float* z;
    Pack<VEC> scale, shift;

    __device__ __forceinline__ Gate(int masked, const Rows& z_rows, const float* saved, int channels, int c, int lane)
        : masked(masked), z(masked == BY_OUTPUT ? of(z_rows, lane) : nullptr) {
        if (masked == BY_NORM) scale = load<VEC>(saved + 2 * channels + c), shift = load<VEC>(saved + 3 * channels + c);
    }

    __device__ __forceinline__ void apply(Pack<VEC>& dz, const Pack<VEC>& x, long long at) const {
        if (masked == BY_OUTPUT) {
            const Pack<VEC> m = load<VEC>(z + at);
#pragma unroll
            for (int k = 0; k < VEC; k++) dz.v[k] = m.v[k] > 0.f ? dz.v[k] : 0.f;
        } else if (masked == BY_NORM) {
#pragma unroll
            for (int k = 0; k < VEC; k++) dz.v[k] = norm_of(scale.v[k], x.v[k], shift.v[k]) > 0.f ? dz.v[k] : 0.f;
        }
    }
};

// partial[chunk][2][C]: MOMENTS Σ(x − x₀), Σ(x − x₀)²; GRADIENT Σ dz′, Σ dz′(x − mean) with dz′ = masked dz; COLUMNS Σ dz.
template <int KIND, int VEC>
__device__ __forceinline__ void reduce_rows(const int* lanes, const int* valid, int pixels, int channels, int chunk_rows,
                                            Rows x_rows, Rows dz_rows, Rows z_rows, Rows saved_rows, int masked, Rows partial_rows) {
    __shared__ float sums[2][256 * VEC];
    const int lane = lanes[backwards()];
    const float* x = KIND == COLUMNS ? nullptr : of(x_rows, lane);
    const float* dz = KIND == MOMENTS ? nullptr : of(dz_rows, lane);
    const float* shift = KIND == MOMENTS ? x : KIND == GRADIENT ? of(saved_rows, lane) : nullptr;
    const int rows = valid[lane] * pixels;
    const int r0 = blockIdx.x * chunk_rows, r1 = min(r0 + chunk_rows, rows);
    float* out = of(partial_rows, lane) + (long long)blockIdx.x * 2 * channels;
    for (int c0 = 0; c0 < channels; c0 += 256 * VEC) {
        const int packs = min(channels - c0, 256 * VEC) / VEC;
        const int at_once = 256 / packs;
        const int c = c0 + threadIdx.x % packs * VEC, first = threadIdx.x / packs;
        float s1[VEC] = {}, s2[VEC] = {};
        if (first < at_once) {
            Pack<VEC> s = {};
            if (KIND != COLUMNS) s = load<VEC>(shift + c);
            const Gate<VEC> mask(KIND == GRADIENT ? masked : ALL, z_rows, shift, channels, c, lane);
            for (int r = r0 + first; r < r1; r += at_once) {
                const long long at = (long long)r * channels + c;
                Pack<VEC> a = load<VEC>((KIND == MOMENTS ? x : dz) + at);
                if constexpr (KIND == MOMENTS) {
#pragma unroll
                    for (int i = 0; i < VEC; i++) {
                        const float d = a.v[i] - s.v[i];
                        s1[i] += d, s2[i] += d * d;
                    }
                } else if constexpr (KIND == GRADIENT) {
                    const Pack<VEC> b = load<VEC>(x + at);
                    mask.apply(a, b, at);
#pragma unroll
                    for (int i = 0; i < VEC; i++) s1[i] += a.v[i], s2[i] += a.v[i] * (b.v[i] - s.v[i]);
                } else {
#pragma unroll
                    for (int i = 0; i < VEC; i++) s1[i] += a.v[i];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VEC; i++) sums[0][threadIdx.x * VEC + i] = s1[i], sums[1][threadIdx.x * VEC + i] = s2[i];
        __syncthreads();
        for (int i = threadIdx.x; i < packs * VEC; i += 256) {
            float t1 = 0, t2 = 0;
            for (int k = 0; k < at_once; k++) t1 += sums[0][k * packs * VEC + i], t2 += sums[1][k * packs * VEC + i];
            out[c0 + i] = t1, out[channels + c0 + i] = t2;
        }
    }
}

#define REDUCE_KERNEL(kind, vec)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) reduce_##kind##_##vec(                                          \
        const int* lanes, const int* valid, int pixels, int channels, int chunk_rows, Rows x, Rows dz, Rows z,        \
        Rows saved, int masked, Rows partial) {                                                                       \
        reduce_rows<kind, vec>(lanes, valid, pixels, channels, chunk_rows, x, dz, z, saved, masked, partial);         \
    }
REDUCE_KERNEL(MOMENTS, 1)
REDUCE_KERNEL(MOMENTS, 4)
REDUCE_KERNEL(GRADIENT, 1)
REDUCE_KERNEL(GRADIENT, 4)
REDUCE_KERNEL(COLUMNS, 1)
REDUCE_KERNEL(COLUMNS, 4)

constexpr int SHARES = 32;  // threads that share the chunks of a channel

// The sums of all chunks for one channel, computed by SHARES threads. The first of them gets the sums.
__device__ __forceinline__ void sum_chunks(const float* partial, int n_chunks, int channels, int c, double& s1, double& s2) {
    __shared__ double parts[2][SHARES][32];
    s1 = 0, s2 = 0;
    if (c < channels) {
#pragma unroll 8
        for (int k = threadIdx.y; k < n_chunks; k += SHARES) {
            s1 += partial[(long long)k * 2 * channels + c];
            s2 += partial[(long long)k * 2 * channels + channels + c];
        }
    }
    parts[0][threadIdx.y][threadIdx.x] = s1, parts[1][threadIdx.y][threadIdx.x] = s2;
    for (int half = SHARES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y >= half) continue;
        parts[0][threadIdx.y][threadIdx.x] += parts[0][threadIdx.y + half][threadIdx.x];
        parts[1][threadIdx.y][threadIdx.x] += parts[1][threadIdx.y + half][threadIdx.x];
    }
    if (threadIdx.y == 0) s1 = parts[0][0][threadIdx.x], s2 = parts[1][0][threadIdx.x];
}

// saved[4][C]: mean, 1/σ, and the coefficients of y = scale·x + shift. The sums are about `about`: the first values of x,
// or the running mean. Mode UPDATE updates the running statistics.
extern "C" __global__ void batch_norm_statistics(const int* lanes, const int* valid, int pixels, int channels, int n_chunks, int mode,
                                                 Rows about, Rows weight, Rows bias, Rows running_mean, Rows running_var,
                                                 Rows saved_rows, Rows partial, float eps, float momentum) {
    const int lane = lanes[blockIdx.z], c = blockIdx.x * 32 + threadIdx.x;
    const bool is_mine = threadIdx.y == 0 && c < channels;
    // Read before the sums, so that a thread waits for memory once.
    float w = 0, b = 0, m = 0, v = 0, x0 = 0;
    if (is_mine) {
        w = of(weight, lane)[c], b = of(bias, lane)[c], m = of(running_mean, lane)[c], v = of(running_var, lane)[c];
        if (mode != FROZEN) x0 = of(about, lane)[c];
    }
    double s1 = 0, s2 = 0;
    if (mode != FROZEN) sum_chunks(of(partial, lane), n_chunks, channels, c, s1, s2);
    if (!is_mine) return;
    float* saved = of(saved_rows, lane);
    double mean, inverse;
    if (mode == FROZEN) {
        mean = m;
        inverse = 1.0 / sqrt(double(v + eps));
    } else {
        const double n = double(valid[lane]) * pixels;
        const double var = fmax(s2 - s1 * s1 / n, 0.0) / n;
        // fmax drops NaN; a NaN in the sums must reach the result.
        const double checked = s2 == s2 ? var : s2;
        mean = double(x0) + s1 / n;
        inverse = 1.0 / sqrt(checked + double(eps));
        if (mode == UPDATE) {
            const double unbiased = n > 1 ? checked * n / (n - 1) : checked;
            of(running_mean, lane)[c] = float((1.0 - double(momentum)) * m + double(momentum) * mean);
            of(running_var, lane)[c] = float((1.0 - double(momentum)) * v + double(momentum) * unbiased);
        }
    }
    const double scale = w * inverse;
    saved[c] = float(mean), saved[channels + c] = float(inverse);
    saved[2 * channels + c] = float(scale), saved[3 * channels + c] = float(b - mean * scale);
}

// z = relu?(scale·x + shift + residual?)
template <int VEC>
__device__ __forceinline__ void normalise(const int* lanes, int len, int channels, Rows x_rows, Rows saved_rows, Rows residual_rows,
                                          Rows z_rows, int with_relu) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= len) return;
    const int lane = lanes[backwards()], c = i % channels;
    const float* saved = of(saved_rows, lane);
    Pack<VEC> v = load<VEC>(of(x_rows, lane) + i);
    const Pack<VEC> scale = load<VEC>(saved + 2 * channels + c), shift = load<VEC>(saved + 3 * channels + c);
#pragma unroll
    for (int k = 0; k < VEC; k++) v.v[k] = norm_of(scale.v[k], v.v[k], shift.v[k]);
    if (residual_rows.at) {
        const Pack<VEC> r = load<VEC>(of(residual_rows, lane) + i);
#pragma unroll
        for (int k = 0; k < VEC; k++) v.v[k] += r.v[k];
    }
    if (with_relu) {
#pragma unroll
        for (int k = 0; k < VEC; k++) v.v[k] = relu(v.v[k]);
    }
    store<VEC>(of(z_rows, lane) + i, v);
}

extern "C" __global__ void normalise_1(const int* lanes, int len, int channels, Rows x, Rows saved, Rows residual, Rows z, int relu) {
    normalise<1>(lanes, len, channels, x, saved, residual, z, relu);
}
extern "C" __global__ void normalise_4(const int* lanes, int len, int channels, Rows x, Rows saved, Rows residual, Rows z, int relu) {
    normalise<4>(lanes, len, channels, x, saved, residual, z, relu);
}

// Gradients of scale and shift, and the coefficients of dx = a·dz′ + b·x + c (in `coefficients`[3][C]).
extern "C" __global__ void batch_norm_gradients(const int* lanes, const int* valid, int pixels, int channels, int n_chunks, int mode,
                                                Rows weight, Rows saved_rows, Rows partial, Rows coefficients, Rows dweight, Rows dbias) {
    const int lane = lanes[blockIdx.z], c = blockIdx.x * 32 + threadIdx.x;
    const bool is_mine = threadIdx.y == 0 && c < channels;
    const float* saved = of(saved_rows, lane);
    float w = 0;
    double mean = 0, inverse = 0;
    if (is_mine) w = of(weight, lane)[c], mean = saved[c], inverse = saved[channels + c];
    double s1, s2;
    sum_chunks(of(partial, lane), n_chunks, channels, c, s1, s2);
    if (!is_mine) return;
    const double n = double(valid[lane]) * pixels;
    of(dweight, lane)[c] = float(s2 * inverse);
    of(dbias, lane)[c] = float(s1);
    const double a = w * inverse;
    const double b = mode == FROZEN ? 0.0 : -a * inverse * inverse * s2 / n;
    const double constant = mode == FROZEN ? 0.0 : -a * s1 / n - b * mean;
    float* out = of(coefficients, lane);
    out[c] = float(a), out[channels + c] = float(b), out[2 * channels + c] = float(constant);
}

// dx = a·dz′ + b·x + c (0 for padding). Adds dz′ to the residual's gradient. flags: 1 dx is fresh, 2 the residual's is.
template <int VEC>
__device__ __forceinline__ void normalise_backward(const int* lanes, const int* valid, int len, int sample, int channels, Rows x_rows,
                                                   Rows z_rows, Rows saved_rows, int masked, Rows coefficients, Rows dz_rows,
                                                   Rows dx_rows, Rows dresidual_rows, int flags) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= len) return;
    const int lane = lanes[blockIdx.z], c = i % channels;
    Pack<VEC> d = load<VEC>(of(dz_rows, lane) + i);
    const Pack<VEC> x = load<VEC>(of(x_rows, lane) + i);
    Gate<VEC>(masked, z_rows, of(saved_rows, lane), channels, c, lane).apply(d, x, i);
    if (dresidual_rows.at) {
        float* to = of(dresidual_rows, lane) + i;
        Pack<VEC> r = d;
        if (!(flags & 2)) {
            const Pack<VEC> before = load<VEC>(to);
#pragma unroll
            for (int k = 0; k < VEC; k++) r.v[k] += before.v[k];
        }
        store<VEC>(to, r);
    }
    const float* q = of(coefficients, lane);
    const Pack<VEC> a = load<VEC>(q + c), b = load<VEC>(q + channels + c), e = load<VEC>(q + 2 * channels + c);
    const bool padding = i >= valid[lane] * sample;
    float* to = of(dx_rows, lane) + i;
    Pack<VEC> out;
#pragma unroll
    for (int k = 0; k < VEC; k++) out.v[k] = padding ? 0.f : through_norm(a.v[k], d.v[k], b.v[k], x.v[k], e.v[k]);
    if (!(flags & 1)) {
        const Pack<VEC> before = load<VEC>(to);
#pragma unroll
        for (int k = 0; k < VEC; k++) out.v[k] += before.v[k];
    }
    store<VEC>(to, out);
}

#define NORMALISE_BACKWARD(vec)                                                                                       \
    extern "C" __global__ void normalise_backward_##vec(const int* lanes, const int* valid, int len, int sample,      \
                                                        int channels, Rows x, Rows z, Rows saved, int masked,         \
                                                        Rows coefficients, Rows dz, Rows dx, Rows dresidual,          \
                                                        int flags) {                                                  \
        normalise_backward<vec>(lanes, valid, len, sample, channels, x, z, saved, masked, coefficients, dz, dx,       \
                                dresidual, flags);                                                                    \
    }
NORMALISE_BACKWARD(1)
NORMALISE_BACKWARD(4)

// The sums of `reduce_COLUMNS`, as a bias's gradient.
extern "C" __global__ void column_sums(const int* lanes, int channels, int n_chunks, Rows partial, Rows out) {
    const int lane = lanes[blockIdx.z], c = blockIdx.x * 32 + threadIdx.x;
    double s1, s2;
    sum_chunks(of(partial, lane), n_chunks, channels, c, s1, s2);
    if (threadIdx.y == 0 && c < channels) of(out, lane)[c] = float(s1);
}

// ---- group normalisation: one block per (group, sample) ----

// z = relu?(norm(x) + residual?); saved[sample][group] = (mean, 1/σ).
extern "C" __global__ void group_norm(const int* lanes, int pixels, int channels, int groups, Rows x_rows, Rows weight, Rows bias,
                                      Rows residual_rows, Rows z_rows, Rows saved_rows, int with_relu, float eps) {
    const int lane = lanes[blockIdx.z], group = blockIdx.x, sample = blockIdx.y;
    const int width = channels / groups, n = pixels * width;
    const long long start = (long long)sample * pixels * channels + group * width;
    const float* x = of(x_rows, lane) + start;
    double s1 = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s1 += x[i / width * channels + i % width];
    const double mean = block_sum(s1) / n;
    double s2 = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double d = x[i / width * channels + i % width] - mean;
        s2 += d * d;
    }
    const double inverse = 1.0 / sqrt(block_sum(s2) / n + double(eps));
    const float* residual = residual_rows.at ? of(residual_rows, lane) + start : nullptr;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int c = group * width + i % width, at = i / width * channels + i % width;
        float v = float((x[at] - mean) * inverse) * of(weight, lane)[c] + of(bias, lane)[c];
        if (residual) v += residual[at];
        of(z_rows, lane)[start + at] = with_relu ? relu(v) : v;
    }
    if (threadIdx.x == 0) {
        float* saved = of(saved_rows, lane) + 2 * (sample * groups + group);
        saved[0] = float(mean), saved[1] = float(inverse);
    }
}

// dx and the residual's gradient as in `normalise_backward`; partial[sample][2][C] = Σ over pixels of dz′ and dz′·x̂.
extern "C" __global__ void group_norm_backward(const int* lanes, int pixels, int channels, int groups, Rows x_rows, Rows weight,
                                               Rows saved_rows, Rows z_rows, Rows dz_rows, Rows dx_rows, Rows dresidual_rows,
                                               Rows partial_rows, int flags) {
    const int lane = lanes[blockIdx.z], group = blockIdx.x, sample = blockIdx.y;
    const int width = channels / groups, n = pixels * width;
    const long long start = (long long)sample * pixels * channels + group * width;
    const float* x = of(x_rows, lane) + start;
    const float* dz = of(dz_rows, lane) + start;
    const float* z = z_rows.at ? of(z_rows, lane) + start : nullptr;
    const float* saved = of(saved_rows, lane) + 2 * (sample * groups + group);
    const float mean = saved[0], inverse = saved[1];
    float* partial = of(partial_rows, lane) + (long long)sample * 2 * channels + group * width;
    double total1 = 0, total2 = 0;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float s1 = 0, s2 = 0;
        for (int p = 0; p < pixels; p++) {
            const int at = p * channels + c;
            const float d = !z || z[at] > 0.f ? dz[at] : 0.f;
            s1 += d, s2 += d * (x[at] - mean) * inverse;
        }
        partial[c] = s1, partial[channels + c] = s2;
        const float w = of(weight, lane)[group * width + c];
        total1 += double(s1) * w, total2 += double(s2) * w;
    }
    const double m1 = block_sum(total1) / n, m2 = block_sum(total2) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int at = i / width * channels + i % width;
        const float d = !z || z[at] > 0.f ? dz[at] : 0.f;
        const float w = of(weight, lane)[group * width + i % width], centred = (x[at] - mean) * inverse;
        if (dresidual_rows.at) {
            float& r = of(dresidual_rows, lane)[start + at];
            r = flags & 2 ? d : r + d;
        }
        float& dx = of(dx_rows, lane)[start + at];
        const float v = float(inverse * (double(w) * d - m1 - centred * m2));
        dx = flags & 1 ? v : dx + v;
    }
}

// Gradients of a group-norm's parameters from its partial sums, sample by sample.
extern "C" __global__ void group_norm_gradients(const int* lanes, int channels, int batch, Rows partial, Rows dweight, Rows dbias) {
    const int lane = lanes[blockIdx.z], c = blockIdx.x * 32 + threadIdx.x;
    double s1, s2;
    sum_chunks(of(partial, lane), batch, channels, c, s1, s2);
    if (threadIdx.y != 0 || c >= channels) return;
    of(dweight, lane)[c] = float(s2);
    of(dbias, lane)[c] = float(s1);
}

// Weight standardisation, one block per output channel: ŵ = (w − mean) / √(variance + ε). Each channel's 1/σ is stored
// after all ŵ.
extern "C" __global__ void standardize(const int* lanes, int len, Rows w_rows, Rows saved_rows, float eps) {
    const int lane = lanes[blockIdx.z], channel = blockIdx.x;
    const float* w = of(w_rows, lane) + (long long)channel * len;
    float* saved = of(saved_rows, lane);
    double s1 = 0;
    for (int i = threadIdx.x; i < len; i += blockDim.x) s1 += w[i];
    const double mean = block_sum(s1) / len;
    double s2 = 0;
    for (int i = threadIdx.x; i < len; i += blockDim.x) s2 += (w[i] - mean) * (w[i] - mean);
    const double inverse = 1.0 / sqrt(block_sum(s2) / len + double(eps));
    for (int i = threadIdx.x; i < len; i += blockDim.x) saved[(long long)channel * len + i] = float((w[i] - mean) * inverse);
    if (threadIdx.x == 0) saved[(long long)gridDim.x * len + channel] = float(inverse);
}

// Replaces dw, the gradient of ŵ, by that of w: 1/σ (dŵ − Σdŵ/n − ŵ Σ(dŵ ŵ)/n).
extern "C" __global__ void standardize_backward(const int* lanes, int len, Rows saved_rows, Rows dw_rows) {
    const int lane = lanes[blockIdx.z], channel = blockIdx.x;
    const float* saved = of(saved_rows, lane) + (long long)channel * len;
    float* dw = of(dw_rows, lane) + (long long)channel * len;
    double s1 = 0, s2 = 0;
    for (int i = threadIdx.x; i < len; i += blockDim.x) s1 += dw[i], s2 += double(dw[i]) * saved[i];
    const double m1 = block_sum(s1) / len, m2 = block_sum(s2) / len;
    const double inverse = of(saved_rows, lane)[(long long)gridDim.x * len + channel];
    for (int i = threadIdx.x; i < len; i += blockDim.x) dw[i] = float(inverse * (dw[i] - m1 - saved[i] * m2));
}
