"""Facts that stand in two places of the code: both say the same."""

import ast
import dataclasses
import itertools
import json
import re
from collections import defaultdict

import numpy as np
import pytest
from support.documents import TEXTS
from support.helpers import ROOT, TINY
from support.imports import product_files

import model
import model_builder
import model_config
from bench import plan
from data.pipeline.meta_file import describe
from data.pipeline.token_files import SPLITS
from data.pipeline.token_writer import give_names, write_files
from model_config import ModelConfig
from ops.ffn_backend import FfnBackend
from ops.recipe import Recipe
from plots.run_record import METHODS
from training.batches.dataset import open_dataset
from training.checkpoints.resume import FREE_TO_CHANGE, NOT_COMPARED
from training.configuration.choices import CHOICES, find, names_of
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS, TrainConfig
from training.configuration.rules import OF_CHOICES
from training.hardware import attention_kernels
from training.hardware.peaks import FORMATS, PRECISIONS
from training.memory.estimate import BYTES
from training.process.exit_status import STOP_SIGNALS
from training.records.utilization import FORMULAS

SOURCES = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in product_files()}

# --- signals and environment ---


def test_stop_signals_are_listed_once():
    """A second list, in the watchdog or in the loader, would miss a signal that is added to the first."""
    listed = r"[(\[{]signal\.SIG[A-Z0-9]+, signal\.SIG"
    lists = [
        path
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)) and re.match(listed, ast.unparse(node))
    ]
    assert lists == ["training/process/exit_status.py"]


def test_torchrun_passes_on_every_signal_that_stops_a_run():
    script = (ROOT / "scripts/slurm_train.sh").read_text()
    stop = {number.name for number in STOP_SIGNALS}
    (handled,) = re.findall(r"--signals-to-handle=(\S+)", script)
    (warning,) = re.findall(r"#SBATCH --signal=B:(\w+)@", script)
    assert stop <= set(handled.split(",")) and f"SIG{warning}" in stop


def test_a_variable_of_the_environment_has_one_default():
    """A peer that is compared with train.py must have the same allocator."""
    defaults = defaultdict(set)
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setdefault"):
                name, value = (ast.unparse(argument) for argument in node.args)
                if re.fullmatch(r"'[A-Z_]{6,}'", name):
                    defaults[name].add(value)
    assert "'PYTORCH_ALLOC_CONF'" in defaults
    assert {name: values for name, values in defaults.items() if len(values) > 1} == {}


# --- what prepares a dataset, and what trains on it ---


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 65_537])
def test_training_reads_the_tokens_and_files_that_the_preparation_writes(tmp_path, vocab_size):
    """At the largest vocabulary of two bytes, and beyond; in the order in which they were written."""
    rng, written, files = np.random.default_rng(0), {}, {}
    for split in SPLITS:
        written[split] = np.append(rng.integers(0, vocab_size, 999), vocab_size - 1)
        for number, part in enumerate(np.split(written[split], [50, 400])):
            stems, documents = {split: f"{split}_{number:06d}"}, [(split, [part])]
            files |= write_files(tmp_path, stems, documents, vocab_size, most=100)
    give_names(tmp_path, files)
    assert {"train_000000.bin", "train_000001_000.bin"} < files.keys()  # one file, and several of a part
    meta = describe(vocab_size, {"kind": "tiktoken", "name": "gpt2"}, None, "random ids", files)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    keys = {**TINY, "dataset": str(tmp_path), "vocab_size": vocab_size, "eval_interval": 1}
    splits, _ = open_dataset(TrainConfig(**keys), scan=True)
    assert tuple(splits) == SPLITS
    for split, tokens in splits.items():
        assert len(tokens.paths) > 10
        assert np.array_equal(tokens.read(0, tokens.total), written[split])


# --- names of methods, dtypes, kernels ---


def test_plots_know_every_formula_of_mfu():
    assert METHODS == {f"v{i}": formula.CALCULATION_METHOD for i, formula in enumerate(FORMULAS, start=1)}


def test_every_dtype_has_its_size_and_its_peak():
    assert BYTES == {name: dtype.itemsize for name, dtype in DTYPES.items()}
    assert set(PRECISIONS) == {*DTYPES, *FORMATS}


@pytest.mark.parametrize(
    ("key", "kind", "names"),
    [
        ("low_precision", Recipe, {"none", "fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4"}),
        ("ffn_backend", FfnBackend, {"torch", "quack"}),
    ],
)
def test_every_name_that_a_setting_takes_has_its_class_and_no_other(key, kind, names):
    """test_architecture.py compares these names with the modules that offer a class."""
    assert set(KEYS[key].choices) == set(names_of(key)) == names
    found = [find(key, name) for name in names_of(key)]
    assert all(issubclass(one, kind) for one in found) and len(set(found)) == len(names)


@pytest.mark.parametrize("key", OF_CHOICES)
def test_settings_of_a_recipe_or_an_optimizer_are_keys_that_some_of_them_reads(key):
    read = {name for one in names_of(key) for name in find(key, one).settings}
    assert read == set(OF_CHOICES[key]) <= set(KEYS) and set(CHOICES) <= set(KEYS)


def test_attention_falls_back_along_the_choices_of_its_key():
    assert attention_kernels.CHAIN == KEYS["attention_backend"].choices
    for backends in (attention_kernels.BACKENDS, attention_kernels.DOCUMENT_BACKENDS):
        assert (*backends, "manual") == attention_kernels.CHAIN


def test_the_model_has_every_choice_that_its_config_allows():
    choices = model_config.CHOICES
    norms = {model.make_norm(ModelConfig(normalization=name)).centered for name in choices["normalization"]}
    assert norms == {False, True}  # RMSNorm and LayerNorm
    assert set(model.ACTIVATIONS) == set(itertools.product(choices["ffn_type"], choices["activation"]))


def test_lists_of_keys_name_keys_that_exist():
    assert {*NOT_COMPARED, *plan.RESERVED} <= set(KEYS)
    assert set(FREE_TO_CHANGE) <= {field.name for field in dataclasses.fields(ModelConfig)}
    for key, value in plan.FIXED.items():
        assert isinstance(value, KEYS[key].types), key


# --- numbers in sentences ---


def test_every_number_of_parameters_in_a_sentence_is_that_of_its_model():
    """A config states its own in its header; a guide states those of the configs."""
    stated, counts = r"(\d{1,3}(?:,\d{3})+) parameters", set()
    for names in ("full_*.py", "qwen*.py", "llama3.2*.py", "smollm*.py"):
        for path in (ROOT / "config").glob(names):
            built = model_builder.build_model(load_config([str(path)]).model_config())
            (count,) = re.findall(stated, path.read_text())
            assert count == f"{built.count_parameters()['total']:,}", path.name
            counts.add(count)
    assert {name: set(re.findall(stated, text)) - counts for name, text in TEXTS.items()} == dict.fromkeys(
        TEXTS, set()
    )
