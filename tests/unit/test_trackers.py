"""What trackers get of a run: each figure once, under a name that stays. And what a tracker cannot do to a
run: hold it up or end it."""

import json
import logging
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec

import pytest
from support.helpers import TINY, last_run, make_dataset, write_config

from common.command import FAILED, USER_ERROR, run_command
from common.errors import UserError
from tools import track
from training.configuration.keys import TrainConfig
from training.configuration.rules import check
from training.records.run_record import RunRecord
from training.trackers import sender as sender_module
from training.trackers.figures import CONSTANT, REPEATED, figures_of
from training.trackers.identity import makes_other_rows, tracked_run
from training.trackers.sender import Trackers
from training.trackers.tracker import NOTHING
from training.trackers.wandb_files import last_step, records
from training.trackers.wandb_tracker import WandbTracker

ROW = {"loss": 2.5, "mfu": None, "memory": None, "tokens_per_sec": 1.0, "time_ms": 5.0}


class FakeTracker:
    """Keeps what it is given. `fail` is called with the name of each method, and may raise or hang."""

    def __init__(self, last=NOTHING, fail=lambda method: None):
        self.last, self.fail = last, fail
        self.steps, self.summary, self.run = [], None, None

    def __call__(self):
        return self

    def open(self, run):
        self.fail("open")
        self.run = run
        return self.last

    def send(self, step, figures, texts):
        self.fail("send")
        self.steps.append((step, figures, texts))

    def close(self, completed, summary):
        self.fail("close")
        self.summary = {"completed": completed, **summary}


@pytest.fixture
def fake(monkeypatch):
    """fake(name, ...): a FakeTracker in the place of the tracker that has this name."""

    def fake(name="wandb", **settings):
        monkeypatch.setitem(sender_module.TRACKERS, name, tracker := FakeTracker(**settings))
        return tracker

    return fake


@pytest.fixture
def warnings(caplog):
    return lambda: [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]


@pytest.fixture
def record(tmp_path):
    """record(names, history, start): the record of an attempt that trackers get, too."""

    def record(*names, history=None, start=0):
        attempts = len(history["attempts"]) if history else 0
        path = tmp_path / f"run_20260101_00000{attempts}.json"
        content = RunRecord(path, {"seed": 1}, {}, False, history, start)
        content.trackers = Trackers(names or ["wandb"], content.content, path)
        return content

    return record


def close(content, status="completed", timeout=10.0):
    content.trackers.close(status, {"final_loss": 2.5}, timeout)


def losses(tracker) -> list[int]:
    return [step for step, figures, _ in tracker.steps if "train/loss" in figures]


# --- what is sent ---


def test_all_that_belongs_to_an_iteration_is_sent_at_once(fake, record):
    tracker, content = fake(), record()
    content.add_iteration({"iter": 0, **ROW})
    content.add_evaluation(2, {"train": 3.0, "val": 3.5, "sources": {"web": {"train": 1.0, "val": 2.0}}}, 0.1)
    for rank in (0, 1):
        content.add_event(2, "straggler", rank=rank, own_ms=7.0)
    content.add_iteration({"iter": 2, **ROW, "lr": 0.1})
    close(content)
    (_, first, _), (step, figures, texts) = tracker.steps
    assert first["train/loss"] == 2.5 and step == 2 and "events/straggler" not in first
    assert figures.items() >= {"eval/val_loss": 3.5, "eval/web/val_loss": 2.0}.items()
    assert figures.items() >= {"events/straggler": 2, "events/straggler/rank": 1}.items()
    assert figures.items() >= {"train/loss": 2.5, "train/learning_rate": 0.1}.items()
    assert texts["events/straggler/message"].count("own_ms") == 2
    assert tracker.summary == {"completed": True, "final_loss": 2.5}


def test_checkpoint_that_was_complete_later_is_sent_later_and_says_its_iteration(fake, record):
    tracker, content = fake(), record()
    for iteration in range(4):
        content.add_iteration({"iter": iteration, **ROW})
    content.add_checkpoint(2, 3.5, "out/step-00000002", write_seconds=1.5)
    assert content.content["checkpoints"][0]["noted_at_iter"] == 3
    close(content)
    assert losses(tracker) == [0, 1, 2, 3]
    step, figures, texts = tracker.steps[-1]
    assert step == 3 and texts["checkpoint/path"] == "out/step-00000002"
    assert (figures["checkpoint/iter"], figures["checkpoint/write_seconds"]) == (2, 1.5)


@pytest.fixture
def measured_row(run, tmp_path):
    """The last row of a run on a CPU whose peak is stated, so that it has an MFU, and its startup_info."""
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **keys, peak_tflops=1.0, gradient_log_interval=1)
    assert run(config) == 0
    content = last_run(tmp_path / "out")
    return content["training_iterations"][-1], content["startup_info"]


def leaves(value, name=""):
    if not isinstance(value, dict):
        return {name: value}
    return {path: leaf for key, item in value.items() for path, leaf in leaves(item, f"{name}/{key}").items()}


def test_every_number_of_a_row_is_a_figure_or_constant_or_repeated(measured_row):
    row, info = measured_row
    sent = figures_of("training_iterations", {**row, "memory": {"allocated_gb": 13.5}}).numbers
    names = "train/loss train/learning_rate gradients/global_norm gradients/grad_std mfu/mfu_percent "
    names += "mfu/mfu_causal_percent mfu/achieved_tflops memory/allocated_gb speed/time_ms tokens"
    assert set(names.split()) <= sent.keys()
    assert sent["tokens"] == 4 * info["tokens_per_iter"], "those of the 4 iterations"
    numbers = {name: value for name, value in leaves(row).items() if isinstance(value, (int, float))}
    left_out = {f"/mfu/{name}" for name in (*CONSTANT, *REPEATED, "flops_per_token_causal")}
    left_out |= {"/iter", "/attempt", "/gpu_samples"}
    ends = {name.rpartition("/")[2] for name in sent} | {"loss", "lr", "tokens_seen"}
    assert {name for name in numbers.keys() - left_out if name.rpartition("/")[2] not in ends} == set()
    known = [value for value in leaves(info).values() if isinstance(value, (int, float))]
    for name in CONSTANT:
        value = row["mfu"].get(name)
        assert value is None or value in known or value / 1e12 in known, f"{name} is in the configuration"
    assert not {name.rpartition("/")[2] for name in sent} & set(CONSTANT)


def test_masked_documents_make_the_causal_count_a_figure():
    mfu = {"flops_per_token_causal": 5, "document_length_per_token": 7.5}
    assert figures_of("training_iterations", {"iter": 0, "mfu": mfu}).numbers == {
        "mfu/flops_per_token_causal": 5,
        "mfu/document_length_per_token": 7.5,
    }


# --- a tracker that fails ---


def raising(method):
    def fail(called):
        if called == method:
            raise ConnectionError("no route to host")

    return fail


@pytest.mark.parametrize("method", ["open", "send", "close"])
def test_tracker_that_raises_warns_once_and_the_others_get_everything(method, fake, record, warnings):
    fake("wandb", fail=raising(method))
    other = fake("tensorboard")
    content = record("wandb", "tensorboard")
    for iteration in range(20):
        content.add_iteration({"iter": iteration, **ROW})
    close(content)
    (warning,) = warnings()
    assert "the tracker wandb gets nothing more of this run: ConnectionError: no route to host" in warning
    assert f"python -m tools.track {content.path} --trackers=wandb" in warning
    assert losses(other) == list(range(20)) and other.summary


@pytest.mark.parametrize("method", ["open", "send", "close"])
def test_tracker_that_hangs_holds_up_neither_the_loop_nor_the_end(method, fake, record, warnings):
    free = threading.Event()
    fake("wandb", fail=lambda called: called == method and free.wait(60))
    other = fake("tensorboard")
    content = record("wandb", "tensorboard")
    began = time.monotonic()
    for iteration in range(20):
        content.add_iteration({"iter": iteration, **ROW})
    close(content, timeout=0.3)
    assert time.monotonic() - began < 30, "and the tracker hangs for 60"
    free.set()
    (warning,) = warnings()
    assert "the tracker wandb gets nothing more" in warning and "within 0.3 s at the end" in warning
    assert losses(other) == list(range(20)) and other.summary


def test_tracker_that_does_not_keep_up_gets_no_more(fake, record, warnings, monkeypatch):
    monkeypatch.setattr(sender_module, "QUEUE_MAX", 5)
    free = threading.Event()
    tracker, content = fake(fail=lambda called: called == "send" and free.wait(60)), record()
    for iteration in range(20):
        content.add_iteration({"iter": iteration, **ROW})
    (warning,) = warnings()
    assert "it has not taken the last 5 rows" in warning
    free.set()
    close(content)
    content.trackers.senders[0].thread.join(10)
    assert losses(tracker) == list(range(len(losses(tracker)))), "without a gap, so that the rest can follow"


def test_run_whose_tracker_fails_is_completed(run, fake, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", package())
    fake(fail=raising("open"))
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **keys), "--wandb_log=True") == 0
    content = last_run(tmp_path / "out")
    assert content["status"] == "completed" and len(content["training_iterations"]) == 4
    assert capfd.readouterr().out.count("the tracker wandb gets nothing more") == 1


def test_folder_in_which_no_id_can_be_written_ends_no_run(fake, record, warnings, tmp_path):
    tracker, content = fake(), record()
    (tmp_path / "trackers_run_20260101_000000.json").mkdir()
    content.add_iteration({"iter": 0, **ROW})
    close(content)
    assert losses(tracker) == [0] and "cannot be written" in warnings()[0]


# --- several attempts ---


def killed_at(content, iteration: int, checkpoint: int, noted: int) -> dict:
    """The record of an attempt that makes rows up to `iteration` and notes a checkpoint after `noted`."""
    for number in range(content.this_attempt["start_iter"], iteration + 1):
        content.add_iteration({"iter": number, **ROW, "loss": float(number)})
        if number == noted:
            content.add_checkpoint(checkpoint, 1.0, f"step-{checkpoint}")
    return json.loads(json.dumps(content.content))


@pytest.mark.parametrize("last", range(NOTHING, 10))
def test_whatever_a_tracker_had_before_the_kill_it_has_every_figure_once(last, fake, record):
    history = killed_at(record("tensorboard"), 9, checkpoint=4, noted=6)
    had = [step for step in range(10) if step <= last]
    had_checkpoint = last >= 6
    tracker, content = fake(last=last), record(history=history, start=4)
    killed_at(content, 12, checkpoint=8, noted=11)
    close(content)
    assert had + losses(tracker) == list(range(13))
    saved = [figures["checkpoint/iter"] for _, figures, _ in tracker.steps if "checkpoint/iter" in figures]
    assert [4] * had_checkpoint + saved == [4, 8]
    steps = [step for step, _, _ in tracker.steps]
    assert steps == sorted(set(steps)), "the steps of Weights & Biases can only rise"


def test_row_says_its_attempt_from_the_second_on():
    assert "run/attempt" not in figures_of("training_iterations", {"iter": 1, "attempt": 1, **ROW}).numbers
    assert figures_of("training_iterations", {"iter": 1, "attempt": 2}).numbers == {"run/attempt": 2}


def test_attempts_have_one_id_and_other_settings_after_lost_iterations_a_new_one(tmp_path):
    content = {"config": {"seed": 1}, "startup_info": {}, "attempts": [{"run_name": "run_1"}]}
    first, again = (tracked_run(content, tmp_path) for _ in range(2))
    assert first.id == again.id and first.unique_name == f"run_1-{first.id}"
    assert tracked_run(content, tmp_path, begins=True).id != first.id
    history = {"config": {"seed": 1, "log_interval": 1}, "training_iterations": [{"iter": 7}]}
    assert not makes_other_rows(history, {"seed": 1, "log_interval": 9}, start=5)
    assert not makes_other_rows(history, {"seed": 2}, start=8), "no iteration is made again"
    assert makes_other_rows(history, {"seed": 2}, start=5) and not makes_other_rows(None, {}, 0)


def test_finished_record_is_sent_with_all_its_attempts(fake, record, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", package())
    fake("tensorboard")
    history = killed_at(record("tensorboard"), 9, checkpoint=4, noted=6)
    content = record("tensorboard", history=history, start=4)
    killed_at(content, 12, checkpoint=8, noted=11)
    path = tmp_path / "run_20260101_000009.json"
    path.write_text(json.dumps({**content.content, "status": "completed", "summary": {"final_iter": 12}}))
    tracker = fake()
    assert run_command(track.main, [str(path), "--trackers=wandb", "--project=other"]) == 0
    assert losses(tracker) == list(range(13)) and tracker.run.project == "other"
    assert tracker.summary == {"completed": True, "final_iter": 12}
    assert "wandb: sent 13 iterations of run_20260101_000000-" in capsys.readouterr().out
    later = fake(last=12)
    assert run_command(track.main, [str(path), "--trackers=wandb"]) == 0
    assert later.steps == [] and later.run.id == tracker.run.id, "it has them"
    fake(fail=raising("send"))
    assert run_command(track.main, [str(path), "--trackers=wandb"]) == FAILED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--trackers=wandb"], "missing.json cannot be read as a run record"),
        (["list.json", "--trackers=wandb"], "list.json cannot be read as a run record: it is not a JSON"),
        (["missing.json", "--trackers=,"], "--trackers is empty; name one or more of wandb,"),
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


# --- settings ---


def package(name="wandb"):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def test_unknown_tracker_and_a_missing_package_are_errors_at_the_start(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="'tensorbord' is none of .* did you mean 'tensorboard'"):
        check(TrainConfig(device="cpu", trackers="tensorbord"), 1)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="trackers='trackio' needs trackio: .*leave trackio out of"):
        check(TrainConfig(device="cpu", trackers=" trackio,"), 1)


def test_folder_of_offline_runs_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="trackers='wandb' needs wandb"):
        check(TrainConfig(device="cpu", trackers="wandb"), 1)


# --- Weights & Biases ---


class FakeRun:
    url, starting_step = None, 5

    def __init__(self):
        self.summary, self.logged = {}, []

    def define_metric(self, *names, **settings):
        self.metric = names, settings

    def log(self, values, step, commit):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


def fake_wandb(monkeypatch, run, mode="online", logged_in=True):
    wandb, asked = package(), {}
    wandb.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
    wandb.login = lambda prompt: logged_in
    wandb.Settings = lambda **settings: settings
    wandb.init = lambda **settings: asked.update(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return asked


def test_run_at_weights_and_biases_is_continued_where_the_server_is(monkeypatch, tmp_path):
    run, tracker = FakeRun(), WandbTracker()
    asked = fake_wandb(monkeypatch, run)
    content = {"config": {"seed": 1}, "startup_info": {}, "attempts": [{"run_name": "run_1"}]}
    assert tracker.open(identity := tracked_run(content, tmp_path)) == 4
    assert (asked["id"], asked["resume"], asked["dir"]) == (identity.id, "allow", str(tmp_path))
    assert asked["settings"]["x_disable_meta"] and not asked["settings"]["save_code"]
    tracker.send(7, {"train/loss": 2.5}, {"checkpoint/path": "out"})
    tracker.close(False, {"time_ms": {"median": 3.0}})
    assert run.logged == [(7, {"iter": 7, "train/loss": 2.5, "checkpoint/path": "out"})]
    assert run.metric == (("*",), {"step_metric": "iter"})
    assert run.summary == {"summary/time_ms/median": 3.0} and run.exit_code == 1


def test_weights_and_biases_without_a_key_is_no_prompt_but_an_error(monkeypatch, tmp_path):
    fake_wandb(monkeypatch, FakeRun(), logged_in=False)
    content = {"config": {}, "startup_info": {}, "attempts": [{"run_name": "run_1"}]}
    with pytest.raises(RuntimeError, match="run `wandb login`, or set WANDB_MODE=offline"):
        WandbTracker().open(tracked_run(content, tmp_path))


def test_offline_file_that_was_cut_off_is_read_up_to_there(tmp_path):
    whole = b":W&B\0\0\0" + b"crc_\3\0\1abc" + b"crc_\2\0\2de" + b"crc_\1\0\4f"
    assert list(records(whole)) == [b"abc", b"def"] == list(records(whole + b"crc_\5\0\1ab"))
    assert list(records(whole[:-1])) == [b"abc"]
    assert list(records(b"")) == [] and last_step(tmp_path, "id") == NOTHING
    with pytest.raises(ValueError, match="no file of Weights & Biases"):
        list(records(b"something else"))
