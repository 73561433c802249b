"""Documents whose lengths are stored beside the tokens are kept apart as those with end-of-text ids are."""

import hashlib
import json
import logging

import numpy as np
import pytest
import torch
from support.helpers import TINY, evaluations, last_run, make_dataset, write_config
from support.masked_documents import write_lengths

from common.errors import UserError
from ops.documents import START, document_starts, plain_ids
from training.batches.document_starts import EndOfText, ListedDocuments
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.batches.windows import inputs_and_targets
from training.configuration.keys import TrainConfig
from training.process.world import World

T, EOT = 32, 0


def lengths_by_eot(path) -> np.ndarray:
    ids = np.fromfile(path, "<u2")
    return np.diff(np.unique([0, *(np.flatnonzero(ids == EOT) + 1), len(ids)]))


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """The same documents in two folders: one names the end-of-text id, the other has lengths."""
    root = tmp_path_factory.mktemp("lengths")
    for name in ("eot", "listed"):
        folder = make_dataset(root / name, train_tokens=40_000, eot_id=EOT)
        meta = json.loads((folder / "meta.json").read_text())
        for path in folder.glob("*.bin"):
            ids = np.fromfile(path, "<u2")
            ids[ids == EOT] = 1
            rng = np.random.default_rng(0)
            ends = np.cumsum(rng.integers(2, 31, len(ids)))
            ids[ends[ends < len(ids)] - 1] = EOT
            ids.astype("<u2").tofile(path)
            meta["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / "meta.json").write_text(json.dumps(meta))
    write_lengths(folder, {name: lengths_by_eot(folder / name) for name in ("train.bin", "val.bin")})
    write_config(root / "run.py", **{**TINY, "dataset": root / "listed", "eval_interval": 2, "max_iters": 4})
    return root


def settings(folder, **keys) -> TrainConfig:
    shape = {name: value for name, value in TINY.items() if name not in ("compile",)}
    return TrainConfig(**{**shape, "dataset": str(folder), "doc_masking": True, "eval_interval": 2, **keys})


def windows_of(config):
    return make_windows(open_sources(config, scan=True), config)


# --- marks ---


def test_marks_follow_the_lengths_across_files_and_the_end_of_the_tokens(twins):
    config = settings(twins / "listed")
    listed = open_sources(config, scan=True)[0].documents["train"]
    assert isinstance(listed, ListedDocuments) and len(listed.starts) > 2
    tokens = listed.tokens
    ids = tokens.read(0, tokens.total).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths_by_eot(twins / "listed" / "train.bin"))[:-1]])
    expected = ids.copy()
    expected[starts] |= START
    marked = ids.copy()
    listed.mark(marked, 0)
    assert np.array_equal(marked, expected)
    second, third = map(int, listed.starts[1:3])
    for begin in (1, 777, tokens.total - 50, second, third - 1, 5 * tokens.total + 3):
        row = tokens.read(begin, 100).astype(np.int64)
        listed.mark(row, begin)
        assert np.array_equal(row, np.take(expected, np.arange(begin, begin + 100), mode="wrap")), begin


def test_targets_are_not_marked_and_the_first_token_of_a_document_is_a_target():
    x, y = inputs_and_targets(torch.tensor([[5, 6 | START, 7, ~(EOT | START), ~(EOT | START)]]))
    assert x.tolist() == [[5, 6 | START, 7, EOT | START]]
    assert y[0, :2].tolist() == [6, 7] and (y[0, 2:] < 0).all()
    assert document_starts(x).tolist() == [[True, True, False, True]]
    assert plain_ids(x).tolist() == [[5, 6, 7, EOT]]


@pytest.mark.parametrize("packing", ["stream", "truncate"])
@pytest.mark.parametrize("workers", [None, 2])
def test_batches_are_those_of_the_same_documents_with_end_of_text_ids(twins, packing, workers):
    keys = {"packing": packing, "use_dataloader": workers is not None, "dataloader_num_workers": workers or 0}
    batches = []
    for name in ("eot", "listed"):
        config = settings(twins / name, **keys)
        loader = Loader(windows_of(config)["train"], config, World(0, 0, 1, torch.device("cpu")))
        batches.append([loader.next() for _ in range(4)])
        loader.close()
    for (x, y), (other_x, other_y) in zip(*batches, strict=True):
        assert torch.equal(plain_ids(x), plain_ids(other_x))
        assert torch.equal(document_starts(x), document_starts(other_x))
        assert torch.equal(y, other_y)
    assert sum(int((x >= START).sum()) for x, _ in batches[0]) > 20


def test_documents_of_one_token_and_ids_of_the_end_inside_are_packed_as_they_are_listed(tmp_path):
    folder = make_dataset(tmp_path / "data", train_tokens=5000)
    write_lengths(folder, {"train.bin": [1, 1, 3] * 1000, "val.bin": [4000]})
    windows = windows_of(settings(folder, packing="truncate"))["train"]
    assert windows.description["documents"] == 3000
    assert (windows.description["tokens_kept"], windows.description["tokens_cut_off"]) == (5000, 0)
    rows = windows.samples(np.arange(windows.count), 1)
    assert (rows >= START).sum() == 3000


# --- runs ---


def test_a_run_trains_and_evaluates_as_one_by_end_of_text_ids(run, twins):
    for name in ("eot", "listed"):
        out = f"--out_dir={twins / ('out-' + name)}"
        assert run(twins / "run.py", out, f"--dataset={twins / name}", "--doc_masking=True") == 0
    assert run(twins / "run.py", f"--out_dir={twins / 'out-plain'}") == 0
    one, two, plain = (last_run(twins / f"out-{name}") for name in ("eot", "listed", "plain"))
    losses = [[row["loss"] for row in record["training_iterations"]] for record in (one, two, plain)]
    assert losses[0] == losses[1] != losses[2]
    assert evaluations(one) == evaluations(two)
    config = settings(f"{twins / 'eot'}:0.5,{twins / 'listed'}:0.5")  # a mixture may have both
    sources = open_sources(config, scan=False)
    kinds = [type(source.documents["train"]) for source in sources]
    assert kinds == [EndOfText, ListedDocuments]
    assert (make_windows(sources, config)["train"].samples(np.arange(64), 1) >= START).any(axis=1).all()


# --- what is refused ---


@pytest.fixture
def listed(tmp_path):
    folder = make_dataset(tmp_path / "data", train_tokens=5000)
    return write_lengths(folder, {"train.bin": [2000, 3000], "val.bin": [1500, 2500]})


def change_meta(change):
    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


def write_train(*lengths):
    return lambda folder: np.array(lengths, "<u4").tofile(folder / "train.bin.lengths")


WRONG = {
    "missing": (lambda f: (f / "train.bin.lengths").unlink(), "lengths is missing or not a regular"),
    "longer": (write_train(1, 1, 1), "has 12 bytes, meta.json says 8"),
    "changed": (write_train(2500, 2500), "not the file that"),
    "count": (
        change_meta(lambda m: m["files"]["train.bin"]["lengths"].update(documents=-1)),
        "documents -1 in the lengths",
    ),
    "format 1": (change_meta(lambda m: m.update(format=1)), "format 1, in which train.bin has"),
    "one file": (change_meta(lambda m: m["files"]["val.bin"].pop("lengths")), "which val.bin has"),
    "format 3": (change_meta(lambda m: m.update(format=3)), "format 3, this code reads 1 and 2"),
    # with the right hash
    "sum": (lambda f: write_lengths(f, {"train.bin": [2000, 2999]}), "documents of 4,999 tokens in all, and"),
    "empty": (lambda f: write_lengths(f, {"train.bin": [0, 5000]}), "document of 0"),
}


@pytest.mark.parametrize(("damage", "message"), WRONG.values(), ids=WRONG)
def test_wrong_lengths_are_found_at_the_start(listed, damage, message):
    damage(listed)
    with pytest.raises(UserError, match=message):
        open_sources(settings(listed), scan=True)


def test_other_lengths_are_other_data_to_a_resume(run, listed, capsys):
    config = write_config(listed.parent / "run.py", **{**TINY, "dataset": listed, "doc_masking": True})
    out = f"--out_dir={listed.parent / 'out'}"
    assert run(config, out, "--max_iters=2") == 0
    write_lengths(listed, {"train.bin": [2500, 2500]})
    logging.getLogger("nanomfu").handlers.clear()
    assert run(config, out, "--max_iters=4", "--init_from=resume") == 2
    assert "other tokens in train.bin" in capsys.readouterr().err
