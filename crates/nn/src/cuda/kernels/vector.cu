// Arithmetic on flat vectors: optimiser steps, inner products and the projection.

extern "C" __global__ void axpy(const int* lanes, int len, float a, Rows x, Rows y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= len) return;
    const int lane = lanes[blockIdx.z];
    of(y, lane)[i] += a * of(x, lane)[i];
}

// out += a·(x − y); equal vectors add exactly nothing.
extern "C" __global__ void axpy_difference(const int* lanes, int len, float a, Rows x, Rows y, Rows out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= len) return;
    const int lane = lanes[blockIdx.z];
    of(out, lane)[i] += a * (of(x, lane)[i] - of(y, lane)[i]);
}

// out = Σ_k weights[k]·row_k, in the given order: `order` lists the lanes. One rounding per term, as on the CPU:
// networks that do not fit the lanes at once are summed there, and the bytes must be the same.
extern "C" __global__ void weighted_sum(int len, int count, const int* order, const float* weights, Rows rows, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= len) return;
    float total = 0;
    for (int k = 0; k < count; k++) total = fmaf(weights[k], of(rows, order[k])[i], total);
    out[i] = total;
}

// out = Σ_k round(factors[k]·row_k) in integers, to even, in any order: the rounder's lowest bits hold the integer. `misfits`
// becomes 1 where a product is no number below `limit`. The compiler must not fuse the product with the sum.
extern "C" __global__ void fixed_sum(int len, int count, const int* order, const double* factors, double rounder, double limit, Rows rows,
                                     long long* out, int* misfits) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= len) return;
    long long total = 0;
    for (int k = 0; k < count; k++) {
        const double scaled = __dmul_rn((double)of(rows, order[k])[i], factors[k]);
        if (!(fabs(scaled) < limit)) misfits[0] = 1;
        total += __double_as_longlong(__dadd_rn(scaled, rounder)) - __double_as_longlong(rounder);
    }
    out[i] = total;
}

constexpr int DOT_CHUNK = 8192;

// sums[chunk] = ⟨g, r⟩, ⟨r, r⟩, ⟨g, g⟩ over a chunk of elements of [begin, end)
extern "C" __global__ void dots(const int* lanes, int begin, int end, Rows g_rows, Rows r_rows, double* sums, long long sums_stride) {
    const int lane = lanes[blockIdx.z];
    const float* g = of(g_rows, lane);
    const float* r = of(r_rows, lane);
    const int first = begin + blockIdx.x * DOT_CHUNK, last = min(first + DOT_CHUNK, end);
    float gr = 0, rr = 0, gg = 0;
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) gr += g[i] * r[i], rr += r[i] * r[i], gg += g[i] * g[i];
    const double a = block_sum(gr), b = block_sum(rr), c = block_sum(gg);
    if (threadIdx.x) return;
    double* to = sums + sums_stride * lane + 3 * blockIdx.x;
    to[0] = a, to[1] = b, to[2] = c;
}

struct Bounds {
    double eps, norm_guard, coefficient_max;
    int always;
    int above_reference;  // only while the replayed loss is not below the reference
    int count;             // whether this comparison counts in the statistics
};

// The coefficient of the projection of g against r; 0 for none. stats[FACTOR] = 1 if anything was projected.
extern "C" __global__ void projection_factor(const int* lanes, int n_chunks, const double* sums, long long sums_stride, Bounds b, double* stats,
                                             float* factors, int first, int decide) {
    const int lane = lanes[blockIdx.z];
    double gr = 0, rr = 0, gg = 0;
    for (int k = threadIdx.x; k < n_chunks; k += blockDim.x) {
        const double* from = sums + sums_stride * lane + 3 * k;
        gr += from[0], rr += from[1], gg += from[2];
    }
    gr = block_sum(gr), rr = block_sum(rr), gg = block_sum(gg);
    if (threadIdx.x) return;
    double* s = stats + lane * STATS;
    if (b.count) {
        const double norms = sqrt(rr * gg);
        s[COMPARED] += 1;
        s[COSINE_TOTAL] += norms > 0 ? gr / norms : 0.0;
    }
    if (first) s[FACTOR] = 0;
    if (!decide) return;
    const double coefficient = gr / (rr + b.eps);
    const float factor = float(-fmin(fmax(coefficient, -b.coefficient_max), b.coefficient_max));
    const bool allowed = !b.above_reference || !(s[REPLAY_LOSS] < s[REFERENCE_LOSS]);
    const bool active = allowed && (gr < 0 || b.always) && rr > b.norm_guard && isfinite(factor) && coefficient == coefficient;
    factors[lane] = active ? factor : 0.f;
    if (active) s[FACTOR] = 1;
}

extern "C" __global__ void count_projected(const int* lanes, double* stats) {
    double* s = stats + lanes[blockIdx.z] * STATS;
    s[PROJECTED] += s[FACTOR];
}

// to += sign·factor·r over [begin, end), if the lane's factor is not 0.
extern "C" __global__ void project(const int* lanes, int begin, int end, const float* factors, float sign, Rows r, Rows to) {
    const int i = begin + blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = lanes[blockIdx.z];
    const float factor = factors[lane];
    if (i >= end || factor == 0.f) return;
    of(to, lane)[i] += sign * factor * of(r, lane)[i];
}

// The factor that scales ‖g‖ to at most `norm_max`; 1 for none.
extern "C" __global__ void clip_factor(const int* lanes, int n_chunks, const double* sums, long long sums_stride, double norm_max, float* factors) {
    const int lane = lanes[blockIdx.z];
    double gg = 0;
    for (int k = threadIdx.x; k < n_chunks; k += blockDim.x) gg += sums[sums_stride * lane + 3 * k + 2];
    const double norm = sqrt(block_sum(gg));
    if (threadIdx.x == 0) factors[lane] = norm > norm_max ? float(norm_max / norm) : 1.f;
}

// The factor that scales g to a length of `radius`; 0 where g is 0.
extern "C" __global__ void length_factor(const int* lanes, int n_chunks, const double* sums, long long sums_stride, double radius, float* factors) {
    const int lane = lanes[blockIdx.z];
    double gg = 0;
    for (int k = threadIdx.x; k < n_chunks; k += blockDim.x) gg += sums[sums_stride * lane + 3 * k + 2];
    const double norm = sqrt(block_sum(gg));
    if (threadIdx.x == 0) factors[lane] = norm == 0 ? 0.f : float(radius / norm);
}

extern "C" __global__ void scale(const int* lanes, int len, const float* factors, Rows g) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = lanes[blockIdx.z];
    if (i < len && factors[lane] != 1.f) of(g, lane)[i] *= factors[lane];
}

struct Rule {
    int adam, nesterov, decoupled;
    float lr, momentum, weight_decay, beta1, beta2, eps;
};

// scalars[lane] = learning rate, Adam's two corrections, 1 for the first step. Counts the step.
extern "C" __global__ void begin_update(const int* lanes, Rule rule, Table lr_factors, const int* cursor, int* n_steps, float* scalars) {
    const int lane = lanes[blockIdx.z];
    const int t = ++n_steps[lane];
    float* s = scalars + 4 * lane;
    s[0] = rule.lr * __uint_as_float(*entry(lr_factors, cursor, 0, lane));
    s[1] = rule.adam ? float(1.0 - pow(double(rule.beta1), double(t))) : 1.f;
    s[2] = rule.adam ? float(sqrt(1.0 - pow(double(rule.beta2), double(t)))) : 1.f;
    s[3] = t == 1 ? 1.f : 0.f;
}

template <int VEC>
__device__ __forceinline__ void step(const int* lanes, int len, const Rule& rule, const float* scalars, Rows theta_rows, Rows g_rows,
                                     Rows m_rows, Rows v_rows) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= len) return;
    const int lane = lanes[blockIdx.z];
    const float* s = scalars + 4 * lane;
    const float lr = s[0];
    float* at = of(theta_rows, lane) + i;
    Pack<VEC> theta = load<VEC>(at), g = load<VEC>(of(g_rows, lane) + i);
    if (rule.adam) {
        const float step = lr / s[1], root = 1.f / s[2];
        float* m_at = of(m_rows, lane) + i;
        float* v_at = of(v_rows, lane) + i;
        Pack<VEC> m = load<VEC>(m_at), v = load<VEC>(v_at);
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float d = g.v[k] + (rule.decoupled ? 0.f : rule.weight_decay * theta.v[k]);
            m.v[k] = rule.beta1 * m.v[k] + (1.f - rule.beta1) * d;
            v.v[k] = rule.beta2 * v.v[k] + (1.f - rule.beta2) * d * d;
            const float decay = rule.decoupled ? 1.f - lr * rule.weight_decay : 1.f;
            theta.v[k] = theta.v[k] * decay - step * m.v[k] / (sqrtf(v.v[k]) * root + rule.eps);
        }
        store<VEC>(m_at, m), store<VEC>(v_at, v);
    } else if (rule.momentum != 0.f) {
        float* m_at = of(m_rows, lane) + i;
        Pack<VEC> m = load<VEC>(m_at);
        const float keep = s[3] != 0.f ? 0.f : rule.momentum;
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float d = g.v[k] + rule.weight_decay * theta.v[k];
            m.v[k] = keep * m.v[k] + d;
            theta.v[k] -= lr * (rule.nesterov ? d + rule.momentum * m.v[k] : m.v[k]);
        }
        store<VEC>(m_at, m);
    } else {
#pragma unroll
        for (int k = 0; k < VEC; k++) theta.v[k] -= lr * (g.v[k] + rule.weight_decay * theta.v[k]);
    }
    store<VEC>(at, theta);
}

// The padding after a lane's vector is updated too. Its gradient is 0, so it stays 0.
extern "C" __global__ void update(const int* lanes, int len, Rule rule, const float* scalars, Rows theta, Rows g, Rows m, Rows v) {
    step<4>(lanes, len, rule, scalars, theta, g, m, v);
}
