"""The kernels of low precision against their plain forms: fp8 by the scale of now and of the past, sums that
a matmul in fp8 adds to, emulated MXFP8 and NVFP4; eager and compiled."""

import pytest
import torch
from support import fake_norm
from support.all_recipes import BLOCKS, RECIPES, use_recipe_in
from support.tensors import (
    E4M3,
    E5M2,
    assert_requantized_as_each_alone,
    error,
    fp8_linear,
    random,
    random_bf16,
)

from model import Block, rotary_angles
from model_config import model_config
from ops import cublaslt, float8
from ops.activation import Activation, no_delta
from ops.float8_recipe import compare_float8
from ops.heads import Rotary, split_heads
from ops.losses import cross_entropy, cross_entropy_float8
from ops.norm import RMSNorm
from ops.quantization.random_bits import bf16_stochastically, random_bits, random_key
from ops.swiglu import swiglu_backward, swiglu_backward_float8, swiglu_with_amax
from recipes.delayed_casts import delayed_quantize, delayed_requantize, delayed_swiglu_backward
from recipes.formats import delayed_scaling
from recipes.formats.hadamard import random_hadamard
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import nvfp4_amaxes, nvfp4_operand, nvfp4_weight
from training.hardware.attention_kernels import _sdpa_default
from training.hardware.capability import capability

pytestmark = pytest.mark.gpu


def assert_same_cast(ours, plain):
    assert ours.inverse_scale.item() == plain.inverse_scale.item()
    for a, b in zip(ours[:2], plain[:2], strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 64), (300, 6144), (301, 96), (2048, 2080)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_cast_kernel_gives_the_bits_of_the_plain_form(shape, dtype):
    x = random_bf16(*shape, std=3.0)
    assert_same_cast(float8.quantize(x.cuda(), dtype), float8.quantize(x, dtype))


def test_weights_that_are_quantized_together_have_scales_of_their_own():
    assert_requantized_as_each_alone("cuda")


@pytest.mark.parametrize("shape", [(64, 48), (272, 1056), (2048, 50304)])
def test_the_loss_writes_the_bits_that_a_cast_of_its_gradient_gives(shape):
    logits = random_bf16(*shape, std=3.0, device="cuda")
    targets = torch.randint(0, shape[1], shape[:1], device="cuda")
    targets[::5] = -1  # not counted
    losses, fused = cross_entropy_float8(logits.clone(), targets, E5M2)
    assert torch.equal(losses, cross_entropy(logits, targets, True))
    apart = float8.quantize(logits, E5M2, torch.ones((), device="cuda"))  # by now, they are their gradient
    assert_same_cast(fused, apart)


@pytest.mark.parametrize("shape", [(128, 64), (272, 1056), (64, 6144)])
def test_the_swiglu_kernels_know_their_largest_magnitude_and_write_the_bits_of_a_cast(shape):
    x, dh = random_bf16(shape[0], 2 * shape[1]), random_bf16(*shape)
    h, amax = swiglu_with_amax(x.cuda())
    plain, plain_amax = swiglu_with_amax(x)
    assert error(h.cpu(), plain) < 3e-3
    assert amax.shape == plain_amax.shape
    assert amax.amax() == h.abs().amax()
    dx = swiglu_backward(x.cuda(), dh.cuda())
    assert error(dx.cpu(), swiglu_backward(x, dh)) < 3e-3
    assert_same_cast(swiglu_backward_float8(x.cuda(), dh.cuda(), E5M2), float8.quantize(dx, E5M2))


@pytest.mark.parametrize("norm", [True, False])
def test_an_fp8_linear_gets_the_amax_of_its_gradient_from_the_heads_kernel(norm):
    B, T, C, H, K, D = 2, 64, 96, 4, 2, 32
    layer = fp8_linear(random_bf16((H + 2 * K) * D, C, std=0.1, device="cuda"))
    norms = [RMSNorm(D, 1e-6).cuda() if norm else None for _ in "qk"]
    for module in filter(None, norms):
        module.weight.data = 1 + 0.3 * random_bf16(D, device="cuda").float()
    rotary = Rotary(*(t.cuda() for t in rotary_angles(T, D, 1e4)))
    outputs = [random_bf16(B, T, heads, D, device="cuda") for heads in (H, K, K)]

    def run(function):
        x = random_bf16(B, T, C, device="cuda").requires_grad_()
        layer.weight_grad = torch.zeros(layer.weight.shape, device="cuda")
        parts = function(x)
        loss = sum((p * o).float().sum() for p, o in zip(parts, outputs, strict=True))
        leaves = [x, *(module.weight for module in norms if module)]
        return [*parts, *torch.autograd.grad(loss, leaves), layer.weight_grad]

    handed = run(lambda x: split_heads(layer.activation(x), H, K, rotary, *norms))
    found = run(lambda x: split_heads(Activation(layer(x)), H, K, rotary, *norms))
    for a, b in zip(handed, found, strict=True):
        assert error(a, b) < 1e-6


def test_an_fp8_matmul_equals_its_plain_form():
    a, b = float8.quantize(random_bf16(256, 128), E5M2), float8.quantize(random_bf16(64, 128), E4M3)
    plain = float8.matmul(a.rows, b.rows, a.inverse_scale, b.inverse_scale)
    moved = [t.cuda() for t in (a.rows, b.rows, a.inverse_scale, b.inverse_scale)]
    assert error(float8.matmul(*moved).cpu(), plain) < 4e-3


def test_a_norms_backward_hands_on_the_amax_that_a_pass_over_the_gradient_finds(monkeypatch):
    """Two blocks in fp8 give the same bits with and without it, eager and compiled. Attention is SDPA's:
    torch.compile chooses by time how to sum a softmax of its own, and another order gives other bits."""
    config = model_config("qwen3", n_layer=1, n_head=4, n_embd=256, d_ff=512, vocab_size=96, block_size=64)
    blocks = [Block(config, _sdpa_default).cuda() for _ in range(2)]
    for index, (name, parameter) in enumerate(
        (n, p) for block in blocks for n, p in block.named_parameters()
    ):
        generator = torch.Generator("cuda").manual_seed(index)
        torch.nn.init.normal_(parameter, float("norm" in name), 0.05, generator=generator)
    for block in blocks:
        use_recipe_in(block, "fp8_tensorwise")
    rotary = rotary_angles(64, config.head_dim, 1e4, "cuda")
    x, above = (random_bf16(2, 64, 256, device="cuda", std=std) for std in (1.0, 0.01))

    def results(hands: bool, wrap=lambda module: module):
        fake_norm.let_layers_ask(monkeypatch, *blocks, layers_tell=hands)
        start = x.clone().requires_grad_()
        total, delta = start, no_delta(start)
        for block in blocks:
            total, delta = wrap(block)(total, delta, rotary)
            assert (delta[1] is not None) == hands
        final = blocks[0].attn_norm.add(total, delta)[0]
        parameters = [p for block in blocks for p in block.parameters()]
        return [final, *torch.autograd.grad(final, [start, *parameters], above)]

    def compiled(module):
        return torch.compile(module, fullgraph=True, dynamic=False)

    for wrap in (lambda module: module, compiled):
        for a, b in zip(results(True, wrap), results(False, wrap), strict=True):
            assert torch.equal(a, b)


def same(a, b):
    return all(torch.equal(x.cpu().float(), y.cpu().float()) for x, y in zip(a, b, strict=True))


def test_every_cast_gives_the_bits_of_the_plain_form_and_the_backward_of_swiglu_those_of_a_cast():
    from support import fp8_delayed_casts as casts

    for shape in [(128, 64), (300, 6144), (301, 96), (640, 2080)]:
        casts.assert_delayed_kernels_equal_plain_forms(shape, "cuda")
    for shape in [(128, 64), (272, 1056), (64, 6144)]:
        casts.assert_swiglu_kernels_equal_a_cast(shape, "cuda")


def test_delayed_weights_are_written_where_they_are():
    matrices = [random(300, 6144, device="cuda"), random_bf16(64, 48, std=0.02, device="cuda")]
    into = [float8.empty_like(matrix) for matrix in matrices]
    scales, amaxes = torch.tensor([0.0, 512.0], device="cuda"), torch.zeros(2, device="cuda")
    delayed_requantize(matrices, into, scales, amaxes)
    for written, matrix, scale, amax in zip(into, matrices, scales, amaxes, strict=True):
        expected = torch.zeros((), device="cuda")
        assert same(written, delayed_quantize(matrix.bfloat16(), scale, expected, E4M3))
        assert amax == expected


def test_compiled_code_updates_the_states_of_several_tensors_in_one_graph():
    def step(x, dh, scales, amaxes):
        first = delayed_quantize(x * 1.7, scales[0], amaxes[0], E4M3)
        second = delayed_quantize(dh, scales[1], amaxes[1], E5M2, dh.abs().amax(-1))
        return *first, *second, *delayed_swiglu_backward(x, dh, scales[2], amaxes[2], E5M2)

    torch._dynamo.reset()
    x, dh = random_bf16(256, 2048, device="cuda"), random_bf16(256, 1024, device="cuda")
    mapped_to, results = torch.tensor([448.0, 57344.0, 57344.0], device="cuda"), []
    for function in (torch.compile(step, fullgraph=True), step):
        scale, history, amax = (torch.zeros(shape, device="cuda") for shape in ((3,), (4, 3), (3,)))
        for factor in (1.0, 2.0):
            found = function(x * factor, dh, scale.unbind(), amax.unbind())
            delayed_scaling.update_all(scale, history, amax, mapped_to)
        results.append((*found, scale, history))
    assert same(*results) and results[0][-2].all()


def test_the_update_in_place_gives_the_bits_of_a_cpu():
    here = random(400).abs(), random(1024, 400).abs(), random(400).abs(), torch.full((400,), 448.0)
    here[2][3:5], here[0][7] = torch.tensor([0.0, torch.inf]), 0
    there = [part.cuda() for part in here]
    for _ in range(2):
        delayed_scaling.update_all(*here)
        delayed_scaling.update_all(*there)
        assert same(there, here)
        here[2].fill_(2.0)
        there[2].fill_(2.0)


SHAPES = [(64, 96, 128), (256, 2080, 512), (4096, 2048, 4096)]  # N, K, M
# of the product: tensor cores round their sums of 128 products, and another algorithm's are others
TOLERANCE = 3e-4


def quantized(N, K, M):
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
    arguments, start = quantized(*shape), start_of(N, K)
    total, product = start.clone(), by_torch(arguments)
    for _ in range(times):
        assert cublaslt.add_product(*arguments, total)
    assert error(total - start, times * product) < TOLERANCE


@pytest.mark.parametrize(("begin", "reason"), [(1, "it is not aligned to 16 bytes"), (4, None)])
def test_a_sum_in_a_flat_buffer_leaves_its_neighbors_and_one_that_is_not_aligned_has_a_pass_of_its_own(
    begin, reason
):
    N, K, M = SHAPES[0]
    arguments, flat = quantized(N, K, M), torch.zeros(N * K + 8, device="cuda")
    total = flat[begin : begin + N * K].view(N, K)
    assert float8.why_own_pass(total) == reason
    float8.add_float8_weight_gradient(*arguments, total)
    assert error(total, by_torch(arguments)) <= (0 if reason else TOLERANCE)
    assert not flat[:begin].any() and not flat[begin + N * K :].any()


def test_compiled_code_adds_the_bits_of_eager_code():
    N, K, M = SHAPES[1]
    arguments = quantized(N, K, M)

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


KEY = random_key(1337, iteration=20, micro_step=3, tensor=17)


@pytest.mark.parametrize("shape", [(32, 32), (96, 544), (160, 1056), (256, 6144)])
def test_every_kernel_of_blocks_gives_the_bits_of_its_plain_form(shape):
    from support.emulated_operands import assert_kernels_equal_plain_forms

    assert_kernels_equal_plain_forms(shape, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_comparison_at_the_start_finds_nothing(recipe):
    kind, device = RECIPES[recipe], torch.device("cuda")
    if kind.support(capability(device)) is None:
        pytest.skip("needs fp8")
    found = kind.compare_casts(device) if recipe in BLOCKS else compare_float8(device, 50_304)
    assert found is None


def test_a_matrix_may_begin_between_two_words_of_memory():
    x = random_bf16(1, 64 * 96 + 1, device="cuda")[0, 1:].view(64, 96)
    assert x.data_ptr() % 4 == 2

    def operands(x):
        amaxes = nvfp4_amaxes(x)
        weight = nvfp4_weight(x, amaxes[0])
        return amaxes, weight, *mxfp8_operand(x), *nvfp4_operand(x, amaxes)

    for a, b in zip(operands(x), operands(x.clone()), strict=True):
        assert torch.equal(a, b)


def test_the_operations_run_the_kernels_on_a_gpu_also_compiled():
    x = random_bf16(96, 544)

    def operands(x, key):
        x = x * 1.7  # torch.compile would keep more digits of it than bf16 has
        amaxes = nvfp4_amaxes(x)
        weight = nvfp4_weight(x, amaxes[0])
        return *mxfp8_operand(x), *nvfp4_operand(x, amaxes, key), weight

    plain = operands(x, KEY)
    for function in (operands, torch.compile(operands, fullgraph=True)):
        for a, b in zip(function(x.cuda(), KEY.cuda()), plain, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("function", ["hadamard", "bits", "bf16"])
def test_a_plain_form_gives_the_bits_of_a_cpu_on_a_gpu(function):
    x, fp32 = random_bf16(128, 256), random(128, 256)
    functions = {
        "hadamard": lambda x, fp32, key: (random_hadamard(x, 0), random_hadamard(x, 1)),
        "bits": lambda x, fp32, key: (random_bits(1000, key, bits=16),),
        "bf16": lambda x, fp32, key: (bf16_stochastically(fp32, key),),
    }
    here = functions[function](x, fp32, KEY)
    there = functions[function](x.cuda(), fp32.cuda(), KEY.cuda())
    for a, b in zip(there, here, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
