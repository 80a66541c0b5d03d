// Gathers batches from data on the device, and computes the layers that are not products.

// A lane's current entry of a table.
struct Table {
    const u32* at;
    long long stride;  // entries per lane
    int width;         // entries per step
};

__device__ __forceinline__ const u32* entry(const Table& table, const int* cursor, int offset, int lane) {
    return table.at + table.stride * lane + (long long)(cursor[lane] + offset) * table.width;
}

constexpr u32 NOBODY = 0xffffffffu;  // padding of a short batch

// A sample. In its copy, pixels are `pitch` floats apart, with zeros between them.
struct Image {
    int len, channels, pitch;

    __device__ __forceinline__ int stored() const { return len / channels * pitch; }

    // Copies a sample by the threads of a block; null stands for zeros.
    __device__ __forceinline__ void copy(const float* row, float* to, bool truncates) const {
        auto element = [&](int k) {
            const float v = row ? row[k] : 0.f;
            return truncates ? truncf(v) : v;
        };
        if (pitch == channels) {
            for (int k = threadIdx.x; k < len; k += blockDim.x) to[k] = element(k);
            return;
        }
        // One pixel per thread. Its pitch is a multiple of four.
        for (int pixel = threadIdx.x; pixel < len / channels; pixel += blockDim.x) {
            for (int c0 = 0; c0 < pitch; c0 += 4) {
                Pack<4> v;
#pragma unroll
                for (int k = 0; k < 4; k++) v.v[k] = c0 + k < channels ? element(pixel * channels + c0 + k) : 0.f;
                store<4>(to + pixel * pitch + c0, v);
            }
        }
    }
};

// Counts the valid samples of a batch. Padding is at the end.
__device__ __forceinline__ void count_valid(const u32* indices, int width, int* valid) {
    int n = 0;
    for (int k = threadIdx.x; k < width; k += blockDim.x) n += indices[k] != NOBODY;
    n = int(block_sum(double(n)));
    if (threadIdx.x == 0) *valid = n;
}

// to[i] = from[table[i]] for the samples of the lane's current batch. Also counts its valid samples.
extern "C" __global__ void gather(const int* lanes, Table table, const int* cursor, int offset, const float* from, Image image, Rows to_rows,
                                  int* valid, int truncate) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const u32* indices = entry(table, cursor, offset, lane);
    const u32 index = indices[i];
    float* to = of(to_rows, lane) + (long long)i * image.stored();
    const float* row = from + (long long)index * image.len;
    image.copy(index == NOBODY ? nullptr : row, to, truncate);
    if (valid && i == 0) count_valid(indices, table.width, valid + lane);
}

// As `gather`, with images that are `width` pixels wide and moved. An entry of `moves` holds, from its lowest byte on, rows
// down + 128, columns right + 128, and whether the image is mirrored. Outside the image there are zeros.
extern "C" __global__ void gather_moved(const int* lanes, Table table, Table moves, const int* cursor, const float* from, Image image, int width,
                                        Rows to_rows, int* valid) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const u32* indices = entry(table, cursor, 0, lane);
    const u32 index = indices[i], move = entry(moves, cursor, 0, lane)[i];
    const int down = int(move & 255) - 128, right = int(move >> 8 & 255) - 128, height = image.len / image.channels / width;
    float* to = of(to_rows, lane) + (long long)i * image.stored();
    const float* row = from + (long long)index * image.len;
    for (int k = threadIdx.x; k < image.stored(); k += blockDim.x) {
        const int pixel = k / image.pitch, c = k - pixel * image.pitch, y = pixel / width, x = pixel - y * width;
        const int from_y = y + down, from_x = (move >> 16 ? width - 1 - x : x) + right;
        const bool in = index != NOBODY && c < image.channels && u32(from_y) < u32(height) && u32(from_x) < u32(width);
        to[k] = in ? row[(from_y * width + from_x) * image.channels + c] : 0.f;
    }
    if (i == 0) count_valid(indices, table.width, valid + lane);
}

// As `gather`, from rows of each lane's own.
extern "C" __global__ void gather_own(const int* lanes, Table table, const int* cursor, int offset, Rows from_rows, int sample, Rows to_rows) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const u32 index = entry(table, cursor, offset, lane)[i];
    const float* row = of(from_rows, lane) + (long long)index * sample;
    for (int k = threadIdx.x; k < sample; k += blockDim.x) {
        of(to_rows, lane)[(long long)i * sample + k] = index == NOBODY ? 0.f : row[k];
    }
}

extern "C" __global__ void gather_labels(const int* lanes, Table table, const int* cursor, int offset, const u32* from, int* to, int batch_max) {
    const int lane = lanes[blockIdx.z];
    const u32* indices = entry(table, cursor, offset, lane);
    for (int i = threadIdx.x; i < table.width; i += blockDim.x) {
        to[(long long)lane * batch_max + i] = indices[i] == NOBODY ? 0 : int(from[indices[i]]);
    }
}

// The input of a generator for features of the lane's current step, one per block: noise, and the code of the label. A
// pass has `batch_max` labels in the table, and behind them each feature's noise as bits. Padding has no label; it gets
// zeros. The labels become those of the batch, whose valid features are counted.
extern "C" __global__ void gather_generated(const int* lanes, Table table, const int* cursor, int pass, int noise, int classes, Rows to_rows,
                                            int* labels, int batch_max, int* valid) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    const u32* drawn = entry(table, cursor, 0, lane) + pass * batch_max * (1 + noise);
    const u32* eps = drawn + batch_max + i * noise;
    const u32 label = drawn[i];
    float* to = of(to_rows, lane) + (long long)i * (noise + classes);
    for (int k = threadIdx.x; k < noise + classes; k += blockDim.x) {
        const float v = k < noise ? __uint_as_float(eps[k]) : float(u32(k - noise) == label);
        to[k] = label == NOBODY ? 0.f : v;
    }
    if (threadIdx.x == 0) labels[(long long)lane * batch_max + i] = label == NOBODY ? 0 : int(label);
    if (i == 0) count_valid(drawn, gridDim.x, valid + lane);
}

// Samples first, first + 1, … of data on the device, the same for every lane.
extern "C" __global__ void gather_range(const int* lanes, const float* from, int first, int count, Image image, Rows to_rows, int* valid) {
    const int lane = lanes[blockIdx.z], i = blockIdx.x;
    float* to = of(to_rows, lane) + (long long)i * image.stored();
    const float* row = from + (long long)(first + i) * image.len;
    image.copy(i < count ? row : nullptr, to, false);
    if (i == 0 && threadIdx.x == 0) valid[lane] = count;
}

extern "C" __global__ void advance(const int* lanes, int* first, int by_first, int* second, int by_second) {
    const int lane = lanes[blockIdx.z];
    first[lane] += by_first;
    second[lane] += by_second;
}

// y[n, c] = mean over pixels
extern "C" __global__ void average_pool(const int* lanes, int len, int pixels, int channels, Rows x_rows, Rows y_rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= len) return;
    const int lane = lanes[blockIdx.z], n = i / channels, c = i % channels;
    const float* x = of(x_rows, lane) + (long long)n * pixels * channels + c;
    float total = 0;
    for (int p = 0; p < pixels; p++) total += x[p * channels];
    of(y_rows, lane)[i] = total / pixels;
}

template <int VEC>
__device__ __forceinline__ void average_pool_backward(const int* lanes, int len, int pixels, int channels, Rows dy_rows, Rows dx_rows, int fresh) {
    const int i = VEC * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= len) return;
    const int lane = lanes[blockIdx.z], n = i / (pixels * channels), c = i % channels;
    Pack<VEC> v = load<VEC>(of(dy_rows, lane) + n * channels + c);
    float* const dx = of(dx_rows, lane) + i;
    Pack<VEC> before = {};
    if (!fresh) before = load<VEC>(dx);
#pragma unroll
    for (int k = 0; k < VEC; k++) v.v[k] = v.v[k] / pixels, v.v[k] = fresh ? v.v[k] : before.v[k] + v.v[k];
    store<VEC>(dx, v);
}

#define AVERAGE_POOL_BACKWARD(vec)                                                                                    \
    extern "C" __global__ void average_pool_backward_##vec(const int* lanes, int len, int pixels, int channels,       \
                                                           Rows dy, Rows dx, int fresh) {                             \
        average_pool_backward<vec>(lanes, len, pixels, channels, dy, dx, fresh);                                      \
    }
AVERAGE_POOL_BACKWARD(1)
AVERAGE_POOL_BACKWARD(4)

enum { RELU, GELU, TANH };

// Calls f.at<4>(i) for every four elements of an extent whose arrays are aligned to vectors, in a grid-stride loop;
// then f.at<1>(i) for the remaining elements.
template <class F>
__device__ __forceinline__ void for_each_pack(const Extent& extent, int lane, const F& f) {
    const int end = of(extent, lane);
    for (int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x); i < end; i += 4 * gridDim.x * blockDim.x) {
        if (i + 4 <= end) {
            f.template at<4>(i);
        } else {
            for (int k = i; k < end; k++) f.template at<1>(k);
        }
    }
}

// The probability that a normal variable is below x.
__device__ __forceinline__ float normal_below(float x) { return 0.5f + 0.5f * erff(x * 0.7071067812f); }

struct Activation {
    int kind;
    const float* x;
    float* y;

    template <int VEC>
    __device__ __forceinline__ void at(int i) const {
        auto pack = load<VEC>(x + i);
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float v = pack.v[k];
            pack.v[k] = kind == RELU ? relu(v) : kind == GELU ? v * normal_below(v) : tanhf(v);
        }
        store<VEC>(y + i, pack);
    }
};

extern "C" __global__ void activation(const int* lanes, int kind, Extent extent, Rows x_rows, Rows y_rows) {
    const int lane = lanes[blockIdx.z];
    for_each_pack(extent, lane, Activation{kind, of(x_rows, lane), of(y_rows, lane)});
}

struct ActivationBackward {
    int kind;
    // The slope is computed from the input of a GELU, and from the output of other activations.
    const float* known;
    const float* dy;
    float* dx;
    int fresh;

    template <int VEC>
    __device__ __forceinline__ void at(int i) const {
        const auto from = load<VEC>(known + i);
        auto v = load<VEC>(dy + i);
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float at = from.v[k];
            const float slope = kind == RELU   ? (at > 0.f ? 1.f : 0.f)
                                : kind == GELU ? normal_below(at) + at * 0.3989422804f * expf(-0.5f * at * at)
                                               : 1.f - at * at;
            v.v[k] = kind == RELU && slope == 0.f ? 0.f : v.v[k] * slope;
        }
        if (!fresh) {
            const auto before = load<VEC>(dx + i);
#pragma unroll
            for (int k = 0; k < VEC; k++) v.v[k] += before.v[k];
        }
        store<VEC>(dx + i, v);
    }
};

extern "C" __global__ void activation_backward(const int* lanes, int kind, Extent extent, Rows x_rows, Rows y_rows, Rows dy_rows,
                                               Rows dx_rows, int fresh) {
    const int lane = lanes[blockIdx.z];
    const float* known = of(kind == GELU ? x_rows : y_rows, lane);
    for_each_pack(extent, lane, ActivationBackward{kind, known, of(dy_rows, lane), of(dx_rows, lane), fresh});
}

// dy = 0 where y ≤ 0: the backward pass of an in-place ReLU.
extern "C" __global__ void mask_negative(const int* lanes, Extent extent, Rows y_rows, Rows dy_rows) {
    const int lane = lanes[blockIdx.z];
    FOR_EACH(i, extent, lane) {
        if (!(of(y_rows, lane)[i] > 0.f)) of(dy_rows, lane)[i] = 0.f;
    }
}

// z = x + y
extern "C" __global__ void add(const int* lanes, Extent extent, Rows x, Rows y, Rows z) {
    const int lane = lanes[blockIdx.z];
    FOR_EACH(i, extent, lane) of(z, lane)[i] = of(x, lane)[i] + of(y, lane)[i];
}

// to ← (to +) from
extern "C" __global__ void accumulate(const int* lanes, Extent extent, Rows from, Rows to, int fresh) {
    const int lane = lanes[blockIdx.z];
    FOR_EACH(i, extent, lane) {
        const float v = of(from, lane)[i];
        float& out = of(to, lane)[i];
        out = fresh ? v : out + v;
    }
}

extern "C" __global__ void fill_zero(const int* lanes, Extent extent, Rows to) {
    const int lane = lanes[blockIdx.z];
    FOR_EACH(i, extent, lane) of(to, lane)[i] = 0.f;
}

__device__ __forceinline__ void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 h0 = __umulhi(0xD2511F53u, c[0]), l0 = 0xD2511F53u * c[0];
        const u32 h1 = __umulhi(0xCD9E8D57u, c[2]), l1 = 0xCD9E8D57u * c[2];
        c[0] = h1 ^ c[1] ^ k0, c[1] = l1, c[2] = h0 ^ c[3] ^ k1, c[3] = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// The dropout of a node in a lane's current step.
struct Drop {
    Table keys;
    const int* cursor;
    u32 purpose, node;
    float rate;  // 0: off

    // The key of the node's masks.
    __device__ __forceinline__ uint2 key(int lane) const {
        const u32* step = entry(keys, cursor, 0, lane);
        u32 k[4] = {purpose, node, 0, 0};
        philox(k, step[0], step[1]);
        return make_uint2(k[0], k[1]);
    }
    __device__ __forceinline__ u32 threshold() const { return u32(rate * 65536.f); }
    __device__ __forceinline__ float scale() const { return 1.f / (1.f - rate); }
};

// y = residual? + dropout(x). The same masks as on the CPU: one Philox call decides eight elements of a block of 128.
extern "C" __global__ void dropout(const int* lanes, Drop drop, Extent extent, Rows x_rows, Rows residual_rows, Rows y_rows, u8* kept,
                                   long long kept_stride) {
    const int lane = lanes[blockIdx.z], len = of(extent, lane);
    const float* x = of(x_rows, lane);
    const float* residual = residual_rows.at ? of(residual_rows, lane) : nullptr;
    const uint2 key = drop.key(lane);
    const u32 threshold = drop.threshold();
    const float scale = drop.scale();
    for (int call = blockIdx.x * blockDim.x + threadIdx.x; call / 16 * 128 < len; call += gridDim.x * blockDim.x) {
        const int first = call / 16 * 128 + call % 16;
        // Reads all before it writes any, so that the loads overlap.
        float v[8], r[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int i = first + 16 * k;
            v[k] = i < len ? x[i] : 0.f;
            r[k] = i < len && residual ? residual[i] : 0.f;
        }
        u32 words[4] = {u32(call), 0, 0, 0};
        philox(words, key.x, key.y);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int i = first + 16 * k;
            if (i >= len) continue;
            const bool keep = (words[k % 4] >> (k / 4 * 16) & 0xffffu) >= threshold;
            const float dropped = keep ? v[k] * scale : 0.f;
            of(y_rows, lane)[i] = residual ? r[k] + dropped : dropped;
            kept[kept_stride * lane + i] = keep;
        }
    }
}

extern "C" __global__ void dropout_backward(const int* lanes, Extent extent, float rate, const u8* kept, long long kept_stride,
                                            Rows dy_rows, Rows dx_rows, int fresh, Rows dresidual, int residual_fresh) {
    const int lane = lanes[blockIdx.z];
    FOR_EACH(i, extent, lane) {
        const float dy = of(dy_rows, lane)[i], v = kept[kept_stride * lane + i] ? dy * (1.f / (1.f - rate)) : 0.f;
        float& dx = of(dx_rows, lane)[i];
        dx = fresh ? v : dx + v;
        if (dresidual.at) {
            float& dr = of(dresidual, lane)[i];
            dr = residual_fresh ? dy : dr + dy;
        }
    }
}
