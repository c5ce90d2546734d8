// hopper_wgrad: dw += dy^T x and db += the column sums of dy, in float32: the gradients of a linear layer's
// weight and bias. Both operands have K, which runs over the tokens, down their rows (MN-major).
// Split-K: a work unit is a run of k-tiles of one output tile of 256 x 192; its sums are added to dw in
// memory. In a block the two consumer warpgroups multiply the halves of one tile. The two blocks of a cluster
// work on neighbouring columns and share the tile of dy. The column sums are a product with ones.
#include "hopper.cuh"

constexpr u32 SLICE_BYTES = 64 * BK * 2;  // 64 columns of a stage: the width of the swizzle
constexpr u32 A_SLICES = 2 * BM / 64, B_SLICES = BN / 64, STAGE_BYTES = (A_SLICES + B_SLICES) * SLICE_BYTES;

// dy: (T, P) bf16, three matrices side by side (the gradients of q, k and v), from columns 0, P1 and P2 on;
// x: (T, Q) bf16; dw: (P, Q) and db: (P,) float32. A work unit has up to unit_k_tiles k-tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
hopper_wgrad(const __grid_constant__ TensorMap dy0_map, const __grid_constant__ TensorMap dy1_map,
             const __grid_constant__ TensorMap dy2_map, const __grid_constant__ TensorMap x_map,
             float* dw, float* db, u32 P, u32 Q, u32 T, u32 P1, u32 P2, u32 unit_k_tiles) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = (u32)__cvta_generic_to_shared(shared), ones = stages + STAGES * STAGE_BYTES;
    const u32 full = ones + 1024, empty = full + 8 * STAGES;  // mbarriers
    const u32 warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    const u32 warp = thread / 32, lane = thread % 32;
    const u32 cta_rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const u32 k_tiles = (T + BK - 1) / BK, tiles_n = (Q + CLUSTER * BN - 1) / (CLUSTER * BN);
    const u32 tiles = (P + 2 * BM - 1) / (2 * BM) * tiles_n;
    // Tile scheduler: clusters take work units in turn; those of the same k-tiles run together, sharing L2.
    const u32 units = tiles * ((k_tiles + unit_k_tiles - 1) / unit_k_tiles);

    if (threadIdx.x < 256) ((u32*)(shared + STAGES * STAGE_BYTES))[threadIdx.x] = 0x3f803f80;  // two ones
    fence_proxy_async();
    init_barriers(full, empty, 2 * CLUSTER, 0);

    if (warpgroup == 2) {  // producer
        producer_registers();
        if (thread == 0) {
            u32 stage = 0, phase = 1;
            for (u32 unit = cluster; unit < units; unit += clusters) {
                const u32 tile = unit % tiles, first = unit / tiles * unit_k_tiles;
                const u32 last = min(first + unit_k_tiles, k_tiles);
                const u32 row = tile / tiles_n * 2 * BM, column = (tile % tiles_n * CLUSTER + cta_rank) * BN;
                const TensorMap* dy_map = row < P1 ? &dy0_map : row < P2 ? &dy1_map : &dy2_map;
                const u32 from = row - (row < P1 ? 0 : row < P2 ? P1 : P2);
                const u32 half = cta_rank * BK / CLUSTER;  // this block's rows of dy's tile
                for (u32 k = first; k < last; k++) {
                    const u32 a = stages + stage * STAGE_BYTES, b = a + A_SLICES * SLICE_BYTES;
                    const u32 barrier = full + 8 * stage;
                    mbarrier_wait(empty + 8 * stage, phase);
                    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
                    for (u32 i = 0; i < A_SLICES; i++)
                        tma_load_multicast(a + i * SLICE_BYTES + half * 128, dy_map, from + 64 * i,
                                           k * BK + half, barrier);
                    for (u32 i = 0; i < B_SLICES; i++)
                        tma_load(b + i * SLICE_BYTES, &x_map, column + 64 * i, k * BK, barrier);
                    advance(stage, phase);
                }
            }
        }
        __syncwarp();
    } else {  // consumers
        consumer_registers();
        float d[2][96], s[2][4];  // s: the column sums of dy, which are row sums of dy^T
        u32 stage = 0, phase = 0;
        for (u32 unit = cluster; unit < units; unit += clusters) {
            const u32 tile = unit % tiles, split = unit / tiles;
            const u32 count = min(unit_k_tiles, k_tiles - split * unit_k_tiles);
            const u32 row = tile / tiles_n * 2 * BM + warpgroup * BM;
            const u32 column = (tile % tiles_n * CLUSTER + cta_rank) * BN;
            // Of the units that have these rows and k-tiles, one adds up the bias' gradient.
            const bool sums_up = cta_rank == 0 && tile % tiles_n == split % tiles_n;
            for (u32 k = 0; k < count; k++) {
                mbarrier_wait(full + 8 * stage, phase);
                const u32 tiles_at = stages + stage * STAGE_BYTES;
                const u64 a = make_smem_desc(tiles_at + warpgroup * 2 * SLICE_BYTES, 1024, SLICE_BYTES);
                const u64 b = make_smem_desc(tiles_at + A_SLICES * SLICE_BYTES, 1024, SLICE_BYTES);
                warpgroup_fence_operand(d);
                warpgroup_fence_operand(s);
                warpgroup_arrive();
                if (sums_up) {  // ahead of d: behind a branch, the compiler waits for every wgmma in flight
                    UNROLL for (u32 i = 0; i < BK / 16; i++)
                        UNROLL for (u32 h = 0; h < 2; h++)
                            wgmma_m64n8k16(s[h], a + (i * 2048 + h * SLICE_BYTES) / 16,
                                           make_smem_desc(ones, 1024), k | i);
                }
                UNROLL for (u32 i = 0; i < BK / 16; i++)
                    UNROLL for (u32 h = 0; h < 2; h++)
                        wgmma_m64n192k16<1, 1>(d[h], a + (i * 2048 + h * SLICE_BYTES) / 16, b + i * 2048 / 16,
                                               k | i);
                warpgroup_commit();
                warpgroup_fence_operand(d);
                warpgroup_fence_operand(s);
                if (k) {  // the k-tile before is multiplied
                    warpgroup_wait<1>();
                    release_previous_stage(stage, empty, thread);
                }
                advance(stage, phase);
            }
            warpgroup_wait<0>();
            warpgroup_fence_operand(d);
            warpgroup_fence_operand(s);
            release_previous_stage(stage, empty, thread);
            UNROLL for (u32 h = 0; h < 2; h++)
                UNROLL for (u32 i = 0; i < 2; i++) {
                    const u32 y = row + h * 64 + warp * 16 + lane / 4 + i * 8;
                    if (y >= P) continue;
                    if (sums_up && lane % 4 == 0) atomicAdd(db + y, s[h][2 * i]);
                    float* to = dw + (u64)y * Q;
                    UNROLL for (u32 j = 0; j < 24; j++) {
                        const u32 x = column + j * 8 + lane % 4 * 2;
                        if (x < Q)
                            asm volatile("red.global.add.v2.f32 [%0], {%1, %2};"
                                ::"l"(to + x), "f"(d[h][4 * j + 2 * i]), "f"(d[h][4 * j + 2 * i + 1])
                                : "memory");
                    }
                }
        }
    }
    // A block stays until the cluster's other block no longer reaches into its barriers and its stages.
    cluster_sync();
}
