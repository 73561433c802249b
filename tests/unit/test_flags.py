"""Flags in each form that they may have, and `train.py --help`."""

import subprocess
import sys

import pytest
from support.helpers import ROOT, TINY, write_config

from bench import throughput
from bench.plan import check_overrides
from common.errors import UserError
from training.configuration.files_and_flags import load_config
from training.configuration.flags import take_flags
from training.configuration.help import help_text


@pytest.fixture
def path(tmp_path):
    return str(write_config(tmp_path / "run.py", **TINY))


# --- flags ---


@pytest.mark.parametrize(
    "words, key, value",
    [
        (["--learning_rate=1"], "learning_rate", 1.0),
        (["--max_iters=1_000"], "max_iters", 1000),
        (["--compile=True"], "compile", True),
        (["--compile=false"], "compile", False),
        (["--wandb_run_name=1"], "wandb_run_name", "1"),
        (["--wandb_run_name=None"], "wandb_run_name", None),
        (["--wandb_run_name=True"], "wandb_run_name", "True"),
        (["--out_dir=runs/x=1/y"], "out_dir", "runs/x=1/y"),
        (["--peak_tflops=2250"], "peak_tflops", 2250.0),
        (["--peak_tflops=measure"], "peak_tflops", "measure"),
        (["--max_iters", "7"], "max_iters", 7),
        (["--learning_rate", "3e-3"], "learning_rate", 3e-3),
        (["--wandb_run_name", "true"], "wandb_run_name", "true"),  # no boolean: its next word is its value
        (["--wandb_run_name", ""], "wandb_run_name", ""),
        (["--wandb_run_name=--x"], "wandb_run_name", "--x"),
        (["--d_ff", "None"], "d_ff", None),
        (["--intermediate_size", "64"], "d_ff", 64),
        (["--max_iters", "7", "--max_iters=8"], "max_iters", 8),
        (["--max_iters=7", "--max_iters", "8"], "max_iters", 8),
        (["--dry_run"], "dry_run", True),
        (["--bias"], "bias", True),
        (["--flash_attn"], "attention_backend", "flash_attn_2"),
    ],
)
def test_a_flag_in_each_form_has_the_type_of_its_key(path, words, key, value):
    for argv in ([*words, path], [path, *words], [path, *words, "--seed=3"]):
        got = getattr(load_config(argv), key)
        assert got == value and type(got) is type(value), argv


def test_a_boolean_leaves_the_next_word_to_others(path):
    config = load_config(["--dry_run", path, "--eval_at_start", "--seed", "5"])
    assert (config.dry_run, config.eval_at_start, config.seed) == (True, True, 5)


def test_a_negative_number_is_a_value(path):
    for number in ("-1", "-1e-3", "-.5"):
        with pytest.raises(UserError, match="must be at least 0"):  # the rule about the value, which was read
            load_config([path, "--weight_decay", number])


def test_a_missing_value_is_named(path):
    for words in ([path, "--max_iters"], [path, "--max_iters", "--seed=1"], ["--max_iters", path]):
        with pytest.raises(UserError, match="^--max_iters has no value; write --max_iters=VALUE$"):
            load_config(words)


def test_an_unknown_key_is_named_with_the_nearest_in_each_form(path):
    for words in (["--batch_sise", "4"], ["--batch_sise=4"], ["--batch_sise"]):
        with pytest.raises(UserError, match="'batch_sise'.*--batch_sise.*did you mean 'batch_size'"):
            load_config([path, *words])


def test_each_form_becomes_key_equals_value_and_other_words_keep_their_order():
    argv = ["a", "--seed", "-1", "--iters", "5", "--compile", "b", "--dataset", "x", "--seed=2"]
    flags, rest = take_flags(argv, others=("dataset",))
    assert flags == ["--seed=-1", "--compile=True", "--seed=2"]
    assert rest == ["a", "--iters", "5", "b", "--dataset", "x"]


def test_benchmarks_read_the_keys_of_train_py_as_train_py_does():
    words = ["--n_layer", "2", "--suite", "quick", "--compile", "--dataset", "random"]
    options, flags = throughput.parse(words)
    assert (options.suite, options.dataset, flags) == ("quick", "random", ["--n_layer=2", "--compile=True"])
    check_overrides(["--n_layer", "2", "--compile"])
    for words, message in (
        (["--max_iters", "5"], "use --iters"),
        (["--eval_only"], "benchmark's to set"),
        (["--n_layers", "2"], "did you mean 'n_layer'"),
        (["--n_layer"], "has no value"),
    ):
        with pytest.raises(UserError, match=message):
            check_overrides(words)


# --- help ---


def test_help_is_printed_before_torch_numpy_or_a_recipe_is_imported():
    slow = ["torch", "numpy", *(f"recipes.{path.stem}" for path in ROOT.glob("recipes/[a-z]*.py"))]
    assert "recipes.mxfp8" in slow
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({slow}));"  # an import of it fails
        "sys.argv = ['train.py', '--help', 'seed']; runpy.run_path('train.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'nvfp4' | package.module" in done.stdout
    assert "--seed=1337  (int, at least 0, guarded)" in done.stdout and done.stdout == f"{help_text()}\n"
