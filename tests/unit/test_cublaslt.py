"""The numbers that cuBLASLt is called with, and when its way of adding weight gradients is not taken."""

import ctypes
import os
import types

import pytest
import torch
from support.tensors import E4M3, E5M2, random_bf16

from ops import cublaslt, float8

# as in cublasLt.h, cublas_api.h and library_types.h of CUDA 12.8 and 13.0
HEADER = {
    "SUCCESS": 0,  # CUBLAS_STATUS_SUCCESS
    "COMPUTE_32F": 68,  # CUBLAS_COMPUTE_32F
    "TRANSPOSED": 1,  # CUBLAS_OP_T
    "TRANSPOSE_A": 3,  # CUBLASLT_MATMUL_DESC_TRANSA
    "A_SCALE_POINTER": 17,  # CUBLASLT_MATMUL_DESC_A_SCALE_POINTER
    "B_SCALE_POINTER": 18,  # CUBLASLT_MATMUL_DESC_B_SCALE_POINTER
    "FAST_ACCUMULATION": 25,  # CUBLASLT_MATMUL_DESC_FAST_ACCUM
    "MAX_WORKSPACE_BYTES": 1,  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
    "MIN_ALIGNMENTS": (5, 6, 7, 8),  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES to _D_BYTES
    # CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2
    "DATA_TYPES": {torch.float32: 0, torch.bfloat16: 14, E4M3: 28, E5M2: 29},
}
# cublasLtMatmulHeuristicResult_t: uint64_t[8], size_t, an enum, float, int[4]
OFFSETS = {"configuration": 0, "workspace_bytes": 64, "state": 72, "waves": 76, "reserved": 80}
ARGUMENTS = {  # of each function, how many
    **{"Create": 1, "MatmulDescCreate": 3, "MatmulDescSetAttribute": 4, "MatrixLayoutCreate": 5},
    **{"MatmulPreferenceCreate": 1, "MatmulPreferenceSetAttribute": 4, "MatmulPreferenceDestroy": 1},
    **{"MatmulAlgoGetHeuristic": 10, "Matmul": 16},
}


CUDA = torch.device("cuda", 0)


def gpu_tensor(address=256, dtype=torch.float32, contiguous=True):
    """What `unsuited` asks a tensor on a GPU."""
    about = {"data_ptr": lambda: address, "is_contiguous": lambda: contiguous}
    return types.SimpleNamespace(is_cuda=True, device=CUDA, dtype=dtype, **about)


@pytest.fixture(autouse=True)
def nothing_remembered():
    cached = (cublaslt.library, cublaslt.unavailable, cublaslt._plan)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def operands(N=32, K=48, M=64):
    dy, x = float8.quantize(random_bf16(M, N), E5M2), float8.quantize(random_bf16(M, K), E4M3)
    return dy.columns, x.columns, dy.inverse_scale, x.inverse_scale


# --- the numbers of the headers ---


def test_constants_layouts_and_functions_are_those_of_the_headers():
    assert {name: getattr(cublaslt, name) for name in HEADER} == HEADER
    assert {name: getattr(cublaslt.Algorithm, name).offset for name in OFFSETS} == OFFSETS
    assert ctypes.sizeof(cublaslt.Algorithm) == 96
    found = {name.removeprefix("cublasLt"): len(types) for name, types in cublaslt.SIGNATURES.items()}
    assert found == ARGUMENTS


# --- algorithms ---


@pytest.fixture
def offered(monkeypatch):
    """The states of the algorithms that the library finds."""
    states = []

    def find(handle, matmul, a, b, c, d, preference, count, results, found):
        for state in states[:count]:
            results._obj.state = state
        found._obj.value = min(count, len(states))

    functions = {name: lambda *arguments: None for name in cublaslt.SIGNATURES}
    functions["cublasLtMatmulAlgoGetHeuristic"] = find
    monkeypatch.setattr(cublaslt, "library", lambda: types.SimpleNamespace(**functions))
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    return states


@pytest.mark.parametrize("states", [[], [15]])
def test_a_shape_without_an_algorithm_is_unavailable(offered, states):
    offered += states
    product = cublaslt.define((64, 32, 16), (E4M3, E4M3, torch.float32))
    with pytest.raises(cublaslt.Unavailable, match="no algorithm for this shape"):
        cublaslt.find_algorithm(product, 0)


# --- when it is not used ---


def test_a_torch_without_cuda_or_one_that_has_not_loaded_the_library_is_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(cublaslt.Unavailable, match="this PyTorch has no CUDA"):
        cublaslt.library()
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    modes = []

    def open_library(name, mode):
        modes.append(mode)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    with pytest.raises(cublaslt.Unavailable, match=r"PyTorch has not loaded libcublasLt\.so\.99"):
        cublaslt.library()
    assert modes and all(mode & os.RTLD_NOLOAD for mode in modes), "and it is not loaded"


@pytest.mark.parametrize(
    "tensors, reason",
    [
        ([gpu_tensor()], None),
        ([gpu_tensor(16), gpu_tensor(32, E5M2), gpu_tensor(48, E4M3)], None),
        ([gpu_tensor(4)], "it is not aligned to 16 bytes"),
        ([gpu_tensor(), gpu_tensor(24, E5M2)], "it is not aligned to 16 bytes"),
        ([gpu_tensor(dtype=torch.bfloat16)], "it is bfloat16, not float32"),
        ([gpu_tensor(contiguous=False)], "it is not contiguous"),
        ([torch.zeros(16, 16)], "it is on cpu, cuBLASLt is for CUDA"),
    ],
)
def test_a_sum_that_the_matmul_cannot_add_to_has_a_reason(tensors, reason):
    assert cublaslt.unsuited(*tensors) == reason


@pytest.fixture
def small_product(monkeypatch):
    """small_product(function): what compares a small product with torch's, outside of a capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return lambda compare: monkeypatch.setattr(cublaslt, "_difference_from_torch", compare)


@pytest.mark.parametrize(
    "difference, reason",
    [(1e-5, None), (0.2, "differs from torch's by 0.2"), (float("nan"), "differs from torch's by nan")],
)
def test_wrong_results_of_a_small_product_are_a_reason(small_product, difference, reason):
    small_product(lambda device: difference)
    found = cublaslt.unavailable(CUDA)
    assert found is None if reason is None else reason in found


def test_an_error_of_the_library_is_a_reason_and_is_asked_for_once(small_product):
    calls = []

    def fail(device):
        calls.append(device)
        raise cublaslt.Unavailable("cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    small_product(fail)
    for _ in range(2):
        assert cublaslt.unavailable(CUDA) == "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED"
    assert len(calls) == 1


def test_the_comparison_is_refused_in_a_capture_which_could_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match="before the capture"):
        cublaslt.unavailable(CUDA)


def test_a_shape_without_an_algorithm_warns_once_and_leaves_the_sum(monkeypatch):
    def fail(*arguments, **keywords):
        raise cublaslt.Unavailable("cuBLASLt has no algorithm for this shape")

    monkeypatch.setattr(cublaslt, "define", fail)
    total = torch.zeros(32, 48)
    on_gpu = types.SimpleNamespace(dtype=total.dtype, device=torch.device("cuda", 0))
    with pytest.warns(UserWarning, match=r"weights \(32, 48\) from 64 tokens .* no algorithm") as warned:
        for _ in range(2):
            assert not cublaslt.add_product(*operands(), on_gpu)
    assert len(warned) == 1


# --- what runs instead ---


def test_the_operation_takes_the_matmul_where_it_can_and_a_pass_of_its_own_elsewhere(monkeypatch):
    dyt, xt, *scales = operands()
    added = []
    expected = (dyt.float() @ xt.float().t()) * scales[0] * scales[1]

    def add_product(dyt, xt, dy_inverse, x_inverse, total):
        added.append(total.shape)
        return len(added) > 1  # the first has no algorithm

    monkeypatch.setattr(cublaslt, "add_product", add_product)
    for reason, calls, ones in (("it is not aligned", 0, 1), (None, 1, 1), (None, 2, 0)):
        monkeypatch.setattr(float8, "why_own_pass", lambda *tensors, reason=reason: reason)
        total = torch.zeros(32, 48)
        float8.add_float8_weight_gradient(dyt, xt, *scales, total)
        assert len(added) == calls
        assert torch.allclose(total, ones * expected)


def test_one_line_says_what_adds_to_how_many_sums_and_why(monkeypatch):
    assert float8.describe_sums([]) == "none: autograd gets the gradients"
    cpu = [torch.zeros(16, 16)] * 2
    assert float8.describe_sums(cpu) == "2 in a pass of their own (it is on cpu, cuBLASLt is for CUDA)"
    monkeypatch.setattr(cublaslt, "unavailable", lambda device: None)
    monkeypatch.setattr(cublaslt, "version", lambda: "13.1.0")
    assert float8.describe_sums([gpu_tensor(), gpu_tensor(4), gpu_tensor()]) == (
        "2 by the matmul (cuBLASLt 13.1.0), 1 in a pass of their own (it is not aligned to 16 bytes)"
    )
