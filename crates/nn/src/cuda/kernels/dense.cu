// Linear layers on tokens by warp-group products (wgmma), in tf32. A block processes the tiles of its lane one after
// another. 32 numbers of the sum, of both factors, are copied to one of four stages in shared memory, two steps ahead,
// also for the next tile.
//   Y[q, o]  = Σ_i  X[q, i] · W[o, i]
//   and dX, from dY, with the weights transposed (`turn_weights`)

struct Dense {
    int ci, co, rows;   // rows: maximum per lane
    const int* tokens;  // rows of each lane
};

// Each warp group computes 64 channels × 128 tokens. GROUPS of them share the tokens.
template <int GROUPS>
__device__ __forceinline__ void dense_product(const Dense& s, const int* lanes, const Rows& x_rows, const Rows& w_rows, const Rows& y_rows,
                                              const After& after, int flags) {
    constexpr int N = 128, BN = 64 * GROUPS, LINES = 16 * GROUPS;  // rows that all threads copy at a time
    constexpr int X_BYTES = 128 * N, PLACE_BYTES = X_BYTES + 128 * BN;
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, part = tid % 8, line = tid / 8, lane = lanes[blockIdx.z];
    const int n_rows = min(s.rows, s.tokens[lane]), n_steps = s.ci / 32;
    const int n_tiles_n = s.co / BN, n_tiles = (n_rows + N - 1) / N * n_tiles_n;
    const float* const x = of(x_rows, lane) + 4 * part;
    const float* const w = of(w_rows, lane) + 4 * part;

    int tile_ahead = blockIdx.x, step_ahead = 0, place_ahead = 0;
    auto fetch = [&] {
        if (tile_ahead >= n_tiles) return;
        const u32 to = shared + place_ahead * PLACE_BYTES + swapped_to(line, part);
        const int m0 = tile_ahead / n_tiles_n * N, n0 = tile_ahead % n_tiles_n * BN;
#pragma unroll
        for (int i = 0; i < N / LINES; i++) {
            const int row = m0 + line + LINES * i;
            copy_once(to + 128 * LINES * i, x + (row < n_rows ? row * s.ci + 32 * step_ahead : 0), row < n_rows);
        }
#pragma unroll
        for (int i = 0; i < BN / LINES; i++) {
            // A thread's two rows of a product, eight apart, must be neighbouring channels.
            const int row = line + LINES * i, channel = row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
            copy_once(to + X_BYTES + 128 * LINES * i, w + (n0 + channel) * s.ci + 32 * step_ahead, true);
        }
        place_ahead = place_ahead + 1 & 3;
        if (++step_ahead < n_steps) return;
        step_ahead = 0;
        tile_ahead += gridDim.x;
    };
    fetch(), copies_commit();
    fetch(), copies_commit();

    const int group = tid / 128, g = tid % 32 / 4, t = tid % 4;
    const u32 w_from = shared + X_BYTES + group * 128 * 64;
    int place = 0;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        float acc[N / 2] = {};
        for (int step = 0; step < n_steps; step++) {
            // This step's copies are complete. So are the products of the step before the last; the next copy reuses
            // its stage.
            products_pending<1>();
            copies_pending<1>();
            const u32 at = place * PLACE_BYTES;
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) multiply(acc, matrix_of_rows(w_from + at + 32 * k), matrix_of_rows(shared + at + 32 * k));
            products_commit();
            fetch(), copies_commit();
            place = place + 1 & 3;
        }
        products_pending<0>();

        // Number 4j + 2h + i of a thread: channel 2g + h of its warp's sixteen, token 8j + 2t + i.
        const int m0 = tile / n_tiles_n * N, n = tile % n_tiles_n * BN + group * 64 + tid / 32 % 4 * 16 + 2 * g;
        const Pair pair = after.pair(lane, n, s.co);
        after.put(of(y_rows, lane), lane, pair, acc, flags, [&](int v) {
            const int token = m0 + v / 2 * 8 + 2 * t + v % 2;
            return token < n_rows ? token * s.co + n : -1;
        });
    }
    asm volatile("cp.async.wait_all;");
}

extern "C" __global__ void __launch_bounds__(128, 2)
    dense_1(Dense s, const int* lanes, Rows x, Rows w, Rows y, After after, int flags) {
    dense_product<1>(s, lanes, x, w, y, after, flags);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    dense_2(Dense s, const int* lanes, Rows x, Rows w, Rows y, After after, int flags) {
    dense_product<2>(s, lanes, x, w, y, after, flags);
}

// dW[o, i] = Σ_q X[q, i] · dY[q, o]. Two warp groups compute 64 × 64 channels each, of different inputs. The sum runs
// over tokens, 32 at a time, and is cut into `splits`. The tensor cores need both factors by tokens: dY is turned on its
// way to shared memory by every other warp (`Four`), X on its way to registers, as in `shifted_weight`.
extern "C" __global__ void __launch_bounds__(256, 2)
    dense_weight(Dense s, const int* lanes, Rows x_rows, Rows w_rows, Rows y_rows, int flags, int splits, float* partial) {
    constexpr int BK = 32, PITCH = 128 + 8;  // threads of a warp read different banks
    constexpr int X_BYTES = 4 * BK * PITCH, PLACE_BYTES = X_BYTES + BK / 4 * FOUR_BYTES;
    const u32 shared = u32(__cvta_generic_to_shared(shared_memory));
    const int tid = threadIdx.x, warp = tid / 32, thread = tid % 32, lane = lanes[blockIdx.z];
    const int n_tiles_i = s.ci / 128, i0 = blockIdx.x % n_tiles_i * 128, o0 = blockIdx.x / n_tiles_i * 64;
    const int n_rows = min(s.rows, s.tokens[lane]), all = (n_rows + BK - 1) / BK;
    const int begin = all * blockIdx.y / splits, end = all * (blockIdx.y + 1) / splits;
    const float* const x = of(x_rows, lane) + i0 + 4 * thread;

    auto fetch_tokens = [&](int chunk, u32 place) {
        const u32 x_to = shared + place * PLACE_BYTES + 4 * (warp * PITCH + 4 * thread);
#pragma unroll
        for (int i = 0; i < BK / 8; i++) {
            const int q = chunk * BK + warp + 8 * i;
            copy_once(x_to + 4 * 8 * i * PITCH, x + (q < n_rows ? q * s.ci : 0), q < n_rows);
        }
    };
    Four four;
    const int o_of = warp / 2 * 16 + Four::channels();
    const float* const y = of(y_rows, lane) + o0 + o_of;
    const u32 y_to = shared + X_BYTES + Four::positions() * FOUR_BYTES + 16 * o_of;
    auto load_gradient = [&](int chunk) {
        if (warp % 2 != 0) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int q = chunk * BK + 4 * Four::positions() + i;
            four.load(i, q < n_rows ? y + q * s.co : nullptr);
        }
    };
    auto store_gradient = [&](u32 place) {
        if (warp % 2 == 0) four.store(y_to + place * PLACE_BYTES);
    };

    float acc[32] = {};
    u32 factors[2][4];
    const int group = warp / 4, g = thread / 4, t = thread % 4;
    const u32 x_from = shared + 4 * (t * PITCH + group * 64 + warp % 4 * 16 + g);
    auto load = [&](u32 (&a)[4], u32 place, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // rows g and g + 8 at t, then at t + 4
            const u32 at = x_from + place * PLACE_BYTES + 4 * ((8 * k + i / 2 * 4) * PITCH + i % 2 * 8);
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a[i]) : "r"(at));
        }
    };

    if (begin < end) load_gradient(begin), fetch_tokens(begin, 0), store_gradient(0);
    copies_commit();
    if (begin + 1 < end) load_gradient(begin + 1), fetch_tokens(begin + 1, 1);
    copies_commit();
    u32 place = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        copies_pending<1>();
        const u32 b = shared + place * PLACE_BYTES + X_BYTES;
        load(factors[0], place, 0);
#pragma unroll
        for (int k = 0; k < BK / 8; k++) {
            products_begin();
            multiply(acc, factors[k % 2], matrix_of_columns(b + 2 * k * FOUR_BYTES, FOUR_BYTES));
            products_commit();
            // Copies begin behind the first products, which run meanwhile.
            if (k == 0 && chunk + 1 < end) store_gradient(place == 2 ? 0 : place + 1);
            if (k == 1 && chunk + 2 < end) fetch_tokens(chunk + 2, place == 0 ? 2 : place - 1), load_gradient(chunk + 2);
            if (k == 1) copies_commit();
            if (k + 1 < BK / 8) {
                products_pending<1>();
                load(factors[(k + 1) % 2], place, k + 1);
            }
        }
        products_pending<0>();
        place = place == 2 ? 0 : place + 1;
    }
    asm volatile("cp.async.wait_all;");

    const bool is_part = splits > 1, fresh = is_part || flags & 1;
    const long long len = (long long)s.ci * s.co;
    float* const to = is_part ? partial + (blockIdx.z * splits + blockIdx.y) * len : of(w_rows, lane);
#pragma unroll
    for (int v = 0; v < 32; v++) {
        const int i = i0 + group * 64 + warp % 4 * 16 + g + v / 2 % 2 * 8, o = o0 + v / 4 * 8 + 2 * t + v % 2;
        float* const at = to + o * s.ci + i;
        *at = fresh ? acc[v] : *at + acc[v];
    }
}
