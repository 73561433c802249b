"""torchtitan as a peer. The package itself is not needed: a stand-in of its trainer takes our batches and
logs. Where torchtitan is installed, its own classes are looked at, too."""

import sys
import types

import pytest
import torch
from support.helpers import ROOT, TINY, make_dataset, write_config

import model_builder
from bench.figures import measure
from bench.peers import program, torchtitan
from bench.peers.program import Rows, check_parameters, report
from bench.peers.torchtitan import RowLog, Torchtitan
from common.errors import UserError
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.configuration.files_and_flags import load_config
from training.process.world import World

QWEN3 = ["config/quickstart.py", "--device=cuda", "--dtype=bfloat16"]
CPU = World(0, 0, 1, torch.device("cpu"))


# --- the stand-in ---


class Metrics:
    logged: list[int]

    def log(self, step, global_avg_loss, **others):
        self.logged.append(step)


class Qwen3(torch.nn.Linear):
    pass


@pytest.fixture
def small(tmp_path):
    """A configuration, and what its training reads."""
    tokens = make_dataset(tmp_path / "tokens", eot_id=0)
    keys = {**TINY, "arch_preset": "qwen3", "dataset": tokens, "packing": "truncate", "peak_tflops": 1.0}
    keys |= {"gradient_accumulation_steps": 2, "max_iters": 6, "log_interval": 2}
    keys["block_size"] = 64  # a document has about 43 tokens, so windows have padding
    config = load_config([str(write_config(tmp_path / "run.py", **keys))])
    return config, open_sources(config, scan=False)


@pytest.fixture
def stand_in(small, monkeypatch):
    """Its trainer, with as many parameters as `parameters` says, which ends after `steps`."""
    config, _ = small
    ours = model_builder.build_model(config.model_config()).count_parameters()["total"]
    seen = types.SimpleNamespace(parameters=ours, steps=config.max_iters, batches=[], closed=False)

    class Trainer:
        def __init__(self, batches):
            self.model_parts, self.batches = [Qwen3(1, seen.parameters, bias=False)], iter(batches)
            self.metrics_processor = seen.metrics = type("Both", (RowLog, Metrics), {"logged": []})()

        def train(self):
            for step in range(1, seen.steps + 1):
                seen.batches += [next(self.batches) for _ in range(config.gradient_accumulation_steps)]
                if self.metrics_processor.should_log(step):
                    self.metrics_processor.log(step, 5.0 - step, global_max_loss=0.0)

        def close(self):
            seen.closed = True

    monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", types.SimpleNamespace(Trainer=Trainer))
    monkeypatch.setattr(torchtitan, "job", lambda config, world, loader: torchtitan.batches(loader))
    return seen


def test_its_trainer_gets_our_batches_and_its_steps_are_rows(small, stand_in):
    config, sources = small
    found = Torchtitan().train(config, CPU, sources)
    rows = found["training_iterations"]
    assert [row["iter"] for row in rows] == [0, 2, 4, 5] and stand_in.metrics.logged == [1, 3, 5, 6]
    assert [row["loss"] for row in rows] == [4.0, 2.0, 0.0, -1.0]
    assert (found["parameters"], found["class"], stand_in.closed) == (stand_in.parameters, "Qwen3", True)
    printed = report(config, CPU, found)
    tokens_per_iter = 2 * config.batch_size * config.block_size
    assert rows[1]["tokens_per_sec"] == pytest.approx(tokens_per_iter / (rows[1]["time_ms"] / 1000))
    figures = measure(printed["training_iterations"], 1)  # as bench.throughput reads them
    assert figures["rows"] == 2 and len(figures["mfu_percent"]) == 2
    ours = Loader(make_windows(sources, config)["train"], config, CPU)
    for iteration in range(config.max_iters):
        x, y = ours.next()
        for step in range(2):
            inputs, labels = stand_in.batches[2 * iteration + step]
            assert torch.equal(inputs["input"], x[step])
            assert torch.equal(labels, torch.where(y[step] < 0, -100, y[step]))
    assert any((labels == -100).any() for _, labels in stand_in.batches)  # padding


def test_a_token_that_is_no_target_is_not_counted():
    y = torch.tensor([[[3, ~3, 0, ~0]]])  # (A, B, T): our datasets store it as the complement of its id
    _, labels = next(torchtitan.batches(types.SimpleNamespace(next=lambda: (y, y))))
    assert labels.tolist() == [[3, -100, 0, -100]]


def test_another_model_or_a_training_that_ends_early_is_no_figure(small, stand_in):
    stand_in.steps = 3
    with pytest.raises(UserError, match="torchtitan ended before iteration 6"):
        Torchtitan().train(small[0], CPU, small[1])
    stand_in.parameters, stand_in.closed, stand_in.batches = 7, False, []
    with pytest.raises(UserError, match="has 7 parameters, our qwen3 .* that torchtitan does not have"):
        Torchtitan().train(small[0], CPU, small[1])
    assert stand_in.closed and not stand_in.batches


def test_time_of_a_row_is_that_of_its_iterations(small, monkeypatch):
    now = iter([100.0, 107.0, 109.0, 113.0])
    monkeypatch.setattr(program, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    rows = Rows(small[0], CPU)
    for iteration in filter(rows.due, range(5)):
        rows.add(iteration, 1.0)
    assert [row["time_ms"] for row in rows.rows] == [7000.0, 1000.0, 2000.0]


def test_the_requirements_file_has_the_version_that_is_asked_for():
    pinned = (ROOT / "requirements/peers.txt").read_text()
    assert f"\ntorchtitan=={torchtitan.VERSION} " in pinned


# --- torchtitan itself, where it is installed ---


@pytest.mark.parametrize(
    "flags",
    [
        QWEN3,
        [*QWEN3, "--weight_tying=True", "--lr_schedule=wsd"],
        [*QWEN3, "--head_dim=24", "--activation_checkpointing=full"],
    ],
)
def test_its_model_and_its_settings_are_ours(flags):
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -r requirements/peers.txt")
    torchtitan.fill_in()
    config = load_config([*flags, "--grad_clip=0"])
    job = torchtitan.job(config, World(0, 0, 2, torch.device("cuda"), 2), None)
    with torch.device("meta"):
        assert check_parameters(job.model_spec.model.build(), config.model_config(), "torchtitan")
    assert job.training.global_batch_size == config.samples_per_iter(2)
    assert (job.training.local_batch_size, job.training.steps) == (config.micro_batch, config.max_iters)
    assert job.training.max_norm == float("inf")  # at 0 it would set every gradient to 0
    assert (job.activation_checkpoint is None) == (config.activation_checkpointing == "none")
