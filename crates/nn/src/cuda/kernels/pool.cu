// Max-pooling, alone or fused with the batch-norm and ReLU before it. Fusing avoids writing and reading their outputs.

struct Pool {
    int h, w, c, ho, wo, kernel, stride, pad;
    Div by_packs, by_w, by_h, by_wo, by_ho, by_stride;  // packs: vectors of channels per pixel
};

constexpr u8 NOWHERE = 255;  // the ReLU has masked the winner

// The largest value per window; the first one wins ties, NaN wins over all. With NORM: of scale·x + shift, followed by
// a ReLU; `x_max` then keeps the winners' x for the backward pass. A window of KERNEL × KERNEL is read completely
// before it is compared, so a thread waits for memory once. KERNEL = 0: any size.
template <int VEC, bool NORM, int KERNEL>
__device__ __forceinline__ void max_pool(const int* lanes, const Pool& p, int packs, Rows x_rows, Rows saved_rows, Rows y_rows, u8* places,
                                         long long places_stride, Rows x_max_rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const int lane = lanes[backwards()], per_pixel = p.c / VEC;
    const int pixel = i / p.by_packs, c = (i - pixel * per_pixel) * VEC;
    const int line = pixel / p.by_wo, ox = pixel - line * p.wo, n = line / p.by_ho, oy = line - n * p.ho;
    const float* x = of(x_rows, lane) + (long long)n * p.h * p.w * p.c + c;
    Pack<VEC> scale, shift;
    if constexpr (NORM) {
        const float* saved = of(saved_rows, lane);
        scale = load<VEC>(saved + 2 * p.c + c), shift = load<VEC>(saved + 3 * p.c + c);
    }
    const int top = oy * p.stride - p.pad, left = ox * p.stride - p.pad;
    auto is_inside = [&](int kr, int kc) { return u32(top + kr) < u32(p.h) && u32(left + kc) < u32(p.w); };
    auto at = [&](int kr, int kc) { return load<VEC>(x + ((top + kr) * p.w + left + kc) * p.c); };
    Pack<VEC> best, winner;
    Places<VEC> place;
    bool found = false;
    auto compare = [&](const Pack<VEC>& raw, int number) {
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float v = NORM ? norm_of(scale.v[k], raw.v[k], shift.v[k]) : raw.v[k];
            if (!found || v > best.v[k] || (v != v && best.v[k] == best.v[k])) {
                best.v[k] = v, winner.v[k] = raw.v[k], place.v[k] = u8(number);
            }
        }
        found = true;
    };
    if constexpr (KERNEL > 0) {
        Pack<VEC> window[KERNEL * KERNEL];
#pragma unroll
        for (int i = 0; i < KERNEL * KERNEL; i++) {
            if (is_inside(i / KERNEL, i % KERNEL)) window[i] = at(i / KERNEL, i % KERNEL);
        }
#pragma unroll
        for (int i = 0; i < KERNEL * KERNEL; i++) {
            if (is_inside(i / KERNEL, i % KERNEL)) compare(window[i], i);
        }
    } else {
        for (int i = 0; i < p.kernel * p.kernel; i++) {
            const int kr = i / p.kernel, kc = i - kr * p.kernel;
            if (is_inside(kr, kc)) compare(at(kr, kc), i);
        }
    }
    if constexpr (NORM) {
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            best.v[k] = relu(best.v[k]);
            if (!(best.v[k] > 0.f)) place.v[k] = NOWHERE;
        }
        if (x_max_rows.at) store<VEC>(of(x_max_rows, lane) + (long long)i * VEC, winner);
    }
    store<VEC>(of(y_rows, lane) + (long long)i * VEC, best);
    *reinterpret_cast<Places<VEC>*>(places + places_stride * lane + (long long)i * VEC) = place;
}

// dx (+)= dy at the winners. With NORM: dz, the gradient before the ReLU, passes through the batch-norm:
// dx = a·dz + b·x + c.
template <int VEC, bool NORM>
__device__ __forceinline__ void max_pool_backward(const int* lanes, const int* valid, const Pool& p, int packs, const u8* places,
                                                  long long places_stride, Rows x_rows, Rows coefficients, Rows dy_rows,
                                                  Rows dx_rows, int fresh) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const int lane = lanes[blockIdx.z], per_pixel = p.c / VEC;
    const int pixel = i / p.by_packs, c = (i - pixel * per_pixel) * VEC;
    const int line = pixel / p.by_w, col = pixel - line * p.w, n = line / p.by_h, row = line - n * p.h;
    const long long image = (long long)n * p.ho * p.wo * p.c + c;
    const u8* place = places + places_stride * lane + image;
    const float* dy = of(dy_rows, lane) + image;
    Pack<VEC> total = {};
    // The windows that cover this pixel, from last to first.
    const int last_y = (row + p.pad) / p.by_stride, last_x = (col + p.pad) / p.by_stride;
    for (int oy = last_y, kr = row + p.pad - last_y * p.stride; kr < p.kernel && oy >= 0; oy--, kr += p.stride) {
        if (oy >= p.ho) continue;
        for (int ox = last_x, kc = col + p.pad - last_x * p.stride; kc < p.kernel && ox >= 0; ox--, kc += p.stride) {
            if (ox >= p.wo) continue;
            const int at = (oy * p.wo + ox) * p.c;
            const Places<VEC> here = *reinterpret_cast<const Places<VEC>*>(place + at);
            const Pack<VEC> d = load<VEC>(dy + at);
#pragma unroll
            for (int k = 0; k < VEC; k++) total.v[k] += here.v[k] == kr * p.kernel + kc ? d.v[k] : 0.f;
        }
    }
    float* to = of(dx_rows, lane) + (long long)i * VEC;
    if constexpr (NORM) {
        const float* q = of(coefficients, lane);
        const Pack<VEC> a = load<VEC>(q + c), b = load<VEC>(q + p.c + c), e = load<VEC>(q + 2 * p.c + c);
        const Pack<VEC> x = load<VEC>(of(x_rows, lane) + (long long)i * VEC);
        const bool padding = n >= valid[lane];
#pragma unroll
        for (int k = 0; k < VEC; k++) total.v[k] = padding ? 0.f : through_norm(a.v[k], total.v[k], b.v[k], x.v[k], e.v[k]);
    }
    if (!fresh) {
        const Pack<VEC> before = load<VEC>(to);
#pragma unroll
        for (int k = 0; k < VEC; k++) total.v[k] += before.v[k];
    }
    store<VEC>(to, total);
}

#define POOL_KERNELS(name, vec, norm)                                                                                 \
    extern "C" __global__ void name##_##vec(const int* lanes, Pool p, int packs, Rows x, Rows saved, Rows y,          \
                                            u8* places, long long places_stride, Rows x_max) {                        \
        if (p.kernel == 3) {                                                                                          \
            max_pool<vec, norm, 3>(lanes, p, packs, x, saved, y, places, places_stride, x_max);                       \
        } else {                                                                                                      \
            max_pool<vec, norm, 0>(lanes, p, packs, x, saved, y, places, places_stride, x_max);                       \
        }                                                                                                             \
    }                                                                                                                 \
    extern "C" __global__ void name##_backward_##vec(const int* lanes, const int* valid, Pool p, int packs,           \
                                                     const u8* places, long long places_stride, Rows x,               \
                                                     Rows coefficients, Rows dy, Rows dx, int fresh) {                \
        max_pool_backward<vec, norm>(lanes, valid, p, packs, places, places_stride, x, coefficients, dy, dx, fresh); \
    }
POOL_KERNELS(pool, 1, false)
POOL_KERNELS(pool, 4, false)
POOL_KERNELS(normalise_pool, 1, true)
POOL_KERNELS(normalise_pool, 4, true)
