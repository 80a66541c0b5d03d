// The layers of text encoders. The tokens of a lane's batch are consecutive, as on the CPU: (tokens, C). A launch
// covers the maximum rows of a batch. Only the kernel knows the actual number; it never reads rows after the last one.

// The tokens of every lane's batch.
struct Texts {
    int* tokens;  // per lane, three arrays of `rows`: words, 2·position + type, texts
    int rows;     // maximum tokens per batch
    int batch;    // texts per batch
    int* starts;  // per lane, batch + 1 entries: first token of each text, then the number of tokens
    int* counts;  // number of tokens per lane

    __device__ __forceinline__ int* words(int lane) const { return tokens + 3ll * rows * lane; }
    __device__ __forceinline__ int* places(int lane) const { return words(lane) + rows; }
    __device__ __forceinline__ int* texts(int lane) const { return words(lane) + 2 * rows; }
    __device__ __forceinline__ int* start(int lane) const { return starts + (long long)(batch + 1) * lane; }
};

// Rows of a matrix, one per warp. `row` runs over the valid rows; `thread` is the index in the warp.
#define FOR_EACH_ROW(row, n) \
    for (int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < (n); row += gridDim.x * (blockDim.x / 32))

__device__ __forceinline__ int row_count(const Extent& rows, int lane) { return of(rows, lane) / rows.width; }

// ---- find the tokens ----

// starts[1 + text] = the number of its tokens. A block is one warp.
extern "C" __global__ void count_tokens(const int* lanes, Texts texts, int slots, Rows x_rows) {
    const int lane = lanes[blockIdx.z], text = blockIdx.x;
    const float* x = of(x_rows, lane) + (long long)text * slots;
    int n = slots;
    for (int slot = threadIdx.x; slot < slots; slot += 32) {
        if (x[slot] == 0.f) {
            n = slot;
            break;
        }
    }
    for (int o = 16; o > 0; o >>= 1) n = min(n, __shfl_xor_sync(~0u, n, o));
    if (threadIdx.x == 0) texts.start(lane)[1 + text] = n;
}

// The prefix sums of those numbers; one block of 256 threads per lane.
extern "C" __global__ void place_texts(const int* lanes, Texts texts) {
    __shared__ int sums[256];
    const int lane = lanes[blockIdx.z];
    int* start = texts.start(lane);
    const int share = (texts.batch + 255) / 256, first = min(texts.batch, int(threadIdx.x) * share), last = min(texts.batch, first + share);
    int own = 0;
    for (int text = first; text < last; text++) own += start[1 + text];
    sums[threadIdx.x] = own;
    __syncthreads();
    int at = 0;
    for (int i = 0; i < threadIdx.x; i++) at += sums[i];
    for (int text = first; text < last; text++) start[1 + text] = at += start[1 + text];
    if (threadIdx.x == 0) start[0] = 0;
    if (threadIdx.x == 255) texts.counts[lane] = at;
}

// Words, positions and texts of all tokens from the slots, which hold 1 + 2·word + type. The host has rejected unknown
// words. The bounds only prevent reads outside the tables if the host is wrong.
extern "C" __global__ void place_tokens(const int* lanes, Texts texts, int slots, int words, int types, Rows x_rows) {
    const int lane = lanes[blockIdx.z], text = blockIdx.x;
    const float* x = of(x_rows, lane) + (long long)text * slots;
    const int start = texts.start(lane)[text], n = texts.start(lane)[text + 1] - start;
    for (int slot = threadIdx.x; slot < n; slot += blockDim.x) {
        const int code = max(int(x[slot]) - 1, 0);
        texts.words(lane)[start + slot] = min(code / 2, words - 1);
        texts.places(lane)[start + slot] = 2 * slot + min(code % 2, types - 1);
        texts.texts(lane)[start + slot] = text;
    }
}

// ---- embedding ----

// y = position + word + type
extern "C" __global__ void embed(const int* lanes, Texts texts, int width, Rows words, Rows positions, Rows types, Rows y_rows) {
    const int lane = lanes[blockIdx.z], n = texts.counts[lane];
    FOR_EACH_ROW(row, n) {
        const int place = texts.places(lane)[row];
        const float* word = of(words, lane) + (long long)texts.words(lane)[row] * width;
        const float* position = of(positions, lane) + (long long)(place / 2) * width;
        const float* type = of(types, lane) + (long long)(place % 2) * width;
        float* y = of(y_rows, lane) + (long long)row * width;
        for (int c = threadIdx.x % 32; c < width; c += 32) y[c] = position[c] + word[c] + type[c];
    }
}

constexpr int LISTED = 512;  // tokens searched at a time

// The gradient of the words; must be zero before. One block per token; the block of a word's first token sums all of
// them in order.
extern "C" __global__ void __launch_bounds__(128) embed_backward_words(const int* lanes, Texts texts, int width, Rows dy_rows, Rows dwords) {
    __shared__ int list[LISTED], n_listed;
    const int lane = lanes[blockIdx.z], n = texts.counts[lane], thread = threadIdx.x % 32;
    const int* words = texts.words(lane);
    const float* dy = of(dy_rows, lane);
    for (int token = blockIdx.x; token < n; token += gridDim.x) {
        const int word = words[token];
        int seen = 0;
        for (int i = threadIdx.x; i < token; i += blockDim.x) seen |= words[i] == word;
        if (__syncthreads_or(seen)) continue;
        float* out = of(dwords, lane) + (long long)word * width;
        for (int from = token; from < n; from += LISTED) {
            const int to = min(n, from + LISTED);
            __syncthreads();
            if (threadIdx.x < 32) {
                int found = 0;
                for (int i = from; i < to; i += 32) {
                    const bool same = i + thread < to && words[i + thread] == word;
                    const u32 votes = __ballot_sync(~0u, same);
                    if (same) list[found + __popc(votes & ((1u << thread) - 1))] = i + thread;
                    found += __popc(votes);
                }
                if (thread == 0) n_listed = found;
            }
            __syncthreads();
            for (int c = threadIdx.x; c < width; c += blockDim.x) {
                float sum = out[c];
                for (int i = 0; i < n_listed; i++) sum += dy[(long long)list[i] * width + c];
                out[c] = sum;
            }
        }
    }
}

// The gradient of the positions of `slots` tokens. A block of 32 × 8 threads sums 32 columns of a position over the
// texts that are long enough; its rows of threads take the texts in turn. The same block clears the rows of positions
// that no token can have.
extern "C" __global__ void embed_backward_positions(const int* lanes, Texts texts, int slots, int positions, int width, Rows dy_rows,
                                                    Rows dpositions) {
    __shared__ float sums[8][32];
    constexpr int AT_ONCE = 4;  // loads in flight
    const int lane = lanes[blockIdx.z], position = blockIdx.x, c = blockIdx.y * 32 + threadIdx.x;
    const int* start = texts.start(lane);
    float* const out = of(dpositions, lane);
    float sum = 0;
    for (int text = threadIdx.y; text < texts.batch; text += 8 * AT_ONCE) {
        int rows[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int at = min(text + 8 * k, texts.batch - 1), row = start[at] + position, end = start[at + 1];
            rows[k] = text + 8 * k < texts.batch && row < end && c < width ? row : -1;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) sum += rows[k] >= 0 ? of(dy_rows, lane)[(long long)rows[k] * width + c] : 0.f;
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (c >= width) return;
    for (int row = position + slots * (1 + threadIdx.y); row < positions; row += 8 * slots) out[(long long)row * width + c] = 0.f;
    if (threadIdx.y) return;
    float total = 0;
    for (int k = 0; k < 8; k++) total += sums[k][threadIdx.x];
    out[(long long)position * width + c] = total;
}

// Two sums over the rows of a matrix per column. A block has eight columns, a whole memory sector per row. Its threads
// take rows in turn, so all of them have work even if a batch has few tokens.
constexpr int SUM_COLUMNS = 8, SUM_THREADS = 512;

template <class Terms>
__device__ __forceinline__ void sum_rows(int n_rows, int channels, float* first, float* second, Terms terms) {
    constexpr int WARPS = SUM_THREADS / 32, AT_ONCE = SUM_THREADS / SUM_COLUMNS;
    __shared__ float sums[2][WARPS][SUM_COLUMNS];
    const int column = threadIdx.x % SUM_COLUMNS, c = blockIdx.x * SUM_COLUMNS + column;
    float s1 = 0, s2 = 0;
    if (c < channels) {
#pragma unroll 8
        for (int row = threadIdx.x / SUM_COLUMNS; row < n_rows; row += AT_ONCE) terms(row, c, s1, s2);
    }
    for (int o = SUM_COLUMNS; o < 32; o *= 2) s1 += __shfl_xor_sync(~0u, s1, o), s2 += __shfl_xor_sync(~0u, s2, o);
    if (threadIdx.x % 32 < SUM_COLUMNS) sums[0][threadIdx.x / 32][column] = s1, sums[1][threadIdx.x / 32][column] = s2;
    __syncthreads();
    const int which = threadIdx.x / SUM_COLUMNS;
    float* const out = which == 0 ? first : which == 1 ? second : nullptr;
    if (!out || c >= channels) return;
    double total = 0;
    for (int w = 0; w < WARPS; w++) total += sums[which][w][column];
    out[c] = float(total);
}

// The gradient of a bias.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_columns(const int* lanes, Extent rows, Rows dy_rows, Rows sums) {
    const int lane = lanes[blockIdx.z], width = rows.width;
    const float* dy = of(dy_rows, lane);
    const auto terms = [&](int row, int c, float& first, float&) { first += dy[(long long)row * width + c]; };
    sum_rows(row_count(rows, lane), width, of(sums, lane), nullptr, terms);
}

// The gradients of one or two types.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) embed_backward_types(const int* lanes, Texts texts, int types, int width,
                                                                               Rows dy_rows, Rows dtypes) {
    const int lane = lanes[blockIdx.z];
    const int* places = texts.places(lane);
    const float* dy = of(dy_rows, lane);
    float* const first = of(dtypes, lane);
    sum_rows(texts.counts[lane], width, first, types == 2 ? first + width : nullptr, [&](int row, int c, float& first, float& second) {
        const float v = dy[(long long)row * width + c];
        const bool is_second = places[row] % 2;
        first += is_second ? 0.f : v, second += is_second ? v : 0.f;
    });
}

// ---- layer normalisation ----

// Loads in flight per thread: a row of 384 numbers. The second read then hits the first-level cache.
constexpr int LOADS = 12;

// y = norm(x) row by row. saved (rows, 2) keeps mean and 1/σ.
extern "C" __global__ void layer_norm(const int* lanes, Extent rows, Rows x_rows, Rows weight_rows, Rows bias_rows, Rows y_rows, Rows saved,
                                      float eps) {
    const int lane = lanes[blockIdx.z], n = row_count(rows, lane), width = rows.width;
    const float* weight = of(weight_rows, lane);
    const float* bias = of(bias_rows, lane);
    FOR_EACH_ROW(row, n) {
        const float* x = of(x_rows, lane) + (long long)row * width;
        float* y = of(y_rows, lane) + (long long)row * width;
        float sum = 0, squares = 0;
        for (int c = threadIdx.x % 32; c < width; c += 32 * LOADS) {
#pragma unroll
            for (int k = 0; k < LOADS; k++) sum += c + 32 * k < width ? x[c + 32 * k] : 0.f;
        }
        const float mean = warp_sum(sum) / width;
        // About the mean: no digits cancel.
        for (int c = threadIdx.x % 32; c < width; c += 32) squares += (x[c] - mean) * (x[c] - mean);
        const float inverse = 1.f / sqrtf(warp_sum(squares) / width + eps);
        for (int c = threadIdx.x % 32; c < width; c += 32) y[c] = (__ldg(x + c) - mean) * inverse * __ldg(weight + c) + __ldg(bias + c);
        if (threadIdx.x % 32 == 0) of(saved, lane)[2 * row] = mean, of(saved, lane)[2 * row + 1] = inverse;
    }
}

// The gradients of bias and weight: Σ dy and Σ dy·x̂ of the columns.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) layer_norm_sums(const int* lanes, Extent rows, Rows x_rows, Rows saved_rows,
                                                                          Rows dy_rows, Rows dweight, Rows dbias) {
    const int lane = lanes[blockIdx.z], width = rows.width;
    const float* x = of(x_rows, lane);
    const float* dy = of(dy_rows, lane);
    const float* saved = of(saved_rows, lane);
    sum_rows(row_count(rows, lane), width, of(dbias, lane), of(dweight, lane), [&](int row, int c, float& first, float& second) {
        const float d = dy[(long long)row * width + c];
        first += d;
        second += d * ((x[(long long)row * width + c] - saved[2 * row]) * saved[2 * row + 1]);
    });
}

// dx = 1/σ (γ dy − Σ(γ dy)/C − x̂ Σ(γ dy x̂)/C); dx may be dy.
extern "C" __global__ void layer_norm_backward(const int* lanes, Extent rows, Rows x_rows, Rows weight_rows, Rows saved, Rows dy_rows,
                                               Rows dx_rows, int fresh) {
    const int lane = lanes[blockIdx.z], n = row_count(rows, lane), width = rows.width;
    const float* weight = of(weight_rows, lane);
    FOR_EACH_ROW(row, n) {
        const float* x = of(x_rows, lane) + (long long)row * width;
        const float* dy = of(dy_rows, lane) + (long long)row * width;
        float* dx = of(dx_rows, lane) + (long long)row * width;
        const float mean = of(saved, lane)[2 * row], inverse = of(saved, lane)[2 * row + 1];
        float s1 = 0, s2 = 0;
        for (int c0 = threadIdx.x % 32; c0 < width; c0 += 32 * LOADS) {
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                const int c = c0 + 32 * k;
                const float d = c < width ? weight[c] * dy[c] : 0.f;
                s1 += d, s2 += d * (c < width ? (x[c] - mean) * inverse : 0.f);
            }
        }
        s1 = warp_sum(s1) / width, s2 = warp_sum(s2) / width;
        for (int c = threadIdx.x % 32; c < width; c += 32) {
            const float v = inverse * (weight[c] * dy[c] - s1 - (x[c] - mean) * inverse * s2);
            dx[c] = fresh ? v : dx[c] + v;
        }
    }
}

// ---- one vector per text ----

// y (texts, C) = the mean of each text's tokens, or its first token; 0 for a text without tokens.
extern "C" __global__ void pool_tokens(const int* lanes, Texts texts, int mean, int width, Rows x_rows, Rows y_rows) {
    const int lane = lanes[blockIdx.z], text = blockIdx.x;
    const int first = texts.start(lane)[text], n = min(texts.start(lane)[text + 1] - first, mean ? texts.rows : 1);
    const float share = 1.f / max(n, 1);
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < n; i++) sum += of(x_rows, lane)[(long long)(first + i) * width + c];
        of(y_rows, lane)[(long long)text * width + c] = sum * share;
    }
}

extern "C" __global__ void pool_tokens_backward(const int* lanes, Texts texts, int mean, int width, Rows dy_rows, Rows dx_rows, int fresh) {
    const int lane = lanes[blockIdx.z], n = texts.counts[lane];
    FOR_EACH_ROW(row, n) {
        const int text = texts.texts(lane)[row], first = texts.start(lane)[text];
        const float share = mean ? 1.f / (texts.start(lane)[text + 1] - first) : row == first ? 1.f : 0.f;
        const float* dy = of(dy_rows, lane) + (long long)text * width;
        float* dx = of(dx_rows, lane) + (long long)row * width;
        for (int c = threadIdx.x % 32; c < width; c += 32) dx[c] = fresh ? share * dy[c] : dx[c] + share * dy[c];
    }
}
