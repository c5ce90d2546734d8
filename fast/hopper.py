"""GEMMs in bf16 for Hopper GPUs (H100, H200), with epilogues that cuBLASLt lacks or runs slower.

The kernels are CUDA: hopper_gemm.cu, hopper_wgrad.cu and what both include, hopper.cuh. NVRTC
(https://docs.nvidia.com/cuda/nvrtc) compiles them when a run starts, in seconds and without a host
compiler; the driver launches them (https://docs.nvidia.com/cuda/cuda-driver-api).
"""

import ctypes
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fast import chips

FOLDER = Path(__file__).parent
HEADER = (FOLDER / "hopper.cuh").read_text()
SIZES = dict(re.findall(r"constexpr u32 (\w+) = (\d+);", HEADER))  # explained there
BM, BN, BK, STAGES = (int(SIZES[name]) for name in ("BM", "BN", "BK", "STAGES"))
CHUNK, CLUSTER, THREADS = (int(SIZES[name]) for name in ("CHUNK", "CLUSTER", "THREADS"))
BOX_COLUMNS = 64  # of bf16, for a tensor_map: as wide as the swizzle
# linear_backward's parts are multiples of this wide: a tile of hopper_wgrad takes one part
PART = 2 * BM

# Every kernel that is compiled: the name of it and its file, and its -D options.
K_MAJOR, N_MAJOR = "B_N_MAJOR=0", "B_N_MAJOR=1"  # b: (N, K); (K, N)
KERNELS = {
    "linear": ("hopper_gemm", "EPILOGUE=BIAS", K_MAJOR),
    "linear_n_major": ("hopper_gemm", "EPILOGUE=BIAS", N_MAJOR),
    "gelu": ("hopper_gemm", "EPILOGUE=GELU", K_MAJOR),
    "dgelu": ("hopper_gemm", "EPILOGUE=DGELU", N_MAJOR),
    "relu2": ("hopper_gemm", "EPILOGUE=RELU2", K_MAJOR),
    "drelu2": ("hopper_gemm", "EPILOGUE=DRELU2", N_MAJOR),
    "exp": ("hopper_gemm", "EPILOGUE=EXP", K_MAJOR),
    "wgrad": ("hopper_wgrad",),
}
SHARED_BYTES = {
    # pipeline stages; two staging buffers for each of the 8 consumer warps; mbarriers
    "hopper_gemm": STAGES * (BM + BN) * BK * 2 + 8 * 2 * 32 * CHUNK * 2 + 256,
    # pipeline stages; a matrix of ones; mbarriers
    "hopper_wgrad": STAGES * (2 * BM + BN) * BK * 2 + 1024 + 128,
}


@functools.cache
def available(device):
    """Whether the kernels run on this torch.device: a Hopper GPU."""
    return chips.capability(device) == (9, 0)


def takes(*operands):
    """Whether the kernels can read and write these operands.

    TMA copies units of 16 bytes: a tensor must be a bf16 matrix or vector, not empty, with
    contiguous rows, and its address, width and row stride multiples of 16 bytes. None stands for no
    operand.
    """
    return all(x is None or fits(x) for x in operands)


def fits(x):
    shape = x.shape
    if x.dtype != torch.bfloat16 or len(shape) not in (1, 2) or min(shape) == 0 or shape[-1] % 8:
        return False
    strides = x.stride()
    if strides[-1] != 1 or x.data_ptr() % 16:
        return False
    return len(strides) == 1 or (strides[0] % 8 == 0 and strides[0] >= shape[1])


def linear(a, b, bias, out, added=None):
    """out = a b + bias. a: (M, K); bias: (N,) or None; out: (M, N).

    b: (K, N), with contiguous rows or columns. `takes` must hold for a, b or b.t(), bias and out,
    as for all operands here. added: None, of which cublas.Plan takes care.
    """
    if b.stride(1) == 1:
        launch_gemm("linear_n_major", [a], b, out, bias=bias)
    else:
        launch_gemm("linear", [a], b.t(), out, bias=bias)


def derivative(kernel, a, b, saved):
    """(a b times GELU's or ReLU^2's derivative, (M, N), its column sums, (N,) float32).

    kernel: "dgelu" or "drelu2"; a: (M, K); b: (K, N); saved: GELU's pre-activation, or ReLU^2's
    output, whose root is half the derivative.
    """
    sums = a.new_empty(cluster_rows(a) // 32, b.size(1), dtype=torch.float32)
    out = torch.empty_like(saved)
    launch_gemm(kernel, [a], b, out, saved=saved, sums=sums)
    return out, sums.sum(0)


def exponentials(a, b, shifts, vocab_size, out=None):
    """Softmax numerators 2^(logits log2(e) - shifts[row]) of logits a b^T, each BN columns summed.

    a: (M, K); b: (N, K); shifts: (M,) float32; columns from vocab_size on count as 0. Returns
    float32 (M, N / BN rounded up, 2): the sums, and by how much the shift was raised for them,
    mostly 0. Where a sum would exceed 2^60, the shift is raised until the largest numerator is 1.
    `out`, (M, N), receives the numerators.
    """
    sums = a.new_empty(cluster_rows(a), -(-b.size(0) // BN), 2, dtype=torch.float32)
    launch_gemm("exp", [a], b, out, shifts=shifts, sums=sums, vocab_size=vocab_size)
    return sums[: a.size(0)]


def linear_backward(parts, x, w):
    """(dx, dw, db) of y = x w^T + b; x: (T, Q) and w: (P, Q) in bf16.

    dx is bf16; dw and db are float32, and added up in no fixed order. parts: the gradient of y in
    three contiguous matrices (T, P_i), each P_i a multiple of PART.
    """
    T, Q = x.shape
    P = w.size(0)
    dx = torch.empty_like(x)
    launch_gemm("linear_n_major", parts, w, dx)
    dw = x.new_zeros(P, Q, dtype=torch.float32)
    db = x.new_zeros(P, dtype=torch.float32)
    clusters = sm_count(x.device) // CLUSTER
    tiles = -(-P // PART) * -(-Q // (CLUSTER * BN))
    maps = [tensor_map(part, BK // CLUSTER, BOX_COLUMNS) for part in parts]
    maps.append(tensor_map(x, BK, BOX_COLUMNS))
    launch(
        "wgrad",
        x.device.index,
        clusters,
        maps=maps,
        tensors=[dw, db],
        numbers=[P, Q, T, *offsets(parts), unit_k_tiles(tiles, -(-T // BK), clusters)],
    )
    return dx, dw, db


@functools.cache
def unit_k_tiles(tiles, k_tiles, clusters):
    """How many k-tiles of a tile are a unit of hopper_wgrad's work, for it to end soonest."""

    def time(splits):  # of the busiest cluster, in k-tiles; to add a unit to dw takes about two
        units = -(-tiles * splits // clusters)
        return units * (-(-k_tiles // splits) + 2)

    splits = min(range(1, 17), key=time)
    return -(-k_tiles // splits)


def launch_gemm(
    kernel,
    parts,
    b,
    out,
    *,
    saved=None,
    bias=None,
    shifts=None,
    sums=None,
    vocab_size=0,
):
    """Launches hopper_gemm on a: (M, K) and b: (N, K), or (K, N) for a kernel with N_MAJOR.

    parts: [a], or the three matrices that stand side by side in a. out: (M, N), or None. The others
    belong to the epilogue of the kernel, whose caller describes them. saved: (M, N), bias: (N,),
    shifts: (M,); sums: by blocks of rows or columns, in float32.
    """
    ensure_context(b.device.index)
    M = parts[0].size(0)
    if N_MAJOR in KERNELS[kernel]:
        K, N = b.shape
        b_map = tensor_map(b, BK // CLUSTER, BOX_COLUMNS)
    else:
        N, K = b.shape
        b_map = tensor_map(b, BN // CLUSTER, BK)
    assert sum(part.size(1) for part in parts) == K, f"a has other columns than b's {K} rows"
    a_maps = [tensor_map(part, BM, BK) for part in parts]
    if len(parts) == 1:
        a_maps *= 3  # as many as the kernel takes; it reads the first
    # a map that the kernel takes and does not use, where it has no such operand
    out_map = saved_map = b_map
    if out is not None:
        out_map = tensor_map(out, 32, CHUNK)
    if saved is not None:
        saved_map = tensor_map(saved, 32, CHUNK)
    tiles = cluster_rows(parts[0]) // (CLUSTER * BM) * -(-N // BN)
    launch(
        kernel,
        b.device.index,
        clusters=min(sm_count(b.device) // CLUSTER, tiles),
        maps=[*a_maps, b_map, out_map, saved_map],
        tensors=[bias, shifts, sums],
        numbers=[M, N, K, *offsets(parts), vocab_size, out is not None],
    )


def cluster_rows(a):
    """a's rows, rounded up to whole tiles of a cluster."""
    return -(-a.size(0) // (CLUSTER * BM)) * CLUSTER * BM


def offsets(parts):
    """The columns at which the second and the third part begin; with a single part, its end."""
    widths = [part.size(1) for part in parts]
    return widths[0], sum(widths[:2])


@functools.cache
def sm_count(device):
    """Streaming multiprocessors of a torch.device; 1 of a CPU, for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(kernel, device, clusters, maps, tensors, numbers):
    """Launches a kernel on the device's current stream; device: its index.

    The kernel's parameters are, in this order, `maps`, `tensors` (None: a null pointer) and
    `numbers`, 32 bits without a sign each.
    """
    arguments = list(maps)
    for x in tensors:
        arguments.append(ctypes.c_void_p(None if x is None else x.data_ptr()))
    arguments += map(ctypes.c_uint32, numbers)
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    grid = CLUSTER * clusters, 1, 1
    block = THREADS, 1, 1
    call(
        driver(), "cuLaunchKernel", loaded(kernel, device), *grid, *block,
        SHARED_BYTES[KERNELS[kernel][0]], stream, addresses, None,
    )  # fmt: skip


def tensor_map(x, rows, columns):
    """A CUtensorMap, TMA's descriptor of a matrix, for boxes of rows x columns.

    They lie in shared memory with the 128-byte swizzle.
    """
    assert takes(x) and x.dim() == 2, f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
    memory = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    sizes = (ctypes.c_uint64 * 2)(x.size(1), x.size(0))
    stride = ctypes.c_uint64(x.stride(0) * 2)
    box = (ctypes.c_uint32 * 2)(columns, rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    bf16, no_interleave, swizzle_128, promote_256, fill_zeros = 9, 0, 3, 3, 0
    call(
        driver(), "cuTensorMapEncodeTiled", aligned, bf16, 2, ctypes.c_void_p(x.data_ptr()), sizes,
        ctypes.byref(stride), box, steps, no_interleave, swizzle_128, promote_256, fill_zeros,
    )  # fmt: skip
    return aligned


def ensure_context(device):
    """Makes the GPU's primary context current in a thread that has none, as some of autograd's."""
    context = ctypes.c_void_p()
    call(driver(), "cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        call(driver(), "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call(driver(), "cuCtxSetCurrent", context)


def call(lib, function, *arguments):
    if status := getattr(lib, function)(*arguments):
        raise RuntimeError(f"{function} failed with status {status}")


@functools.cache
def driver():
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def nvrtc():
    """NVRTC from PyTorch's packages or else from the system; OSError where there is none."""
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    packaged = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    if packaged:
        name = str(packaged[0])
    return ctypes.CDLL(name)


@functools.cache
def loaded(kernel, device):
    """The kernel's CUfunction on that GPU."""
    name = KERNELS[kernel][0]
    module = ctypes.c_void_p()
    call(driver(), "cuModuleLoadData", ctypes.byref(module), compiling()[kernel].result())
    function = ctypes.c_void_p()
    call(driver(), "cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    max_dynamic_shared_bytes = 8
    call(driver(), "cuFuncSetAttribute", function, max_dynamic_shared_bytes, SHARED_BYTES[name])
    return function


@functools.cache
def compiling():
    """{kernel: future of its cubin}; starts to compile all, in threads, beside torch.compile."""
    threads = ThreadPoolExecutor(len(KERNELS))
    cubins = {kernel: threads.submit(compiled, kernel) for kernel in KERNELS}
    threads.shutdown(wait=False)
    return cubins


def compiled(kernel):
    """The kernel's machine code for sm_90a, a cubin; a RuntimeError has the compiler's log."""
    name, *definitions = KERNELS[kernel]
    file = FOLDER / f"{name}.cu"
    headers = (ctypes.c_char_p * 1)(HEADER.encode())
    include_names = (ctypes.c_char_p * 1)(b"hopper.cuh")
    program = ctypes.c_void_p()
    call(
        nvrtc(), "nvrtcCreateProgram", ctypes.byref(program), file.read_bytes(),
        file.name.encode(), 1, headers, include_names,
    )  # fmt: skip
    options = [b"--gpu-architecture=sm_90a"]
    options += [f"-D{definition}".encode() for definition in definitions]
    strings = (ctypes.c_char_p * len(options))(*options)
    if nvrtc().nvrtcCompileProgram(program, len(options), strings):
        raise RuntimeError(nvrtc_output(program, "ProgramLog").rstrip(b"\0").decode())
    return nvrtc_output(program, "CUBIN")


def nvrtc_output(program, what):
    size = ctypes.c_size_t()
    call(nvrtc(), f"nvrtcGet{what}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    call(nvrtc(), f"nvrtcGet{what}", program, content)
    return content.raw
