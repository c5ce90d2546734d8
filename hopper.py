"""Products in bf16 as CUDA kernels of our own for Hopper, compiled by NVRTC as a run starts, where cuBLASLt's are
slower or want another pass over memory: the MLP's first product with its GELU, the second's backward with the GELU's
slope and the first bias' gradient; those of the layer before attention, from the gradients of q, k and v where they
are, bias gradient included; and that of the logits with their exponentials and the sums of these.

hopper_product: two warpgroups of a thread block take turns. While one multiplies its tile, the other finishes the one
before; cuBLASLt's matrix units wait for their epilogues. hopper_weight: both multiply halves of one tile. In both a
thread of its own fetches what is multiplied, and what two neighbouring blocks (a cluster) have in common, each by half.

The instructions (wgmma, mbarrier, cp.async.bulk.tensor): https://docs.nvidia.com/cuda/parallel-thread-execution; the
calls: https://docs.nvidia.com/cuda/nvrtc and https://docs.nvidia.com/cuda/cuda-driver-api.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BM, BN, BK, STAGES = 128, 192, 64, 4  # a warpgroup's tile and its steps of K; steps in shared memory
CHUNK = 64  # columns that a warp finishes at once, of its 32 rows
TEAM = 2  # blocks of a cluster
THREADS = 3 * 128
SHARED = {  # bytes
    "hopper_product": STAGES * (BM + BN) * BK * 2 + 2 * 2 * BM * CHUNK * 2 + 256,  # each warp has two buffers
    "hopper_weight": STAGES * (2 * BM + BN) * BK * 2 + 1024 + 128,  # a kilobyte of ones
}
PART = 2 * BM  # of whose multiples the widths must be of what is side by side in linear_backward
LINEAR, LINEAR_BACKWARD, GELU, GELU_BACKWARD, EXPONENTIALS = KINDS = range(5)  # of hopper_product
BACKWARD = LINEAR_BACKWARD, GELU_BACKWARD

COMMON = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 opaque[16]; };  // a CUtensorMap

constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE = A_BYTES + B_BYTES, BUFFER = 32 * CHUNK * 2;

__device__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void arrive_at(u32 barrier, u32 block) {  // of the cluster
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(block) : "memory");
}

__device__ void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

__device__ void load(u32 to, const Map* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

__device__ void load_for_team(u32 to, const Map* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;"
        ::"r"(to), "l"(map), "r"(barrier), "h"((unsigned short)((1 << TEAM) - 1)), "r"(x), "r"(y) : "memory");
}

__device__ void store(const Map* map, u32 x, u32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
        " cp.async.bulk.commit_group;" ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}

template <int LEFT> __device__ void stores_read() {  // all of this thread's but the last LEFT have left shared memory
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ void written() {  // what this warp has written into shared memory is there for a store
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

// A tile for wgmma, of swizzled rows of 128 bytes, by eights. K along the rows: the eights are `eights` bytes apart.
// K down the rows: they are too, and 64 columns are `columns` bytes from the next 64.
__device__ u64 described(u32 tile, u32 eights, u32 columns = 16) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(columns >> 4) << 16 | (u64)(eights >> 4) << 32 | (u64)1 << 62;
}

// A_DOWN, B_DOWN: K is down the rows of a, of b
template <int A_DOWN, int B_DOWN> __device__ void multiply(float (&d)[96], u64 a, u64 b, u32 add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %98, 0;"
        " wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {@REGISTERS}, %96, %97, p, 1, 1, %99, %100; }"
        : @OPERANDS : "l"(a), "l"(b), "r"(add), "n"(A_DOWN), "n"(B_DOWN));
}

__device__ void add_up(float (&d)[4], u64 a, u64 ones, u32 add) {  // K is down the rows of a
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0;"
        " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(ones), "r"(add));
}

template <int N> __device__ void hold(float (&d)[N]) {  // registers that wgmma writes are not to be touched before
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N> __device__ void hold(float (&d)[2][N]) {
    hold(d[0]);
    hold(d[1]);
}

__device__ void meet() {  // all threads of the cluster
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barriers: of each stage `full` and, released so many times, `empty`; behind those `more` of one arrival each.
__device__ void make_barriers(u32 full, u32 empty, u32 releases, u32 more) {
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(releases));
        }
        for (u32 i = 0; i < more; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(empty + 8 * (STAGES + i)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet();
}

__device__ void advance(u32& stage, u32& parity) {
    if (++stage == STAGES) stage = 0, parity ^= 1;
}

__device__ void release_before(u32 stage, u32 empty, u32 thread) {  // the stage before that, to all of the cluster
    if (thread < TEAM) arrive_at(empty + 8 * ((stage + STAGES - 1) % STAGES), thread);
}

// four 8 x 8 blocks from or to shared memory; of each a lane has two neighbours, as of wgmma's results
__device__ void read(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ void write(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
        ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

__device__ float power(float x, float shift) {  // e^x 2^-shift
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(fmaf(x, 1.4426950409f, -shift)));
    return p;
}

constexpr float ROOT = 0.7978845608f, CUBE = 0.044715f;  // GELU(x) = x / 2 (1 + tanh(ROOT (x + CUBE x^3)))

__device__ float tanh_of(float x, float square) {  // to 2^-11, as in cuBLASLt's
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * fmaf(square, ROOT * CUBE, ROOT)));
    return t;
}
__device__ float gelu(float x) {
    const float half = .5f * x;
    return fmaf(half, tanh_of(x, x * x), half);
}
__device__ float slope(float x) {
    const float square = x * x, t = tanh_of(x, square);
    return fmaf(fmaf(-t, t, 1.f), x * fmaf(square, 1.5f * ROOT * CUBE, .5f * ROOT), fmaf(t, .5f, .5f));
}
"""

PRODUCT = r"""
// out = a b^T (BACKWARD: a b) + bias. a: (M, K), three side by side of which the second begins at K1, the third at K2;
// b: (N, K) (BACKWARD: (K, N)); all bf16. WITH_GELU: `before` receives that, and out its GELU. WITH_GELU and BACKWARD:
// out = a b * slope(before), and sums gets the column sums of each 32 rows, (M / 32, N), M up to whole TEAM * BM.
// EXPONENTIAL: out = 2^(a b^T log2(e) - shifts[row]), if there is an out, of the first `real` columns, 0 behind; and
// sums gets the row sums of each BN columns, (M up to whole TEAM * BM, N / BN rounded up).
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(TEAM, 1, 1)
hopper_product(const __grid_constant__ Map a0_map, const __grid_constant__ Map a1_map,
               const __grid_constant__ Map a2_map, const __grid_constant__ Map b_map,
               const __grid_constant__ Map out_map,
               const __grid_constant__ Map before_map, const unsigned short* bias, const float* shifts, float* sums,
               u32 M, u32 N, u32 K, u32 K1, u32 K2, u32 real, u32 keep) {
    constexpr bool SLOPE = BACKWARD && WITH_GELU;
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = (u32)__cvta_generic_to_shared(shared), buffers = stages + STAGES * STAGE;
    const u32 full = buffers + 16 * BUFFER, empty = full + 8 * STAGES, come = empty + 8 * STAGES;  // barriers
    const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 block = blockIdx.x % TEAM, team = blockIdx.x / TEAM, teams = gridDim.x / TEAM;
    const u32 steps = (K + BK - 1) / BK, across = (N + BN - 1) / BN;
    const u32 down = (M + TEAM * BM - 1) / (TEAM * BM), tiles = down * across;
    // those side by side in time have the larger operand in common, so that it comes to L2 but once
    const auto row_of = [&](u32 tile) { return ((EXPONENTIAL ? tile % down : tile / across) * TEAM + block) * BM; };
    const auto column_of = [&](u32 tile) { return (EXPONENTIAL ? tile / down : tile % across) * BN; };

    make_barriers(full, empty, TEAM, 16);

    if (group == 2) {  // fetches
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) {
            u32 stage = 0, parity = 1;
            for (u32 tile = team; tile < tiles; tile += teams) {
                const u32 row = row_of(tile), column = column_of(tile);
                for (u32 k = 0; k < K; k += BK) {
                    const u32 a = stages + stage * STAGE, b = a + A_BYTES, barrier = full + 8 * stage;
                    wait(empty + 8 * stage, parity);
                    arrive_expecting(barrier, STAGE);
                    if (k < K1) load(a, &a0_map, k, row, barrier);
                    else if (k < K2) load(a, &a1_map, k - K1, row, barrier);
                    else load(a, &a2_map, k - K2, row, barrier);
                    const u32 mine = block * (BACKWARD ? BK : BN) / TEAM;  // rows of b's tile
                    if (BACKWARD)
                        for (u32 n = 0; n < BN; n += 64)
                            load_for_team(b + n * BK * 2 + mine * 128, &b_map, column + n, k + mine, barrier);
                    else
                        load_for_team(b + mine * 128, &b_map, k, column + mine, barrier);
                    advance(stage, parity);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float d[2][96];
        const u32 mine = buffers + (group * 4 + warp) * 2 * BUFFER, arrived = come + (group * 4 + warp) * 16;
        const u32 turn = 1 + group, other_turn = 2 - group;
        // d[h]'s rows are eights 0 and 2, or 1 and 3, of the warp's 32; blocks 2 j and 2 j + 1 of their columns:
        const u32 place = (lane / 8 % 2 * 16 + lane % 8) * 128;
#define PLACE(j, h) (place + h * (8 * 128) + ((2 * j + lane / 16) ^ lane % 8) * 16)
        u32 turns = 0;  // of the two buffers
        u32 stage = group * steps % STAGES, parity = group * steps / STAGES & 1;
        u32 tile = team + group * teams;
        u32 row = row_of(tile), column = column_of(tile);
        const auto fetch = [&](u32 x, u32 y, u32 turn) {
            arrive_expecting(arrived + 8 * (turn % 2), BUFFER);
            load(mine + turn % 2 * BUFFER, &before_map, x, y + 32 * warp, arrived + 8 * (turn % 2));
        };
        if (SLOPE && lane == 0 && tile < tiles)
            for (u32 c = 0; c < 2; c++) fetch(column + c * CHUNK, row, c);
        if (group == 1) asm volatile("bar.arrive %0, 256;" ::"r"(other_turn) : "memory");

        while (tile < tiles) {
            asm volatile("bar.sync %0, 256;" ::"r"(turn) : "memory");
            for (u32 k = 0; k < steps; k++) {
                wait(full + 8 * stage, parity);
                const u32 tile_a = stages + stage * STAGE;
                const u64 a = described(tile_a, 2048);  // every other eight rows, so that a warp has 32 side by side
                const u64 b = described(tile_a + A_BYTES, 1024, BACKWARD ? BK * 128 : 16);
                const u32 b_step = BACKWARD ? 2048 : 32;
                hold(d);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (u32 i = 0; i < BK / 16; i++)
#pragma unroll
                    for (u32 h = 0; h < 2; h++)
                        multiply<0, BACKWARD>(d[h], a + (i * 32 + h * 1024) / 16, b + i * b_step / 16, k | i);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                hold(d);
                if (k) {  // the step before is done
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    release_before(stage, empty, thread);
                }
                advance(stage, parity);
            }
            asm volatile("bar.arrive %0, 256;" ::"r"(other_turn) : "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold(d);
            release_before(stage, empty, thread);
            stage += steps;  // the other warpgroup's tile is between
            parity ^= stage / STAGES & 1;
            stage %= STAGES;

            const u32 next = tile + 2 * teams;
            const u32 next_row = row_of(next), next_column = column_of(next);
            float shift[2][2], row_sum[2][2];  // of this lane's rows
            if (EXPONENTIAL)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 y = row + 32 * warp + i % 2 * 16 + i / 2 * 8 + lane / 4;
                    shift[i / 2][i % 2] = __ldg(shifts + min(y, M - 1));
                    row_sum[i / 2][i % 2] = 0.f;
                }
#pragma unroll
            for (u32 c = 0; c < BN / CHUNK; c++, turns++) {
                const u32 n = column + c * CHUNK, y = row + 32 * warp;
                const bool takes_turns = SLOPE || !WITH_GELU;
                const u32 buffer = mine + (takes_turns ? turns % 2 * BUFFER : BUFFER);
                if (SLOPE) {
                    wait(arrived + 8 * (turns % 2), turns / 2 & 1);
                } else {
                    const u32 first = WITH_GELU ? mine : buffer;
                    if (lane == 0) stores_read<1>();
                    __syncwarp();
#pragma unroll
                    for (u32 j = 0; j < CHUNK / 16; j++) {
                        u32 added[2] = {0, 0};
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            const u32 at = n + 16 * j + 8 * i + lane % 4 * 2;
                            if (!EXPONENTIAL && bias) added[i] = __ldg((const u32*)(bias + min(at, N - 2)));
                        }
#pragma unroll
                        for (u32 h = 0; h < 2; h++) {
                            float* v = &d[h][c * (CHUNK / 2) + j * 8];
                            u32 r[4];
#pragma unroll
                            for (u32 i = 0; i < 4; i++) {
                                float &left = v[2 * i], &right = v[2 * i + 1];
                                left += low(added[i / 2]), right += high(added[i / 2]);
                                if (EXPONENTIAL) {
                                    const u32 at = n + 16 * j + i / 2 * 8 + lane % 4 * 2;
                                    left = at < real ? power(left, shift[h][i % 2]) : 0.f;
                                    right = at + 1 < real ? power(right, shift[h][i % 2]) : 0.f;
                                    row_sum[h][i % 2] += left + right;
                                }
                                r[i] = packed(left, right);
                            }
                            write(first + PLACE(j, h), r);
                        }
                    }
                    written();
                    if (lane == 0 && (!EXPONENTIAL || keep)) store(WITH_GELU ? &before_map : &out_map, n, y, first);
                    if (!WITH_GELU) continue;
                    if (lane == 0) stores_read<1>();
                    __syncwarp();
                }
                float total[8];  // of 32 columns: two neighbours in each eight
#pragma unroll
                for (u32 j = 0; j < CHUNK / 16; j++) {
                    u32 r[2][4];
                    if (SLOPE)
#pragma unroll
                        for (u32 h = 0; h < 2; h++) read(r[h], buffer + PLACE(j, h));
#pragma unroll
                    for (u32 h = 0; h < 2; h++) {
                        const float* v = &d[h][c * (CHUNK / 2) + j * 8];
#pragma unroll
                        for (u32 i = 0; i < 4; i++) {
                            float left = v[2 * i], right = v[2 * i + 1];
                            if (SLOPE) {
                                left *= slope(low(r[h][i])), right *= slope(high(r[h][i]));
                                float* t = &total[j % 2 * 4 + i / 2 * 2];
                                t[0] = left + (h || i % 2 ? t[0] : 0.f);
                                t[1] = right + (h || i % 2 ? t[1] : 0.f);
                            } else {
                                left = gelu(left), right = gelu(right);
                            }
                            r[h][i] = packed(left, right);
                        }
                    }
#pragma unroll
                    for (u32 h = 0; h < 2; h++) write(buffer + PLACE(j, h), r[h]);
                    if (SLOPE && j % 2) {  // eight lanes have rows of the same columns
#pragma unroll
                        for (u32 half = 4; half > 1; half /= 2) {  // of two lanes, each goes on with half of them
                            const bool upper = lane & half * 4;
#pragma unroll
                            for (u32 i = 0; i < half; i++) {
                                const float first = total[i], second = total[i + half];
                                const float other = __shfl_xor_sync(~0u, upper ? first : second, half * 4);
                                total[i] = (upper ? second : first) + other;
                            }
                        }
                        for (u32 i = 0; i < 2; i++) total[i] += __shfl_xor_sync(~0u, total[i], 4);
                        const u32 at = n + j / 2 * 32 + lane / 8 * 8 + lane % 4 * 2;
                        float2* to = (float2*)(sums + (u64)(y / 32) * N + at);
                        if (lane % 8 < 4 && at < N) *to = make_float2(total[0], total[1]);
                    }
                    if (SLOPE && j == 1 && lane == 0 && turns) {  // the chunk before this has left its buffer
                        stores_read<0>();
                        if (c + 1 < BN / CHUNK) fetch(n + CHUNK, row, turns + 1);
                        else if (next < tiles) fetch(next_column, next_row, turns + 1);
                    }
                }
                written();
                if (lane == 0) store(&out_map, n, y, buffer);
            }
            if (EXPONENTIAL) {  // four lanes have columns of the same rows; of each four, every lane has one of them
                float sum = 0.f;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float whole = row_sum[i / 2][i % 2];
                    whole += __shfl_xor_sync(~0u, whole, 1);
                    whole += __shfl_xor_sync(~0u, whole, 2);
                    sum = lane % 4 == i ? whole : sum;
                }
                const u32 y = row + 32 * warp + lane % 2 * 16 + lane % 4 / 2 * 8 + lane / 4;
                sums[(u64)y * across + column / BN] = sum;
            }
            tile = next, row = next_row, column = next_column;
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    // a block does not end while the other one may still reach its barriers and its stages
    meet();
}
"""

WEIGHT = r"""
// out: (P, Q) float32 += dy^T x, sums: (P) += the column sums of dy. dy: (T, P), side by side of three of which the
// second begins at column P1, the third at P2; x: (T, Q). Of a tile's T / BK steps a cluster adds up `each` at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(TEAM, 1, 1)
hopper_weight(const __grid_constant__ Map dy0_map, const __grid_constant__ Map dy1_map,
              const __grid_constant__ Map dy2_map, const __grid_constant__ Map x_map, float* out, float* sums,
              u32 P, u32 Q, u32 T, u32 P1, u32 P2, u32 each) {
    constexpr u32 SLICE = 64 * BK * 2, A_SLICES = 2 * BM / 64, B_SLICES = BN / 64, BOTH = (A_SLICES + B_SLICES) * SLICE;
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = (u32)__cvta_generic_to_shared(shared), ones = stages + STAGES * BOTH;
    const u32 full = ones + 1024, empty = full + 8 * STAGES;
    const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 block = blockIdx.x % TEAM, team = blockIdx.x / TEAM, teams = gridDim.x / TEAM;
    const u32 steps = (T + BK - 1) / BK, across = (Q + TEAM * BN - 1) / (TEAM * BN);
    const u32 tiles = (P + 2 * BM - 1) / (2 * BM) * across;
    const u32 units = tiles * ((steps + each - 1) / each);  // those of the same steps side by side, for L2's sake

    if (threadIdx.x < 256) ((u32*)(shared + STAGES * BOTH))[threadIdx.x] = 0x3f803f80;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    make_barriers(full, empty, 2 * TEAM, 0);

    if (group == 2) {  // fetches
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) {
            u32 stage = 0, parity = 1;
            for (u32 unit = team; unit < units; unit += teams) {
                const u32 tile = unit % tiles, first = unit / tiles * each, last = min(first + each, steps);
                const u32 row = tile / across * 2 * BM, column = (tile % across * TEAM + block) * BN;
                const Map* dy_map = row < P1 ? &dy0_map : row < P2 ? &dy1_map : &dy2_map;
                const u32 from = row - (row < P1 ? 0 : row < P2 ? P1 : P2), mine = block * BK / TEAM;
                for (u32 step = first; step < last; step++) {
                    const u32 a = stages + stage * BOTH, b = a + A_SLICES * SLICE, barrier = full + 8 * stage;
                    wait(empty + 8 * stage, parity);
                    arrive_expecting(barrier, BOTH);
                    for (u32 i = 0; i < A_SLICES; i++)
                        load_for_team(a + i * SLICE + mine * 128, dy_map, from + 64 * i, step * BK + mine, barrier);
                    for (u32 i = 0; i < B_SLICES; i++)
                        load(b + i * SLICE, &x_map, column + 64 * i, step * BK, barrier);
                    advance(stage, parity);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float d[2][96], s[2][4];
        u32 stage = 0, parity = 0;
        for (u32 unit = team; unit < units; unit += teams) {
            const u32 tile = unit % tiles, chunk = unit / tiles, count = min(each, steps - chunk * each);
            const u32 row = tile / across * 2 * BM + group * BM, column = (tile % across * TEAM + block) * BN;
            const bool adds_up = block == 0 && tile % across == chunk % across;  // one of those that have these rows
            for (u32 k = 0; k < count; k++) {
                wait(full + 8 * stage, parity);
                const u32 tile_a = stages + stage * BOTH + group * 2 * SLICE;
                const u64 a = described(tile_a, 1024, SLICE);
                const u64 b = described(stages + stage * BOTH + A_SLICES * SLICE, 1024, SLICE);
                hold(d);
                hold(s);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                if (adds_up) {  // before the others: after a branch, the compiler waits for what was left in flight
#pragma unroll
                    for (u32 i = 0; i < BK / 16; i++)
#pragma unroll
                        for (u32 h = 0; h < 2; h++)
                            add_up(s[h], a + (i * 2048 + h * SLICE) / 16, described(ones, 1024), k | i);
                }
#pragma unroll
                for (u32 i = 0; i < BK / 16; i++)
#pragma unroll
                    for (u32 h = 0; h < 2; h++)
                        multiply<1, 1>(d[h], a + (i * 2048 + h * SLICE) / 16, b + i * 2048 / 16, k | i);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                hold(d);
                hold(s);
                if (k) {  // the step before is done
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    release_before(stage, empty, thread);
                }
                advance(stage, parity);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold(d);
            hold(s);
            release_before(stage, empty, thread);
#pragma unroll
            for (u32 h = 0; h < 2; h++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 y = row + h * 64 + warp * 16 + lane / 4 + i * 8;
                    if (y >= P) continue;
                    if (adds_up && lane % 4 == 0) atomicAdd(sums + y, s[h][2 * i]);
                    float* to = out + (u64)y * Q;
#pragma unroll
                    for (u32 j = 0; j < 24; j++) {
                        const u32 x = column + j * 8 + lane % 4 * 2;
                        if (x < Q)
                            asm volatile("red.global.add.v2.f32 [%0], {%1, %2};"
                                ::"l"(to + x), "f"(d[h][4 * j + 2 * i]), "f"(d[h][4 * j + 2 * i + 1]) : "memory");
                    }
                }
        }
    }
    meet();
}
"""


@functools.cache
def available(device):
    """Whether the kernel runs there: a Hopper GPU, and NVRTC, which PyTorch for CUDA brings."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return bool(nvrtc())
    except OSError:
        return False


def linear(a, b, bias, out):
    """out = a b + bias. a: (M, K), of contiguous rows; b: (K, N), of contiguous rows or columns; bias: (N,) or None;
    out: (M, N); all bf16, of widths that are multiples of 8."""
    if b.stride(1) == 1:
        launch_product(LINEAR_BACKWARD, [a], b, out, bias=bias)
    else:
        launch_product(LINEAR, [a], b.t(), out, bias=bias)
    return out


def gelu(a, b, bias):
    """(GELU of a b^T + bias, what it was taken of). a: (M, K), b: (N, K), as of `linear`."""
    out, before = (a.new_empty(a.size(0), b.size(0)) for _ in range(2))
    launch_product(GELU, [a], b, out, before, bias)
    return out, before


def dgelu(a, b, before):
    """(a b times the GELU's slope at `before`, its column sums in float32). a: (M, K), b: (K, N), before: (M, N)."""
    out = torch.empty_like(before)
    sums = torch.empty(bands(a) * TEAM * BM // 32, out.size(1), dtype=torch.float32, device=a.device)
    launch_product(GELU_BACKWARD, [a], b, out, before, sums=sums)
    return out, sums.sum(0)


def exponentials(a, b, shifts, real, out=None):
    """Sums of 2^(a b^T log2(e) - shifts[row]) over each BN of the first `real` columns, (M, N / BN rounded up) float32.

    a: (M, K), b: (N, K), as of `linear`; shifts: (M,) float32; out: (M, N) bf16, receives what was summed, rounded, and
    0 in the other columns.
    """
    sums = torch.empty(bands(a) * TEAM * BM, -(-b.size(0) // BN), dtype=torch.float32, device=a.device)
    launch_product(EXPONENTIALS, [a], b, out, shifts=shifts, sums=sums, real=real)
    return sums[: a.size(0)]


def linear_backward(parts, x, w):
    """Gradients of y = x w^T + b: (that of x, those of w and b in float32).

    parts: three (T, P_i), dy's columns, each P_i a multiple of PART; x: (T, Q); w: (sum of P_i, Q); all bf16 and
    contiguous. Those of w and b are sums whose terms are added in no fixed order: from call to call they differ by
    float32's rounding.
    """
    (T, Q), P = x.shape, w.size(0)
    dx = torch.empty_like(x)
    launch_product(LINEAR_BACKWARD, parts, w, dx)
    dw, db = (torch.zeros(size, dtype=torch.float32, device=x.device) for size in ((P, Q), P))
    clusters = sm_count(x.device) // TEAM
    each = steps_at_once(-(-P // PART) * -(-Q // (TEAM * BN)), -(-T // BK), clusters)
    maps = [*(tensor_map(part, BK // TEAM, 64) for part in parts), tensor_map(x, BK, 64)]
    numbers = P, Q, T, *starts(parts), each
    launch("hopper_weight", LINEAR, x.device.index, TEAM * clusters, maps, (dw, db), numbers)
    return dx, dw, db


@functools.cache
def steps_at_once(tiles, steps, clusters):
    """How many of a tile's steps a cluster is to add up: few pieces, but all clusters have work to the end."""

    def longest(pieces):  # in steps; to add a piece up takes as long as some two
        return -(-tiles * pieces // clusters) * (-(-steps // pieces) + 2)

    return -(-steps // min(range(1, 17), key=longest))


def launch_product(kind, parts, b, out, before=None, bias=None, shifts=None, sums=None, real=0):
    """parts: a, or three whose columns side by side are a's."""
    in_context(b.device.index)
    backward = kind in BACKWARD
    M, (K, N) = parts[0].size(0), (b.shape if backward else b.shape[::-1])
    maps = [tensor_map(part, BM, BK) for part in (parts if len(parts) == 3 else parts * 3)]
    maps += [tensor_map(b, *((BK // TEAM, 64) if backward else (BN // TEAM, BK)))]
    maps += [tensor_map(b if x is None else x, 32, CHUNK) for x in (out, before)]
    clusters = min(sm_count(b.device) // TEAM, bands(parts[0]) * -(-N // BN))
    numbers = M, N, K, *starts(parts), real, out is not None
    launch("hopper_product", kind, b.device.index, TEAM * clusters, maps, (bias, shifts, sums), numbers)


def bands(a):
    """How many times the rows that a cluster multiplies at once go into a's, rounded up."""
    return -(-a.size(0) // (TEAM * BM))


def starts(parts):
    """Columns at which the second and the third part begin, if there are any."""
    widths = [part.size(1) for part in parts]
    return widths[0], sum(widths[:2])


@functools.cache
def sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch(name, kind, device, blocks, maps, tensors, numbers):
    arguments = [*maps, *(ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors)]
    arguments += [ctypes.c_uint32(n) for n in numbers]
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    function, shared = kernel(name, kind, device), SHARED[name]
    grid = blocks, 1, 1, THREADS, 1, 1
    check(driver().cuLaunchKernel(function, *grid, shared, stream, addresses, None), "cuLaunchKernel")


def tensor_map(x, rows, columns):
    """A CUtensorMap: how to copy boxes of a bf16 matrix of contiguous rows, swizzled by 128 bytes."""
    memory = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    sizes, stride = (ctypes.c_uint64 * 2)(x.size(1), x.size(0)), ctypes.c_uint64(x.stride(0) * 2)
    box, steps = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    bf16, plain, swizzle_128, promote_256, zeros = 9, 0, 3, 3, 0
    status = driver().cuTensorMapEncodeTiled(
        aligned, bf16, 2, ctypes.c_void_p(x.data_ptr()), sizes, ctypes.byref(stride), box, steps, plain, swizzle_128,
        promote_256, zeros,
    )  # fmt: skip
    check(status, "cuTensorMapEncodeTiled")
    return aligned


def in_context(device):
    """Gives this thread, if it has made no call to that GPU, the current one, yet, its context."""
    context = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context:
        check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def check(status, what):
    if status:
        raise RuntimeError(f"{what} failed with status {status}")


@functools.cache
def driver():
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def nvrtc():
    """The library as PyTorch's packages have it, or the system's; OSError where there is none."""
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    packaged = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    return ctypes.CDLL(str(packaged[0]) if packaged else name)


@functools.cache
def kernel(name, kind, device):
    module, function, most_shared = ctypes.c_void_p(), ctypes.c_void_p(), 8
    check(driver().cuModuleLoadData(ctypes.byref(module), compiling()[name, kind].result()), "cuModuleLoadData")
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    check(driver().cuFuncSetAttribute(function, most_shared, SHARED[name]), "cuFuncSetAttribute")
    return function


@functools.cache
def compiling():
    """The machine code of each kernel, in the making: a thread each, so that it is there when torch.compile is done."""
    kernels = [("hopper_product", kind) for kind in KINDS] + [("hopper_weight", LINEAR)]
    threads = ThreadPoolExecutor(len(kernels))
    codes = {kernel: threads.submit(compiled, *kernel) for kernel in kernels}
    threads.shutdown(wait=False)
    return codes


def compiled(name, kind):
    """The kernel's machine code; RuntimeError with the compiler's words if it has any."""
    registers = ", ".join(f"%{i}" for i in range(96))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(96))
    source = (
        (COMMON + {"hopper_product": PRODUCT, "hopper_weight": WEIGHT}[name])
        .replace("@REGISTERS", registers)
        .replace("@OPERANDS", operands)
    )
    values = {
        "BACKWARD": kind in BACKWARD,
        "WITH_GELU": kind in (GELU, GELU_BACKWARD),
        "EXPONENTIAL": kind == EXPONENTIALS,
    }
    values |= {"BM": BM, "BN": BN, "BK": BK, "STAGES": STAGES, "CHUNK": CHUNK, "TEAM": TEAM, "THREADS": THREADS}
    options = [b"--gpu-architecture=sm_90a", *(f"-D{key}={int(value)}u".encode() for key, value in values.items())]
    lib, program = nvrtc(), ctypes.c_void_p()
    check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"hopper.cu", 0, None, None), "NVRTC")
    status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        raise RuntimeError(text(program, "ProgramLog").decode())
    return text(program, "CUBIN")


def text(program, what):
    size = ctypes.c_size_t()
    check(getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "NVRTC")
    content = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc(), f"nvrtcGet{what}")(program, content), "NVRTC")
    return content.raw
