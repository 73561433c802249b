"""sample.py as a user runs it: on the checkpoint of a tiny run."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, TINY, make_dataset, write_config

import sample
from common.errors import UserError


@pytest.fixture
def trained(run, tmp_path):
    """The out_dir of a run on characters, evaluated and saved twice."""
    tokens = make_dataset(tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    meta["tokenizer"] = {"kind": "char", "name": "char", "chars": "".join(map(chr, range(48, 48 + 64)))}
    (tokens / "meta.json").write_text(json.dumps(meta | {"format": 1, "eot_id": None, "source": "test"}))
    keys = {**TINY, "dataset": str(tokens), "out_dir": str(tmp_path / "out"), "eval_interval": 2}
    assert run(write_config(tmp_path / "run.py", **keys)) == 0
    return tmp_path / "out"


def text(capsys, out_dir, *flags) -> str:
    sample.main([f"--out_dir={out_dir}", "--prompt=AB", "--max_new_tokens=40", "--device=cpu", *flags])
    return capsys.readouterr().out


def test_a_seed_gives_one_text_and_another_seed_another(trained, capsys):
    first, again, other = (text(capsys, trained, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other
    assert "--- sample 1 ---\nAB" in first
    assert len(first.split("--- sample 1 ---\n")[1].rstrip("\n")) == 42


def test_temperature_0_and_top_k_1_both_take_the_most_likely_token(trained, capsys):
    assert text(capsys, trained, "--temperature=0") == text(capsys, trained, "--top_k=1", "--seed=5")


def test_the_best_checkpoint_can_be_chosen(trained, capsys):
    assert "step-00000004" in text(capsys, trained)
    best = (trained / "checkpoints" / "best").read_text().strip()
    assert best in text(capsys, trained, "--checkpoint=best")
    with pytest.raises(UserError, match="there are latest, best, step-"):
        text(capsys, trained, "--checkpoint=step-7")


@pytest.mark.parametrize("flag", ["--top_k=-1", "--temperature=nan", "--num_samples=0", "--device=tpu"])
def test_bad_options_are_named_without_a_traceback(trained, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        text(capsys, trained, flag)
    assert stop.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_no_checkpoint_is_one_line_and_status_1(tmp_path):
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "holds no complete checkpoint" in done.stderr
