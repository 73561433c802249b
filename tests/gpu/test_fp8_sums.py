"""fp8 weight gradients that the matmul adds to their sum, against torch's matmul and an addition."""

import pytest
import torch
from support.tensors import E4M3, E5M2, error, random_bf16

from ops import cublaslt, float8

pytestmark = pytest.mark.gpu

SHAPES = [(64, 96, 128), (256, 2080, 512), (4096, 2048, 4096)]  # N, K, M
# of the product: tensor cores round their sums of 128 products, and another algorithm's are others
TOLERANCE = 3e-4


def operands(N, K, M):
    dy = float8.quantize(random_bf16(M, N, device="cuda"), E5M2)
    x = float8.quantize(random_bf16(M, K, std=3.0, device="cuda"), E4M3)
    return dy.columns, x.columns, dy.inverse_scale, x.inverse_scale


def by_torch(arguments):
    dyt, xt, dy_inverse, x_inverse = arguments
    return float8.matmul(dyt, xt, dy_inverse, x_inverse, torch.float32)


def start_of(N, K):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)).cuda()


def test_the_matmul_is_what_adds_here():
    total = torch.zeros(64, 64, device="cuda")
    assert float8.why_own_pass(total) is None
    assert "1 by the matmul (cuBLASLt 1" in float8.describe_sums([total])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("times", [1, 2])
def test_it_adds_what_torchs_matmul_and_an_addition_do(shape, times):
    N, K, _ = shape
    arguments, start = operands(*shape), start_of(N, K)
    total, product = start.clone(), by_torch(arguments)
    for _ in range(times):
        assert cublaslt.add_product(*arguments, total)
    assert error(total - start, times * product) < TOLERANCE


def test_a_sum_that_is_not_aligned_gets_the_same_from_a_pass_of_its_own():
    N, K, M = SHAPES[0]
    arguments, flat = operands(N, K, M), torch.zeros(N * K + 8, device="cuda")
    total = flat[1 : 1 + N * K].view(N, K)
    assert float8.why_own_pass(total) == "it is not aligned to 16 bytes"
    float8.add_float8_weight_gradient(*arguments, total)
    assert torch.equal(total, by_torch(arguments))
    assert flat[0] == 0 and not flat[1 + N * K :].any()


def test_neighbors_in_a_flat_buffer_stay_as_they_are():
    N, K, M = SHAPES[0]
    arguments, flat = operands(N, K, M), torch.zeros(N * K + 8, device="cuda")
    total = flat[4 : 4 + N * K].view(N, K)
    assert float8.why_own_pass(total) is None
    float8.add_float8_weight_gradient(*arguments, total)
    assert error(total, by_torch(arguments)) < TOLERANCE
    assert not flat[:4].any() and not flat[4 + N * K :].any()


def test_compiled_code_adds_the_bits_of_eager_code():
    N, K, M = SHAPES[1]
    arguments = operands(N, K, M)

    def step(total, *arguments):
        float8.add_float8_weight_gradient(*arguments, total)
        return total * 2

    eager, compiled = (start_of(N, K) for _ in range(2))
    expected, found = step(eager, *arguments), torch.compile(step, fullgraph=True)(compiled, *arguments)
    assert torch.equal(compiled, eager) and torch.equal(found, expected)


def test_the_comparison_leaves_the_random_numbers_of_a_run_as_they_are():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    cublaslt.unavailable.cache_clear()
    assert cublaslt.unavailable(torch.device("cuda", torch.cuda.current_device())) is None
    assert torch.equal(torch.cuda.get_rng_state(), state)
