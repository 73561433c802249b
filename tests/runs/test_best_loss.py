"""The best validation loss is the best of losses that can be compared: of one measure."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoint_parts import copy_checkpoint, make_config, make_saver, make_state, save, sign
from support.helpers import TINY, edit_json, last_run, make_dataset, write_config

from plots.run_record import load_run
from training.batches.fingerprint import run_fingerprint
from training.batches.sources import make_windows, open_sources
from training.checkpoints.folder import by_loss, find_checkpoint
from training.checkpoints.saved_state import read_state
from training.configuration.keys import TrainConfig
from training.evaluation import measure
from training.optimization.update_guard import UpdateGuard


def shuffle(folder: Path, split: str) -> Path:
    """The tokens in an order that cannot be learned: its loss stays above ln 64."""
    path, meta = folder / f"{split}.bin", json.loads((folder / "meta.json").read_text())
    np.random.default_rng(0).permutation(np.fromfile(path, "<u2")).tofile(path)
    meta["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_json(folder / "meta.json", **meta)
    return folder


@pytest.fixture
def config(tmp_path):
    """Of a run that saves a new best only."""
    keys = {"max_iters": 6, "eval_interval": 2, "out_dir": tmp_path / "out", "always_save_checkpoint": False}
    return write_config(tmp_path / "run.py", **{**TINY, **keys}, dataset=make_dataset(tmp_path / "easy"))


def best_of(out_dir: Path) -> str:
    return find_checkpoint(out_dir, "best").name


@pytest.mark.resume
def test_after_another_dataset_the_best_begins_anew(run, config, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(config) == 0
    first = last_run(out)["summary"]["best_val_loss"]
    assert first < 4 and best_of(out) == "step-00000006"
    capsys.readouterr()
    hard = f"--dataset={shuffle(make_dataset(tmp_path / 'hard'), 'val')}"
    resume = config, "--init_from=resume", "--allow_changes=dataset", hard
    assert run(*resume, "--max_iters=12", "--learning_rate=1e-2") == 0
    said = f"are of other tokens or windows than before iteration 6: their best, {first:.4f}, stays"
    assert capsys.readouterr().out.count(said) == 1
    record, path = last_run(out), max(out.glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns)
    (event,) = record["events"]
    assert (event["kind"], event["iter"], event["best_val_loss"]) == ("other_measure", 6, first)
    losses = {step["iter"]: step["val_loss"] for step in record["eval_steps"] if step["attempt"] == 2}
    best = min(losses, key=losses.get)
    assert losses[best] > first, "what counted as no new best"
    assert record["summary"]["best_val_loss"] == load_run(path).best_val_loss == losses[best]
    assert best_of(out) == (out / "checkpoints" / "best").read_text().strip() == f"step-{best:08d}"
    state = read_state(out / "checkpoints" / best_of(out))
    assert (state.measured_since, state.best_val_loss) == (6, losses[best])
    # the next resume, with the same data, goes on with that best
    assert run(config, "--init_from=resume", hard, "--max_iters=14") == 0
    assert said not in capsys.readouterr().out
    assert last_run(out)["summary"]["best_val_loss"] <= losses[best]


def measured(dataset: Path, **keys) -> str | None:
    config = TrainConfig(**{**TINY, "eval_interval": 2, **keys, "dataset": str(dataset)})
    sources = open_sources(config, scan=True)
    return measure(make_windows(sources, config), config, run_fingerprint(sources))


def test_the_measure_is_the_windows_and_their_tokens(tmp_path):
    """And not how they are divided, what the model trains on, or where the dataset is."""
    made = {name: make_dataset(tmp_path / name, eot_id=0) for name in ("one", "copy", "train", "val")}
    shuffle(made["train"], "train")
    shuffle(made["val"], "val")
    one = made["one"]
    usual = measured(one)
    assert measured(made["copy"]) == measured(made["train"]) == usual
    assert [measured(one, **keys) for keys in DIVIDED] == [usual] * len(DIVIDED)
    everything = {"eval_iters": 1000, "eval_batch_size": 1}
    assert measured(one, **everything, seed=5) == measured(one, **everything, seed=1337), "in any order"
    datasets = (made["val"], f"{one}:0.7,{made['val']}:0.3", f"{one}:0.6,{made['val']}:0.4")
    others = [measured(each) for each in datasets] + [measured(one, **{key: value}) for key, value in OTHERS]
    assert len({usual, None, *others}) == 2 + len(others)
    assert measured(one, eval_interval=0) is None


DIVIDED = [{"eval_iters": 4, "eval_batch_size": 2}, {"batch_size": 2}]
DIVIDED += [{"eval_batch_size": 4, "batch_size": 8}]
DIVIDED += [{"learning_rate": 1e-3, "dtype": "bfloat16", "eval_interval": 7}]
OTHERS = [("eval_iters", 3), ("eval_batch_size", 3), ("seed", 5)]
OTHERS += [("packing", "truncate"), ("doc_masking", True), ("block_size", 16)]


@pytest.mark.resume
def test_a_resume_evaluates_the_windows_of_before(run, config, tmp_path, capsys):
    """Unless a number is stated. Earlier versions saved None, and meant batch_size."""
    out, resume = tmp_path / "out", (config, "--init_from=resume", "--eval_batch_size=None")
    assert run(config, "--eval_batch_size=3") == 0
    assert run(*resume, "--max_iters=8") == 0
    assert last_run(out)["config"]["eval_batch_size"] == 3

    assert run(config, f"--out_dir={tmp_path / 'older'}") == 0
    folder = max((tmp_path / "older" / "checkpoints").glob("step-*"))
    settings = json.loads((folder / "state.json").read_text())["config"]
    assert settings["eval_batch_size"] == settings["batch_size"] == 4
    edit_json(folder / "state.json", config={**settings, "eval_batch_size": None})
    sign(folder)
    capsys.readouterr()
    divided = f"--out_dir={tmp_path / 'older'}", "--batch_size=2", "--gradient_accumulation_steps=2"
    assert run(*resume, *divided, "--max_iters=8") == 0
    record = last_run(tmp_path / "older")
    assert record["config"]["eval_batch_size"] == 4 and record["events"] == []
    assert "eval_batch_size" not in record["startup_info"]["changed_since_checkpoint"]
    assert "other tokens or windows" not in capsys.readouterr().out

    assert run(config, f"--out_dir={tmp_path / 'new'}", "--eval_batch_size=None", "--batch_size=2") == 0
    assert last_run(tmp_path / "new")["config"]["eval_batch_size"] == 16


def test_the_best_checkpoint_is_of_the_newest_measure(tmp_path):
    """Until the new one has a loss, the old one's stays. Earlier versions saved no measure."""
    config = make_config(tmp_path / "template")
    template, root = save(make_saver(config, make_state(config)), 1), tmp_path / "checkpoints"
    root.mkdir()

    def add(step, loss, **fields):
        return copy_checkpoint(template, root, step, val_loss=loss, **fields)

    old = [add(1, 2.0), add(2, 1.0)]
    state = json.loads((old[0] / "state.json").read_text())
    del state["measure"], state["measured_since"]
    (old[0] / "state.json").write_text(json.dumps(state))
    new = {"measure": "b", "measured_since": 2}
    folders = [*old, add(3, None, **new)]
    assert by_loss(folders) == [old[1], old[0]]
    folders += [add(4, 3.0, **new), add(5, 2.5, **new)]
    assert by_loss(folders) == [folders[4], folders[3]]


@pytest.mark.resume
def test_accepted_changes_empty_the_spike_window(run, config, tmp_path, monkeypatch):
    """Else the first losses of other data are spikes, until max_skips ends the run."""
    forgotten = []
    monkeypatch.setattr(UpdateGuard, "forget", lambda self: forgotten.append(self.accepted.item()))
    spikes = "--skip_spikes=6", "--always_save_checkpoint=True"
    assert run(config, *spikes) == 0
    assert run(config, *spikes, "--init_from=resume", "--max_iters=7") == 0
    assert forgotten == []
    changed = "--allow_changes=seed", "--seed=5"
    assert run(config, *spikes, "--init_from=resume", "--max_iters=8", *changed) == 0
    assert forgotten == [7]
    monkeypatch.undo()
    guard = UpdateGuard(replace(TrainConfig(), skip_spikes=6.0), torch.device("cpu"))
    usual, high = torch.tensor(1.0), torch.tensor(100.0)
    for _ in range(guard.size):
        guard.judge(usual, usual)
    assert guard.judge(high, usual)[0] > 0
    guard.forget()
    assert guard.judge(high, usual)[0] == 0
