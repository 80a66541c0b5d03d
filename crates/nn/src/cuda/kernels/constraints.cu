// Projections against several references at once: onto a cone, and away from what acts on layers' inputs. Both are rare
// beside the passes that make their references, and bound by reading those.

struct References {
    Rows at[16];
    int n;
};

// Copies references to shared memory, where an index that is no constant costs nothing. All threads of a block call it.
__device__ __forceinline__ void share(const References& r, Rows* to) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) to[i] = r.at[i];
    }
    __syncthreads();
}

// Inner products of n references and g, which counts as the last: sums[pair][chunk] for the pairs (i, j) with j <= i.
extern "C" __global__ void cone_dots(const int* lanes, int len, References r, Rows g, double* sums, long long sums_stride) {
    __shared__ Rows at[16];
    share(r, at);
    const int lane = lanes[blockIdx.z];
    int i = 0, j = blockIdx.y;
    while (j > i) j -= ++i;
    const float* a = i < r.n ? of(at[i], lane) : of(g, lane);
    const float* b = j < r.n ? of(at[j], lane) : of(g, lane);
    const int first = blockIdx.x * DOT_CHUNK, last = min(first + DOT_CHUNK, len);
    float sum = 0;
    for (int k = first + threadIdx.x; k < last; k += blockDim.x) sum += a[k] * b[k];
    const double total = block_sum(sum);
    if (threadIdx.x == 0) sums[sums_stride * lane + blockIdx.y * gridDim.x + blockIdx.x] = total;
}

// The dual of the nearest vector to g that points against no reference: v >= 0 that minimises ½ vᵀ(R Rᵀ)v + ⟨R g, v⟩, one
// number after another (Hildreth 1957), as on the CPU.
extern "C" __global__ void cone_dual(const int* lanes, int n, int n_chunks, const double* sums, long long sums_stride, int passes,
                                     double tolerance, Rows dual, double* stats) {
    __shared__ double products[17][17], v[16];
    const int lane = lanes[blockIdx.z];
    const double* from = sums + sums_stride * lane;
    for (int i = 0; i <= n; i++) {
        for (int j = 0; j <= i; j++, from += n_chunks) {
            double part = 0;
            for (int k = threadIdx.x; k < n_chunks; k += blockDim.x) part += from[k];
            const double total = block_sum(part);
            if (threadIdx.x == 0) products[i][j] = products[j][i] = total;
        }
    }
    if (threadIdx.x) return;
    const double* along = products[n];
    const double norm = sqrt(along[n]);
    double squares = 0, sum = 0;
    for (int i = 0; i < n; i++) {
        v[i] = 0;
        sum += along[i];
        for (int j = 0; j < n; j++) squares += products[i][j];
    }
    for (int pass = 0; pass < passes; pass++) {
        double moved = 0;
        for (int i = 0; i < n; i++) {
            const double length = products[i][i];
            // A reference of 0 constrains nothing.
            if (!(length > 0)) continue;
            double slope = along[i];
            for (int j = 0; j < n; j++) slope += products[i][j] * v[j];
            const double next = fmax(v[i] - slope / length, 0.0);
            moved = fmax(moved, fabs(next - v[i]) * sqrt(length));
            v[i] = next;
        }
        if (moved <= tolerance * norm) break;
    }
    bool projected = false;
    for (int i = 0; i < n; i++) {
        of(dual, lane)[i] = float(v[i]);
        projected |= v[i] > 0;
    }
    const double norms = norm * sqrt(fmax(squares, 0.0));
    double* s = stats + lane * STATS;
    s[COMPARED] += 1;
    s[COSINE_TOTAL] += norms > 0 ? sum / norms : 0.0;
    s[PROJECTED] += projected;
}

// g += Σ_i v_i·r_i, over the references that bind.
extern "C" __global__ void cone_add(const int* lanes, int len, References r, Rows dual, Rows g) {
    __shared__ Rows at[16];
    share(r, at);
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= len) return;
    const int lane = lanes[blockIdx.z];
    const float* v = of(dual, lane);
    float value = of(g, lane)[k];
    for (int i = 0; i < r.n; i++) {
        if (v[i] > 0.f) value += v[i] * of(at[i], lane)[k];
    }
    of(g, lane)[k] = value;
}

// Where a layer's weights are in a flat vector: a row per output, and biases unless `bias` is negative.
struct Layer {
    int weight, bias, outputs, row;
};

__device__ __forceinline__ int width(const Layer& l) { return l.row + (l.bias >= 0); }

// The place of entry i of an output's row; the bias is the last.
__device__ __forceinline__ int place(const Layer& l, int output, int i) {
    return i < l.row ? l.weight + output * l.row + i : l.bias + output;
}

// Entry i of the layer's j-th direction: a vector holds one per output, in the place of that output's row.
__device__ __forceinline__ float direction(const Layer& l, const Rows* at, int lane, int j, int i) {
    return of(at[j / l.outputs], lane)[place(l, j % l.outputs, i)];
}

// How many directions a layer has, `most` at most. They come without gaps, so the first of zeros ends them.
extern "C" __global__ void count_directions(const int* lanes, Layer l, References r, int most, Rows counts) {
    __shared__ Rows at[16];
    share(r, at);
    const int lane = lanes[blockIdx.z];
    int n = 0;
    for (; n < most; n++) {
        double found = 0;
        for (int i = threadIdx.x; i < width(l); i += blockDim.x) found += direction(l, at, lane, n, i) != 0.f;
        if (block_sum(found) == 0) break;
    }
    if (threadIdx.x == 0) of(counts, lane)[0] = float(n);
}

// along[o][j] = ⟨row o of v, r_j⟩. A block per row, a warp per direction.
extern "C" __global__ void along_directions(const int* lanes, Layer l, References r, int most, Rows counts, Rows v, Rows along) {
    __shared__ Rows at[16];
    share(r, at);
    const int lane = lanes[blockIdx.z], o = blockIdx.x, n = int(of(counts, lane)[0]);
    for (int j = threadIdx.x / 32; j < n; j += blockDim.x / 32) {
        float sum = 0;
        for (int i = threadIdx.x % 32; i < width(l); i += 32) sum += of(v, lane)[place(l, o, i)] * direction(l, at, lane, j, i);
        const double total = warp_sum(double(sum));
        if (threadIdx.x % 32 == 0) of(along, lane)[o * most + j] = float(total);
    }
}

// Row o of g += sign·Σ_j by[o][j]·r_j; with `trusted` only where that is not 0.
extern "C" __global__ void add_directions(const int* lanes, Layer l, References r, int most, Rows counts, float sign, Rows by, Rows trusted,
                                          Rows g) {
    __shared__ Rows at[16];
    share(r, at);
    const int lane = lanes[blockIdx.z], o = blockIdx.x, n = int(of(counts, lane)[0]);
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width(l) || (trusted.at && of(trusted, lane)[0] == 0.f)) return;
    float* to = of(g, lane) + place(l, o, i);
    float value = *to;
    for (int j = 0; j < n; j++) value += sign * of(by, lane)[o * most + j] * direction(l, at, lane, j, i);
    *to = value;
}

// TRGP: whether a layer's gradient lies along its directions by a share of its length. One block per lane.
extern "C" __global__ void trust_directions(const int* lanes, Layer l, int most, Rows counts, float share, Rows g, Rows along, Rows trusted) {
    const int lane = lanes[blockIdx.z], n = int(of(counts, lane)[0]);
    double inside = 0, all = 0;
    for (int o = 0; o < l.outputs; o++) {
        for (int j = threadIdx.x; j < n; j += blockDim.x) inside += double(of(along, lane)[o * most + j]) * of(along, lane)[o * most + j];
        for (int i = threadIdx.x; i < width(l); i += blockDim.x) {
            const double v = of(g, lane)[place(l, o, i)];
            all += v * v;
        }
    }
    inside = block_sum(inside), all = block_sum(all);
    if (threadIdx.x == 0) of(trusted, lane)[0] = inside >= double(share) * share * all ? 1.f : 0.f;
}

// out = aᵀ b, n by n, or out = a b with a row per output (`plain`). All matrices have rows of `most`.
extern "C" __global__ void multiply_directions(const int* lanes, int outputs, int most, Rows counts, int plain, Rows a, Rows b, Rows out) {
    const int lane = lanes[blockIdx.z], n = int(of(counts, lane)[0]);
    const int at = blockIdx.x * blockDim.x + threadIdx.x, i = at / most, j = at % most;
    if (i >= (plain ? outputs : n) || j >= n) return;
    double sum = 0;
    for (int k = 0; k < (plain ? n : outputs); k++) {
        sum += double(of(a, lane)[plain ? i * most + k : k * most + i]) * of(b, lane)[k * most + j];
    }
    of(out, lane)[i * most + j] = float(sum);
}
