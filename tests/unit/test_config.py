"""Configuration: what a file and flags may say, and that what is wrong is named before anything starts."""

import os

import pytest
from support.helpers import ROOT, TINY, write_config

import model_config
from common.errors import UserError
from training.configuration import rules
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import USAGE, load_config
from training.configuration.help import help_text
from training.configuration.keys import FACTORS, KEYS
from training.configuration.other_names import (
    ALIASES,
    REMOVED_KEYS,
    REMOVED_VALUES,
    removed_settings,
    todays_settings,
)
from training.configuration.rules import captures_cuda_graphs, cuda_graphs_obstacle, shards_optimizer

SHIPPED = sorted((ROOT / "config").glob("*.py"))


@pytest.fixture
def load(tmp_path):
    """load(*flags, text="", world_size=1): the configuration of a tiny run, with `text` added to its file."""

    def load(*flags, text="", world_size=1):
        path = write_config(tmp_path / "run.py", **TINY)
        path.write_text(path.read_text() + text)
        return load_config([str(path), *flags], world_size)

    return load


def refusal(load, *flags, **arguments) -> str:
    with pytest.raises(UserError) as error:
        load(*flags, **arguments)
    return str(error.value)


FIRST_LINE = len(TINY) + 1  # of the text that a test adds to the file


# --- values and types ---


def test_a_flag_wins_over_the_file_and_the_last_of_several_over_the_others(tmp_path):
    path = str(write_config(tmp_path / "run.py", **TINY))
    assert load_config([path]).max_iters == TINY["max_iters"]
    assert load_config(["--max_iters=7", path]).max_iters == 7
    assert load_config([path, "--max_iters=7", "--max_iters=8"]).max_iters == 8


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("batch_size = True", "expected int"),  # bool never becomes int
        ("learning_rate = True", "expected float"),
        ("max_iters = 100.5", "expected int"),
        ("max_iters = 1e2", "write 100"),
        ("max_iters = '100'", "expected int"),
        ("batch_size = None", "expected int"),
        ("d_ff = 2.0", "expected int or None; write 2"),
        ("dataset = ['a', 'b']", "expected str"),
        ("intermediate_size = 'wide'", "expected int or None"),
        ("learning_rate = lambda step: 1e-3", "expected float"),
    ],
)
def test_wrong_type_in_a_file_names_the_line_and_what_is_expected(load, text, wanted):
    message = refusal(load, text=text)
    assert text.split(" =")[0] in message and wanted in message
    assert f"run.py:{FIRST_LINE}" in message


def test_wrong_type_in_a_flag_names_the_flag_and_what_is_expected(load):
    for flag, wanted in (
        ("--max_iters=1e2", "write 100"),
        ("--max_iters=", "expected int"),
        ("--batch_size=True", "expected int"),
        ("--learning_rate=nan", "expected float"),
        ("--learning_rate={[]: 1}", "expected float"),
    ):
        message = refusal(load, flag)
        assert flag.split("=")[0] in message and wanted in message


# --- names ---


def test_typo_in_a_file_names_file_line_and_nearest_key(load):
    message = refusal(load, text="\nlearing_rate = 1e-3\n")
    assert "'learing_rate'" in message and f"run.py:{FIRST_LINE + 1}" in message
    assert "did you mean 'learning_rate'?" in message


@pytest.mark.parametrize("flag", ["-compile=True", "--", "-c"])
def test_flag_without_key_and_value_shows_how_one_is_written(load, flag):
    message = refusal(load, flag)
    assert repr(flag) in message and "--key=value" in message


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--intermediate_size=64", "--d_ff=65"], "d_ff"),
        (["--d_ff=65", "--intermediate_size=64"], "d_ff"),
        (["--attention_backend=sdpa", "--flash_attn=True"], "attention_backend"),
    ],
)
def test_a_key_and_its_alias_must_not_contradict_each_other(load, flags, key):
    assert f"both set {key}" in refusal(load, *flags)


def test_aliases_set_the_key_that_they_stand_for(load):
    assert load("--intermediate_size=96", "--d_ff=96").d_ff == 96
    assert load("--flash_attn=True", text="attention_backend = 'sdpa'\n").attention_backend == "flash_attn_2"
    assert load("--flash_attn=False").attention_backend == "sdpa"
    assert load(text="intermediate_size = 96\nflash_attn = True\n").model_config().d_ff == 96


# --- one line a key: what it says is what is checked ---

WITH_CHOICES = [name for name in KEYS if KEYS[name].choices]
WITH_MINIMUM = [name for name in KEYS if KEYS[name].minimum is not None]


def refusal_or_none(load, *flags) -> str:
    """The error, if there is one: another rule may refuse what the one in question allows."""
    try:
        load(*flags)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KEYS, ids="--{}".format)  # "gpu" alone is also a marker
def test_key_says_what_it_means_and_has_a_default_that_it_allows(name):
    key = KEYS[name]
    assert len(key.help) > 9 and key.help == key.help.strip(" .")
    assert type(key.default) in key.types or key.default in key.words
    assert key.default in key.choices or not key.choices
    assert key.below is None or key.default < key.below
    unbounded = key.minimum is None or key.default is None or key.default in key.words
    assert unbounded or key.default >= key.minimum


@pytest.mark.parametrize("name", WITH_CHOICES)
def test_every_choice_of_a_key_is_allowed_and_no_other(load, name):
    choices = KEYS[name].choices
    for choice in choices:
        assert f"{name}={choice!r} is not one of" not in refusal_or_none(load, f"--{name}={choice}")
    listed = ", ".join(map(repr, choices)) + ", nor a package.module" * KEYS[name].modules
    assert refusal(load, f"--{name}=zzz") == f"{name}='zzz' is not one of {listed}"


@pytest.mark.parametrize("name", WITH_MINIMUM)
def test_the_minimum_of_a_key_is_allowed_and_what_is_below_is_not(load, name):
    minimum, number = KEYS[name].minimum, KEYS[name].types[0]
    below = number(minimum - 1)
    assert "must be at least" not in refusal_or_none(load, f"--{name}={minimum}")
    assert refusal(load, f"--{name}={below}") == f"{name}={below} must be at least {minimum}"


@pytest.mark.parametrize("name", [*KEYS, "processes"], ids="--{}".format)
def test_allow_changes_takes_the_guarded_keys_and_no_other(load, name):
    if name in FACTORS or KEYS[name].guarded:
        assert load(f"--allow_changes={name}").allow_changes == name
        return
    listed = "dataset, seed, tokens_per_iter, doc_masking, packing, optimizer, muon_momentum, "
    message = refusal(load, f"--allow_changes={name}")
    assert message.startswith(f"allow_changes: {name!r} is not one of {listed}")


def test_every_dtype_that_a_key_takes_is_one_of_torch():
    assert set(KEYS["dtype"].choices) == set(DTYPES)
    for name in ("param_dtype", "adam_dtype", "reduce_dtype", "gradient_dtype"):
        assert set(KEYS[name].choices) <= {*DTYPES, "8bit"}  # a pair of tensors, which torch has no dtype for


def test_model_keys_name_the_choices_that_the_model_has():
    for name, choices in {**model_config.CHOICES, "arch_preset": model_config.PRESETS}.items():
        assert [choice for choice in choices if repr(choice) not in KEYS[name].help] == []


def test_help_shows_every_key_with_its_default_and_help_in_its_section():
    text = help_text()
    assert text.startswith(USAGE)
    assert [name for name in ALIASES if f"\n  --{name}  (" not in text] == []
    places = [text.index(f"\n  --{name}={key.default}  (") for name, key in KEYS.items()]
    assert places == sorted(places)
    assert [name for name, key in KEYS.items() if f"\n      {key.help}\n" not in text] == []
    for section, first, last in (("run", "out_dir", "dry_run"), ("data", "dataset", "dataloader_prefetch")):
        inside = text.partition(f"\n\n{section}\n")[2].partition("\n\n")[0]
        assert inside.startswith(f"  --{first}=") and f"\n  --{last}" in inside
    for line in (
        "  --batch_size=12  (int | 'auto', at least 1, at most 1,048,576)",
        "  --backend=None  (None | 'nccl' | 'gloo')",
        "  --d_ff=None  (int | None)",
        "  --packing=stream  ('stream' | 'truncate', guarded)",
    ):
        assert f"\n{line}\n" in text


# --- the file ---


def test_file_may_compute_import_define_functions_and_use_private_names(load, monkeypatch):
    monkeypatch.setenv("NANOMFU_TEST", "before")
    config = load(
        text="""
import math, os
import os.path as somewhere
from pathlib import Path as P
_heads = 4
_widths = [8 * _heads * i for i in range(3)]
def _double(x):
    return 2 * x
def triple(x):
    return 3 * x
class Anything:
    pass
n_head = _heads
n_embd = _widths[1]
batch_size = triple(_double(math.isqrt(4)))
out_dir = str(P("out") / "here")
os.environ["NANOMFU_TEST"] = "after"
wandb_run_name = P(__file__).stem
"""
    )
    assert (config.n_head, config.n_embd, config.batch_size) == (4, 32, 12)
    assert (config.out_dir, config.wandb_run_name) == ("out/here", "run")
    assert os.environ["NANOMFU_TEST"] == "after"


def test_setting_imported_from_another_file_is_a_setting(load, tmp_path, monkeypatch):
    (tmp_path / "shared_settings.py").write_text("weight_decay = 0.5\nbatch_size = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(text="from shared_settings import weight_decay\n").weight_decay == 0.5
    assert load(text="from shared_settings import *\n").batch_size == 3


def test_public_helper_variable_is_refused_and_its_line_named(load):
    message = refusal(load, text="\n\ngpus = 8\nbatch_size = 2 * gpus\n")
    assert "'gpus'" in message and f"run.py:{FIRST_LINE + 2}" in message


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("batch_size = 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("batch_size = = 3", "invalid syntax"),
    ],
)
def test_file_that_cannot_run_names_its_line(load, text, wanted):
    message = refusal(load, text=f"\n{text}\n")
    line = FIRST_LINE + text.count("\n") + 1
    assert f"run.py:{line}:" in message and wanted in message


def test_one_config_file_is_expected_and_the_shipped_ones_are_listed():
    with pytest.raises(UserError, match="no config file given") as error:
        load_config(["--max_iters=3"])
    assert all(f"config/{path.name}" in str(error.value) for path in SHIPPED)
    both = ["config/quickstart.py", "config/smoke_gpt2.py"]
    with pytest.raises(UserError, match=f"one config file expected.*{' '.join(both)}"):
        load_config(both)


# --- shipped configs ---


def test_shipped_configs_say_what_was_measured_and_share_no_out_dir():
    for path in SHIPPED:
        header = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any("easured" in line for line in header), "the header says what was measured, or 'unmeasured'"
    out_dirs = {load_config([str(path), "--wandb_log=False"]).out_dir for path in SHIPPED}
    assert len(out_dirs) == len(SHIPPED) and all(out_dir.startswith("out-") for out_dir in out_dirs)


# --- cross-checks ---


@pytest.mark.parametrize("processes", [1, 2])
def test_zero1_is_used_where_there_is_another_process(load, processes):
    assert shards_optimizer(load("--use_zero1=True", world_size=processes), processes) == (processes > 1)


@pytest.mark.parametrize(
    ("flags", "processes", "why"),
    [
        (["--device=cpu"], 1, "device='cpu'"),
        (["--device=cuda"], 1, None),
        (["--device=cuda", "--use_zero1=True"], 2, None),
        (["--device=cuda", "--use_fsdp=True", "--reshard_after_forward=True"], 2, None),
        (["--device=cuda", "--use_fsdp=True", "--fsdp_sharding=hybrid"], 2, "fsdp_sharding='hybrid'"),
    ],
)
def test_cuda_graphs_fall_back_where_they_cannot_work(load, flags, processes, why):
    config = load("--use_cuda_graphs=True", *flags, world_size=processes)
    obstacle = cuda_graphs_obstacle(config)
    assert obstacle is None if why is None else obstacle.startswith(why)
    assert captures_cuda_graphs(config) == (why is None)


@pytest.mark.parametrize("name", sorted(REMOVED_KEYS))
def test_a_key_that_left_is_refused_with_what_to_do_instead(load, name):
    message = refusal(load, f"--{name}=1")
    assert f"{name} in the flag --{name} was removed: " in message and "leave it out" in message


@pytest.mark.parametrize(("name", "value"), sorted(REMOVED_VALUES))
def test_a_value_that_left_is_refused_with_what_to_do_instead(load, name, value):
    assert REMOVED_VALUES[name, value] in refusal(load, f"--{name}={value}")


def test_names_that_were_keys_still_set_what_they_did(load):
    assert load("--decay_lr=False").lr_schedule == "constant"
    assert load("--decay_lr=True").lr_schedule == "cosine"
    assert load("--keep_all_checkpoints=True").keep_last is None
    assert load("--keep_all_checkpoints=False", text="keep_last = 5").keep_last == 5
    assert load("--keep_all_checkpoints=False", text="keep_all_checkpoints = True").keep_last == 2
    assert load("--wandb_log=False", text="trackers = 'wandb, tensorboard'").trackers == "tensorboard"
    assert "contradicts" in refusal(load, "--decay_lr=True", "--lr_schedule=constant")


def test_wandb_log_adds_to_the_trackers(monkeypatch, load):
    monkeypatch.setattr(rules, "require_tracker", lambda name: None)
    for flags in (["--wandb_log=True", "--trackers=tensorboard"], ["--trackers=tensorboard", "--wandb_log"]):
        assert load(*flags).trackers == "tensorboard,wandb"
    assert load(text="wandb_log = True\ntrackers = 'trackio'").trackers == "trackio,wandb"


def test_the_home_folder_may_begin_every_path_of_a_mixture(monkeypatch, load):
    monkeypatch.setenv("HOME", "/home/me")
    found = load("--dataset=~/a:0.5, ~/b:0.3,/c/~/d:0.2", "--out_dir=~/out")
    assert found.dataset == "/home/me/a:0.5, /home/me/b:0.3,/c/~/d:0.2" and found.out_dir == "/home/me/out"


def test_settings_of_an_earlier_version_mean_what_they_did():
    saved = {"decay_lr": False, "lr_schedule": "wsd", "keep_all_checkpoints": False, "keep_last": 3}
    saved |= {"wandb_log": True, "trackers": "tensorboard", "matmul_algorithms": "measured", "sm_carveout": 0}
    now = todays_settings(saved)
    assert (now["lr_schedule"], now["keep_last"], now["trackers"]) == ("constant", 3, "tensorboard,wandb")
    assert todays_settings({"decay_lr": True, "lr_schedule": "constant"}) == {"lr_schedule": "constant"}
    (line,) = removed_settings(now)
    assert line.startswith("matmul_algorithms='measured' was removed: ")


@pytest.mark.parametrize(
    "flag, nearest",
    [
        ("--dtype=bfloat", "bfloat16"),
        ("--attention_backend=flash_attn", "flash_attn_"),
        ("--backend=glo", "gloo"),
        ("--arch_preset=qwen", "qwen3"),
    ],
)
def test_bad_choice_lists_the_choices_and_suggests_the_nearest(load, flag, nearest):
    key, value = flag.removeprefix("--").split("=")
    message = refusal(load, flag)
    assert f"{key}={value!r} is not one of" in message and f"did you mean '{nearest}" in message


@pytest.mark.parametrize(
    "setting",
    [
        *("normalization=batchnorm", "activation=relu", "position_encoding=alibi", "ffn_type=moe"),
        *("n_layer=0", "vocab_size=0", "block_size=0", "beta2=-0.1", "dropout=1.0"),
    ],
)
def test_value_out_of_its_range_is_named(load, setting):
    key, value = setting.split("=")
    message = refusal(load, f"--{setting}")
    assert key in message and value.strip("-") in message
