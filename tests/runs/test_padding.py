"""With padding, the same windows give the same loss, gradient and validation loss, however they are divided
over micro-steps, processes and evaluation batches: each is a mean over all targets, no mean of means."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.all_recipes import RECIPES as LOW
from support.graphed_runs import build, weights
from support.helpers import STRATEGIES, TINY, last_run, make_dataset, run_in_one_launch, write_config
from support.masked_documents import write_lengths

from common.errors import RunError
from training.batches.sources import make_windows, open_sources
from training.configuration.keys import TrainConfig
from training.evaluation import evaluate
from training.process.world import World

CPU = torch.device("cpu")
T, EOT, ITERATIONS = 32, 0, 4
EVALUATION = {1: 24, 3: 8, 8: 3}  # eval_batch_size: eval_iters; 24 windows each time


def write_documents(folder, lengths):
    """Both splits of a dataset, as documents of these lengths."""
    make_dataset(folder, train_tokens=sum(lengths), val_tokens=sum(lengths))
    return write_lengths(folder, {"train.bin": lengths, "val.bin": lengths})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents that fill a window or half of it; and 23 that fill a window, with one of a single token."""
    folder = tmp_path_factory.mktemp("padding")
    padded = np.random.default_rng(0).choice([18, 19, 33], 96, p=[0.35, 0.35, 0.3])
    write_documents(folder / "padded", padded.tolist())
    write_documents(folder / "one_token", [T + 1] * 12 + [1] + [T] * 11)
    keys = {**TINY, "packing": "truncate", "dataset": folder / "padded", "gradient_log_interval": 1}
    write_config(folder / "run.py", **{**keys, "max_iters": ITERATIONS, "eval_interval": 2})
    return folder


# name -> (processes, micro-steps, sequences of one, sequences of an evaluation batch, other flags)
DIVIDED = {
    "1 x 1 x 8": (1, 1, 8, 8, []),
    "1 x 4 x 2": (1, 4, 2, 1, []),
    **{f"{name}, 2 x 2 x 2": (2, 2, 2, 3, flags) for name, flags in STRATEGIES.items()},
    "ddp, sent in bf16": (2, 2, 2, 8, ["--reduce_dtype=bfloat16"]),
    "float16": (1, 2, 4, 8, ["--dtype=float16"]),
}
ONE_TOKEN = {  # two sequences an iteration: each window once in 12 iterations
    "1 x 1 x 2": (1, 1, 2, 8, []),
    **{f"{name}, 2 x 1 x 1": (2, 1, 1, 1, flags) for name, flags in STRATEGIES.items()},
}
ALONE = ["--batch_size=1", "--max_iters=24", "--eval_interval=12"]  # one iteration has no target


@pytest.fixture(scope="module")
def runs(folder):
    """name -> run record"""
    commands = {1: {}, 2: {}}
    for name, (processes, steps, sequences, evaluated, flags) in (DIVIDED | ONE_TOKEN).items():
        commands[processes][name] = [
            folder / "run.py",
            f"--gradient_accumulation_steps={steps}",
            f"--batch_size={sequences}",
            f"--eval_batch_size={evaluated}",
            f"--eval_iters={EVALUATION[evaluated]}",
            *([f"--dataset={folder / 'one_token'}", "--max_iters=12"] if name in ONE_TOKEN else []),
            *flags,
        ]
    alone = [folder / "run.py", f"--dataset={folder / 'one_token'}", *ALONE]
    commands[1] |= {"alone": alone, "stopped": [*alone, "--max_iters=12"]}
    for processes, of_processes in commands.items():
        for name, command in of_processes.items():
            command.append(f"--out_dir={folder / name}")
        resumed = [[*of_processes["stopped"], *ALONE, "--init_from=resume"]] if processes == 1 else []
        run_in_one_launch(folder, [*of_processes.values(), *resumed], processes)
    return {name: last_run(folder / name) for of in commands.values() for name in of}


def figures(record) -> list[list[float]]:
    rows = record["training_iterations"]
    gradients = [[row["gradients"][key] for row in rows] for key in ("global_norm", "grad_mean", "grad_std")]
    evaluations = [[step[key] for step in record["eval_steps"]] for key in ("train_loss", "val_loss")]
    return [[row["loss"] for row in rows], *gradients, *evaluations]


def agree(found, expected, relative):
    for mine, theirs in zip(figures(found), figures(expected), strict=True):
        assert len(mine) == len(theirs) > 0
        assert mine == pytest.approx(theirs, rel=relative, abs=relative * 1e-3)


@pytest.mark.parametrize("name", [name for name in DIVIDED if name != "1 x 1 x 8"])
def test_the_same_windows_give_the_same_figures_however_they_are_divided(runs, name):
    relative = {"ddp, sent in bf16": 2e-3, "float16": 1e-2}.get(name, 5e-6)
    agree(runs[name], runs["1 x 1 x 8"], relative)


@pytest.mark.parametrize("name", [name for name in ONE_TOKEN if name != "1 x 1 x 2"])
def test_a_micro_step_or_process_without_any_target_contributes_nothing(runs, name):
    agree(runs[name], runs["1 x 1 x 2"], 5e-6)
    assert max(row["padding_percent"] for row in runs[name]["training_iterations"]) > 49


def test_an_iteration_without_any_target_is_a_gradient_of_zero_and_no_nan_also_after_a_resume(runs):
    """It is once in each epoch of 24 iterations; its loss, of nothing, is 0."""
    rows = runs["alone"]["training_iterations"]
    (empty,) = (row for row in rows if row["padding_percent"] == 100)
    assert empty["loss"] == empty["gradients"]["global_norm"] == 0
    assert not any(row.get("skipped_updates") for row in rows)
    assert runs["alone"]["status"] == "completed" and rows[-1]["loss"] > 0
    assert figures(runs["stopped"]) == figures(runs["alone"])
    assert runs["stopped"]["startup_info"]["resumed_from"]


def test_a_row_says_how_much_was_padding(runs, folder):
    config = TrainConfig(**TINY, dataset=str(folder / "padded"), packing="truncate")
    windows = make_windows(open_sources(config, scan=True), config)["train"]
    rows = runs["zero1, 2 x 2 x 2"]["training_iterations"]
    assert np.mean([row["padding_percent"] for row in rows]) > 20
    for i, row in enumerate(rows):
        read = windows.samples(np.arange(8 * i, 8 * i + 8), config.seed)
        assert row["padding_percent"] == pytest.approx(100 * (read[:, 1:] < 0).mean(), rel=1e-5)
        assert row["tokens_seen"] == (i + 1) * 8 * T  # padding included
    log = next((folder / "1 x 1 x 8").glob("run_*.log")).read_text()
    first = runs["1 x 1 x 8"]["training_iterations"][0]["padding_percent"]
    assert re.search(rf"Tokens/s: \d+ \({first:.2f}% padding\)", log)


def test_an_evaluation_without_any_target_says_so(folder):
    class OneToken:
        count = 8

        def read(self, indices):
            return np.concatenate([np.ones((len(indices), 1), int), np.full((len(indices), T), ~EOT)], 1)

    parts = build(folder / "padded", packing="truncate")
    one_token = SimpleNamespace(by_source={"": (1, OneToken())})
    with pytest.raises(RunError, match="no token to predict.*packing='stream'"):
        evaluate(parts.state.strategy.module, {"val": one_token}, parts.config, World(0, 0, 1, CPU))


def batch(targets: list[int]):
    """x, y (1, B, T), of the number of targets of each sequence; the rest is padding."""
    ids = torch.randint(1, 64, (len(targets), T + 1), generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(T) < torch.tensor(targets)[:, None], ids[:, 1:], ~EOT)
    return ids[None, :, :-1], y[None]


@pytest.mark.parametrize("divided", [(1, 4), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradient_norm_are_those_of_one_mean_over_all_targets(folder, divided, chunks):
    x, y = batch([32, 5, 0, 20])
    strategy = build(folder / "padded").state.strategy
    loss = F.cross_entropy(strategy.module(x[0]).flatten(0, 1), y[0].flatten(), ignore_index=~EOT)
    loss.backward()
    strategy.reduce_gradients(loss.detach())
    _, norm = strategy.loss_and_norm()
    parts = build(folder / "padded", packing="truncate", loss_chunks=chunks)
    result = parts.step(x.view(*divided, T), y.view(*divided, T), 0.0)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert result.targets.item() == pytest.approx(57 / 128)


RECIPES = {
    "float16": {"dtype": "float16"},
    **{name: {"dtype": "bfloat16", "low_precision": name} for name in LOW},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_precision_makes_nan_of_windows_without_targets(folder, recipe):
    """A micro-step without any target, then an iteration without any, then again one with targets."""
    keys = {**RECIPES[recipe], "n_embd": 64, "d_ff": 128, "low_precision_scope": "layers_and_head"}
    if recipe == "float16":
        del keys["low_precision_scope"]
    parts = build(folder / "padded", packing="truncate", **keys)
    for targets in ([32, 0], [0, 0], [7, 32]):
        x, y = (part.view(2, 1, T) for part in batch(targets))
        result = parts.step(x, y, 1e-2)
        assert result.verdict == 0 and (result.grad_norm > 0) == (sum(targets) > 0), result
        assert 0 < result.loss < 5 if sum(targets) else result.loss == 0
        assert all(weight.isfinite().all() for weight in weights(parts))
