"""A loss of power at any moment leaves each file whole or not there: content is on disk before its name, and
names that others rely on are on disk before the next step.

`disk` watches fsync, replace, rename and unlink, and knows at each moment what a loss of power would leave:
the content that a file had at its last fsync, and the names that a folder had at its last one.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoint_parts import make_config, make_saver, make_state, save
from support.packed_tokens import EOT, T, files_of
from support.preparation import write_small
from support.three_parts import make

from common import durable_file
from training.batches.document_starts import EndOfText
from training.batches.packing import pack_documents
from training.checkpoints.tensor_files import Part, write_parts
from training.configuration.keys import TrainConfig
from training.records.attempts import read_record
from training.records.run_record import RunRecord

pytestmark = pytest.mark.usefixtures("here")


@dataclass
class Event:
    """One rename or deletion below the watched folder."""

    kind: str  # "name" or "delete"
    path: str  # what got this name, or was deleted
    before: set[str]  # what a loss of power just before would leave: files and folders
    after: set[str]  # and what one just before the next event


@dataclass
class Disk:
    root: Path
    content: dict[int, bytes] = field(default_factory=dict)  # of a file at its last fsync
    names: dict[int, set] = field(default_factory=dict)  # of a folder at its last fsync: (name, inode)
    events: list[Event] = field(default_factory=list)

    def sync(self, descriptor: int) -> None:
        stat, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[stat.st_ino] = {(entry.name, entry.inode()) for entry in os.scandir(path)}
        else:
            self.content[stat.st_ino] = path.read_bytes()

    def is_whole(self, path: Path) -> bool:
        """Whether a loss of power would leave this file's content, or all files of this folder."""
        if path.is_dir():
            known = self.names.get(path.stat().st_ino, set())
            return all(
                (child.name, child.stat().st_ino) in known and self.is_whole(child)
                for child in path.iterdir()
            )
        return self.content.get(path.stat().st_ino) == path.read_bytes()

    def durable(self) -> set[str]:
        """The files and folders whose content and name a loss of power would leave."""
        found = set()
        for path in self.root.rglob("*"):
            names = self.names.get(path.parent.stat().st_ino, set())
            if (path.name, path.stat().st_ino) in names and (path.is_dir() or self.is_whole(path)):
                found.add(str(path.relative_to(self.root)))
        return found

    def note(self, kind: str, path: Path) -> None:
        path = Path(path)
        if path.absolute().is_relative_to(self.root):
            name, before = str(path.absolute().relative_to(self.root)), self.durable()
            if self.events:
                self.events[-1].after = before
            self.events.append(Event(kind, name, before, set()))

    def end(self) -> None:
        self.events[-1].after = self.durable()

    def named(self, path: str) -> Event:
        """The last time that something got this name."""
        return [event for event in self.events if event.kind == "name" and event.path == path][-1]

    def order(self) -> list[str]:
        return [event.path for event in self.events if event.kind == "name"]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder tmp_path / 'disk', watched."""
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    fsync, unlink = os.fsync, Path.unlink

    def watched_fsync(descriptor):
        fsync(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        disk.sync(descriptor)

    def watched_rename(real):
        def rename(source, target):
            if Path(source).absolute().is_relative_to(disk.root) and ".tmp" not in str(target):
                assert disk.is_whole(Path(source)), f"{source} gets its name before its content is on disk"
            disk.note("name", target)
            real(source, target)

        return rename

    def watched_unlink(path, missing_ok=False):
        if path.exists():
            disk.note("delete", path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_rename(os.replace))
    monkeypatch.setattr(os, "rename", watched_rename(os.rename))
    monkeypatch.setattr(Path, "unlink", watched_unlink)
    return disk


# --- the parts ---


def test_a_file_is_replaced_after_its_content_is_on_disk_and_a_json_file_is_there_to_stay(disk):
    durable_file.write_bytes(disk.root / "a", b"1")
    assert disk.order() == ["a"] and disk.is_whole(disk.root / "a") and "a" not in disk.durable()
    durable_file.write_json(disk.root / "b.json", {"b": 1})
    assert disk.durable() >= {"a", "b.json"}
    (disk.root / "c").write_bytes(b"3")
    durable_file.sync_folder(disk.root)
    assert "c" not in disk.durable(), "the test would see a file that was not synced"
    durable_file.sync(disk.root / "c")
    assert "c" in disk.durable()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(disk, monkeypatch):
    durable_file.write_bytes(disk.root / "a", b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        durable_file.write_bytes(disk.root / "a", b"new")
    assert [path.name for path in disk.root.iterdir()] == ["a"]
    assert (disk.root / "a").read_bytes() == b"old"


def test_a_write_that_fails_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(OSError, match="No such file or directory: '.*/absent/a'"):
        durable_file.write_bytes(tmp_path / "absent" / "a", b"1")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory: '.*/file/a'"):
        durable_file.new_folder(tmp_path / "file" / "a").__enter__()


# --- checkpoints ---


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_before_pointers_name_it(disk, asynchronous):
    config = make_config(disk.root / "out", keep_last=1, async_checkpoint=asynchronous)
    saver = make_saver(config, make_state(config))
    durable_file.sync_folder(disk.root)
    for iteration in (1, 2, 3):
        save(saver, iteration, val_loss=float(iteration))
        disk.end()
        place, final = "out/checkpoints", f"out/checkpoints/step-{iteration:08d}"
        temporary = next(e.path for e in disk.events if e.path.startswith(f"{final}.tmp")).rpartition("/")[0]
        order = disk.order()[-6:] if iteration == 1 else [p for p in disk.order() if p.startswith(place)]
        steps = [f"{temporary}/{name}" for name in ("report-00000.json", "state.json", "manifest.json")]
        steps += [final, f"{place}/latest", f"{place}/best"]
        places = [len(order) - 1 - order[::-1].index(step) for step in steps]
        assert places == sorted(places), order
        assert place in disk.named(final).before, "the name of its folder comes first"
        files = {f"{final}/{name}" for name in os.listdir(disk.root / final)}
        assert disk.named(f"{place}/latest").before >= {final, *files}
    best = disk.named(f"{place}/best")
    assert disk.root.joinpath(best.path).read_text() == "step-00000001\n"
    gone = [e for e in disk.events if e.kind == "name" and "step-00000002.tmp-delete" in e.path]
    assert len(gone) == 1 and f"{place}/step-00000003" in gone[0].before, "deleted when its successor is safe"


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
def test_all_of_a_tensor_file_is_on_disk_when_it_is_written(disk, size):
    part = Part("t", (0,), (size,), torch.uint8)
    write_parts(disk.root / "t.safetensors", [(part, torch.ones(size, dtype=torch.uint8))])
    assert disk.is_whole(disk.root / "t.safetensors")


# --- the run record ---


def test_a_run_record_is_on_disk_before_its_journal_is_removed(disk):
    path = disk.root / "run_1.json"
    record = RunRecord(path, TrainConfig().to_dict(), {}, enabled=True)
    for iteration in range(3):
        record.add_event(iteration, "test")
        record.save(at_once=True)
        assert "run_1.json" in disk.durable()
        assert json.loads(path.read_text())["events"][-1]["iter"] == iteration
    record.close("completed", {})
    disk.end()
    (removed,) = [event for event in disk.events if event.path == "run_1.jsonl" and event.kind == "delete"]
    assert "run_1.json" in removed.before
    assert json.loads(path.read_text())["status"] == "completed"


def test_what_earlier_attempts_recorded_is_on_disk_before_an_attempt_adds_its_own(disk):
    first = RunRecord(disk.root / "run_1.json", {}, {}, enabled=True)
    first.add_event(0, "test")
    first.close("failed", {})
    second = RunRecord(disk.root / "run_2.json", {}, {}, True, read_record(first.path), 1)
    second.save()
    assert {"run_2.json", "run_2.jsonl"} <= disk.durable()


# --- datasets ---


@pytest.mark.parametrize(("part_bytes", "shard_tokens"), [(1, 10**6), (None, 10**6), (1, 30)])
def test_token_files_are_on_disk_before_the_manifest_of_their_part_and_meta_json(
    disk, bpe, part_bytes, shard_tokens
):
    meta = make(disk.root, bpe, part_bytes, shard_tokens)
    disk.end()
    assert disk.order()[0] == "plan.json" and disk.order()[-1] in ("meta.json", ".verified.json")
    manifests = [path for path in disk.order() if path.startswith("parts/")]
    assert len(manifests) == (3 if part_bytes else 1)
    for path in manifests:
        files = json.loads((disk.root / path).read_text())["files"]
        assert files and disk.named(path).before >= set(files), path
    assert disk.named("meta.json").before >= {*meta["files"], *manifests, "plan.json"}
    assert disk.durable() >= {*meta["files"], "meta.json", "meta.pkl", "tokenizer.json"}


def test_a_small_dataset_is_on_disk_before_its_files_have_their_names(disk):
    for _ in range(2):  # the second replaces the first
        write_small(disk.root)
        disk.end()
        names = [path for path in disk.order() if path != ".verified.json"][-4:]
        assert names == ["train.bin", "val.bin", "meta.pkl", "meta.json"]
        assert disk.durable() >= set(names)
    second = [(e.kind, e.path) for e in disk.events if e.path in names][len(names) :]
    assert second == [("delete", "meta.json"), *(("name", name) for name in names)], "the old one goes first"


def test_a_packing_is_on_disk_before_it_has_its_name(disk):
    """`disk` would refuse a folder's name that comes before its content."""
    ids = np.arange(1, 400)
    ids[::13] = EOT
    ids.astype("<u2").tofile(disk.root / "train_000.bin")
    pack_documents(EndOfText(files_of(disk.root), EOT), disk.root, "train", T)
    disk.end()
    (name,) = {path for path in disk.order() if "/" not in path}
    assert name == f".packed-train-{T}"
    files = {f"{name}/{file}" for file in ("index.json", "windows.bin", "pieces.bin")}
    assert disk.durable() >= {name, *files}
