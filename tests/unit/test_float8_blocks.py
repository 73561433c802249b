"""fp8 in blocks: operands and weights in the layout of cuBLASLt, the three matmuls, the comparison at the
start, and the kernels in an interpreter."""

import os
import sys

import pytest
import torch
from support import warm_python
from support.tensors import error, random, random_bf16
from torch.utils.flop_counter import FlopCounterMode

from ops import block_float8
from ops.block_float8 import (
    add_block_weight_gradient,
    block_emulated_operand,
    block_emulated_weight,
    block_matmul,
    block_operand,
    block_weight,
    compare_with_emulation,
    dequantized,
)
from ops.quantization import blockwise
from ops.quantization.blockwise import ALONG_COLUMNS, SQUARE

CPU = torch.device("cpu")
M, K, N = 256, 384, 640  # K / 128 and N / 128 are no multiples of 4


def same(a, b):
    return torch.equal(a.float(), b.float())


# --- operands and weights ---


def test_an_operand_has_the_blocks_of_its_rows_and_of_its_transposes_rows():
    x = random_bf16(M, K)
    operand = block_operand(x)
    rows, columns = blockwise.quantize(x), blockwise.quantize(x.t().contiguous())
    assert same(operand.values, rows.values) and same(operand.transposed, columns.values)
    assert torch.equal(operand.inverse_scales, rows.inverse_scales)
    assert torch.equal(operand.transposed_inverse_scales, columns.inverse_scales)


def test_neighboring_scales_of_an_operand_are_those_of_neighboring_rows():
    operand = block_operand(random_bf16(M, K))
    assert operand.values.is_contiguous() and operand.transposed.is_contiguous()
    for scales, shape in ((operand[1], (M, K // 128)), (operand[3], (K, M // 128))):
        assert (scales.shape, scales.stride()) == (shape, (1, shape[0]))


def test_a_weight_has_squares_whose_scales_are_padded_to_a_multiple_of_4():
    w = random(N, K, std=0.02)
    weight, expected = block_weight(w), blockwise.quantize(w.bfloat16(), SQUARE)
    assert same(weight.values, expected.values) and same(weight.transposed, expected.values.t())
    assert weight.values.is_contiguous() and weight.transposed.is_contiguous()
    assert (weight.inverse_scales.shape, weight.inverse_scales.stride()) == ((4, 5), (1, 4))
    assert torch.equal(weight.inverse_scales[:3], expected.inverse_scales.t())
    assert not weight.inverse_scales[3:].any()
    transposed = weight.transposed_inverse_scales
    assert (transposed.shape, transposed.stride()) == ((8, 3), (1, 8))
    assert torch.equal(transposed[:5], expected.inverse_scales) and not transposed[5:].any()


def test_weights_are_written_where_they_are():
    old, new = random_bf16(N, K), random_bf16(N, K, std=3.0)
    written = block_weight(old)
    addresses = [part.data_ptr() for part in written]
    block_float8.write_block_weights([new], [written])
    assert [part.data_ptr() for part in written] == addresses
    assert all(map(same, written, block_weight(new)))


def test_emulated_operands_have_the_numbers_of_the_fp8_ones():
    x, w = random_bf16(M, K, std=1e-5), random_bf16(N, K, std=0.02)
    by_rows, by_columns = block_emulated_operand(x)
    operand, weight = block_operand(x), block_weight(w)
    assert torch.equal(by_rows, dequantized(*operand[:2]))
    assert torch.equal(by_columns.t(), dequantized(*operand[2:]))
    assert torch.equal(by_columns, blockwise.dequantize(blockwise.quantize(x, ALONG_COLUMNS)))
    assert torch.equal(block_emulated_weight(w), dequantized(*weight[:2], squares=True))
    assert torch.equal(block_emulated_weight(w).t(), dequantized(*weight[2:], squares=True))


@pytest.mark.parametrize("function", [block_operand, block_emulated_operand, block_emulated_weight])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (random_bf16(192, 128), "its height must be a multiple of 128"),
        (random_bf16(128, 192), "its width one of 128"),
        (random(128, 128), "made of bf16, not torch.float32; cast the matrix first"),
    ],
)
def test_a_matrix_that_has_no_blocks_is_an_error(function, x, message):
    with pytest.raises(ValueError, match=message):
        function(x)
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode() as mode:
        function(mode.from_tensor(x))


# --- matmuls ---


def products(x, dy, w):
    """y, dx and dw of a Linear."""
    x8, dy8, w8 = block_operand(x), block_operand(dy), block_weight(w)
    total = torch.zeros(N, K)
    add_block_weight_gradient(*dy8[2:], *x8[2:], total)
    return block_matmul(*x8[:2], *w8[:2], True), block_matmul(*dy8[:2], *w8[2:], True), total


def test_the_three_matmuls_are_those_of_emulated_operands():
    x, dy, w = random_bf16(M, K), random_bf16(M, N, std=1e-4), random_bf16(N, K, std=0.02)
    y, dx, dw = products(x, dy, w)
    (x_rows, x_columns), (dy_rows, dy_columns) = block_emulated_operand(x), block_emulated_operand(dy)
    weight = block_emulated_weight(w)
    assert y.dtype == dx.dtype == torch.bfloat16
    assert torch.equal(y, (x_rows.float() @ weight.float().t()).bfloat16())
    assert torch.equal(dx, (dy_rows.float() @ weight.float()).bfloat16())
    assert error(dw, dy_columns.float().t() @ x_columns.float()) < 1e-6
    wide = [matrix.float() for matrix in (x, dy, w)]
    for found, exact in ((y, wide[0] @ wide[2].t()), (dx, wide[1] @ wide[2]), (dw, wide[1].t() @ wide[0])):
        assert 0.03 < error(found, exact) < 0.05


def test_a_weights_gradient_is_added_to_its_sum():
    x8, dy8 = block_operand(random_bf16(M, K)), block_operand(random_bf16(M, N))
    once, twice = torch.zeros(N, K), torch.zeros(N, K)
    add_block_weight_gradient(*dy8[2:], *x8[2:], once)
    for _ in range(2):
        add_block_weight_gradient(*dy8[2:], *x8[2:], twice)
    assert once.any() and torch.equal(twice, 2 * once)


def test_matmuls_count_their_operations():
    with FlopCounterMode(display=False) as counter:
        products(random_bf16(M, K), random_bf16(M, N), random_bf16(N, K))
    assert counter.get_total_flops() == 3 * 2 * M * K * N


# --- torch.compile ---


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones():
    x8, dy8 = block_operand(random_bf16(M, K)), block_operand(random_bf16(M, N))
    w8 = block_weight(random_bf16(N, K))
    operations = torch.ops.nanomfu
    for operation, arguments in (
        (operations.block_operand, (random_bf16(M, K),)),
        (operations.emulate_block_operand, (random_bf16(M, K),)),
        (operations.emulate_block_weight, (random_bf16(M, K),)),
        (operations.block_matmul, (*x8[:2], *w8[:2], True, torch.bfloat16)),
        (operations.add_block_weight_gradient, (*dy8[2:], *x8[2:], torch.zeros(N, K))),
    ):
        torch.library.opcheck(operation.default, arguments, test_utils="test_faketensor")


def test_compiled_code_gives_the_bits_of_eager_code_in_one_graph():
    def results(x, dy, w8):
        x8, dy8 = block_operand(x * 1.7), block_operand(dy)
        total = torch.zeros(N, K)
        add_block_weight_gradient(*dy8[2:], *x8[2:], total)
        emulated = *block_emulated_operand(x), block_emulated_weight(x)
        return block_matmul(*x8[:2], *w8[:2], True), block_matmul(*dy8[:2], *w8[2:], True), total, *emulated

    arguments = random_bf16(M, K), random_bf16(M, N), block_weight(random_bf16(N, K))
    torch._dynamo.reset()  # it counts how often a function is compiled anew, also one per test
    compiled = torch.compile(results, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*arguments), results(*arguments)))


# --- the comparison at the start ---


def test_the_comparison_finds_nothing_on_a_cpu():
    assert compare_with_emulation(CPU) is None


def test_the_comparison_finds_scales_that_are_read_without_their_padding(monkeypatch):
    """What torch did before November 2025."""
    right = block_float8._block_matmul

    def wrong(a, a_inverse, b_transposed, b_inverse, squares, dtype):
        if squares:
            blocks = b_transposed.shape[1] // 128
            padded = b_inverse.t().contiguous().flatten()  # as it lies in memory
            b_inverse = padded[: b_inverse.shape[1] * blocks].view(-1, blocks).t()
        return right(a, a_inverse, b_transposed, b_inverse, squares, dtype)

    monkeypatch.setattr(block_float8, "_block_matmul", wrong)
    assert "the matmul of the forward of 384 x 256 x 640 is" in compare_with_emulation(CPU)


@pytest.mark.parametrize("field", block_float8.BlockFloat8._fields)
@pytest.mark.parametrize("name", ["block_operand", "block_weight"])
def test_the_comparison_finds_a_kernel_that_stores_wrong_numbers(name, field, monkeypatch):
    right = getattr(block_float8, name)

    def wrong(x):
        found = right(x)
        return found._replace(**{field: getattr(found, field).roll(1, 1)})

    monkeypatch.setattr(block_float8, name, wrong)
    reason = compare_with_emulation(CPU)
    assert "stores other numbers than the emulation" in reason
    assert ("weight" in reason) == (name == "block_weight")
    assert ("transposing" in reason) == ("transposed" in field)


@pytest.mark.parametrize("wrong", [1.02, torch.nan])
def test_the_comparison_finds_a_matmul_that_is_2_percent_off_or_nan(wrong, monkeypatch):
    right = block_float8._block_matmul
    monkeypatch.setattr(block_float8, "_block_matmul", lambda *arguments: right(*arguments) * wrong)
    assert "off the emulation" in compare_with_emulation(CPU)


def test_a_matmul_that_cannot_run_is_a_reason_not_an_error(monkeypatch):
    def refuses(*arguments):
        raise NotImplementedError("scaling only supported in CUDA for SM90\nC++ trace")

    monkeypatch.setattr(block_float8, "_block_matmul", refuses)
    reason = "fp8_blockwise failed: NotImplementedError: scaling only supported in CUDA for SM90"
    assert compare_with_emulation(CPU) == reason


# --- kernels ---


@pytest.mark.slow
def test_the_kernels_give_the_bits_of_the_plain_forms_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = warm_python.run(
        [sys.executable, "-m", "support.block_operands"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
