"""matmul_algorithms='measured': what is chosen and restored, and that nothing of it is there by default."""

import ctypes
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from support.helpers import TINY, last_run, make_dataset, write_config
from support.tensors import E4M3, E5M2, random_bf16, use_recipe
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

import model_builder
from common.errors import UserError
from ops import cublaslt
from ops import matmul as matmul_module
from ops.linear import Linear, refresh_weights
from ops.matmul import Matmul, Plan, chosen, chosen_matmul
from training.checkpoints.saved_state import _matmul_algorithms
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.optimization import matmul_algorithms
from training.optimization.low_precision import use_low_precision
from training.optimization.matmul_algorithms import (
    Timing,
    choose_algorithms,
    head_tokens,
    step_matmuls,
    sure_winner,
)
from training.process.world import World

GPU = World(0, 0, 1, torch.device("cuda", 0))
CPU = World(0, 0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_plans():
    chosen.replace({})
    yield
    chosen.replace({})
    torch._dynamo.reset()


def config_of(**keys):
    # no two matmuls of the same size
    settings = {
        **TINY,
        "vocab_size": 96,
        "dtype": "bfloat16",
        "device": "cuda",
        "matmul_algorithms": "measured",
    }
    return TrainConfig(**{**settings, **keys})


def model_of(config):
    model = model_builder.build_model(config.model_config(), dtype=DTYPES[config.dtype])
    model.init_weights(torch.device("cpu"), seed=1)
    use_low_precision(model, config)
    return model


def plan_of(number):
    """Of an algorithm whose bytes are this number."""
    algorithm = cublaslt.Algorithm(configuration=(ctypes.c_uint64 * 8)(number))
    return Plan(SimpleNamespace(lock=None), algorithm)


def hex_of(number):
    return number.to_bytes(8, "little").hex() + 56 * "00"


@pytest.fixture
def library(monkeypatch):
    """A cuBLASLt of three algorithms for each matmul. The winner wins the measurement of each forward."""
    fake = SimpleNamespace(gpu="NVIDIA H200", version="13.1.0", measured=[], offered=[1, 2, 3], winner=3)

    def measure(matmuls, device):
        fake.measured.append([name for name, _ in matmuls])
        return {m.label: timing(name) for name, m in matmuls}

    def timing(name):
        return (
            Timing(1.0, 0.9, 0.05, hex_of(fake.winner)) if "forward" in name else Timing(1.0, 1.0, 0.0, None)
        )

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: fake.gpu)
    monkeypatch.setattr(cublaslt, "version", lambda: fake.version)
    monkeypatch.setattr(matmul_algorithms, "_measure", measure)
    monkeypatch.setattr(
        matmul_algorithms, "candidates", lambda matmul, device, count: [plan_of(n) for n in fake.offered]
    )
    return fake


def choose(saved=None, **keys):
    config = config_of(**keys)
    return choose_algorithms(model_of(config), config, GPU, saved)


# --- which matmuls ---


def test_the_matmuls_of_a_step_are_the_forwards_and_dgrads_of_its_linears():
    config = config_of()
    tokens, model = config.batch_size * config.block_size, config.model_config()
    found = {
        name: (matmul, count) for (name, matmul), count in step_matmuls(model_of(config), config).items()
    }
    directions = ("forward", "dgrad")
    assert set(found) == {f"{n} {d}" for n in ("qkv", "out", "up", "down", "lm_head") for d in directions}
    bf16, up = torch.bfloat16, model.d_ff * 2
    assert found["up forward"] == (
        Matmul(tokens, model.n_embd, up, bf16, bf16, True, False),
        model.n_layer,
    )
    assert found["up dgrad"] == (Matmul(tokens, up, model.n_embd, bf16, bf16, False, False), model.n_layer)
    assert found["lm_head forward"][1] == 1


def test_fp8_matmuls_have_the_dtypes_and_the_accumulation_of_the_step():
    config = config_of(low_precision="fp8_tensorwise")
    found = {name: matmul for name, matmul in step_matmuls(model_of(config), config)}
    assert (found["up forward"].a, found["up forward"].b, found["up forward"].fast) == (E4M3, E4M3, True)
    dgrad = found["up dgrad"]
    assert (dgrad.a, dgrad.b, dgrad.transposed) == (E5M2, E4M3, True) and not dgrad.fast
    assert found["lm_head forward"].a == torch.bfloat16


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_the_heads_parts_are_those_of_torch_chunk(parts):
    config = config_of(loss_chunks=parts)
    tokens = config.batch_size * config.block_size
    assert head_tokens(config) == [len(chunk) for chunk in torch.zeros(tokens).chunk(parts)]


@pytest.mark.parametrize(
    "keys", [{}, {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head"}]
)
def test_a_step_asks_for_exactly_the_matmuls_that_are_measured(keys, monkeypatch):
    """So a plan is found by the shapes and dtypes with which the operation is called."""
    config = config_of(device="cpu", **keys)
    model, asked = model_of(config), set()

    class Plans(dict):
        def get(self, matmul):
            asked.add(matmul)

    for module in model.modules():
        if isinstance(module, Linear):
            module.weight_grad = torch.zeros(module.weight.shape)
            module.to(torch.bfloat16)
            refresh_weights(module)
    monkeypatch.setattr(chosen, "plans", Plans())
    monkeypatch.setattr(chosen, "plans_exist", True)
    tokens = torch.zeros(config.batch_size, config.block_size, dtype=torch.long)
    model(tokens, tokens, torch.ones(())).backward()
    assert asked == {matmul for _, matmul in step_matmuls(model, config)}


# --- the choice ---


@pytest.mark.parametrize(
    "others, winner",
    [
        ([[0.90, 0.91, 0.92]], 2),
        ([[0.90, 0.91, 0.99]], None),  # its slowest block is within the margin of the usual ones' fastest
        ([[0.80, 0.80, 1.20]], None),
        ([[0.95, 0.95, 0.95], [0.80, 0.80, 0.97], [0.94, 0.94, 0.94]], 4),
        ([], None),
    ],
)
def test_only_what_is_faster_in_every_block_is_taken(others, winner):
    usual = [[1.0, 1.1, 1.2], [0.994, 1.0, 1.3]]
    assert sure_winner([*usual, *others]) == winner


def test_the_choice_is_used_described_and_saved(library):
    choice = choose()
    info = choice.info["matmul_algorithms"]
    assert len(library.measured) == 1 and chosen.plans_exist
    assert {bytes(plan.algorithm.configuration).hex() for plan in chosen.plans.values()} == {hex_of(3)}
    assert all(matmul.transposed for matmul in chosen.plans) and len(chosen.plans) == 5
    layers = config_of().n_layer
    assert info["sure_gain_ms"] == pytest.approx(0.05 * (4 * layers + 1))
    assert "for 5 of 10 another than cuBLAS's first, which saves at least" in info["line"]
    assert (choice.saved["gpu"], choice.saved["cublaslt"]) == ("NVIDIA H200", "13.1.0")
    assert sorted(map(str, choice.saved["algorithms"].values())) == 5 * [hex_of(3)] + 5 * ["None"]
    json.dumps(info)


def test_a_resume_takes_the_saved_choice_without_measuring(library, caplog):
    saved = json.loads(json.dumps(choose().saved))
    plans = {matmul: bytes(plan.algorithm) for matmul, plan in chosen.plans.items()}
    again = choose(_matmul_algorithms(saved))
    assert len(library.measured) == 1
    assert {matmul: bytes(plan.algorithm) for matmul, plan in chosen.plans.items()} == plans
    assert again.saved == saved and "as in the checkpoint" in again.info["matmul_algorithms"]["line"]
    assert "bit-exact" not in caplog.text


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"gpu": "NVIDIA H100"}, "it was NVIDIA H200 with cuBLASLt 13.1.0, it is NVIDIA H100 with"),
        ({"version": "13.2.0"}, "it is NVIDIA H200 with cuBLASLt 13.2.0 now"),
        ({"offered": [1, 2], "winner": 2}, "does not offer the saved algorithm for qkv forward"),
    ],
)
def test_another_gpu_or_library_measures_again_and_says_so(library, caplog, change, reason):
    saved = choose().saved
    vars(library).update(change)
    with caplog.at_level(logging.WARNING):
        choose(saved)
    assert len(library.measured) == 2
    assert reason in caplog.text and "this resume is not bit-exact" in caplog.text


def test_another_micro_batch_measures_again(library, caplog):
    saved = choose().saved
    choose(saved, batch_size=config_of().batch_size + 1)
    assert len(library.measured) == 2 and "no choice for this size of qkv forward" in caplog.text


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"eval_only": True}, "eval_only=True trains nothing"),
        ({"dtype": "float16"}, "dtype='float16', and only matmuls in bfloat16 and fp8"),
    ],
)
def test_where_nothing_can_be_measured_cublas_chooses_and_the_reason_is_told(library, keys, reason):
    choice = choose(**keys)
    assert reason in choice.info["matmul_algorithms"]["line"]
    assert choice.saved is None and not chosen.plans_exist and not library.measured


def test_ranks_on_different_gpus_keep_cublas_algorithms(library, monkeypatch):
    """The choice of rank 0 would not hold for the others."""
    other = {"gpu": "NVIDIA H100", "cublaslt": "13.1.0"}
    monkeypatch.setattr(matmul_algorithms, "gather_objects", lambda value, world: [value, other])
    line = choose().info["matmul_algorithms"]["line"]
    assert "the ranks differ: NVIDIA H200 with cuBLASLt 13.1.0, and NVIDIA H100 with" in line
    assert not chosen.plans_exist and not library.measured


def test_a_rank_that_is_not_offered_the_choice_says_what_to_do(library):
    library.offered = [1, 2]
    with pytest.raises(UserError, match=r"rank 0: cuBLASLt does not offer .* set matmul_algorithms='cublas'"):
        choose()


def test_by_default_nothing_is_measured_and_plans_of_another_run_are_gone(library):
    choose()
    assert choose(matmul_algorithms="cublas") == ({}, None)
    assert not chosen.plans_exist and len(library.measured) == 1


@pytest.mark.parametrize(
    "value", [[], {"gpu": "x"}, {"gpu": "x", "cublaslt": "1", "algorithms": {"a": 7}}, {"gpu": 1}]
)
def test_a_wrong_saved_choice_is_damage(value):
    with pytest.raises(ValueError, match="matmul_algorithms"):
        _matmul_algorithms(value)


# --- the measurement ---


BF16 = (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("dtypes, transposed", [(BF16, True), (BF16, False), ((E5M2, E4M3), True)])
def test_only_algorithms_with_torchs_result_are_timed(monkeypatch, dtypes, transposed):
    matmul = Matmul(128, 32, 64, *dtypes, transposed, False)
    plans, timed = [plan_of(number) for number in range(5)], []

    def multiply(plan, a, b, N, *scales):
        number = plan.algorithm.configuration[0]
        if number == 2:
            raise cublaslt.Unavailable("cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED")
        right = matmul_module.matmul_by_torch(a, b, transposed, *scales, False)
        return right * 1.1 if number == 3 else right

    def time_in_turns(calls):
        timed.extend(call() for call in calls)
        return [[1.0, 1.1], [1.0, 1.2], [0.95, 0.9], [0.8, 0.85]][: len(calls)]

    monkeypatch.setattr(matmul_algorithms, "candidates", lambda *arguments: plans)
    monkeypatch.setattr(matmul_algorithms, "multiply", multiply)
    monkeypatch.setattr(matmul_algorithms, "time_in_turns", time_in_turns)
    found = matmul_algorithms.measure_one(matmul, torch.Generator())
    assert len(timed) == 4 and all(torch.equal(result, timed[0]) for result in timed)
    assert 3 < timed[0].float().std() < 9, "numbers as a step has them: K normal products"
    assert found == (1.05, 0.825, pytest.approx(0.15), hex_of(4))


def test_a_matmul_that_cannot_be_measured_keeps_cublas_algorithm_and_the_rest_is_measured(
    monkeypatch, caplog
):
    sizes = [Matmul(M, 16, 16, torch.bfloat16, torch.bfloat16, True, False) for M in (16, 32)]

    def measure_one(matmul, generator):
        if matmul is sizes[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return Timing(1.0, 0.9, 0.05, hex_of(3))

    monkeypatch.setattr(matmul_algorithms, "measure_one", measure_one)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    matmuls = {("head forward", sizes[0]): 1, ("up forward", sizes[1]): 24}
    found = matmul_algorithms._measure(matmuls, torch.device("cpu"))
    assert [timing.algorithm for timing in found.values()] == [None, hex_of(3)]
    assert "head forward keeps cuBLAS's own algorithm" in caplog.text and "9 GiB" in caplog.text


def test_blocks_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    order = []

    def block_ms(call, count):
        order.append((call.__name__, count))
        return float(len(order))

    def first(): ...

    def second(): ...

    monkeypatch.setattr(matmul_algorithms, "_block_ms", block_ms)
    times = matmul_algorithms.time_in_turns([first, second])
    assert [name for name, _ in order[2:]] == ["first", "second"] * (1 + matmul_algorithms.ROUNDS)
    assert order[2:4] == [("first", 80), ("second", 40)], "as many calls as fill a block"
    assert times == [[5.0, 7.0, 9.0], [6.0, 8.0, 10.0]]


# --- the operation ---


def graphs_of(linear, x):
    """The code that torch.compile makes of a Linear, forward and backward."""
    torch._dynamo.reset()
    code = []

    def compiler(module, inputs):
        code.append(module.code)
        return make_boxed_func(module.forward)

    run = torch.compile(
        linear.forward, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=compiler)
    )
    y = run(x)
    y.backward(torch.ones_like(y))
    assert len(code) == 2
    return "".join(code), y.detach()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_compiled_code_has_the_operation_only_if_there_are_plans(sums, fp8):
    x = random_bf16(32, 16).requires_grad_()
    linear = Linear(16, 48, bias=False).to(torch.bfloat16)
    if fp8:
        use_recipe(linear, "fp8_tensorwise")
    results = []
    for plans_exist in (False, True):
        linear.weight_grad, linear.weight.grad, x.grad = torch.zeros(48, 16) if sums else None, None, None
        chosen.plans_exist = plans_exist
        code, y = graphs_of(linear, x)
        assert ("nanomfu.matmul" in code) == plans_exist
        results.append((y, x.grad, linear.weight_grad if sums else linear.weight.grad))
    for without, with_plans in zip(*results, strict=True):
        assert torch.equal(without, with_plans)


def test_the_operation_counts_its_flops():
    a, b, one = random_bf16(32, 16), random_bf16(48, 16), torch.ones(())
    with FlopCounterMode(display=False) as counter:
        chosen_matmul(a, b, True, None, None, False)
        chosen_matmul(a, b.t().contiguous(), False, None, None, False)
        chosen_matmul(a.to(E4M3), b.to(E4M3), True, one, one, True)
    assert counter.get_total_flops() == 3 * 2 * 32 * 16 * 48


def test_a_plan_computes_what_lies_in_memory_as_it_was_told_and_torch_the_rest(monkeypatch):
    a, b = random_bf16(32, 16), random_bf16(48, 16)
    used = []

    def multiply(plan, a, b, N, *scales):
        used.append(plan)
        return a @ b.t()

    monkeypatch.setattr(matmul_module, "multiply", multiply)
    chosen.replace({Matmul(32, 16, 48, a.dtype, b.dtype, True, False): "plan"})
    expected = a @ b.t()
    torch.testing.assert_close(chosen_matmul(a, b, True, None, None, False), expected)
    assert used == ["plan"]
    shifted = torch.cat([a.new_zeros(1), a.flatten()])[1:].view(32, 16)
    for other in (shifted, a.t().contiguous().t()):
        torch.testing.assert_close(chosen_matmul(other, b, True, None, None, False), expected)
    chosen_matmul(a[:16], b, True, None, None, False)
    assert used == ["plan"]


def test_cublaslt_is_told_the_layouts_that_the_operands_have(monkeypatch):
    """By a plain model of its matrices, whose columns follow one another."""
    told = []

    def define(size, dtypes, fast, a_transposed):
        told.append((size, a_transposed))

    monkeypatch.setattr(cublaslt, "define", define)
    monkeypatch.setattr(cublaslt, "find_algorithms", lambda product, device, count: [])
    a, b, bf16 = random_bf16(32, 16), random_bf16(48, 16), torch.bfloat16
    for transposed, stored in ((True, b), (False, b.t().contiguous())):
        matmul_module.candidates(Matmul(32, 16, 48, bf16, bf16, transposed, False), 0, 8)
        (m, n, k), a_transposed = told[-1]
        of_a = stored.flatten().view(-1, k if a_transposed else m).t()  # cuBLASLt's A is b
        of_b = a.flatten().view(-1, k).t()
        product = ((of_a.t() if a_transposed else of_a) @ of_b).t()
        assert product.shape == (n, m)
        torch.testing.assert_close(product, a @ b.t())


# --- a run ---


def test_a_cpu_run_says_why_nothing_is_measured(run, tmp_path):
    make_dataset(tmp_path / "tokens")
    write_config(tmp_path / "run.py", **TINY, dataset=str(tmp_path / "tokens"))
    flags = ["--matmul_algorithms=measured", "--max_iters=1", f"--out_dir={tmp_path / 'out'}"]
    assert run(tmp_path / "run.py", *flags) == 0
    info = last_run(tmp_path / "out")["startup_info"]["matmul_algorithms"]
    assert info["used"] == "cublas" and info["reason"] == "device='cpu' has no cuBLASLt"
    (log_file,) = (tmp_path / "out").glob("run_*.log")
    assert "Matmul algorithms:           not measured" in log_file.read_text()


def test_a_resumed_run_takes_the_algorithms_of_its_checkpoint(library, run, tmp_path, monkeypatch):
    """Of a library that multiplies as torch does, and tells which matmuls it was asked for."""
    used = set()

    def multiply(plan, a, b, N, *scales):
        used.add((N, bytes(plan.algorithm.configuration).hex()))
        return matmul_module.matmul_by_torch(a, b, True, *scales, False)

    def machine(config, device):
        return {"gpu": library.gpu, "cublaslt": library.version}

    monkeypatch.setattr(matmul_algorithms, "_machine", machine)
    monkeypatch.setattr(matmul_module, "multiply", multiply)
    make_dataset(tmp_path / "tokens")
    keys = {**TINY, "dtype": "bfloat16", "matmul_algorithms": "measured", "dataset": str(tmp_path / "tokens")}
    write_config(tmp_path / "run.py", **keys)
    out = f"--out_dir={tmp_path / 'out'}"
    assert run(tmp_path / "run.py", out, "--max_iters=2") == 0
    before, chosen_before = set(used), set(chosen.plans)
    assert {algorithm for _, algorithm in before} == {hex_of(3)}
    used.clear()
    assert run(tmp_path / "run.py", out, "--init_from=resume") == 0
    assert used == before and set(chosen.plans) == chosen_before
    assert len(library.measured) == 1
    assert "as in the checkpoint" in last_run(tmp_path / "out")["startup_info"]["matmul_algorithms"]["line"]
