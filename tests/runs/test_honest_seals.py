"""No honest run is accused: each shipped config with its model made tiny, and pairs of keys, is sealed,
verified and run again with equal losses."""

import itertools
from types import SimpleNamespace

import pytest
from support.helpers import ROOT
from support.masked_documents import make_documents_run

from common.command import run_command
from tools import replay
from tools import seal as seal_command

SHIPPED = sorted(
    path.name for path in (ROOT / "config").glob("*.py") if "init_weights" not in path.read_text()
)
TINY = {
    "device": "cpu",
    "compile": False,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "d_ff": 64,
    "vocab_size": 64,
    "block_size": 32,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "tokens_per_iter": None,
    "warmup_iters": 2,
    "max_iters": 7,  # two rows after the warm-up
    "eval_interval": 4,
    "eval_iters": 1,
    "loss_targets": "4.14,0.5",  # some reach the first, none the second
    "eval_batch_size": 2,
    "log_interval": 1,
    "peak_tflops": 1.0,
    "always_save_checkpoint": False,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
KEYS = {
    "yarn": {"rope_scaling": YARN},
    "packing": {"packing": "truncate"},
    "masks": {"doc_masking": True},
    "fp8": {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head"},
    "rows of 3": {"log_interval": 3},
    "auto": {"batch_size": "auto", "gradient_accumulation_steps": "auto", "tokens_per_iter": 128},
    "no peak": {"peak_tflops": None},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_documents_run(tmp_path_factory.mktemp("documents")) / "data"


@pytest.fixture
def seal_and_replay(run, monkeypatch, tmp_path, capsys, data):
    """seal_and_replay(config, settings, ...): a run for each of these settings, in one folder, and then
    everything that a stranger does with the last record."""

    def run_here(command, log, timeout_s, keep_cache):
        script = next(i for i, word in enumerate(command) if word.endswith("train.py"))
        return SimpleNamespace(reason="it failed" if run(*command[script + 1 :]) else None)

    def call(config, *runs):
        for settings in runs:
            flags = [f"--{key}={value}" for key, value in {**TINY, "dataset": data, **settings}.items()]
            assert run(config, *flags, f"--out_dir={tmp_path / 'out'}") == 0, capsys.readouterr().err
        record = max((tmp_path / "out").glob("run_*.json"))
        monkeypatch.setattr(replay, "run_process", run_here)
        seal = record.with_name(record.name.replace("run_", "seal_"))
        capsys.readouterr()
        for main, arguments in (
            (seal_command.main, [str(record)]),
            (seal_command.main, ["--verify", str(seal)]),
            (replay.main, [str(seal), f"--out_dir={tmp_path / 'again'}"]),
        ):
            status, shown = run_command(main, arguments), capsys.readouterr()
            assert status == 0, shown
        lines = [line for line in shown.out.splitlines() if line.startswith(("losses ", "evaluations "))]
        assert len(lines) == 2 and all("are equal to the last digit" in line for line in lines), lines

    return call


@pytest.mark.parametrize("name", SHIPPED)
def test_a_run_of_a_shipped_config_is_sealed_and_replayed(name, seal_and_replay):
    grouped = "num_key_value_heads" in (text := (ROOT / "config" / name).read_text()) or "qwen" in text
    seal_and_replay(ROOT / "config" / name, {"num_key_value_heads": 2 if grouped else 4})


# each pair of keys is in one of these runs (the lines of the Fano plane)
TRIPLES = ("ABC", "ADE", "AFG", "BDF", "BEG", "CDG", "CEF")


@pytest.mark.parametrize("letters", TRIPLES)
def test_runs_with_each_pair_of_keys_are_sealed_and_replayed(letters, seal_and_replay, tmp_path):
    (tmp_path / "run.py").write_text("arch_preset = 'qwen3'\nnum_key_value_heads = 2\ndtype = 'bfloat16'\n")
    keys = [list(KEYS.values())["ABCDEFG".index(letter)] for letter in letters]
    seal_and_replay(tmp_path / "run.py", {name: value for each in keys for name, value in each.items()})


def test_each_pair_of_keys_is_in_a_run():
    assert {*itertools.combinations("ABCDEFG", 2)} == {
        pair for triple in TRIPLES for pair in itertools.combinations(triple, 2)
    }
    assert len(KEYS) == 7


def test_a_run_that_was_stopped_and_resumed_is_sealed_and_replayed(seal_and_replay, tmp_path):
    (tmp_path / "run.py").write_text("arch_preset = 'llama'\nalways_save_checkpoint = True\n")
    stopped = {"lr_decay_iters": 100, "always_save_checkpoint": True}
    resumed = {**stopped, "max_iters": 14, "init_from": "resume"}
    seal_and_replay(tmp_path / "run.py", stopped, resumed)
