// What the Hopper kernels share: mbarriers, TMA, wgmma, the pipeline from the producer's warpgroup to the
// consumers' two, bf16 arithmetic. Names are CUTLASS's and those of the PTX instructions issued:
// https://docs.nvidia.com/cuda/parallel-thread-execution. Addresses of shared memory are 32-bit, as in PTX.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define UNROLL _Pragma("unroll")
struct alignas(64) TensorMap { u64 opaque[16]; };  // CUtensorMap

// hopper.py reads these values from here.
constexpr u32 BM = 128;       // rows of the tile that a consumer warpgroup holds in its accumulators
constexpr u32 BN = 192;       // columns of that tile
constexpr u32 BK = 64;        // depth (K) of a pipeline stage: 128 bytes, the width of the swizzle
constexpr u32 STAGES = 4;     // pipeline stages in shared memory
constexpr u32 CHUNK = 64;     // columns that a warp's epilogue stages in shared memory at once, for 32 rows
constexpr u32 CLUSTER = 2;    // thread blocks (CTAs) of a cluster
constexpr u32 THREADS = 384;  // of a block: consumer warpgroups 0 and 1, producer warpgroup 2

__device__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Arrives, and the phase also waits for so many bytes of TMA copies.
__device__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of the cluster's block `cta_rank`.
__device__ void mbarrier_arrive_cluster(u32 barrier, u32 cta_rank) {
    asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(cta_rank) : "memory");
}

// Waits for the end of the phase of this parity (0 or 1).
__device__ void mbarrier_wait(u32 barrier, u32 phase) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p;"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
}

__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ void named_barrier_sync(u32 id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ void named_barrier_arrive(u32 id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// ---- TMA: boxes of a matrix between global and shared memory; x is the column, y the row ------------------

#define TMA_LOAD "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"

__device__ void tma_load(u32 to, const TensorMap* map, u32 x, u32 y, u32 barrier) {
    asm volatile(TMA_LOAD " [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// Into the same place of every block of the cluster; each block's own barrier counts the bytes.
__device__ void tma_load_multicast(u32 to, const TensorMap* map, u32 x, u32 y, u32 barrier) {
    asm volatile(TMA_LOAD ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;"
        ::"r"(to), "l"(map), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1)), "r"(x), "r"(y) : "memory");
}

__device__ void tma_store(const TensorMap* map, u32 x, u32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
        " cp.async.bulk.commit_group;" ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}

// Waits until all stores of this thread but the last PENDING have read shared memory, which is then free.
template <u32 PENDING> __device__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Until they have reached global memory.
__device__ void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes writes to shared memory visible to TMA and wgmma, which go through the async proxy.
__device__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The producer gives up registers that it does not need, and the consumers take them: registers a thread.
__device__ void producer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
__device__ void consumer_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }

__device__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <u32 PENDING> __device__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses of the accumulators across: wgmma writes them asynchronously.
template <int N> __device__ void warpgroup_fence_operand(float (&d)[N]) {
    UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N> __device__ void warpgroup_fence_operand(float (&d)[2][N]) {
    warpgroup_fence_operand(d[0]), warpgroup_fence_operand(d[1]);
}

// Descriptor of a wgmma operand at `tile` in shared memory, in rows of 128 bytes with the 128-byte swizzle.
// K-major (K along the rows): groups of 8 rows are `stride` bytes apart; `leading` is not used.
// MN-major (K down the rows): the same, and the next 64 columns are `leading` bytes away.
__device__ u64 make_smem_desc(u32 tile, u32 stride, u32 leading = 16) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 62;
}

// d = a b, or d += a b where `accumulate` is not 0: a (64, 16), b (16, 192), bf16 by descriptors; d float32
// in registers. TRANS_A, TRANS_B: 1 where that operand is MN-major.
template <int TRANS_A, int TRANS_B>
__device__ void wgmma_m64n192k16(float (&d)[96], u64 a, u64 b, u32 accumulate) {
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0;"
        " wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, %96, %97, p, 1, 1, %99, %100; }"
        : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28), D4(32), D4(36), D4(40), D4(44),
          D4(48), D4(52), D4(56), D4(60), D4(64), D4(68), D4(72), D4(76), D4(80), D4(84), D4(88), D4(92)
        : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B));
}

// The same for b (16, 8) and an MN-major a.
__device__ void wgmma_m64n8k16(float (&d)[4], u64 a, u64 b, u32 accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
        " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 1, 0; }"
        : D4(0) : "l"(a), "l"(b), "r"(accumulate));
}

// ---- the pipeline: STAGES buffers, each with a barrier `full` and a barrier `empty` -----------------------

// `full` completes a phase with one arrival (the producer's) and all bytes of its copies, `empty` with
// `consumer_arrivals`; `more` barriers of one arrival follow. The cluster's other block arrives at them too.
__device__ void init_barriers(u32 full, u32 empty, u32 consumer_arrivals, u32 more) {
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, consumer_arrivals);
        }
        for (u32 i = 0; i < more; i++) mbarrier_init(empty + 8 * (STAGES + i), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
}

__device__ void advance(u32& stage, u32& phase) {
    if (++stage == STAGES) stage = 0, phase ^= 1;
}

// A consumer warpgroup gives the stage before `stage` back to the producers of every block in the cluster,
// since what they load into it is multicast.
__device__ void release_previous_stage(u32 stage, u32 empty, u32 thread) {
    if (thread < CLUSTER) mbarrier_arrive_cluster(empty + 8 * ((stage + STAGES - 1) % STAGES), thread);
}

// Four 8 x 8 matrices; a lane holds two neighbours of each and gives `at`, the address of a row of 16 bytes.
__device__ void ldmatrix_x4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ void stmatrix_x4(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
        ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ u32 pack_bf16x2(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ float low_bf16(u32 both) { return __uint_as_float(both << 16); }
__device__ float high_bf16(u32 both) { return __uint_as_float(both & 0xffff0000u); }
