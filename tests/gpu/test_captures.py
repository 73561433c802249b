"""CUDA Graphs on a GPU: each known way to break a capture, with what the eager step gives and what the
replays give."""

import gc
import shutil

import pytest
import torch
from support.gpu_runs import TWO_GPUS, losses, needs_fp8
from support.gpu_runs import train as run_it
from support.graphed_runs import ON_GPU, build, captured, rate, same, train, weights
from support.helpers import TINY, evaluations, make_dataset, write_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("graphs") / "tokens", train_tokens=100_000, eot_id=0)


STOCHASTIC = {"param_dtype": "bfloat16", "weight_rounding": "stochastic"}
COMPILED = {"compile": True, "gradient_accumulation_steps": 2}
CASES = {
    "plain": {},
    "compiled": COMPILED,
    "dropout": {"dropout": 0.1},
    "compiled dropout": {"compile": True, "dropout": 0.1},
    "float16": {"dtype": "float16", "gradient_accumulation_steps": 3},
    "float32": {"dtype": "float32"},
    "bf16 weights": {"param_dtype": "bfloat16"},
    "bf16 moments": {"adam_dtype": "bfloat16"},
    "rounded stochastically": {**STOCHASTIC, "adam_dtype": "bfloat16"},
    "8-bit moments": {**STOCHASTIC, "adam_dtype": "8bit"},
    "bf16 sums": {"param_dtype": "bfloat16", "gradient_dtype": "bfloat16", "gradient_accumulation_steps": 2},
    "fp8": {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head"},
    "fp8 delayed": {"low_precision": "fp8_delayed", "gradient_accumulation_steps": 2, "amax_history": 4},
    "mxfp8": {"low_precision": "mxfp8", "low_precision_scope": "layers_and_head"},
    "nvfp4": {"low_precision": "nvfp4", "compile": True, "gradient_accumulation_steps": 2},
    "blocks recomputed": {"activation_checkpointing": "full", "loss_chunks": 2},
    "inputs recomputed": {**COMPILED, "activation_checkpointing": "memory_bound"},
    "attention recomputed": {"activation_checkpointing": "attention"},
    "gpt2": {"arch_preset": "gpt2", "num_key_value_heads": None, "bias": True},
    "no clipping": {"grad_clip": 0.0},
    "padded": {"packing": "truncate", "gradient_accumulation_steps": 2},  # a third of each window
}


@pytest.mark.parametrize("name", CASES)
def test_replays_are_the_eager_run_bit_for_bit(dataset, graph_lines, name):
    """New batches, a rate that jumps, accumulation, cleared gradients, moments, dropout, gradient sums.
    All results are read at the end, so those of a replay outlast the next one."""
    keys = {**ON_GPU, **CASES[name]}
    if name.startswith("fp8"):
        needs_fp8()
    eager = build(dataset, **keys)
    expected = train(eager)
    parts = build(dataset, **keys)
    step = captured(parts)
    results = train(parts, step)
    assert step.choice["used"] == "CUDA Graph", step.choice
    assert results == expected
    assert same(weights(parts), weights(eager))
    assert any("replaying from iteration 10" in line for line in graph_lines())
    assert any("also with the gradient's sum" in line for line in graph_lines())
    step.close()


def test_replays_do_not_wait_for_the_gpu(dataset):
    parts = build(dataset, **ON_GPU)
    step = captured(parts)
    train(parts, step, range(12), sums=(10,))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # any synchronizing call raises
    try:
        for i in range(3):
            step(*parts.loader.next(), rate(i), i == 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.close()


# Ways to break a capture: each wraps an eager step in one that works, and that a capture gets wrong.


def looks_at_a_value(step):
    def broken(*arguments):
        result = step(*arguments)
        assert result.loss.item() > 0
        return result

    return broken


def copies_from_pageable_memory(step):
    """A number that the device must have taken before Python goes on."""

    def broken(x, y, rate, *flags):
        return step(x, y, rate * torch.tensor(1.0).to(x.device), *flags)

    return broken


def synchronizes(step):
    """Refused by CUDA in the middle of a capture."""

    def broken(*arguments):
        result = step(*arguments)
        torch.cuda.synchronize()
        return result

    return broken


def replaces_a_tensor(step):
    """A tensor made anew in each iteration: a capture goes on reading the old one. Its values alternate, so
    the first replay is right."""
    held = [torch.ones((), device="cuda")]

    def broken(x, y, rate, *flags):
        result = step(x, y, rate * held[0], *flags)
        held[0] = 1.5 - held[0]
        return result

    return broken


def raises(step):
    """An error of Python's own, in the middle of a capture."""

    def broken(*arguments):
        result = step(*arguments)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while capturing")
        return result

    return broken


WAITS = "the step waits for the GPU at gpu/test_captures.py:"
BREAKERS = {
    looks_at_a_value: WAITS,
    copies_from_pageable_memory: WAITS,
    synchronizes: "",
    replaces_a_tensor: "its replay differs from the eager step",
    raises: "ValueError: not while capturing",
}


@pytest.mark.parametrize("breaker", BREAKERS, ids=lambda breaker: breaker.__name__)
def test_what_breaks_a_capture_is_noticed_and_the_eager_run_goes_on(dataset, breaker):
    """With dropout: after a capture that failed, the generator must draw what it would have drawn."""
    eager = build(dataset, **ON_GPU, dropout=0.1)
    expected = train(eager, breaker(eager.step))
    parts = build(dataset, **ON_GPU, dropout=0.1)
    step = captured(parts, breaker(parts.step))
    results = train(parts, step)
    assert step.choice["used"] == "eager step"
    assert BREAKERS[breaker] in step.choice["reason"], step.choice
    # one keeps something in Python that the failed capture has moved on, no part of the run's state
    if breaker != replaces_a_tensor:
        assert results == expected
        assert same(weights(parts), weights(eager))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_capture_can_follow_one_that_failed(dataset):
    first = build(dataset, **ON_GPU)
    step = captured(first, synchronizes(first.step))
    train(first, step, range(12))
    assert step.choice["used"] == "eager step"
    second = build(dataset, **ON_GPU)
    again = captured(second)
    train(second, again, range(12))
    assert again.choice["used"] == "CUDA Graph", again.choice
    again.close()


@pytest.mark.parametrize("level", ["attention", "full"])
def test_recomputation_with_dropout_falls_back_or_agrees(dataset, level):
    keys = {**ON_GPU, "dropout": 0.1, "activation_checkpointing": level}
    eager = build(dataset, **keys)
    expected = train(eager)
    parts = build(dataset, **keys)
    step = captured(parts)
    assert train(parts, step) == expected, step.choice
    step.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gradient_that_is_not_finite_skips_the_update_in_a_replay(dataset, dtype):
    keys = {**ON_GPU, "dtype": dtype}
    runs = []
    for make in (lambda parts: parts.step, captured):
        parts = build(dataset, **keys)
        step = make(parts)
        results = train(parts, step, range(14))
        before, scale = weights(parts), parts.state.loss_scale.scale.clone()
        parts.state.loss_scale.scale.fill_(1e38)  # every gradient overflows
        results += train(parts, step, range(14, 15))
        assert results[-1][3] == 1.0, results[-1]
        assert same(weights(parts), before)
        assert parts.state.loss_scale.scale.item() == pytest.approx(0.5e38 if dtype == "float16" else 1e38)
        parts.state.loss_scale.scale.copy_(scale)
        results += train(parts, step, range(15, 20))
        runs.append((results[:14] + results[15:], weights(parts)))
    assert step.choice["used"] == "CUDA Graph", step.choice
    assert runs[1][0] == runs[0][0]
    assert same(runs[1][1], runs[0][1])
    step.close()


def test_eager_and_captured_activations_are_not_held_together(dataset):
    """A model whose activations outweigh its weights: the memory reserved must not double."""
    keys = {**ON_GPU, "batch_size": 64, "block_size": 256, "n_layer": 4}

    def reserved(graph: bool) -> int:
        """At most, beside what tests before this one still hold."""
        parts = build(dataset, **keys)
        gc.collect()  # hooks hold a model in a circle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        if not graph:
            train(parts, iterations=range(3))
            return torch.cuda.max_memory_reserved() - before
        step = captured(parts)
        train(parts, step)
        assert step.choice["used"] == "CUDA Graph", step.choice
        step.close()
        return torch.cuda.max_memory_reserved() - before

    alone, both = reserved(graph=False), reserved(graph=True)
    assert both < 1.35 * alone, (alone, both)


# --- runs, on GPUs ---

GRAPHS = "--use_cuda_graphs=True"


@pytest.fixture(scope="module")
def folder(dataset):
    keys = {**TINY, **ON_GPU, "compile": True, "gradient_accumulation_steps": 2, "max_iters": 30}
    keys |= {"attention_backend": "manual", "gradient_log_interval": 5}
    write_config(dataset.parent / "run.py", **keys, dataset=str(dataset))
    return dataset.parent


def log_of(folder, out: str) -> str:
    return max((folder / out).glob("run_*.log")).read_text()


def test_a_run_says_what_happened_and_its_rows_are_the_eager_ones(folder):
    flags = ["--eval_interval=12", "--always_save_checkpoint=False"]
    eager, graphs = run_it(folder, "eager", *flags), run_it(folder, "graphs", *flags, GRAPHS)
    assert losses(graphs) == losses(eager)
    rows, expected = graphs["training_iterations"], eager["training_iterations"]
    assert [row["gradients"] for row in rows] == [row["gradients"] for row in expected]
    assert [row["lr"] for row in rows] == [row["lr"] for row in expected]
    assert evaluations(graphs) == evaluations(eager)
    choice = graphs["startup_info"]["cuda_graphs"]
    assert choice == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
    assert "cuda_graphs" not in eager["startup_info"]
    log = log_of(folder, "graphs")
    assert "CUDA Graph: capture after 10 iterations" in log
    assert "CUDA Graph: replaying from iteration 10 (bit-equal to the eager step" in log
    times = [row["time_ms"] for row in rows]
    usual = sorted(times[2:8])[3]
    assert max(times[8:11]) < 10 * usual, times  # the capture is in no row


def test_a_checkpoint_of_a_graphed_run_resumes_as_the_eager_run_does(folder):
    flags = ["--eval_interval=15", "--keep_last=None", "--dropout=0.1"]
    # as in test_two_gpus_replay_together_and_end: all runs take the compiler's choices of a first one
    choices = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "resumes-compiled")}
    run_it(folder, "resumes-first", *flags, "--max_iters=2", **choices)
    whole = run_it(folder, "whole", *flags, **choices)
    assert losses(run_it(folder, "captured", *flags, GRAPHS, **choices)) == losses(whole)
    kept = "checkpoints/step-00000015"
    for out, more in (("resumed", []), ("resumed-captured", [GRAPHS])):
        shutil.copytree(folder / "captured" / kept, folder / out / kept)
        resumed = run_it(folder, out, *flags, "--init_from=resume", *more, **choices)
        assert losses(resumed) == losses(whole)[15:]
    assert "CUDA Graph: replaying from iteration 25" in log_of(folder, "resumed-captured")


@TWO_GPUS
@pytest.mark.parametrize(
    "more", [[], ["--dtype=float16"], ["--reduce_dtype=bfloat16"], ["--param_dtype=bfloat16"]]
)
def test_two_gpus_replay_together_and_end(folder, more):
    """The end matters: NCCL waits for ever for a graph that is still alive."""
    name = "-".join(["ddp", *more]).replace("=", "-")
    # The compiler chooses some kernels by timing them when it first meets them, so two cold starts may round
    # differently. Both runs take the choices of a first one, which nobody else shares.
    choices = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}-compiled")}
    run_it(folder, f"{name}-first", *more, "--max_iters=2", processes=2, **choices)
    eager = run_it(folder, name, *more, processes=2, **choices)
    graphs = run_it(folder, f"{name}-graphs", *more, GRAPHS, processes=2, **choices)
    choice = graphs["startup_info"]["cuda_graphs"]
    assert choice["used"] == "CUDA Graph", choice
    assert losses(graphs) == pytest.approx(losses(eager), rel=1e-4)
    assert graphs["status"] == "completed"


@TWO_GPUS
def test_gloo_is_not_captured(folder):
    record = run_it(folder, "gloo", GRAPHS, "--backend=gloo", "--max_iters=14", processes=2)
    assert "use nccl" in record["startup_info"]["cuda_graphs"]["reason"]
