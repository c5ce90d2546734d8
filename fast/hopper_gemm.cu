// hopper_gemm: out = epilogue(a b), bf16 with float32 accumulators. -DEPILOGUE picks what happens to these
// before they are stored, -DB_N_MAJOR the layout of b.
// A persistent grid, one block per SM, in clusters of two. In a block two consumer warpgroups alternate
// (ping-pong in CUTLASS): while one multiplies its tile, the other runs the epilogue of the tile before. One
// thread of the third warpgroup, the producer, loads the operands by TMA. The two blocks of a cluster work on
// neighbouring rows and share the tile of b: each loads half and multicasts it to both.
#include "hopper.cuh"

enum Epilogue {
    BIAS,    // out = a b + bias
    RELU2,   // out = max(a b + bias, 0)^2
    GELU,    // preact = a b + bias, out = GELU(preact)
    DRELU2,  // out = a b * 2 sqrt(saved), sums[m / 32][n] = column sums of 32 rows of it before rounding.
             // saved: RELU2's output, from which the derivative follows without the pre-activation
    DGELU,   // the same for GELU: out = a b * GELU'(saved), where saved is the pre-activation
    EXP,     // out = 2^(a b log2(e) - shifts[m] - raised) in the first n_valid columns and 0 behind them;
             // sums[m][n / BN] = (row sums of BN columns of it before rounding, raised): see raise_shifts
};

constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 STAGING_BYTES = 32 * CHUNK * 2;  // a warp stages 32 rows of a chunk at once
constexpr u32 CHUNKS = BN / CHUNK;             // of a tile
constexpr float LOG2E = 1.4426950409f;

__device__ float exp2_approx(float x) {
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(x));
    return p;
}

__device__ float relu2(float x) {
    const float positive = x < 0.f ? 0.f : x;  // unlike fmaxf it keeps NaN
    return positive * positive;
}

// GELU(x) = x / 2 (1 + tanh(SQRT_2_PI (x + CUBIC x^3)))
constexpr float SQRT_2_PI = 0.7978845608f, CUBIC = 0.044715f;

__device__ float gelu_tanh(float x, float square) {  // to 2^-11, as in cuBLASLt's epilogue
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * fmaf(square, SQRT_2_PI * CUBIC, SQRT_2_PI)));
    return t;
}

__device__ float gelu(float x) {
    const float half = .5f * x;
    return fmaf(half, gelu_tanh(x, x * x), half);
}

__device__ float gelu_derivative(float x) {
    const float square = x * x, t = gelu_tanh(x, square);
    const float inner = fmaf(square, 1.5f * SQRT_2_PI * CUBIC, .5f * SQRT_2_PI);
    return fmaf(fmaf(-t, t, 1.f), x * inner, fmaf(t, .5f, .5f));
}

__device__ float derivative(float saved) {  // of the activation, see DRELU2 and DGELU
    if (EPILOGUE == DGELU) return gelu_derivative(saved);
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(saved));
    return 2.f * root;
}

// A consumer warp's accumulators. A tile's 128 rows take two wgmma instructions, h = 0 and 1, of 64 rows. The
// descriptor of a skips every other group of 8 rows, so that a warp's rows of both are 32 consecutive ones:
// d[0] has their groups 0 and 2, d[1] 1 and 3. In the 16 columns j, for i = 0..3, a lane has d[h][8 j + 2 i]
// and its right neighbour at row 16 (i % 2) + 8 h + lane / 4, column 16 j + 8 (i / 2) + 2 (lane % 4).
typedef float Accumulators[2][96];

struct Tile { u32 row, column; };  // of the output, where the block's tile begins

struct Warp {
    u32 index, lane;
    u32 staging;  // this warp's two buffers in shared memory, (32, CHUNK) bf16 each
    u32 loaded;   // DRELU2, DGELU: their two mbarriers; a phase ends when a chunk of `saved` has arrived
    u32 offset;   // of this lane's row in a buffer, for ldmatrix and stmatrix
    u32 chunk;    // chunks that this warp has finished; the buffers alternate

    __device__ u32 buffer() const { return staging + chunk % 2 * STAGING_BYTES; }
    // Offset in a buffer of the 16 columns j of d[h]'s rows, with the 128-byte swizzle.
    __device__ u32 matrix(u32 j, u32 h) const {
        return offset + h * (8 * 128) + ((2 * j + lane / 16) ^ lane % 8) * 16;
    }
};

// Waits until TMA has read a buffer, which is then free: all stores but the last PENDING are done.
template <u32 PENDING> __device__ void acquire_staging(const Warp& warp) {
    if (warp.lane == 0) tma_store_wait_read<PENDING>();
    __syncwarp();
}

__device__ void commit_staging() {  // makes the whole warp's writes visible to TMA
    fence_proxy_async();
    __syncwarp();
}

// Adds the bias to chunk c of d, from column n on, and writes it (RELU2: its activation) into buffer `to`.
__device__ void stage_with_bias(const Warp& warp, Accumulators& d, u32 c, u32 n, const u16* bias, u32 N,
                                u32 to) {
    UNROLL for (u32 j = 0; j < CHUNK / 16; j++) {
        u32 added[2] = {0, 0};
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 at = n + 16 * j + 8 * i + warp.lane % 4 * 2;
            if (bias) added[i] = __ldg((const u32*)(bias + min(at, N - 2)));
        }
        UNROLL for (u32 h = 0; h < 2; h++) {
            float* v = &d[h][c * (CHUNK / 2) + j * 8];
            u32 r[4];
            UNROLL for (u32 i = 0; i < 4; i++) {
                float &left = v[2 * i], &right = v[2 * i + 1];
                left += low_bf16(added[i / 2]), right += high_bf16(added[i / 2]);
                r[i] = EPILOGUE == RELU2 ? pack_bf16x2(relu2(left), relu2(right)) : pack_bf16x2(left, right);
            }
            stmatrix_x4(to + warp.matrix(j, h), r);
        }
    }
    commit_staging();
}

__device__ void epilogue_bias(Warp& warp, Accumulators& d, Tile tile, const TensorMap* out,
                              const u16* bias, u32 N) {
    UNROLL for (u32 c = 0; c < CHUNKS; c++, warp.chunk++) {
        const u32 n = tile.column + c * CHUNK, m = tile.row + 32 * warp.index, buffer = warp.buffer();
        acquire_staging<1>(warp);
        stage_with_bias(warp, d, c, n, bias, N, buffer);
        if (warp.lane == 0) tma_store(out, n, m, buffer);
    }
}

// preact goes through the first buffer, out through the second. GELU takes the sum before it is rounded.
__device__ void epilogue_gelu(Warp& warp, Accumulators& d, Tile tile, const TensorMap* out_map,
                              const TensorMap* preact_map, const u16* bias, u32 N) {
    UNROLL for (u32 c = 0; c < CHUNKS; c++) {
        const u32 n = tile.column + c * CHUNK, m = tile.row + 32 * warp.index;
        const u32 preact = warp.staging, out = warp.staging + STAGING_BYTES;
        acquire_staging<1>(warp);
        stage_with_bias(warp, d, c, n, bias, N, preact);
        if (warp.lane == 0) tma_store(preact_map, n, m, preact);
        acquire_staging<1>(warp);
        UNROLL for (u32 j = 0; j < CHUNK / 16; j++) {
            u32 r[2][4];
            UNROLL for (u32 h = 0; h < 2; h++) {
                const float* v = &d[h][c * (CHUNK / 2) + j * 8];
                UNROLL for (u32 i = 0; i < 4; i++) r[h][i] = pack_bf16x2(gelu(v[2 * i]), gelu(v[2 * i + 1]));
            }
            UNROLL for (u32 h = 0; h < 2; h++) stmatrix_x4(out + warp.matrix(j, h), r[h]);
        }
        commit_staging();
        if (warp.lane == 0) tma_store(out_map, n, m, out);
    }
}

// Loads the warp's rows of `saved`, from column x and the block's row y on, into chunk's buffer, in one lane.
__device__ void load_saved(const Warp& warp, const TensorMap* saved_map, u32 x, u32 y, u32 chunk) {
    const u32 barrier = warp.loaded + 8 * (chunk % 2);
    mbarrier_arrive_expect_tx(barrier, STAGING_BYTES);
    tma_load(warp.staging + chunk % 2 * STAGING_BYTES, saved_map, x, y + 32 * warp.index, barrier);
}

// Stores the sums of 32 columns, from n on, over a warp's 32 rows. total: this lane's sums of its four rows,
// of two neighbours in each 8 columns. Eight lanes have the same columns: at each exchange two split theirs.
__device__ void store_column_sums(float (&total)[8], u32 lane, u32 n, float* sums, u32 N) {
    UNROLL for (u32 half = 4; half > 1; half /= 2) {
        const bool upper = lane & half * 4;
        UNROLL for (u32 i = 0; i < half; i++) {
            const float first = total[i], second = total[i + half];
            const float other = __shfl_xor_sync(~0u, upper ? first : second, half * 4);
            total[i] = (upper ? second : first) + other;
        }
    }
    for (u32 i = 0; i < 2; i++) total[i] += __shfl_xor_sync(~0u, total[i], 4);
    const u32 at = n + lane / 8 * 8 + lane % 4 * 2;
    float2* to = (float2*)(sums + at);
    if (lane % 8 < 4 && at < N) *to = make_float2(total[0], total[1]);
}

// A chunk of `saved` is loaded into a buffer and overwritten there by out. When the store of the chunk before
// has read the other buffer, `saved` of the chunk after goes there. The kernel loads a warp's first two.
__device__ void epilogue_derivative(Warp& warp, Accumulators& d, Tile tile, Tile next, bool has_next,
                                    const TensorMap* out_map, const TensorMap* saved_map, float* sums,
                                    u32 N) {
    UNROLL for (u32 c = 0; c < CHUNKS; c++, warp.chunk++) {
        const u32 n = tile.column + c * CHUNK, m = tile.row + 32 * warp.index, buffer = warp.buffer();
        mbarrier_wait(warp.loaded + 8 * (warp.chunk % 2), warp.chunk / 2 & 1);
        float total[8];  // of 32 columns: two neighbours in each 8
        UNROLL for (u32 j = 0; j < CHUNK / 16; j++) {
            u32 r[2][4];
            UNROLL for (u32 h = 0; h < 2; h++) ldmatrix_x4(r[h], buffer + warp.matrix(j, h));
            UNROLL for (u32 h = 0; h < 2; h++) {
                const float* v = &d[h][c * (CHUNK / 2) + j * 8];
                UNROLL for (u32 i = 0; i < 4; i++) {
                    float left = v[2 * i], right = v[2 * i + 1];
                    left *= derivative(low_bf16(r[h][i])), right *= derivative(high_bf16(r[h][i]));
                    float* t = &total[j % 2 * 4 + i / 2 * 2];
                    t[0] = left + (h || i % 2 ? t[0] : 0.f);
                    t[1] = right + (h || i % 2 ? t[1] : 0.f);
                    r[h][i] = pack_bf16x2(left, right);
                }
            }
            UNROLL for (u32 h = 0; h < 2; h++) stmatrix_x4(buffer + warp.matrix(j, h), r[h]);
            if (j % 2) store_column_sums(total, warp.lane, n + j / 2 * 32, sums + (u64)(m / 32) * N, N);
            if (j == 1 && warp.lane == 0 && warp.chunk) {
                tma_store_wait_read<0>();
                if (c + 1 < CHUNKS) load_saved(warp, saved_map, n + CHUNK, tile.row, warp.chunk + 1);
                else if (has_next) load_saved(warp, saved_map, next.column, next.row, warp.chunk + 1);
            }
        }
        commit_staging();
        if (warp.lane == 0) tma_store(out_map, n, m, buffer);
    }
}

constexpr float LARGEST_EXPONENT = 60.f;  // of two: see raise_shifts

// Exponents far above their row's shift would overflow. Of this lane's rows whose sums are above 2 to
// LARGEST_EXPONENT, both [h][i % 2], this raises the shift to the tile's largest exponent -> whether any lane
// did. valid: the tile's columns that count, from this lane's first on. A row is raised once at most: logits
// from 7e8 on, whose shift's rounding alone is above LARGEST_EXPONENT, keep too large a sum.
__device__ bool raise_shifts(const Warp& warp, const Accumulators& d, int valid, const float (&row_sum)[2][2],
                             float (&shift)[2][2]) {
    bool large[2][2], any = false;
    UNROLL for (u32 i = 0; i < 4; i++)
        any |= large[i / 2][i % 2] = row_sum[i / 2][i % 2] > exp2f(LARGEST_EXPONENT);
    if (!__any_sync(~0u, any)) return false;
    float top[2][2] = {{-3e38f, -3e38f}, {-3e38f, -3e38f}};
    UNROLL for (u32 at = 0; at < 96; at++) {
        const int column = at / 8 * 16 + at / 4 % 2 * 8 + at % 2;
        UNROLL for (u32 h = 0; h < 2; h++)
            if (column < valid) top[h][at / 2 % 2] = fmaxf(top[h][at / 2 % 2], d[h][at]);
    }
    bool raised = false;
    UNROLL for (u32 i = 0; i < 4; i++) {
        float& from = shift[i / 2][i % 2];
        float to = top[i / 2][i % 2];  // four lanes have columns of the same rows
        to = fmaxf(to, __shfl_xor_sync(~0u, to, 1));
        to = fmaxf(to, __shfl_xor_sync(~0u, to, 2)) * LOG2E;
        if (large[i / 2][i % 2] && to > from) from = to, raised = true;
    }
    if (!__any_sync(~0u, raised)) return false;
    if (warp.lane == 0) tma_store_wait_all();  // the same places are written again
    return true;
}

// tiles_n: the output's width in tiles, the row stride of sums. Rows behind M, up to a tile, are written too.
__device__ void epilogue_exp(Warp& warp, Accumulators& d, Tile tile, const TensorMap* out_map,
                             const float* shifts, float2* sums, u32 M, u32 n_valid, u32 tiles_n,
                             u32 has_out) {
    const int valid = n_valid - tile.column - warp.lane % 4 * 2;  // that count, from the lane's first on
    float shift[2][2], row_sum[2][2];  // of this lane's rows: [h][i % 2]
    UNROLL for (u32 i = 0; i < 4; i++) {
        const u32 m = tile.row + 32 * warp.index + i % 2 * 16 + i / 2 * 8 + warp.lane / 4;
        shift[i / 2][i % 2] = __ldg(shifts + min(m, M - 1));
    }
    do {
        UNROLL for (u32 i = 0; i < 4; i++) row_sum[i / 2][i % 2] = 0.f;
        UNROLL for (u32 c = 0; c < CHUNKS; c++, warp.chunk++) {
            const u32 n = tile.column + c * CHUNK, m = tile.row + 32 * warp.index, buffer = warp.buffer();
            acquire_staging<1>(warp);
            UNROLL for (u32 j = 0; j < CHUNK / 16; j++)
                UNROLL for (u32 h = 0; h < 2; h++) {
                    const float* v = &d[h][c * (CHUNK / 2) + j * 8];
                    u32 r[4];
                    UNROLL for (u32 i = 0; i < 4; i++) {
                        float p[2];
                        UNROLL for (u32 k = 0; k < 2; k++) {
                            p[k] = exp2_approx(fmaf(v[2 * i + k], LOG2E, -shift[h][i % 2]));
                            if ((int)(c * CHUNK + 16 * j + i / 2 * 8 + k) >= valid) p[k] = 0.f;
                        }
                        row_sum[h][i % 2] += p[0] + p[1];
                        r[i] = pack_bf16x2(p[0], p[1]);
                    }
                    stmatrix_x4(buffer + warp.matrix(j, h), r);
                }
            commit_staging();
            if (warp.lane == 0 && has_out) tma_store(out_map, n, m, buffer);
        }
        UNROLL for (u32 i = 0; i < 4; i++) {  // four lanes have columns of the same rows
            float& sum = row_sum[i / 2][i % 2];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
        // a row may have to be computed again, over what was stored
    } while (raise_shifts(warp, d, valid, row_sum, shift));
    float sum = 0.f, to = 0.f;  // each of those four lanes writes one of their four rows
    UNROLL for (u32 i = 0; i < 4; i++) {
        sum = warp.lane % 4 == i ? row_sum[i / 2][i % 2] : sum;
        to = warp.lane % 4 == i ? shift[i / 2][i % 2] : to;
    }
    const u32 m = tile.row + 32 * warp.index + warp.lane % 2 * 16 + warp.lane % 4 / 2 * 8 + warp.lane / 4;
    const float from = __ldg(shifts + min(m, M - 1));
    sums[(u64)m * tiles_n + tile.column / BN] = make_float2(sum, to > from ? to - from : 0.f);
}

// a: (M, K), three matrices side by side (the gradients of q, k and v), from columns 0, K1 and K2 on; b:
// (N, K), or (K, N) with B_N_MAJOR; out, saved: (M, N); all bf16 with contiguous rows. saved: GELU
// writes it (the pre-activation), DRELU2 and DGELU read it. bias: (N,) bf16 or null. shifts: (M,) float32.
// sums: float32, (M / 32, N) for DRELU2 and DGELU, (M, N / BN rounded up, 2) for EXP, M rounded up to whole
// tiles of a cluster. EXP writes no out where has_out is 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
hopper_gemm(const __grid_constant__ TensorMap a0_map, const __grid_constant__ TensorMap a1_map,
            const __grid_constant__ TensorMap a2_map, const __grid_constant__ TensorMap b_map,
            const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap saved_map,
            const u16* bias, const float* shifts, float* sums,
            u32 M, u32 N, u32 K, u32 K1, u32 K2, u32 n_valid, u32 has_out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = (u32)__cvta_generic_to_shared(shared), staging = stages + STAGES * STAGE_BYTES;
    const u32 full = staging + 16 * STAGING_BYTES, empty = full + 8 * STAGES, loaded = empty + 8 * STAGES;
    const u32 warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const u32 cta_rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const u32 k_tiles = (K + BK - 1) / BK, tiles_n = (N + BN - 1) / BN;
    const u32 tiles_m = (M + CLUSTER * BM - 1) / (CLUSTER * BM), tiles = tiles_m * tiles_n;

    // Tile scheduler: clusters take tiles in turn, and tiles that run at the same time share their part of
    // the larger operand (the logits': b, the vocabulary; else a), so that L2 reads it from memory once.
    constexpr bool LOGITS = EPILOGUE == EXP;
    constexpr bool DERIVATIVE = EPILOGUE == DRELU2 || EPILOGUE == DGELU;
    const auto tile_at = [&](u32 index) {
        const u32 row = ((LOGITS ? index % tiles_m : index / tiles_n) * CLUSTER + cta_rank) * BM;
        return Tile{row, (LOGITS ? index / tiles_m : index % tiles_n) * BN};
    };

    init_barriers(full, empty, CLUSTER, 16);

    if (warpgroup == 2) {  // producer
        producer_registers();
        if (thread == 0) {
            u32 stage = 0, phase = 1;
            for (u32 index = cluster; index < tiles; index += clusters) {
                const Tile tile = tile_at(index);
                for (u32 k = 0; k < K; k += BK) {
                    const u32 a = stages + stage * STAGE_BYTES, b = a + A_BYTES, barrier = full + 8 * stage;
                    mbarrier_wait(empty + 8 * stage, phase);
                    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
                    if (k < K1) tma_load(a, &a0_map, k, tile.row, barrier);
                    else if (k < K2) tma_load(a, &a1_map, k - K1, tile.row, barrier);
                    else tma_load(a, &a2_map, k - K2, tile.row, barrier);
                    const u32 half = cta_rank * (B_N_MAJOR ? BK : BN) / CLUSTER;  // its rows of b's tile
                    const u32 to = b + half * 128, column = tile.column;
                    if (!B_N_MAJOR) tma_load_multicast(to, &b_map, k, column + half, barrier);
                    else
                        for (u32 n = 0; n < BN; n += 64)
                            tma_load_multicast(to + n * BK * 2, &b_map, column + n, k + half, barrier);
                    advance(stage, phase);
                }
            }
        }
        __syncwarp();
    } else {  // consumers
        consumer_registers();
        Accumulators d;
        const u32 index_in_block = warpgroup * 4 + thread / 32;
        Warp warp{thread / 32, lane, staging + index_in_block * 2 * STAGING_BYTES,
                  loaded + index_in_block * 16, (lane / 8 % 2 * 16 + lane % 8) * 128, 0};
        const u32 turn = 1 + warpgroup, other_turn = 2 - warpgroup;  // named barriers: whose turn to multiply
        u32 stage = warpgroup * k_tiles % STAGES, phase = warpgroup * k_tiles / STAGES & 1;
        u32 index = cluster + warpgroup * clusters;
        Tile tile = tile_at(index);
        if (DERIVATIVE && lane == 0 && index < tiles)
            for (u32 c = 0; c < 2; c++) load_saved(warp, &saved_map, tile.column + c * CHUNK, tile.row, c);
        if (warpgroup == 1) named_barrier_arrive(other_turn);

        while (index < tiles) {
            named_barrier_sync(turn);
            for (u32 k = 0; k < k_tiles; k++) {
                mbarrier_wait(full + 8 * stage, phase);
                const u32 a_tile = stages + stage * STAGE_BYTES;
                const u64 a = make_smem_desc(a_tile, 2048);  // every other group of 8 rows: see Accumulators
                const u64 b = make_smem_desc(a_tile + A_BYTES, 1024, B_N_MAJOR ? BK * 128 : 16);
                const u32 b_step = B_N_MAJOR ? 2048 : 32;  // bytes to the next 16 of K
                warpgroup_fence_operand(d);
                warpgroup_arrive();
                UNROLL for (u32 i = 0; i < BK / 16; i++)
                    UNROLL for (u32 h = 0; h < 2; h++)
                        wgmma_m64n192k16<0, B_N_MAJOR>(d[h], a + (i * 32 + h * 1024) / 16,
                                                       b + i * b_step / 16, k | i);
                warpgroup_commit();
                warpgroup_fence_operand(d);
                if (k) {  // the k-tile before is multiplied
                    warpgroup_wait<1>();
                    release_previous_stage(stage, empty, thread);
                }
                advance(stage, phase);
            }
            named_barrier_arrive(other_turn);
            warpgroup_wait<0>();
            warpgroup_fence_operand(d);
            release_previous_stage(stage, empty, thread);
            stage += k_tiles;  // skips the stages of the other warpgroup's tile
            phase ^= stage / STAGES & 1;
            stage %= STAGES;

            const u32 next_index = index + 2 * clusters;
            const Tile next = tile_at(next_index);
            if (EPILOGUE == BIAS || EPILOGUE == RELU2) epilogue_bias(warp, d, tile, &out_map, bias, N);
            if (EPILOGUE == GELU) epilogue_gelu(warp, d, tile, &out_map, &saved_map, bias, N);
            if (DERIVATIVE)
                epilogue_derivative(warp, d, tile, next, next_index < tiles, &out_map, &saved_map, sums, N);
            if (LOGITS)
                epilogue_exp(warp, d, tile, &out_map, shifts, (float2*)sums, M, n_valid, tiles_n, has_out);
            index = next_index, tile = next;
        }
        if (lane == 0) tma_store_wait_all();
        __syncwarp();
    }
    // A block stays until the cluster's other block no longer reaches into its barriers and its stages.
    cluster_sync();
}
