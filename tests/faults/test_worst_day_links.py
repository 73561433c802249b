"""The worst day of an out_dir: somebody has planted links in it. Nothing is written through one, be it to a
file outside, to a name that is not taken yet, or by a second name (a hard link)."""

import json
import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.faults import saved_steps
from torch._C import _distributed_c10d as c10d

from training.faults import traces
from training.process.console import LogFile
from training.process.world import _record_collectives
from training.records import beginning, run_record

PRECIOUS = "not yours\n"


@pytest.fixture(params=["link", "dangling link", "second name"])
def plant(request, tmp_path):
    """plant(path) puts a link to a file outside at that path. None of them may have been written through."""
    outside, planted = tmp_path / "outside", []
    outside.mkdir()

    def plant(path: Path) -> None:
        target = outside / f"{len(planted)}-{path.name}"
        planted.append(target)
        if request.param != "dangling link":
            target.write_text(PRECIOUS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(target) if request.param == "second name" else path.symlink_to(target)

    yield plant
    assert planted
    for target in planted:
        there = target.read_text() if target.exists() else None
        assert there == (None if request.param == "dangling link" else PRECIOUS), target


def test_no_file_of_a_run_is_written_through_a_link(run, config, out, plant, monkeypatch):
    record = out / "run_x.json"
    monkeypatch.setattr(beginning, "new_record_path", lambda config: record)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    pid, root = os.getpid(), out / "checkpoints"
    for path in (
        out / f".write_test_{pid}",
        out / "record.tmp",
        out / "run_x.jsonl",
        *(out / f"run.token{end}" for end in ("", f".tmp{pid}")),
        *(root / f"{pointer}{end}" for pointer in ("latest", "best") for end in ("", ".tmp", f".tmp{pid}")),
    ):
        plant(path)
    assert run(config) == 0
    assert json.loads(record.read_text())["status"] == "completed"
    assert (root / "latest").read_text() == "step-00000004\n"
    assert (
        json.loads((root / "step-00000004/state.json").read_text())["token"]
        == (out / "run.token").read_text()
    )


def test_a_record_has_a_name_that_no_link_has(run, config, out, plant, monkeypatch):
    now = datetime(2026, 1, 1)
    monkeypatch.setattr(beginning, "datetime", SimpleNamespace(now=lambda: now))
    monkeypatch.setattr(run_record, "_now", lambda unit="seconds": now.isoformat())
    for end in (".json", "_2.log", "_3.jsonl"):
        plant(out / f"run_20260101_000000{end}")
        plant(out / f"eval_20260101_000000{end}")
    assert run(config) == 0
    assert run(config, "--init_from=resume", "--eval_only=True") == 0
    assert (out / "run_20260101_000000_4.json").is_file() and (out / "run_20260101_000000_4.log").is_file()
    assert (out / "eval_20260101_000000_4.json").is_file()


def test_the_lock_is_a_file_of_its_own_and_no_pipe(run, config, out, plant, capfd):
    plant(out / "run.lock")
    assert run(config) == 2
    assert "cannot be written" in capfd.readouterr().err
    (out / "run.lock").rename(out / "planted")
    os.mkfifo(out / "run.lock")
    assert run(config) == 2
    assert f"remove it: rm {out}/run.lock" in capfd.readouterr().err


def test_the_traces_of_a_hang_are_not_written_through_a_link(out, plant, monkeypatch):
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    monkeypatch.setattr(traces.torch.cuda, "is_available", lambda: True)
    for name, write in (("stacks", traces.write_stacks), ("recorder", traces.write_collectives)):
        plant(out / name)
        write(out / name)
        assert (out / name).stat().st_size > 4


def test_nccl_finds_no_link_to_write_through(out, plant, request, monkeypatch):
    """Its own code opens the file, so a link is removed before."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
    plant(out / "flight_recorder_rank_1")
    _record_collectives(out, 1)
    assert not os.path.lexists(out / "flight_recorder_rank_1")


def test_a_log_that_was_replaced_by_a_link_is_not_opened_again(tmp_path):
    handler, path = LogFile(tmp_path / "run.log"), tmp_path / "run.log"
    handler.write("one\n")
    handler.close()
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        handler.write("two\n")
    assert not (tmp_path / "outside").exists()


def test_an_out_dir_and_its_checkpoints_may_be_links_to_other_disks(run, config, out, tmp_path):
    disk, checkpoints = tmp_path / "disk", tmp_path / "checkpoint-disk"
    disk.mkdir(), checkpoints.mkdir()
    out.symlink_to(disk)
    (disk / "checkpoints").symlink_to(checkpoints)
    assert run(config) == 0 and run(config) == 0
    assert (disk / "checkpoints").is_symlink() and saved_steps(tmp_path, checkpoints.name) == [2, 4]
    assert len(list(checkpoints.glob("step-*.before"))) == 2
    assert run(config, "--init_from=resume", "--max_iters=6") == 0
    assert run(config, "--max_iters=6") == 2, "a second set"
