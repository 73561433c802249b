"""Calls cuBLASLt, as torch does, for fp8 products that are added to an fp32 sum.

Why
    A weight's gradient is summed over micro-steps in fp32. torch._scaled_mm only writes a new tensor, which
    another pass reads and adds: 16 bytes of traffic for each weight. With beta = 1, the matmul adds as it
    writes: 8 bytes.
How
    ctypes calls the library that torch has already loaded, so nothing is installed or compiled. The numbers
    below are from cublasLt.h, cublas_api.h and library_types.h, and the same in CUDA 12 and 13. The first use
    on a device compares a small product with torch's (`unavailable`).
    Which algorithm runs depends on shape, device and the library's version, but not on addresses:
    cuBLASLt is told that tensors are aligned to 16 bytes and no more. So the same run gives the same bits.
    An algorithm's workspace is a tensor of each call. torch's allocator then keeps streams and CUDA Graphs
    apart, and most algorithms need none.
Letters
    cuBLASLt stores matrices column by column. To it, a tensor (R, C) is a matrix (C, R) whose leading
    dimension is C. A `Product` is D (m, n) = A (m, k) B (k, n) + D in its letters.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from ctypes import POINTER, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

import torch

SUCCESS = 0
COMPUTE_32F = 68
TRANSPOSED = 1
DATA_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
TRANSPOSE_A, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION = 3, 17, 18, 25  # of a matmul
MAX_WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # of a preference; the alignments of A, B, C and D

ALIGNMENT = 16  # bytes; the copy engine of Hopper's kernels needs it
WORKSPACE_BYTES = 32 * 2**20  # at most; what NVIDIA recommends for Hopper
TOLERANCE = 1e-3  # two algorithms differ by about 1e-4, a wrong layout or scale by about 1


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first field is a cublasLtMatmulAlgo_t."""

    _fields_ = [
        ("configuration", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


SIGNATURES = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    # handle, matmul, A, B, C, D, preference, how many, results, how many were found
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(Algorithm), POINTER(c_int)),
    # handle, matmul, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
    # workspace, its size, stream
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class Unavailable(Exception):
    """cuBLASLt cannot do this here; the message says why."""


# --- the library ---


@functools.cache
def library() -> ctypes.CDLL:
    """The copy that torch has loaded, with functions that raise Unavailable if they fail."""
    if torch.version.cuda is None:
        raise Unavailable("this PyTorch has no CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        raise Unavailable(f"PyTorch has not loaded {name}") from None
    loaded.cublasLtGetVersion.restype = c_size_t
    loaded.cublasLtGetStatusName.restype = ctypes.c_char_p

    def check(status, function, arguments):
        if status != SUCCESS:
            raise Unavailable(f"{function.__name__}: {loaded.cublasLtGetStatusName(status).decode()}")

    for function_name, types in SIGNATURES.items():
        function = getattr(loaded, function_name)
        function.argtypes, function.restype, function.errcheck = types, c_int, check
    return loaded


def version() -> str:
    number = library().cublasLtGetVersion()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        library().cublasLtCreate(byref(handle))
    return handle


# --- a product ---


class Product(NamedTuple):
    """D (m, n) = A (m, k) B (k, n) + D, for tensors at any address. Never freed: shapes are few."""

    matmul: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]  # A, B, D
    lock: threading.Lock  # the scales' addresses are written into `matmul` before each call

    def set(self, name: int, value) -> None:
        library().cublasLtMatmulDescSetAttribute(self.matmul, name, byref(value), ctypes.sizeof(value))

    def set_scales(self, a_scale: torch.Tensor, b_scale: torch.Tensor) -> None:
        """The fp32 scalars on the device that A and B are multiplied by."""
        self.set(A_SCALE_POINTER, c_void_p(a_scale.data_ptr()))
        self.set(B_SCALE_POINTER, c_void_p(b_scale.data_ptr()))


def define(size: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> Product:
    """size (m, n, k); dtypes of A, B and D. A is stored as (k, m), and B as (k, n), because Hopper's fp8
    tensor cores take nothing else. Slow accumulation, as gradients need it."""
    (m, n, k), (of_a, of_b, of_d) = size, dtypes
    matmul = c_void_p()
    library().cublasLtMatmulDescCreate(byref(matmul), COMPUTE_32F, DATA_TYPES[torch.float32])
    layouts = _layout(of_a, k, m), _layout(of_b, k, n), _layout(of_d, m, n)
    product = Product(matmul, layouts, threading.Lock())
    product.set(TRANSPOSE_A, c_int(TRANSPOSED))
    product.set(FAST_ACCUMULATION, c_int8(False))
    return product


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Of a matrix whose columns follow one another."""
    result = c_void_p()
    library().cublasLtMatrixLayoutCreate(byref(result), DATA_TYPES[dtype], rows, columns, rows)
    return result


def find_algorithm(product: Product, device: int) -> Algorithm:
    """The one that cuBLASLt expects to be fastest. Raises Unavailable if there is none."""
    preference, found, result = c_void_p(), c_int(), Algorithm()
    a, b, d = product.layouts
    library().cublasLtMatmulPreferenceCreate(byref(preference))
    try:
        limits = [(name, c_uint32(ALIGNMENT)) for name in MIN_ALIGNMENTS]
        for name, value in [(MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES)), *limits]:
            size = ctypes.sizeof(value)
            library().cublasLtMatmulPreferenceSetAttribute(preference, name, byref(value), size)
        library().cublasLtMatmulAlgoGetHeuristic(
            _handle(device), product.matmul, a, b, d, d, preference, 1, byref(result), byref(found)
        )
    finally:
        library().cublasLtMatmulPreferenceDestroy(preference)
    if not found.value or result.state != SUCCESS:
        raise Unavailable("cuBLASLt has no algorithm for this shape")
    return result


# --- sums of weight gradients ---


def add_product(
    dyt: torch.Tensor,
    xt: torch.Tensor,
    dy_inverse: torch.Tensor,
    x_inverse: torch.Tensor,
    total: torch.Tensor,
) -> bool:
    """total (N, K) fp32 += dy^T x, of dy^T (N, M) and x^T (K, M) in fp8. False if there is no algorithm for
    this shape; then total is as it was. For tensors that `unsuited` and `unavailable` accept."""
    (N, M), K = dyt.shape, xt.shape[0]
    plan = _plan((K, N, M), (xt.dtype, dyt.dtype, total.dtype), total.device.index)
    if plan is None:
        return False
    product, algorithm = plan
    (of_a, of_b, of_d), one = product.layouts, c_float(1.0)
    with product.lock, torch.cuda.device(total.device):
        product.set_scales(x_inverse, dy_inverse)
        workspace = torch.empty(algorithm.workspace_bytes, dtype=torch.uint8, device=total.device)
        library().cublasLtMatmul(
            *(_handle(total.device.index), product.matmul),
            *(byref(one), xt.data_ptr(), of_a, dyt.data_ptr(), of_b),
            *(byref(one), total.data_ptr(), of_d, total.data_ptr(), of_d),
            *(byref(algorithm), workspace.data_ptr(), workspace.numel()),
            torch.cuda.current_stream().cuda_stream,
        )
    return True


@functools.cache
def _plan(
    size: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], device: int
) -> tuple[Product, Algorithm] | None:
    try:
        product = define(size, dtypes)
        any_scale = torch.empty((), device=f"cuda:{device}")  # the algorithm depends on there being scales
        product.set_scales(any_scale, any_scale)
        return product, find_algorithm(product, device)
    except Unavailable as error:
        K, N, M = size
        warnings.warn(
            f"gradients of weights ({N}, {K}) from {M} tokens are added in a pass of their own: {error}",
            stacklevel=2,
        )
        return None


def unsuited(total: torch.Tensor, *operands: torch.Tensor) -> str | None:
    """Why add_product cannot take these tensors; None if it can."""
    if not total.is_cuda:
        return f"it is on {total.device.type}, cuBLASLt is for CUDA"
    if total.dtype != torch.float32:
        return f"it is {str(total.dtype).removeprefix('torch.')}, not float32"
    if not all(tensor.is_contiguous() for tensor in (total, *operands)):
        return "it is not contiguous"
    if any(tensor.data_ptr() % ALIGNMENT for tensor in (total, *operands)):
        return f"it is not aligned to {ALIGNMENT} bytes"
    return None


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why add_product cannot be used on this GPU; None if it can. Its first call on a device compares a small
    product with torch's and waits for it, which a capture of a CUDA Graph does not allow."""
    assert not torch.cuda.is_current_stream_capturing(), "compare before the capture"
    try:
        difference = _difference_from_torch(device)  # sync point, once
    except Exception as error:  # a library that is called by address may fail in any way; the user is told
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None if difference < TOLERANCE else f"a small product differs from torch's by {difference:.3g}"


def _difference_from_torch(device: torch.device) -> float:
    """How much add_product differs from torch._scaled_mm and an addition, as a share of the product."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    N, K, M = 128, 192, 256  # three sizes, so that no two can be swapped unseen

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    dyt, xt, total = random(N, M).to(torch.float8_e5m2), random(K, M).to(torch.float8_e4m3fn), random(N, K)
    dy_inverse, x_inverse = torch.tensor(0.5, device=device), torch.tensor(3.0, device=device)
    product = torch._scaled_mm(
        dyt, xt.t(), dy_inverse, x_inverse, out_dtype=torch.float32, use_fast_accum=False
    )
    expected = total + product
    if not add_product(dyt, xt, dy_inverse, x_inverse, total):
        raise Unavailable("cuBLASLt has no algorithm for a small product")
    return float((total - expected).norm() / product.norm())
