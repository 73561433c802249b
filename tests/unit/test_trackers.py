"""What trackers get of a run: each figure once, under a name that stays. And what a tracker cannot do to a
run: hold it up or end it."""

import json
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from support.helpers import TINY, last_run, make_dataset, write_config
from support.records import add_row

from common.command import FAILED, USER_ERROR, run_command
from common.errors import UserError
from tools import track
from tools.track import figures_of
from tools.trackers import NOTHING, TRACKERS, Run, Wandb
from training.configuration.keys import TrainConfig
from training.configuration.rules import check
from training.records import follower
from training.records.run_record import RunRecord

ROW = {"loss": 2.5, "mfu": None, "memory": None, "tokens_per_sec": 1.0, "time_ms": 5.0}


class FakeTracker:
    """Keeps what it is given. `fail` names the method that raises."""

    def __init__(self, last=NOTHING, fail=""):
        self.last, self.fail = last, fail
        self.steps, self.summary, self.run = [], None, None

    def __call__(self):
        return self

    def called(self, method):
        if method == self.fail:
            raise ConnectionError("no route to host")

    def open(self, run):
        self.called("open")
        self.run = run
        return self.last

    def send(self, step, figures):
        self.called("send")
        self.steps.append((step, figures))

    def close(self, record):
        self.called("close")
        self.summary = {"status": record["status"], **(record.get("summary") or {})}


@pytest.fixture
def fake(monkeypatch):
    """fake(name, ...): a FakeTracker in the place of the tracker that has this name."""

    def fake(name="wandb", **settings):
        monkeypatch.setitem(sys.modules, name, package(name))
        monkeypatch.setitem(TRACKERS, name, tracker := FakeTracker(**settings))
        return tracker

    return fake


def package(name="wandb"):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


@pytest.fixture
def record(tmp_path):
    """record(history, start): the record of an attempt."""

    def record(history=None, start=0):
        attempts = len(history["attempts"]) if history else 0
        path = tmp_path / f"run_20260101_00000{attempts}.json"
        return RunRecord(path, {"seed": 1}, {}, False, history, start)

    return record


def send(content, tracker="wandb", *arguments, status="completed"):
    path = content.path
    path.write_text(
        json.dumps({**content.content, "status": status, "summary": {"final_loss": 2.5}}, default=list)
    )
    return run_command(track.main, [str(path), f"--trackers={tracker}", *arguments])


def losses(tracker) -> list[int]:
    return [step for step, figures in tracker.steps if "train/loss" in figures]


def saved(tracker) -> list[int]:
    """The iterations of the checkpoints."""
    return [figures["checkpoint/iter"] for _, figures in tracker.steps if "checkpoint/iter" in figures]


@pytest.fixture
def gone():
    """A flag: the process that is followed has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return f"--follow={process.pid}"


# --- what is sent ---


def test_all_that_belongs_to_an_iteration_is_sent_at_once(fake, record):
    tracker, content = fake(), record()
    add_row(content, {"iter": 0, **ROW})
    losses_of = {"train_loss": 3.0, "val_loss": 3.5, "lr": 0.1}
    content.add("eval_steps", {"iter": 2, **losses_of, "sources": {"web": {"train": 1.0, "val": 2.0}}})
    for rank in (0, 1):
        content.add_event(2, "straggler", rank=rank, own_ms=7.0)
    add_row(content, {"iter": 2, **ROW, "lr": 0.1})
    assert send(content) == 0
    (_, first), (step, figures) = tracker.steps
    assert first["train/loss"] == 2.5 and step == 2 and "events/straggler" not in first
    assert figures.items() >= {"eval/val_loss": 3.5, "eval/web/val_loss": 2.0}.items()
    assert not {"eval/iter", "eval/lr", "eval/attempt", "events/straggler/attempt"} & figures.keys()
    assert figures.items() >= {"events/straggler": 1, "events/straggler/rank": 1}.items()
    assert figures.items() >= {"train/loss": 2.5, "train/learning_rate": 0.1}.items()
    assert tracker.summary == {"status": "completed", "final_loss": 2.5}


def test_the_numbers_of_a_row_are_figures_under_their_names(run, tmp_path):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **keys, peak_tflops=1.0, gradient_log_interval=1)
    assert run(config) == 0
    row = last_run(tmp_path / "out")["training_iterations"][-1]
    sent = figures_of("training_iterations", {**row, "memory": {"allocated_gb": 13.5}})
    names = "train/loss train/learning_rate gradients/global_norm gradients/grad_std mfu/mfu_percent "
    names += "memory/allocated_gb speed/time_ms tokens run/attempt"
    assert set(names.split()) <= sent.keys()
    assert {name.removeprefix("mfu/") for name in sent if name.startswith("mfu/")} == {
        *("mfu_percent", "mfu_causal_percent", "hfu_percent", "achieved_tflops", "achieved_tflops_per_gpu")
    }
    assert sent["train/loss"] == row["loss"] and sent["tokens"] == row["tokens_seen"]


# --- a tracker that fails ---


@pytest.mark.parametrize("method", ["open", "send", "close"])
def test_tracker_that_raises_is_named_and_the_others_get_everything(method, fake, record, capsys):
    fake("wandb", fail=method)
    other, content = fake("tensorboard"), record()
    for iteration in range(20):
        add_row(content, {"iter": iteration, **ROW})
    assert send(content, "wandb,tensorboard") == FAILED
    said = capsys.readouterr()
    assert "error: wandb gets nothing more: ConnectionError: no route to host" in said.err
    assert losses(other) == list(range(20)) and other.summary
    assert "tensorboard: sent 20 iterations" in said.out and "wandb: sent" not in said.out


def test_what_the_database_of_trackio_does_not_have_was_not_sent(record, monkeypatch, capsys):
    """trackio keeps to itself what keeps it from writing: no message, no exception."""
    has = types.SimpleNamespace(_next_step=2, log=lambda figures, step: None, finish=lambda: None)
    trackio = package("trackio")
    trackio.init = lambda **keys: has
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    content = record()
    for iteration in range(3):
        add_row(content, {"iter": iteration, **ROW})
    assert send(content, "trackio") == FAILED
    said = capsys.readouterr()
    assert "it took figures up to iteration 2, but has 1" in said.err and "sent" not in said.out
    has._next_step = 3
    assert send(content, "trackio") == 0
    assert "trackio: sent 0 iterations" in capsys.readouterr().out


@pytest.mark.parametrize("command, says", [(["sleep", "30"], "still sending"), (["false"], "lacks figures")])
def test_run_whose_tracker_hangs_or_fails_is_completed_and_says_so(
    command, says, run, tmp_path, capfd, monkeypatch
):
    """Whatever the follower does: the loop does not know it, and the end waits for it for a limited time."""
    monkeypatch.setitem(sys.modules, "wandb", package())
    monkeypatch.setattr(follower, "WAIT_S", 0.2)
    popen, started = subprocess.Popen, []

    def start(asked, **settings):
        started.extend(asked if "tools.track" in asked else [])
        return popen(command if "tools.track" in asked else asked, **settings)

    monkeypatch.setattr(follower.subprocess, "Popen", start)
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **keys), "--wandb_log=True") == 0
    content = last_run(tmp_path / "out")
    assert content["status"] == "completed" and len(content["training_iterations"]) == 4
    said = capfd.readouterr().out
    assert says in said and ("python -m tools.track" in said) == (command == ["false"])
    assert "--trackers=wandb" in started and f"--follow={os.getpid()}" in started


# --- a live run, and several attempts ---


def test_a_live_run_is_followed_to_its_end(fake, record, monkeypatch):
    """The newest iteration waits until it is complete: an evaluation may still belong to it."""
    tracker, content = fake(), record()
    add_row(content, {"iter": 0, **ROW})
    add_row(content, {"iter": 1, **ROW})
    seen, looks = [], iter([{"iter": 2, **ROW}, {"iter": 3, **ROW}, None])

    def sleep(seconds):
        if not seconds:  # at the end
            return
        seen.append(losses(tracker))
        row = next(looks)
        if row:
            add_row(content, row)
        status = "running" if row else "completed"
        content.path.write_text(json.dumps({**content.content, "status": status}, default=list))

    monkeypatch.setattr(track.time, "sleep", sleep)
    assert send(content, "wandb", f"--follow={os.getpid()}", status="running") == 0
    assert seen == [[0], [0, 1], [0, 1, 2]] and losses(tracker) == [0, 1, 2, 3]


def test_what_a_run_writes_just_before_its_end_is_sent(fake, record, monkeypatch):
    tracker, content = fake(), record()
    add_row(content, {"iter": 0, **ROW})

    def ends(pid):
        add_row(content, {"iter": 1, **ROW})
        content.path.write_text(json.dumps({**content.content, "status": "completed"}, default=list))
        return False

    monkeypatch.setattr(track, "is_running", ends)
    assert send(content, "wandb", "--follow=77", status="running") == 0
    assert losses(tracker) == [0, 1] and tracker.summary["status"] == "completed"


def test_what_a_killed_run_had_is_sent_when_its_process_is_gone(gone, fake, record):
    tracker, content = fake(), record()
    add_row(content, {"iter": 0, **ROW})
    assert send(content, "wandb", gone, status="running") == 0
    assert losses(tracker) == [0] and tracker.summary["status"] == "running"


def killed_at(content, iteration: int, checkpoint: int, noted: int) -> dict:
    """The record of an attempt that makes rows up to `iteration` and notes a checkpoint after `noted`."""
    for number in range(content.this_attempt["start_iter"], iteration + 1):
        add_row(content, {"iter": number, **ROW, "loss": float(number)})
        if number == noted:
            content.add("checkpoints", {"iter": checkpoint, "val_loss": 1.0, "path": f"step-{checkpoint}"})
    return json.loads(json.dumps(content.content, default=list))


@pytest.mark.parametrize("last", range(NOTHING, 10))
def test_whatever_a_tracker_had_before_the_kill_it_has_every_figure_once(last, fake, record):
    history = killed_at(record(), 9, checkpoint=4, noted=6)
    had = [step for step in range(10) if step <= last]
    tracker, content = fake(last=last), record(history=history, start=4)
    killed_at(content, 12, checkpoint=8, noted=11)
    assert send(content) == 0
    assert had + losses(tracker) == list(range(13))
    assert [4] * (last >= 6) + saved(tracker) == [4, 8]
    steps = [step for step, _ in tracker.steps]
    assert steps == sorted(set(steps)), "the steps of Weights & Biases can only rise"


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("stopped", range(2, 7))
def test_a_clean_stop_and_a_resume_lose_no_row(stopped, by_hand, gone, fake, record):
    """The stop saves a checkpoint of the next iteration, which the resume begins with. By hand: between the
    two, a user sends the record, with no process to follow."""
    first = record()
    history = killed_at(first, stopped, checkpoint=stopped + 1, noted=stopped)
    had = fake()
    assert send(first, "wandb", *[gone] * (not by_hand), status="interrupted") == 0
    assert losses(had) == list(range(stopped + 1))
    tracker, content = fake(last=had.steps[-1][0]), record(history=history, start=stopped + 1)
    killed_at(content, stopped + 3, checkpoint=stopped + 2, noted=stopped + 2)
    assert send(content) == 0
    assert losses(had) + losses(tracker) == list(range(stopped + 4))
    assert saved(tracker) == [stopped + 1, stopped + 2]


def test_attempts_have_one_id(fake, record):
    first, one, other = record(), fake(), fake("trackio")
    add_row(first, {"iter": 0, **ROW})
    assert send(first, "wandb,trackio") == 0
    second, resumed = record(history=json.loads(json.dumps(first.content, default=list)), start=1), fake()
    assert send(second) == 0
    assert resumed.run.id == one.run.id == other.run.id and one.run.id.isalnum()
    assert one.run.unique_name == f"run_20260101_000000-{one.run.id}" and one.run.project == "nanomfu"


# --- settings ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--trackers=wandb"], "missing.json cannot be read as a run record"),
        (["list.json", "--trackers=wandb"], "list.json cannot be read as a run record: it is not a JSON"),
        (["missing.json", "--trackers=wand"], "'wand' is none of wandb, tensorboard, trackio; did you mean"),
    ],
)
def test_bad_arguments_of_track_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", package())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    assert run_command(track.main, arguments) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_unknown_tracker_and_a_missing_package_are_errors_at_the_start(monkeypatch):
    with pytest.raises(UserError, match="'tensorbord' is none of .* did you mean 'tensorboard'"):
        check(TrainConfig(device="cpu", trackers="tensorbord"), 1)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="trackers='trackio' needs trackio: .*leave trackio out of"):
        check(TrainConfig(device="cpu", trackers=" trackio,"), 1)
    monkeypatch.setitem(sys.modules, "trackio", package("trackio"))
    with pytest.raises(UserError, match="set save_log_to_json=True, or trackers="):
        check(TrainConfig(device="cpu", trackers="trackio", save_log_to_json=False), 1)


def test_folder_of_offline_runs_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="trackers='wandb' needs wandb"):
        check(TrainConfig(device="cpu", trackers="wandb"), 1)


# --- Weights & Biases ---


def test_run_at_weights_and_biases_is_continued_where_the_server_is(monkeypatch, tmp_path):
    """The files of an offline run, which no server has, are written anew."""
    asked, logged = {}, []
    online = types.SimpleNamespace(url=None, starting_step=5, summary={}, finish=lambda exit_code: None)
    online.log = lambda values, step, commit: logged.append((step, values))
    wandb = package()
    wandb.Settings = lambda **settings: settings
    wandb.init = lambda **settings: asked.update(settings) or online
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (earlier := tmp_path / "wandb/offline-run-20260101_000000-ab12").mkdir(parents=True)
    tracker = Wandb()
    for mode, last in (("online", 4), ("offline", NOTHING)):
        assert earlier.exists()
        wandb.setup = lambda mode=mode: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
        assert tracker.open(Run("ab12", "run_1", "run_1-ab12", "nanomfu", tmp_path, {})) == last
        assert (asked["id"], asked["resume"], asked["dir"]) == ("ab12", "allow", str(tmp_path))
    assert asked["settings"]["x_disable_meta"] and not asked["settings"]["save_code"]
    assert not earlier.exists()
    tracker.send(7, {"train/loss": 2.5})
    with pytest.raises(RuntimeError, match="could not write into"):  # it took another folder
        tracker.close({"status": "interrupted", "summary": {"final_loss": 3.0}})
    assert logged == [(7, {"train/loss": 2.5})] and online.summary == {"summary": {"final_loss": 3.0}}
