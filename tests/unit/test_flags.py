"""Flags in each form that they may have, and `train.py --help [WORD]`."""

import subprocess
import sys

import pytest
from support.helpers import ROOT, TINY, write_config

from bench import throughput
from bench.plan import check_overrides
from common.command import run_command
from common.errors import UserError
from training.configuration.files_and_flags import load_config
from training.configuration.flags import take_flags
from training.configuration.help import help_text, print_help, sections, wants_help
from training.configuration.keys import KEYS


@pytest.fixture
def path(tmp_path):
    return str(write_config(tmp_path / "run.py", **TINY))


# --- flags ---


@pytest.mark.parametrize(
    "words, key, value",
    [
        (["--max_iters", "7"], "max_iters", 7),
        (["--learning_rate", "3e-3"], "learning_rate", 3e-3),
        (["--wandb_run_name", "a=b"], "wandb_run_name", "a=b"),
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
def test_a_value_may_follow_its_flag_and_a_boolean_alone_is_true(path, words, key, value):
    for argv in ([*words, path], [path, *words], [path, *words, "--seed=3"]):
        got = getattr(load_config(argv), key)
        assert got == value and type(got) is type(value), argv


def test_a_boolean_leaves_the_next_word_to_others(path):
    config = load_config(["--dry_run", path, "--eval_at_start", "--seed", "5"])
    assert (config.dry_run, config.eval_at_start, config.seed) == (True, True, 5)


@pytest.mark.parametrize("word", ["False", "true", "0", "None", "no"])
def test_a_value_after_a_boolean_is_refused_with_how_to_write_it(path, word):
    with pytest.raises(UserError, match=f"write --compile={word}$"):
        load_config([path, "--compile", word])


@pytest.mark.parametrize("number", ["-1", "-1e-3", "-.5"])
def test_a_negative_number_is_a_value(path, number):
    with pytest.raises(UserError, match="must be at least 0"):  # the rule about the value, which was read
        load_config([path, "--weight_decay", number])


def test_a_missing_value_is_named_with_what_stands_in_its_place(path):
    for words, found in (
        ([path, "--max_iters"], "it is the last word"),
        ([path, "--max_iters", "--seed=1"], "it is followed by '--seed=1'"),
        (["--max_iters", path], f"it is followed by '{path}'"),
    ):
        with pytest.raises(UserError) as error:
            load_config(words)
        assert str(error.value).startswith(f"--max_iters has no value: {found}"), words
        assert str(error.value).endswith("write --max_iters=VALUE")


@pytest.mark.parametrize("words", [["--batch_sise", "4"], ["--batch_sise=4"], ["--batch_sise"]])
def test_an_unknown_key_is_named_with_the_nearest_in_each_form(path, words):
    with pytest.raises(UserError, match="'batch_sise'.*did you mean 'batch_size'"):
        load_config([path, *words])


def test_each_form_becomes_key_equals_value_and_other_words_keep_their_order():
    argv = ["a", "--seed", "-1", "--iters", "5", "--compile", "b", "--dataset", "x", "--seed=2"]
    flags, rest = take_flags(argv, others=("dataset",))
    assert flags == ["--seed=-1", "--compile=True", "--seed=2"]
    assert rest == ["a", "--iters", "5", "b", "--dataset", "x"]


def test_benchmarks_read_the_keys_of_train_py_as_train_py_does():
    options, flags = throughput.parse(
        ["--n_layer", "2", "--suite", "quick", "--compile", "--dataset", "random"]
    )
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


def shown(capfd, *words) -> list[str]:
    """The names of the keys that `train.py WORDS` prints."""
    assert wants_help(list(words))
    assert run_command(print_help, list(words)) == 0
    lines = capfd.readouterr().out.splitlines()
    return [line[4:].partition("=")[0].partition(" ")[0] for line in lines if line.startswith("  --")]


def test_help_without_a_word_lists_every_key(capfd):
    everything = shown(capfd, "--help")
    assert everything[: len(KEYS)] == list(KEYS)
    for words in (["-h"], ["config/quickstart.py", "--help"], ["--help", "config/quickstart.py"]):
        assert shown(capfd, *words) == everything


def test_a_word_selects_keys_by_name_part_text_and_section(capfd):
    assert shown(capfd, "--help", "beta1") == ["beta1"]
    assert shown(capfd, "--help=beta") == ["beta1", "beta2"]
    assert "adam_dtype" in shown(capfd, "--help", "moments")  # only its text has this word
    assert shown(capfd, "--help", "d_ff") == ["d_ff", "intermediate_size"]
    assert set(sections()["attention"]) < set(shown(capfd, "--help", "attention"))
    numbers = next(names for title, names in sections().items() if title.startswith("bad numbers"))
    assert shown(capfd, "--help", "bad numbers") == numbers


def test_a_word_is_found_however_it_is_written(capfd):
    for word in ("Learning rate", "learning-rate", "--learning_rate", "--learning_rate=1"):
        assert "learning_rate" in shown(capfd, "--help", word), word


def test_what_is_shown_about_a_word_is_what_the_whole_help_says(capfd):
    assert run_command(print_help, ["--help", "warmup_iters"]) == 0
    section, *lines = capfd.readouterr().out.splitlines()
    assert section == "optimizer" and "\n".join(lines[:2]) in help_text()


def test_a_word_that_nothing_has_is_an_error_with_the_nearest_names(capfd):
    assert run_command(print_help, ["--help", "bacth_size"]) == 2
    out, error = capfd.readouterr()
    assert out == "" and "'bacth_size'" in error and "the nearest names are" in error
    assert "batch_size" in error.partition("nearest names are")[2]


def test_help_is_printed_before_torch_or_numpy_is_imported():
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['numpy'] = None;"  # an import of it fails
        "sys.argv = ['train.py', '--help', 'seed']; runpy.run_path('train.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--seed=1337  (int, at least 0, guarded)" in done.stdout
