// Losses at a node and their gradients. One warp per row. Each row's loss goes to `losses`; the rows are summed in order
// afterwards. flags: 1: the gradient is fresh. 2: the row's loss is fresh.

struct LossArgs {
    const int* lanes;
    const int* valid;
    int features;
    Rows z, target, grad;
    double* losses;
    long long losses_stride;
    float weight;
    int flags;
};

struct LossRow {
    int lane, row, n;
    bool padding;
    const float* z;
    float* grad;

    __device__ LossRow(const LossArgs& a, int batch) {
        lane = a.lanes[blockIdx.z];
        row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        n = a.valid[lane];
        padding = row >= n;
        z = of(a.z, lane) + (long long)row * a.features;
        grad = of(a.grad, lane) + (long long)row * a.features;
    }
};

__device__ __forceinline__ void put_gradient(const LossArgs& a, float* to, float v) { *to = a.flags & 1 ? v : *to + v; }

__device__ __forceinline__ void put_loss(const LossArgs& a, const LossRow& r, double v) {
    if (threadIdx.x % 32) return;
    double& to = a.losses[a.losses_stride * r.lane + r.row];
    to = a.flags & 2 ? v : to + v;
}

__device__ __forceinline__ void pad_row(const LossArgs& a, const LossRow& r) {
    for (int i = threadIdx.x % 32; i < a.features; i += 32) put_gradient(a, r.grad + i, 0.f);
    put_loss(a, r, 0.0);
}

// log Σ exp(z/T) over a row
__device__ __forceinline__ double log_sum_exp(const float* z, int n, float t) {
    float top = MINUS_INFINITY;
    for (int i = threadIdx.x % 32; i < n; i += 32) top = fmaxf(top, z[i] / t);
    top = warp_max(top);
    double total = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) total += double(expf(z[i] / t - top));
    return double(top) + log(warp_sum(total));
}

extern "C" __global__ void cross_entropy(LossArgs a, int batch, const int* labels, int batch_max) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const int label = labels[(long long)r.lane * batch_max + r.row];
    const double log_sum = log_sum_exp(r.z, a.features, 1.f);
    const float scale = a.weight / r.n;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        put_gradient(a, r.grad + i, scale * (expf(r.z[i] - float(log_sum)) - (i == label ? 1.f : 0.f)));
    }
    put_loss(a, r, double(a.weight) * (log_sum - double(r.z[label])));
}

// Cross-entropy of z + offsets; a class whose offset is −∞ is left out.
extern "C" __global__ void offset_cross_entropy(LossArgs a, int batch, const int* labels, int batch_max, Rows offset_rows) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const int label = labels[(long long)r.lane * batch_max + r.row];
    const float* offsets = of(offset_rows, r.lane);
    float top = MINUS_INFINITY;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) top = fmaxf(top, r.z[i] + offsets[i]);
    top = warp_max(top);
    double total = 0;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) total += double(expf(r.z[i] + offsets[i] - top));
    const double log_sum = double(top) + log(warp_sum(total));
    const float scale = a.weight / r.n;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        put_gradient(a, r.grad + i, scale * (expf(r.z[i] + offsets[i] - float(log_sum)) - (i == label ? 1.f : 0.f)));
    }
    put_loss(a, r, double(a.weight) * (log_sum - double(r.z[label] + offsets[label])));
}

// KL between softmax(target/T) and softmax(z/T), in either order, times `factor`. Rows whose entry in `has` is 0 are left out.
extern "C" __global__ void kl_divergence(LossArgs a, int batch, float t, int student_first, float factor, const int* has, int batch_max) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding || (has && !has[(long long)r.lane * batch_max + r.row])) return pad_row(a, r);
    const float* q_row = of(a.target, r.lane) + (long long)r.row * a.features;
    const float log_zs = float(log_sum_exp(r.z, a.features, t)), log_ts = float(log_sum_exp(q_row, a.features, t));
    double loss = 0;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        const float log_p = r.z[i] / t - log_zs, log_q = q_row[i] / t - log_ts;
        loss += student_first ? double(expf(log_p)) * (log_p - log_q) : double(expf(log_q)) * (log_q - log_p);
    }
    loss = warp_sum(loss);
    const float scale = a.weight / r.n * factor / t;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        const float log_p = r.z[i] / t - log_zs, log_q = q_row[i] / t - log_ts;
        const float slope = student_first ? expf(log_p) * (log_p - log_q - float(loss)) : expf(log_p) - expf(log_q);
        put_gradient(a, r.grad + i, scale * slope);
    }
    put_loss(a, r, double(a.weight) * factor * loss);
}

// KL between softmax(teacher/T) and softmax(z/T) over all classes but the label's.
extern "C" __global__ void not_true_divergence(LossArgs a, int batch, const int* labels, int batch_max, Rows teacher_rows, float t) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const int label = labels[(long long)r.lane * batch_max + r.row];
    const float* q_row = of(teacher_rows, r.lane) + (long long)r.row * a.features;
    auto log_sum = [&](const float* z) {
        float top = MINUS_INFINITY;
        for (int i = threadIdx.x % 32; i < a.features; i += 32) top = i == label ? top : fmaxf(top, z[i] / t);
        top = warp_max(top);
        double total = 0;
        for (int i = threadIdx.x % 32; i < a.features; i += 32) total += i == label ? 0.0 : double(expf(z[i] / t - top));
        return float(double(top) + log(warp_sum(total)));
    };
    const float log_zs = log_sum(r.z), log_ts = log_sum(q_row), scale = a.weight / r.n / t;
    double loss = 0;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        const float log_p = r.z[i] / t - log_zs, log_q = q_row[i] / t - log_ts;
        if (i != label) loss += double(expf(log_q)) * (log_q - log_p);
        put_gradient(a, r.grad + i, i == label ? 0.f : scale * (expf(log_p) - expf(log_q)));
    }
    put_loss(a, r, double(a.weight) * warp_sum(loss));
}

// The mean of |z − target| over the row. Where both are equal, the slope is 0.
extern "C" __global__ void absolute_error(LossArgs a, int batch) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const float* target = of(a.target, r.lane) + (long long)r.row * a.features;
    const float scale = a.weight / r.n / a.features;
    double loss = 0;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        const float d = r.z[i] - target[i];
        loss += fabs(double(d));
        put_gradient(a, r.grad + i, d > 0.f ? scale : d < 0.f ? -scale : 0.f);
    }
    put_loss(a, r, double(a.weight) * warp_sum(loss) / a.features);
}

// Σ (z − target)² over the dimensions where either is positive.
extern "C" __global__ void masked_squares(LossArgs a, int batch) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const float* target = of(a.target, r.lane) + (long long)r.row * a.features;
    const float scale = a.weight / r.n;
    double loss = 0;
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        const float d = r.z[i] - target[i];
        float slope = 0;
        if (r.z[i] > 0.f || target[i] > 0.f) {
            loss += double(d) * d;
            slope = 2.f * d;
        }
        put_gradient(a, r.grad + i, scale * slope);
    }
    put_loss(a, r, double(a.weight) * warp_sum(loss));
}

struct Cosine {
    double value, norm_a, norm_b;

    __device__ Cosine(const float* a, const float* b, int n) {
        double ab = 0, aa = 0, bb = 0;
        for (int i = threadIdx.x % 32; i < n; i += 32) {
            ab += double(a[i]) * b[i], aa += double(a[i]) * a[i], bb += double(b[i]) * b[i];
        }
        norm_a = fmax(sqrt(warp_sum(aa)), 1e-8), norm_b = fmax(sqrt(warp_sum(bb)), 1e-8);
        value = warp_sum(ab) / (norm_a * norm_b);
    }

    __device__ double slope(double a, double b) const { return b / (norm_a * norm_b) - value * a / (norm_a * norm_a); }
};

// −log σ((cos(z, positive) − cos(z, negative)) / τ)
extern "C" __global__ void contrast(LossArgs a, int batch, Rows positive, Rows negative, float temperature) {
    const LossRow r(a, batch);
    if (r.row >= batch) return;
    if (r.padding) return pad_row(a, r);
    const float* p = of(positive, r.lane) + (long long)r.row * a.features;
    const float* q = of(negative, r.lane) + (long long)r.row * a.features;
    const Cosine to_p(r.z, p, a.features), to_q(r.z, q, a.features);
    const double gap = (to_p.value - to_q.value) / temperature;
    const double slope = -double(a.weight) / (double(r.n) * temperature) / (1.0 + exp(gap));
    for (int i = threadIdx.x % 32; i < a.features; i += 32) {
        put_gradient(a, r.grad + i, float(slope * (to_p.slope(r.z[i], p[i]) - to_q.slope(r.z[i], q[i]))));
    }
    put_loss(a, r, double(a.weight) * (fmax(-gap, 0.0) + log1p(exp(-fabs(gap)))));
}

// ---- Relaxed contrast at one node. `unit`: pooled rows, normalised; `slopes`[i][j] = ∂loss/∂⟨unit_i, unit_j⟩ ----

extern "C" __global__ void pool_and_normalise(const int* lanes, int pixels, int channels, Rows x_rows, Rows unit_rows, Rows norm_rows) {
    const int lane = lanes[blockIdx.z], n = blockIdx.x;
    const float* x = of(x_rows, lane) + (long long)n * pixels * channels;
    float* unit = of(unit_rows, lane) + (long long)n * channels;
    double squares = 0;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        double mean = 0;
        for (int p = 0; p < pixels; p++) mean += x[p * channels + c];
        unit[c] = float(mean / pixels);
        squares += double(unit[c]) * unit[c];
    }
    const double norm = fmax(sqrt(block_sum(squares)), 1e-12);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) unit[c] = float(unit[c] / norm);
    if (threadIdx.x == 0) of(norm_rows, lane)[n] = float(norm);
}

extern "C" __global__ void similarities(const int* lanes, int batch, int channels, Rows unit_rows, Rows sims_rows) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const float* a = of(unit_rows, lane) + (long long)i * channels;
    for (int j = threadIdx.x / 32; j < batch; j += blockDim.x / 32) {
        const float* b = of(unit_rows, lane) + (long long)j * channels;
        double total = 0;
        for (int c = threadIdx.x % 32; c < channels; c += 32) total += double(a[c]) * b[c];
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) of(sims_rows, lane)[i * batch + j] = i == j ? 1.f : float(total);
    }
}

// One thread per sample: it picks the sample's partners and writes its row of slopes.
extern "C" __global__ void relaxed_contrast(LossArgs a, int batch, const int* labels, int batch_max, Rows sims_rows, Rows slopes_rows,
                                            float temperature, float threshold, float contrast_weight, float penalty_weight, float scale) {
    const int lane = a.lanes[blockIdx.z], i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= batch) return;
    const int n = a.valid[lane];
    const int* label = labels + (long long)lane * batch_max;
    const float* sims = of(sims_rows, lane) + (long long)i * batch;
    float* slopes = of(slopes_rows, lane) + (long long)i * batch;
    for (int j = 0; j < batch; j++) slopes[j] = 0.f;
    double loss = 0;
    if (i < n) {
        int least = -1, partner = -1, near[2] = {-1, -1};
        for (int j = 0; j < n; j++) {
            if (label[j] == label[i]) {
                if (least < 0 || sims[j] < sims[least]) least = j;
                if (j != i && (partner < 0 || sims[j] < sims[partner])) partner = j;
            } else if (near[0] < 0 || sims[j] > sims[near[0]]) {
                near[1] = near[0], near[0] = j;
            } else if (near[1] < 0 || sims[j] > sims[near[1]]) {
                near[1] = j;
            }
        }
        auto info_nce = [&](int positive, const int* negatives, int count, float weight) {
            float top = sims[positive];
            for (int k = 0; k < count; k++) top = fmaxf(top, sims[negatives[k]]);
            const double own = exp(double(sims[positive] - top) / temperature);
            double all = own;
            for (int k = 0; k < count; k++) all += exp(double(sims[negatives[k]] - top) / temperature);
            loss += double(weight) * -log(own / all);
            const double slope = double(weight) * scale / (double(n) * temperature);
            if (positive != i) slopes[positive] += float(slope * (own / all - 1.0));
            for (int k = 0; k < count; k++) {
                slopes[negatives[k]] += float(slope * exp(double(sims[negatives[k]] - top) / temperature) / all);
            }
        };
        if (near[0] >= 0) info_nce(least, near, near[1] >= 0 ? 2 : 1, contrast_weight);
        if (partner >= 0 && sims[partner] >= threshold) info_nce(i, &partner, 1, penalty_weight);
    }
    double& to = a.losses[a.losses_stride * lane + i];
    const double v = loss * scale;
    to = a.flags & 2 ? v : to + v;
}

// Back through the normalisation, ∂/∂f = (g − ⟨g, u⟩u)/‖f‖ with g = (S + Sᵀ)u, and over the pixels.
extern "C" __global__ void relaxed_contrast_gradient(const int* lanes, int batch, int pixels, int channels, Rows unit_rows, Rows norm_rows,
                                                     Rows slopes_rows, Rows grad_rows, int fresh) {
    extern __shared__ float own[];
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const float* unit = of(unit_rows, lane);
    const float* slopes = of(slopes_rows, lane);
    double along = 0;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        double g = 0;
        for (int j = 0; j < batch; j++) {
            g += (double(slopes[i * batch + j]) + slopes[j * batch + i]) * unit[(long long)j * channels + c];
        }
        own[c] = float(g);
        along += g * unit[(long long)i * channels + c];
    }
    along = block_sum(along);
    const double norm = of(norm_rows, lane)[i];
    float* grad = of(grad_rows, lane) + (long long)i * pixels * channels;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        const float v = float((own[c] - along * unit[(long long)i * channels + c]) / norm / pixels);
        for (int p = 0; p < pixels; p++) grad[p * channels + c] = fresh ? v : grad[p * channels + c] + v;
    }
}

// ---- What a lane keeps of its losses ----

enum { LOSS_TOTAL, REPLAY_LOSS, REPLAY_LOSS_FIRST, HAS_REPLAY_LOSS, COSINE_TOTAL, COMPARED, PROJECTED, BAD_STEP, BAD_LOSS, REFERENCE_LOSS, FACTOR, STATS = 16 };
enum { SAMPLES, REPLAY, REFERENCE, PERTURBED };  // the last two are not counted, but PERTURBED must be finite

// Adds the mean of the rows' losses to the lane's statistics.
extern "C" __global__ void record_loss(const int* lanes, const int* valid, int batch, const double* losses, long long losses_stride, double* stats,
                                       const int* step, int kind) {
    const int lane = lanes[blockIdx.z];
    double total = 0;
    for (int i = threadIdx.x; i < batch; i += blockDim.x) total += losses[losses_stride * lane + i];
    const double loss = block_sum(total) / valid[lane];
    if (threadIdx.x) return;
    double* s = stats + lane * STATS;
    if (kind == SAMPLES) s[LOSS_TOTAL] += loss;
    if (kind == REPLAY) {
        s[REPLAY_LOSS] = loss;
        if (s[HAS_REPLAY_LOSS] == 0) s[REPLAY_LOSS_FIRST] = loss, s[HAS_REPLAY_LOSS] = 1;
    }
    if (kind == REFERENCE) s[REFERENCE_LOSS] = loss;
    if (!isfinite(loss) && s[BAD_STEP] < 0 && kind != REFERENCE) s[BAD_STEP] = step[lane], s[BAD_LOSS] = loss;
}
