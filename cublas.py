"""cuBLASLt called directly: what PyTorch does not pass on, a GELU and its gradient in the product's epilogue, and a
choice among its algorithms, and hopper.py's, by timing where PyTorch takes its first guess.

Constants and structures: https://docs.nvidia.com/cuda/cublas, section cuBLASLt API. Every operation is one call of
`matmul`; a shape's descriptors and its fastest algorithm are kept from the first call on.
"""

import ctypes
import functools
import statistics

import torch

import hopper

CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F, SUCCESS = 68, 0
TRANSA, TRANSB, EPILOGUE, BIAS, AUX, AUX_LD = 3, 4, 7, 8, 11, 12  # attributes of a product
A_SCALE, B_SCALE, FAST_ACCUM, BIAS_TYPE = 17, 18, 25, 26
MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # of the preference
PLAIN, WITH_BIAS, GELU, DGELU, KEEP = 1, 4, 32, 64, 128  # epilogues are sums of these, but for PLAIN
WORKSPACE_BYTES = 32 * 2**20  # NVIDIA's advice for Hopper
CANDIDATES, ROUNDS = 8, 5  # algorithms timed per shape, and how often
FAST_TERMS = 4096  # in longer sums `fast` is not: their error grows


class Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library():
    """(cuBLASLt as PyTorch has loaded it, a handle); OSError where there is none."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
    lib = ctypes.PyDLL(paths.pop() if paths else f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    handle = ctypes.c_void_p()
    check(lib.cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return lib, handle


def check(status, what):
    if status != SUCCESS:
        raise RuntimeError(f"{what} failed with cuBLAS status {status}")


@functools.cache
def workspace(device, stream):
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def matmul(a, b, out, *, bias=None, gelu=None, dgelu=None, accumulate=False, scales=None, fast=False, tune=True):
    """out = a @ b (+ out), on the current stream. a: (M, K), b: (K, N), of contiguous rows or columns; out: (M, N). All
    begin at multiples of 16 bytes.

    bias: (N,), added. gelu: (M, N), receives the product with its bias, and `out` its tanh GELU. dgelu: (M, N), what
    `gelu` received: `out` is the product times the GELU's derivative there. tune: time the algorithms at the first call
    of a shape. For fp8 operands, a must have contiguous rows and b contiguous columns; scales: the two float32 scalars
    that they are multiplied with; fast: sums stay in the matrix units, which keep some 14 bits, to their end. That is
    for sums of like terms: where large ones cancel, as over the tokens of a weight's gradient, small ones are lost.
    """
    aux = gelu if dgelu is None else dgelu
    parts = WITH_BIAS * (bias is not None) + (GELU + KEEP) * (gelu is not None) + (DGELU + KEEP) * (dgelu is not None)
    key = (a.device, *a.shape, b.shape[1], a.stride(), b.stride(), a.dtype, b.dtype, out.dtype, parts or PLAIN)
    key += (accumulate, fast, None if bias is None else bias.dtype)
    plan = PLANS.get(key) or PLANS.setdefault(key, Plan(*key))
    pointers = [(BIAS, bias), (AUX, aux), *zip((A_SCALE, B_SCALE), reversed(scales or ()))]
    for attribute, tensor in pointers:
        if tensor is not None:
            plan.set(attribute, ctypes.c_uint64(tensor.data_ptr()))
    if tune and not plan.tuned:
        plan.tune(a, b, bias, torch.empty_like(out) if accumulate else out)
    plan.run(a, b, bias, out, plan.fastest)
    return out


PLANS = {}


class Plan:
    """Descriptors of one shape. cuBLAS counts in columns: it is asked for out.T = b.T @ a.T."""

    def __init__(self, device, M, K, N, a_strides, b_strides, a_type, b_type, out_type, epilogue, *options):
        lib, _ = library()
        accumulate, fast, bias_type = options
        ta, tb = (strides[1] != 1 for strides in (a_strides, b_strides))
        self.device, self.tuned, self.fastest = device, False, 0
        self.alpha, self.beta = ctypes.c_float(1), ctypes.c_float(accumulate)
        self.description = ctypes.c_void_p()
        made = lib.cublasLtMatmulDescCreate(ctypes.byref(self.description), COMPUTE_32F, CUDA_TYPES[torch.float32])
        check(made, "cublasLtMatmulDescCreate")
        self.set(TRANSA, ctypes.c_int32(tb))
        self.set(TRANSB, ctypes.c_int32(ta))
        self.set(EPILOGUE, ctypes.c_int32(epilogue))
        if bias_type:
            self.set(BIAS_TYPE, ctypes.c_int32(CUDA_TYPES[bias_type]))
        if epilogue & KEEP:
            self.set(AUX_LD, ctypes.c_int64(N))
        if fast and K <= FAST_TERMS:
            self.set(FAST_ACCUM, ctypes.c_int8(1))
        self.layouts = [
            layout(b_type, K, N, b_strides[1]) if tb else layout(b_type, N, K, b_strides[0]),
            layout(a_type, M, K, a_strides[1]) if ta else layout(a_type, K, M, a_strides[0]),
            layout(out_type, N, M, N),
        ]
        self.found = self.candidates()
        self.by_hopper = epilogue in (PLAIN, WITH_BIAS) and a_type == b_type == out_type == torch.bfloat16
        self.by_hopper &= bias_type in (None, torch.bfloat16) and not (ta or accumulate) and hopper.available(device)

    def set(self, attribute, value):
        lib, _ = library()
        size = ctypes.sizeof(value)
        status = lib.cublasLtMatmulDescSetAttribute(self.description, attribute, ctypes.byref(value), size)
        check(status, f"setting attribute {attribute}")

    def candidates(self):
        lib, handle = library()
        preference, limit = ctypes.c_void_p(), ctypes.c_uint64(WORKSPACE_BYTES)
        check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        lib.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, ctypes.byref(limit), 8)
        for operand in MIN_ALIGNMENTS:
            lib.cublasLtMatmulPreferenceSetAttribute(preference, operand, ctypes.byref(ctypes.c_uint32(16)), 4)
        found, count = (Heuristic * CANDIDATES)(), ctypes.c_int()
        la, lb, lo = self.layouts
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            handle, self.description, la, lb, lo, lo, preference, CANDIDATES, found, ctypes.byref(count)
        )
        check(status, "cublasLtMatmulAlgoGetHeuristic")
        return found[: count.value]

    def run(self, a, b, bias, out, which):  # of `found`, or behind those hopper.py's
        if self.by_hopper and which == len(self.found):
            return hopper.linear(a, b, bias, out)
        lib, handle = library()
        la, lb, lo = self.layouts
        stream = torch.cuda.current_stream(self.device).cuda_stream
        space = workspace(self.device, stream)
        status = lib.cublasLtMatmul(
            handle, self.description, ctypes.byref(self.alpha),
            ctypes.c_void_p(b.data_ptr()), la, ctypes.c_void_p(a.data_ptr()), lb, ctypes.byref(self.beta),
            ctypes.c_void_p(out.data_ptr()), lo, ctypes.c_void_p(out.data_ptr()), lo,
            ctypes.byref(self.found[which].algorithm), ctypes.c_void_p(space.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
        )  # fmt: skip
        check(status, "cublasLtMatmul")

    def tune(self, a, b, bias, out):
        self.tuned = True
        ways = range(len(self.found) + self.by_hopper)
        ways = [functools.partial(self.run, a, b, bias, out, which) for which in ways]
        self.fastest = fastest(ways, self.device)


def fastest(ways, device):
    """Index of the function that takes the GPU the least time, tried in turn, several rounds over, since the clock
    drifts with the chip's power. Those that raise a RuntimeError are left out: cuBLAS offers some that do not run.
    """
    times = {which: [] for which in range(len(ways))}
    for _ in range(ROUNDS):
        for which in list(times):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            try:
                ways[which]()
            except RuntimeError:
                del times[which]
                continue
            begin.record()
            ways[which]()
            ways[which]()
            end.record()
            times[which].append((begin, end))
    torch.cuda.synchronize(device)
    medians = {w: statistics.median(begin.elapsed_time(end) for begin, end in t) for w, t in times.items()}
    return min(medians, key=medians.get)


def layout(dtype, rows, columns, stride):
    lib, _ = library()
    made = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
    check(lib.cublasLtMatrixLayoutCreate(ctypes.byref(made), CUDA_TYPES[dtype], *sizes), "cublasLtMatrixLayoutCreate")
    return made
