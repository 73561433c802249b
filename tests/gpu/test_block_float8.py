"""fp8 in blocks on a GPU: the kernels against their plain forms, native matmuls against the emulation."""

import pytest
import torch
import torch.nn.functional as F
from support.tensors import error, random_bf16

from ops import block_float8
from ops.block_float8 import (
    add_block_weight_gradient,
    block_emulated_operand,
    block_emulated_weight,
    block_matmul,
    block_operand,
    block_weight,
    compare_with_emulation,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# (M, K, N): squares, odd numbers of blocks, K / 128 a multiple of 4 and not
SHAPES = [(512, 512, 512), (384, 640, 896), (128, 128, 128), (2048, 2048, 6144), (640, 4224, 256)]


@pytest.fixture
def native():
    major, _ = torch.cuda.get_device_capability()
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if major != 9 or cuda < (12, 9):
        pytest.skip("matmuls of blocks need compute capability 9.0 and CUDA 12.9")


# --- kernels ---


def has_fp8():
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("shape", [(128, 128), (384, 640), (256, 6144)])
def test_every_kernel_gives_the_bits_of_its_plain_form(shape):
    from support.block_operands import assert_block_kernels_equal_plain_forms

    assert_block_kernels_equal_plain_forms(shape, "cuda", fp8=has_fp8())


def test_every_bf16_amax_has_the_scale_of_the_plain_form():
    from support.block_operands import assert_kernels_equal_plain_forms, every_amax

    assert_kernels_equal_plain_forms("every amax", every_amax(), "cuda", fp8=has_fp8())


def test_the_operations_run_the_kernels_on_a_gpu_also_compiled():
    x = random_bf16(384, 640)

    def operands(x):
        return *block_operand(x * 1.7), *block_emulated_operand(x), block_emulated_weight(x)

    plain = operands(x)
    for function in (operands, torch.compile(operands, fullgraph=True)):
        for a, b in zip(function(x.cuda()), plain, strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.cpu().float(), b.float())


def test_a_captured_graph_reads_weights_that_were_written_anew():
    first, second = random_bf16(256, 384, device="cuda"), random_bf16(256, 384, std=3.0, device="cuda")
    written = block_weight(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = [part.clone() for part in written]
    block_float8.write_block_weights([second], [written])
    graph.replay()
    for copy, expected in zip(copies, block_weight(second), strict=True):
        assert torch.equal(copy.float(), expected.float())


# --- native matmuls ---


def test_the_comparison_at_the_start_finds_nothing(native):
    assert compare_with_emulation(CUDA) is None


@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
@pytest.mark.parametrize("sizes", ["alike", "by block"])
def test_the_three_native_matmuls_equal_the_emulated_ones(native, M, K, N, sizes):
    def matrix(rows, columns, std):
        made = random_bf16(rows, columns, std=std, device="cuda")
        factors = block_float8._block_sizes(rows, columns, CUDA) if sizes == "by block" else 1.0
        return (made * factors).bfloat16()

    x, dy, w = matrix(M, K, 1.0), matrix(M, N, 1e-4), matrix(N, K, 0.02)
    x8, dy8, w8 = block_operand(x), block_operand(dy), block_weight(w)
    (x_rows, x_columns), (dy_rows, dy_columns) = block_emulated_operand(x), block_emulated_operand(dy)
    weight = block_emulated_weight(w)
    total = torch.ones(N, K, device="cuda")
    add_block_weight_gradient(*dy8[2:], *x8[2:], total)
    for name, found, expected in (
        ("y", block_matmul(*x8[:2], *w8[:2], True), x_rows.float() @ weight.float().t()),
        ("dx", block_matmul(*dy8[:2], *w8[2:], True), dy_rows.float() @ weight.float()),
        ("dw", total - 1, dy_columns.float().t() @ x_columns.float()),
    ):
        assert error(found, expected) < 5e-3, name


def test_native_matmuls_in_one_compiled_graph(native):
    M, K, N = 384, 640, 896
    x, dy = random_bf16(M, K, device="cuda"), random_bf16(M, N, device="cuda")
    w8 = block_weight(random_bf16(N, K, device="cuda"))

    def results(x, dy):
        x8, dy8 = block_operand(x), block_operand(dy)
        total = torch.zeros(N, K, device="cuda")
        add_block_weight_gradient(*dy8[2:], *x8[2:], total)
        return block_matmul(*x8[:2], *w8[:2], True), block_matmul(*dy8[:2], *w8[2:], True), total

    assert all(map(torch.equal, torch.compile(results, fullgraph=True)(x, dy), results(x, dy)))


def test_torch_refuses_scales_of_squares_that_are_not_padded(native):
    x8, w8 = block_operand(random_bf16(128, 384, device="cuda")), block_weight(torch.ones(256, 384).cuda())
    unpadded = w8.inverse_scales[:3].t().contiguous().t()
    with pytest.raises((RuntimeError, ValueError)):
        F.scaled_mm(
            x8.values,
            w8.values.t(),
            x8.inverse_scales,
            F.ScalingType.BlockWise1x128,
            unpadded,
            F.ScalingType.BlockWise128x128,
        )
