"""Muon's kernels against their plain forms, its updates in captured graphs, and its bits over two GPUs."""

import pytest
import torch
from support.gpu_runs import TWO_GPUS
from support.graphed_runs import ON_GPU, build, captured, same, train, weights
from support.helpers import TINY, checkpoint_tensors, make_dataset, run_in_one_launch, write_config
from support.muon_directions import assert_direction_of_float32, gradient_of_size
from support.ranks import on_ranks

from ops.orthogonalize import orthogonalize, symmetric_product
from ops.quantization.random_bits import bf16_stochastically, weight_key

pytestmark = pytest.mark.gpu

SHAPES = [(64, 64), (256, 96), (96, 300), (1024, 2048), (2048, 512), (136, 1000)]


def gaussian(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 100, 72), (2, 257, 136), (2, 512, 2048)], ids=str)
def test_symmetric_products_are_those_of_double_precision(shape, dtype):
    x = gaussian(*shape, dtype=dtype) / shape[-1] ** 0.5
    add = symmetric_product(x, x)
    found = symmetric_product(x, x, 1.5, add, -0.5, diagonal=2.0)
    wide = x.double() @ x.double().mT
    expected = 1.5 * wide - 0.5 * add.double() + 2 * torch.eye(shape[1], device="cuda")
    digits = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert ((found.double() - expected).abs() <= digits * (1.01 * expected.abs() + 0.01)).all()
    assert torch.equal(add, add.mT)
    columns = x.mT.contiguous().mT  # the same numbers, column by column
    assert torch.equal(symmetric_product(columns, columns), add)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonal_factors_are_those_of_the_plain_form_whatever_is_beside_them(shape, dtype):
    many = [gaussian(*shape, dtype=dtype, seed=i) for i in range(4)]
    together = orthogonalize(many)
    plain = orthogonalize([matrix.float().cpu() for matrix in many])
    distance = (together.float().cpu() - plain).norm() / plain.norm()
    assert distance < (1e-3 if dtype == torch.float32 else 0.05)
    for one, both in zip(many, together, strict=True):
        assert torch.equal(orthogonalize([one])[0], both)
        values = torch.linalg.svdvals(both.float())
        assert values.max() < 1.16 and values.median() > 0.8


@pytest.mark.parametrize("shape", [(768, 768), (768, 2048), (2048, 768)], ids=str)
def test_gradients_with_one_large_direction_keep_finite_factors(shape):
    """As those of a new model have it, in batches as large as those of the 124M model."""
    many = []
    for i in range(24):
        u, s, v = torch.linalg.svd(gaussian(*shape, seed=i), full_matrices=False)
        s = torch.arange(1.0, len(s) + 1, device="cuda") ** -(0.3 + 0.05 * i)
        s[0] = s[1:].norm() * (0.5 + 0.1 * i)
        many.append((1e-3 * (u * s) @ v).bfloat16())
    values = torch.linalg.svdvals(orthogonalize(many).float())
    assert values.max() < 1.3 and values[:, 0].min() > 0.6


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
def test_the_blend_is_nesterov_s_and_a_skipped_update_keeps_the_momentum(gradients):
    gradient, momentum = gaussian(33, 100, dtype=gradients), gaussian(33, 100, seed=1)
    scale, zero, one = (torch.full((), value, device="cuda") for value in (4.0, 0.0, 1.0))
    expected = momentum.lerp(gradient.float() / 4, 0.05)
    kept = momentum.clone()
    blend = torch.empty_like(momentum, dtype=torch.bfloat16)
    from ops.triton_kernels.muon import triton_blend

    triton_blend(gradient, momentum, blend, 0.95, scale, one)
    assert torch.equal(momentum, kept)
    triton_blend(gradient, momentum, blend, 0.95, scale, zero)
    torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-7)
    wanted = (gradient.float() / 4).lerp(expected, 0.95)
    torch.testing.assert_close(blend.float(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rms", [1e3, 1e-7, 1e-9])
def test_float16_has_the_direction_of_float32_for_gradients_of_any_size(rms):
    assert_direction_of_float32(gradient_of_size(rms).cuda(), "float16")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [None, 0, 13])
def test_a_weight_is_updated_rounded_and_copied_in_one_pass(stored, start):
    from ops.triton_kernels.muon import triton_apply

    weight, direction = gaussian(33, 100, dtype=stored), gaussian(33, 100, dtype=torch.bfloat16, seed=1)
    rate, zero, one, step = (torch.full((), v, device="cuda") for v in (0.02, 0.0, 1.0, 7.0))
    rounding = None if start is None else (weight_key(5, 3, "cuda"), start)
    copy, before = torch.zeros_like(weight, dtype=torch.bfloat16), weight.clone()
    triton_apply(weight, direction, copy, rate, 3.0, 0.1, one, step, rounding)
    assert torch.equal(weight, before) and not copy.any()
    triton_apply(weight, direction, copy, rate, 3.0, 0.1, zero, step, rounding)
    new = before.float() * (1 - 0.02 * 0.1) - 0.02 * 3.0 * direction.float()
    if rounding and stored == torch.bfloat16:
        rounding[0][1] = 7
        new = bf16_stochastically(new, rounding[0], start=start)
        assert (weight != new).float().mean() < 0.01  # where one more rounding of fp32 crosses a boundary
    else:
        torch.testing.assert_close(
            weight, new.to(stored), rtol=2**-7 if stored != torch.float32 else 1e-6, atol=1e-6
        )
    assert torch.equal(copy, weight.bfloat16())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("muon") / "tokens")


def test_replays_of_a_captured_update_have_the_bits_of_the_eager_step(dataset):
    eager, parts = (build(dataset, **ON_GPU, optimizer="muon") for _ in range(2))
    step = captured(parts)
    assert train(eager) == train(parts, step)
    assert step.choice["used"] == "CUDA Graph", step.choice
    assert same(weights(eager), weights(parts))


@TWO_GPUS
def test_the_same_gradients_give_the_bits_of_one_process_s_updates_on_two_gpus(tmp_path, dataset):
    config = write_config(tmp_path / "run.py", **{**TINY, **ON_GPU, "optimizer": "muon", "dataset": dataset})
    assert on_ranks(2, "runs.test_strategies:wrong_updates", config, "bfloat16") == [[], []]


@TWO_GPUS
def test_ddp_and_zero1_make_the_same_weights_on_two_gpus(tmp_path, dataset):
    """Without clipping: the last bit of the gradient's norm depends on the order of its parts. FSDP's
    gradients are summed in another order."""
    keys = {**TINY, **ON_GPU, "optimizer": "muon", "max_iters": 6, "dataset": dataset, "grad_clip": 0}
    write_config(tmp_path / "run.py", **keys)
    flags = {"ddp": [], "zero1": ["--use_zero1=True"]}
    commands = [[tmp_path / "run.py", f"--out_dir={tmp_path / name}", *more] for name, more in flags.items()]
    run_in_one_launch(tmp_path, commands, 2)
    ddp, zero1 = (
        checkpoint_tensors(next((tmp_path / name / "checkpoints").glob("step-*"))) for name in flags
    )
    kept = [name for name in ddp if name.startswith(("model.", "optimizer."))]
    assert [name for name in kept if not torch.equal(ddp[name], zero1[name])] == []


@TWO_GPUS
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_an_update_only_sends_rows_to_owners_and_back(tmp_path, dataset, strategy):
    """As on a CPU, tests/runs/test_collectives.py: FSDP gathers no weight for it."""
    config = write_config(tmp_path / "run.py", **{**TINY, **ON_GPU, "dataset": dataset})
    found = on_ranks(2, "runs.test_collectives:counts", config)[0]
    assert found[f"{strategy} muon"] == found[f"{strategy} adamw"] | {"alltoall_base": 2}
