"""Matrix products by cuBLASLt, called directly for what torch.matmul lacks.

It lacks epilogues with GELU and its derivative, fp8 scales, the addition of another matrix, and a
choice of algorithm. PyTorch runs the first one that cuBLASLt's heuristic proposes; at the first
call of a shape `matmul` times the first CANDIDATES and hopper.py's kernel. Another algorithm adds
in another order, so a deterministic run takes the first one, and none that adds partial sums up in
the output.

Constants and structures: https://docs.nvidia.com/cuda/cublas, section "Using the cuBLASLt API".
"""

import ctypes
import functools
import statistics

import torch

from fast import hopper
from system.errors import UserError

# cudaDataType_t, cublasComputeType_t
TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F = 68
# CUBLASLT_MATMUL_DESC_...
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, EPILOGUE_AUX_POINTER, EPILOGUE_AUX_LD = 3, 4, 7, 8, 11, 12
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 17, 18, 25, 26
# CUBLASLT_MATMUL_PREF_...
MAX_WORKSPACE_BYTES, REDUCTION_SCHEMES = 1, 3
MIN_ALIGNMENT_BYTES = 5, 6, 7, 8  # of a, b, c and d
# CUBLASLT_REDUCTION_SCHEME_..., bits: the type in which split-K adds up its partial sums
COMPUTE_TYPE, OUTPUT_TYPE = 2, 4
# CUBLASLT_EPILOGUE_..., bits but for DEFAULT. AUX: GELU writes, or DGELU reads, the pre-activation
DEFAULT, BIAS, GELU, DGELU, AUX = 1, 4, 32, 64, 128

WORKSPACE_BYTES = 32 * 2**20  # NVIDIA's advice for Hopper
CANDIDATES = 8  # algorithms that are timed for a shape
ROUNDS = 5  # how often they are timed
FINALISTS = 4  # how many of them after the first round
FAST_TERMS = 4096  # longer sums never use fast accumulation, whose error grows with their length


class HeuristicResult(ctypes.Structure):  # cublasLtMatmulHeuristicResult_t
    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t)]
    _fields_ += [("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


@functools.cache
def library():
    """(the cuBLASLt that PyTorch has loaded, which the linker finds by its name; a handle)"""
    lib = ctypes.PyDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    handle = ctypes.c_void_p()
    hopper.call(lib, "cublasLtCreate", ctypes.byref(handle))
    return lib, handle


def call(function, *arguments):
    hopper.call(library()[0], function, *arguments)


@functools.cache
def workspace(device, stream):
    """Scratch memory of a stream's GEMMs, which run one after another."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def matmul(
    a, b, out, *, bias=None, gelu=None, dgelu=None, added=None, scales=None, fast=False, tune=True
):
    """out = a b, or a b + added, on the current stream; returns out.

    a: (M, K), b: (K, N), each with contiguous rows or columns; out: (M, N), contiguous; all begin
    at multiples of 16 bytes. added: as out, or out itself. bias: (N,), is added. gelu: (M, N),
    receives the pre-activation a b + bias, and out its tanh GELU. dgelu: (M, N), a pre-activation:
    out is a b times GELU's derivative there. tune: time the algorithms at the first call of a
    shape.

    fp8: a has contiguous rows and b contiguous columns; scales: two float32 scalars, which multiply
    a and b. fast: fast accumulation, in the tensor cores' accumulators of about 14 bits instead of
    float32. Where large terms cancel, as in a weight's gradient, which sums over all tokens, it
    loses the small ones.
    """
    epilogue = 0
    pointers = []
    if bias is not None:
        epilogue += BIAS
        pointers.append((BIAS_POINTER, bias))
    if gelu is not None:
        epilogue += GELU + AUX
        pointers.append((EPILOGUE_AUX_POINTER, gelu))
    if dgelu is not None:
        epilogue += DGELU + AUX
        pointers.append((EPILOGUE_AUX_POINTER, dgelu))
    if scales is not None:  # they change places, as the operands do: see Plan
        pointers += (B_SCALE_POINTER, scales[0]), (A_SCALE_POINTER, scales[1])
    assert a.shape[1] == b.shape[0], f"a: {tuple(a.shape)}, b: {tuple(b.shape)}"
    types = a.dtype, b.dtype, out.dtype, None if bias is None else bias.dtype
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = a.device, *a.shape, b.shape[1], a.stride(), b.stride(), types, epilogue
    key += added is not None, fast, deterministic
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = Plan(
            a, b, bias, out, epilogue=epilogue or DEFAULT, adds=added is not None, fast=fast
        )
    for attribute, tensor in pointers:
        plan.set(attribute, ctypes.c_uint64(tensor.data_ptr()))
    if tune and not plan.tuned and not deterministic:
        if added is out:  # every algorithm that is tried would add to it
            scratch = torch.empty_like(out)
            plan.tune(a, b, bias, out=scratch, added=scratch)
        else:
            plan.tune(a, b, bias, out, added)
    plan.fastest(a, b, bias, out, added)
    return out


PLANS = {}


class Plan:
    """Descriptors and algorithms of products of one shape, made from the tensors of the first.

    cuBLAS is column-major, so it is asked for out^T = b^T a^T. adds: whether there is `added`.
    ways: functions of a, b, bias, out and added, one of which is `fastest`.
    """

    def __init__(self, a, b, bias, out, *, epilogue, adds, fast):
        self.device = a.device
        self.tuned = False
        self.alpha = ctypes.c_float(1)
        self.beta = ctypes.c_float(adds)
        self.descriptor = ctypes.c_void_p()
        to = ctypes.byref(self.descriptor)
        call("cublasLtMatmulDescCreate", to, COMPUTE_32F, TYPES[torch.float32])
        self.set(TRANSA, ctypes.c_int32(not rows_contiguous(b)))
        self.set(TRANSB, ctypes.c_int32(not rows_contiguous(a)))
        self.set(EPILOGUE, ctypes.c_int32(epilogue))
        if bias is not None:
            self.set(BIAS_DATA_TYPE, ctypes.c_int32(TYPES[bias.dtype]))
        if epilogue & AUX:
            self.set(EPILOGUE_AUX_LD, ctypes.c_int64(out.size(1)))
        if fast and a.size(1) <= FAST_TERMS:
            self.set(FAST_ACCUM, ctypes.c_int8(1))
        self.layouts = layout(b), layout(a), layout(out)
        self.ways = [functools.partial(self.run, found) for found in self.heuristic()]
        if not self.ways:
            shapes = f"{tuple(a.shape)} by {tuple(b.shape)}"
            other = "--precision=bf16" if a.dtype.itemsize == 1 else "--ops=torch"
            raise UserError(
                f"cuBLASLt has no algorithm that multiplies {shapes} on this GPU; try {other}"
            )
        self.fastest = self.ways[0]
        # whether hopper.linear computes the same for operands that it takes
        self.has_hopper = epilogue in (DEFAULT, BIAS) and not adds and hopper.available(self.device)

    def set(self, attribute, value):
        arguments = self.descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)
        call("cublasLtMatmulDescSetAttribute", *arguments)

    def heuristic(self):
        """The algorithms that cuBLASLt proposes for the shape, which it thinks fastest first.

        None where it has none.
        """
        preference = ctypes.c_void_p()
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limits = [(MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))]
        limits += [(operand, ctypes.c_uint32(16)) for operand in MIN_ALIGNMENT_BYTES]
        if torch.are_deterministic_algorithms_enabled():
            limits.append((REDUCTION_SCHEMES, ctypes.c_uint32(COMPUTE_TYPE | OUTPUT_TYPE)))
        for attribute, value in limits:
            arguments = preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            call("cublasLtMatmulPreferenceSetAttribute", *arguments)
        b, a, out = self.layouts
        found = (HeuristicResult * CANDIDATES)()
        count = ctypes.c_int()
        lib, handle = library()
        lib.cublasLtMatmulAlgoGetHeuristic(  # fails where there is none: count stays 0
            handle, self.descriptor, b, a, out, out, preference, CANDIDATES, found,
            ctypes.byref(count),
        )  # fmt: skip
        return found[: count.value]

    def run(self, found, a, b, bias, out, added):
        """Runs an algorithm that the heuristic found; the descriptor has the bias."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        scratch = workspace(self.device, stream)
        _, handle = library()
        lb, la, lo = self.layouts
        algorithm = ctypes.byref(found.algorithm)
        pointer = ctypes.c_void_p
        to = pointer(out.data_ptr())
        added = to if added is None else pointer(added.data_ptr())
        call(
            "cublasLtMatmul", handle, self.descriptor,
            ctypes.byref(self.alpha), pointer(b.data_ptr()), lb, pointer(a.data_ptr()), la,
            ctypes.byref(self.beta), added, lo, to, lo, algorithm,
            pointer(scratch.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES), pointer(stream),
        )  # fmt: skip

    def tune(self, a, b, bias, out, added):
        """Finds the way that `matmul` takes from now on; writes to out."""
        if self.has_hopper and hopper.takes(a, b if rows_contiguous(b) else b.t(), bias, out):
            self.ways.append(hopper.linear)
        tried = [functools.partial(way, a, b, bias, out, added) for way in self.ways]
        self.fastest = self.ways[fastest(tried, self.device)]
        self.tuned = True


def runs(function):
    """Calls it -> whether it raised no RuntimeError; one for lack of memory is raised on."""
    try:
        function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def fastest(functions, device):
    """Index of the function that runs and takes the GPU the least time, the median of ROUNDS.

    They are timed in turn, since the clock drifts with the chip's power; after each round FINALISTS
    go on.
    """
    times = {which: [] for which, function in enumerate(functions) if runs(function)}
    if not times:
        functions[0]()  # raises its error
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    for _ in range(ROUNDS):
        events = {which: (event(), event()) for which in times}
        for which, (begin, end) in events.items():
            functions[which]()  # so that the caches hold what it leaves there
            begin.record()
            functions[which]()
            functions[which]()
            end.record()
        torch.cuda.synchronize(device)
        for which, (begin, end) in events.items():
            times[which].append(begin.elapsed_time(end))
        ranked = sorted(times, key=lambda which: statistics.median(times[which]))
        times = {which: times[which] for which in ranked[:FINALISTS]}
    return ranked[0]


def rows_contiguous(matrix):
    return matrix.stride(1) == 1


def layout(matrix):
    """Descriptor of a matrix as cuBLAS sees it: column-major, so transposed if rows are contiguous.

    cuBLAS calls the number of elements from one column to the next the leading dimension.
    """
    if rows_contiguous(matrix):
        matrix = matrix.t()
    rows, columns = matrix.shape
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(matrix.stride(1))
    descriptor = ctypes.c_void_p()
    call("cublasLtMatrixLayoutCreate", ctypes.byref(descriptor), TYPES[matrix.dtype], *sizes)
    return descriptor
