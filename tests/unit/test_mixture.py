"""A mixture samples its sources by weight, from a sample's number alone, each source as if it were alone."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.helpers import TINY, last_run, make_dataset, write_config

from common.errors import UserError
from training.batches.fingerprint import data_differences, run_fingerprint
from training.batches.loader import IterationBatches
from training.batches.mixture import BLOCK, Mixture
from training.batches.sources import make_windows, open_sources
from training.batches.windows import StreamWindows
from training.configuration.dataset_name import parse_dataset
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.evaluation import eval_batches, evaluate
from training.process.world import World

T = TINY["block_size"]
SEED = 1337
TOKENIZER = {"kind": "tokenizers", "name": "tok", "sha256": "a" * 64}


def numbered(folder, first, windows, dtype="uint32", **meta):
    """A dataset whose tokens are first, first + 1, ...: windows of it tell where they are from."""
    folder.mkdir(parents=True)
    ids = (first + np.arange(windows * T + 1)).astype({"uint32": "<u4", "uint16": "<u2"}[dtype])
    ids.tofile(folder / "train.bin")
    ids[: 40 * T + 1].tofile(folder / "val.bin")
    content = {"dtype": dtype, "vocab_size": 50_000, "tokenizer": TOKENIZER, "eot_id": 0, **meta}
    (folder / "meta.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """100 windows of ids below 10,000 and 50 windows of ids from there on, in another dtype."""
    root = tmp_path_factory.mktemp("mixture")
    return numbered(root / "a", 0, 100), numbered(root / "b", 10_000, 50, "uint16")


def config(dataset, **keys) -> TrainConfig:
    keys = {"vocab_size": 50_000, "eval_interval": 0, "batch_size": 2, **keys}
    return TrainConfig(**{**TINY, "dataset": str(dataset), **keys})


def mixed(folders, weights=(0.7, 0.3)) -> str:
    return ",".join(f"{folder}:{weight}" for folder, weight in zip(folders, weights, strict=True))


def world(rank=0, size=1) -> World:
    return World(rank, rank, size, torch.device("cpu"))


def open_windows(settings: TrainConfig) -> dict:
    return make_windows(open_sources(settings, scan=False), settings)


@pytest.fixture(scope="module")
def mixture(folders) -> Mixture:
    return open_windows(config(mixed(folders)))["train"]


def shares(*weights) -> Mixture:
    """A mixture of which only the schedule is of interest."""
    total = sum(Fraction(str(weight)) for weight in weights)
    return Mixture({str(i): (Fraction(str(weight)) / total, None) for i, weight in enumerate(weights)})


# --- what the key says ---


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("quickstart", {"quickstart": 1}),
        ("/a,b/c", {"/a,b/c": 1}),
        ("a:3", {"a": 1}),  # weights are relative to their sum
        ("a:0.7,b:0.3", {"a": Fraction(7, 10), "b": Fraction(3, 10)}),
        (" a : 2 , /x/y:1.0 ", {"a": Fraction(2, 3), "/x/y": Fraction(1, 3)}),
        ("/with:colon/a:1,b:3", {"/with:colon/a": Fraction(1, 4), "b": Fraction(3, 4)}),
    ],
)
def test_a_dataset_is_one_name_or_several_with_weights(text, sources):
    assert parse_dataset(text) == sources


@pytest.mark.parametrize(
    "text, why",
    [
        ("a:0.7,b", "'b' is not NAME:WEIGHT"),
        ("a:0.7,b:", "'b:' is not NAME:WEIGHT"),
        ("a:0.7,b:much", "'b:much' is not NAME:WEIGHT"),
        ("a:0.7,b:nan", "'b:nan' is not NAME:WEIGHT"),
        ("a:1/0", "'a:1/0' is not NAME:WEIGHT"),
        ("a:0.7,b:0", "'b:0' is not NAME:WEIGHT, with a weight above 0"),
        ("a:0.7,b:-0.3", "'b:-0.3' is not NAME:WEIGHT, with a weight above 0"),
        ("a:0.7,b:1e999999999", "'b:1e999999999' is not NAME:WEIGHT"),
        ("a:0.7,a:0.3", "'a' is there twice"),
        ("a:0.7,:0.3", "':0.3' is not NAME:WEIGHT"),
        ("a:0.7,", "'' is not NAME:WEIGHT"),
    ],
)
def test_mixture_that_cannot_be_read_is_refused_when_the_configuration_is_loaded(tmp_path, text, why):
    path = write_config(tmp_path / "config.py", **{**TINY, "dataset": text})
    with pytest.raises(UserError) as error:
        load_config([str(path)])
    assert why in str(error.value) and "'a:0.7,b:0.3'" in str(error.value)


# --- the schedule ---


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (1, 1, 1), (0.9, 0.0999, 0.0001), (5_000_000_001, 7, 3), (1,)]
)
def test_each_source_gets_its_weight_of_the_samples_each_in_order(weights):
    mixture, samples = shares(*weights), 40 * BLOCK
    sources, own = mixture.schedule(np.arange(samples), SEED)
    for source, (weight, _) in enumerate(mixture.by_source.values()):
        numbers = own[sources == source]
        assert np.array_equal(numbers, np.arange(len(numbers)))  # none twice, none left out, in order
        assert abs(len(numbers) - weight * samples) < len(weights)


def test_sample_is_found_without_those_before_it():
    mixture = shares(0.7, 0.2, 0.1)
    sources, own = mixture.schedule(np.arange(10 * BLOCK), SEED)
    some = np.array([2500, 3, 777, 256, 255])
    assert np.array_equal(mixture.schedule(some, SEED), (sources[some], own[some]))
    far = 10**15 + 12_345  # exact, where a float is not
    source, number = mixture.schedule(np.array([far]), SEED)
    assert abs(int(number[0]) - far * [7, 2, 1][int(source[0])] // 10) < BLOCK


def test_schedule_is_that_of_checkpoints_that_exist():
    sources, own = shares(0.7, 0.3).schedule(np.arange(16), SEED)
    assert sources.tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0]
    assert own.tolist() == [0, 0, 1, 2, 3, 4, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10]
    sources, own = shares(0.7, 0.3).schedule(BLOCK + np.arange(16), SEED)  # the second block's order
    assert sources.tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1]
    assert own.tolist() == [179, 180, 181, 77, 182, 78, 183, 184, 79, 80, 185, 186, 81, 187, 188, 82]
    assert shares(0.29, 0.71).counts(25 * BLOCK).tolist() == [1856, 4544], "a product of floats is 1855.99"


# --- samples ---


def samples(mixture, size=1, position=0, iterations=1, settings=None) -> np.ndarray:
    """(N, T + 1) in the order of their global numbers, 8 an iteration."""
    settings = settings or config("-", gradient_accumulation_steps=4 // size)
    rows = []
    for i in range(iterations):
        at = position + 8 * i
        ranks = [IterationBatches(mixture, settings, world(rank, size))[at] for rank in range(size)]
        rows.append(torch.stack(ranks, dim=1).reshape(8, T + 1))
    return torch.cat(rows).numpy()


def test_source_in_a_mixture_has_the_order_that_it_has_alone(mixture, folders):
    rows = samples(mixture, iterations=60)
    for folder, mine in zip(folders, (rows[:, 0] < 10_000, rows[:, 0] >= 10_000), strict=True):
        alone = open_windows(config(folder))["train"]
        assert isinstance(alone, StreamWindows)
        assert np.array_equal(rows[mine], samples(alone, iterations=60)[: mine.sum()])


@pytest.mark.parametrize("size", [2, 4])
def test_world_size_and_resumes_change_no_sample_of_a_mixture(mixture, size):
    whole = samples(mixture, iterations=40)
    before = samples(mixture, size, iterations=17)
    after = samples(mixture, 1, position=17 * 8, iterations=23)
    assert np.array_equal(np.concatenate([before, after]), whole)


# --- what is refused ---


def refusal(settings) -> str:
    with pytest.raises(UserError) as error:
        open_sources(settings, scan=True)
    return str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer": {**TOKENIZER, "sha256": "b" * 64}},
        {"tokenizer": {"kind": "tiktoken", "name": "gpt2"}},
        {"tokenizer": {}},
        {"vocab_size": 49_999},
        {"eot_id": 1},
    ],
)
def test_sources_of_two_tokenizers_are_refused_by_name(tmp_path, folders, changed):
    other = numbered(tmp_path / "other", 20_000, 50, **changed)
    message = refusal(config(mixed((folders[0], other))))
    assert str(folders[0]) in message and str(other) in message and "tok (50,000 ids" in message


def test_tokenizers_with_one_hash_are_one_whatever_their_folders_are_called(tmp_path, folders):
    other = numbered(tmp_path / "other", 20_000, 50, tokenizer={**TOKENIZER, "name": "copy"})
    assert len(open_sources(config(mixed((folders[0], other))), scan=True)) == 2


def test_one_folder_under_two_names_is_refused(folders):
    again = f"{folders[0].parent}/../{folders[0].parent.name}/a"
    assert "are one folder" in refusal(config(mixed((folders[0], again))))


# --- evaluation and record ---


class MeanId(torch.nn.Module):
    def forward(self, x, y):
        return x.double().mean()


def test_validation_loss_is_the_mean_of_the_sources_by_weight(folders):
    settings = config(mixed(folders), eval_interval=1, eval_iters=10, eval_batch_size=2)
    windows = open_windows(settings)
    losses = evaluate(MeanId(), windows, settings, world())
    a, b = (losses["sources"][str(folder)] for folder in folders)
    assert a["val"] < 10_000 < b["val"]
    for split in ("train", "val"):
        assert losses[split] == pytest.approx(0.7 * a[split] + 0.3 * b[split])
    part = windows["val"].by_source[str(folders[1])]
    assert len(eval_batches(part[1], settings, part[0])) == 3  # of ten


def test_a_resume_hears_which_source_has_changed(tmp_path):
    one, other, third = (make_dataset(tmp_path / name, seed=seed) for seed, name in enumerate("abc"))
    saved = run_fingerprint(open_sources(config(f"{one}:1,{other}:1"), scan=False))
    weights = ["source 1: weight 3/4 instead of 1/2", "source 2: weight 1/4 instead of 1/2"]
    for text, wanted in (
        (f"{one}:2,{other}:2", []),
        (f"{one}:3,{other}:1", weights),
        (f"{one}:1,{third}:1", ["source 2: other tokens in train.bin"]),
        (str(one), ["1 sources instead of 2"]),
    ):
        assert data_differences(saved, run_fingerprint(open_sources(config(text), scan=False))) == wanted


def test_run_on_a_mixture_states_it_and_resumes_to_the_same_loss(tmp_path, run):
    one, other = (make_dataset(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    keys = {**TINY, "dataset": mixed((one, other)), "eval_interval": 2}

    def train(name, *flags):
        path = write_config(tmp_path / f"{name}.py", **{**keys, "out_dir": tmp_path / name})
        assert run(path, *flags) == 0
        return last_run(tmp_path / name)

    whole = train("whole")
    train("parts", "--max_iters=2")
    rows = [record["training_iterations"] for record in (whole, train("parts", "--init_from=resume"))]
    losses = [[row["loss"] for row in each] for each in rows]
    assert losses[0] == losses[1], "of both attempts"
    sources = whole["startup_info"]["data"]["sources"]
    assert [(source["name"], source["weight"]) for source in sources] == [(str(one), 0.7), (str(other), 0.3)]
    evaluation = whole["eval_steps"][-1]
    parts = [evaluation["sources"][str(folder)]["val"] for folder in (one, other)]
    assert evaluation["val_loss"] == pytest.approx(0.7 * parts[0] + 0.3 * parts[1])
    log = next((tmp_path / "whole").glob("*.log")).read_text()
    assert "2 sources, mixed by weight" in log and f"{other}" in log and "30 % of samples" in log
