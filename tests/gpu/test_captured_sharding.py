"""CUDA Graphs with ZeRO-1 and FSDP on two GPUs: losses, evaluations and final weights are those of the eager
run, bit for bit. Each pair of runs shares its processes, so both take the same compiled kernels."""

import shutil

import pytest
import torch
from support.gpu_runs import TWO_GPUS, needs_fp8
from support.graphed_runs import ON_GPU, build, captured, same, train, weights
from support.helpers import (
    TINY,
    checkpoint_tensors,
    evaluations,
    last_run,
    make_dataset,
    run_in_one_launch,
    write_config,
)
from support.ranks import on_ranks

from training.configuration.files_and_flags import load_config
from training.process.world import World

pytestmark = [pytest.mark.gpu, TWO_GPUS]

ITERATIONS = 24
GRAPHS = "--use_cuda_graphs=True"
TWICE = "--gradient_accumulation_steps=2"
FP8 = ["--low_precision=fp8_tensorwise", "--low_precision_scope=layers_and_head"]
ZERO1, FSDP = ["--use_zero1=True"], ["--use_fsdp=True"]
CASES = {
    "zero1": ZERO1,
    "zero1-compiled": [*ZERO1, TWICE, "--compile=True", "--reduce_dtype=bfloat16"],
    # 65 rows do not divide by 2
    "zero1-bf16-weights": [*ZERO1, "--param_dtype=bfloat16", "--vocab_size=65"],
    "zero1-fp8": [*ZERO1, TWICE, *FP8],
    "fsdp": FSDP,
    "fsdp-compiled": [*FSDP, TWICE, "--compile=True"],
    "fsdp-resharded": [*FSDP, TWICE, "--reshard_after_forward=True", "--reduce_dtype=bfloat16"],
    "fsdp-fp8": [*FSDP, TWICE, *FP8],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    dataset = make_dataset(folder / "tokens", vocab_size=64, train_tokens=100_000)
    keys = {**TINY, **ON_GPU, "max_iters": ITERATIONS, "eval_interval": 6, "keep_last": None}
    keys |= {"attention_backend": "manual", "gradient_log_interval": 5}
    write_config(folder / "run.py", **keys, dataset=str(dataset))
    return folder


def run_all(folder, runs: dict[str, list[str]]) -> list[dict]:
    """The records of runs by the same two processes, one after another."""
    commands = [[folder / "run.py", f"--out_dir={folder / out}", *flags] for out, flags in runs.items()]
    run_in_one_launch(folder, commands, processes=2)
    return [last_run(folder / out) for out in runs]


def check_equal(folder, eager: str, graphs: str) -> None:
    """What a row has of an iteration, all evaluations, and every tensor of the last checkpoint."""
    expected, found = last_run(folder / eager), last_run(folder / graphs)
    assert found["startup_info"]["cuda_graphs"]["used"] == "CUDA Graph", found["startup_info"]["cuda_graphs"]
    for key in ("iter", "loss", "lr", "gradients"):
        rows = ([row[key] for row in record["training_iterations"]] for record in (found, expected))
        assert next(rows) == next(rows), key
    assert evaluations(found) == evaluations(expected)
    step = f"checkpoints/step-{ITERATIONS:08d}"
    ours, theirs = (checkpoint_tensors(folder / out / step) for out in (graphs, eager))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert found["status"] == "completed"


@pytest.mark.parametrize("name", CASES)
def test_replays_are_the_eager_run_bit_for_bit(folder, name):
    """With evaluations between replays, whose weights FSDP gathers for itself, and gradient sums."""
    if name.endswith("fp8"):
        needs_fp8()
    eager, graphs = f"{name}-eager", f"{name}-graphs"
    run_all(folder, {eager: CASES[name], graphs: [*CASES[name], GRAPHS]})
    check_equal(folder, eager, graphs)


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_a_captured_run_resumes_captured(folder, name):
    flags = {"zero1": ZERO1, "fsdp": FSDP}[name]
    whole, captured, resumed = f"{name}-whole", f"{name}-captured", f"{name}-resumed"
    run_all(folder, {whole: flags, captured: [*flags, GRAPHS]})
    kept = "checkpoints/step-00000012"  # written by a replay
    shutil.copytree(folder / captured / kept, folder / resumed / kept)
    (record,) = run_all(folder, {resumed: [*flags, GRAPHS, "--init_from=resume"]})
    rows = last_run(folder / whole)["training_iterations"]
    assert [row["loss"] for row in record["training_iterations"]] == [row["loss"] for row in rows][12:]
    assert record["startup_info"]["cuda_graphs"]["used"] == "CUDA Graph"


def failed_capture(world: World, config: str) -> dict:
    """A capture that fails on rank 1 alone, in which NCCL has sent gradients and sends weights."""
    dataset = load_config([config], world.size).dataset
    keys = {**ON_GPU, "use_zero1": True, "gradient_accumulation_steps": 2, "vocab_size": 65}
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    expected = train(eager, iterations=range(14))

    def fails(*arguments):
        result = parts.step(*arguments)
        if world.rank == 1 and torch.cuda.is_current_stream_capturing():
            raise ValueError("not while capturing")
        return result

    step = captured(parts, fails)
    equal = train(parts, step, range(14)) == expected and same(weights(parts), weights(eager))
    step.close()
    return {"choice": step.choice, "equal": equal}


def test_a_zero1_run_goes_on_after_a_capture_that_failed_on_one_rank(folder, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # as train.py does
    for found in on_ranks(2, "gpu.test_captured_sharding:failed_capture", folder / "run.py"):
        assert found["choice"]["used"] == "eager step"
        assert found["choice"]["reason"] == "rank 1: ValueError: not while capturing"
        assert found["equal"]
