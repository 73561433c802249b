"""Coming from another program: what has another name here is named."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import HANG_S, ROOT, TINY, write_config

import sample
import train
from common.errors import UserError
from training.checkpoints.folder import find_checkpoint
from training.configuration.elsewhere import FLAGS
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS
from training.pretrained.settings import load_run_config

# --- nanoGPT ---


def test_a_config_that_states_no_dataset_trains_on_none(tmp_path):
    path = str(tmp_path / "empty.py")
    Path(path).write_text("")
    with pytest.raises(UserError, match="no dataset is stated; add --dataset=NAME"):
        train.main([path])
    assert load_run_config([path, "--dry_run=True"], needs_dataset=True).dry_run
    assert load_run_config([path, "--dataset=quickstart"], needs_dataset=True).dataset == "quickstart"


@pytest.mark.parametrize("value", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_real_gpt2_weights_have_another_key(value):
    with pytest.raises(UserError, match=f"here real weights are init_weights='hf:openai-community/{value}'"):
        load_config(["config/quickstart.py", f"--init_from={value}"])


def test_mps_is_refused_by_name():
    with pytest.raises(UserError, match="device='mps' is not supported: .*--device=cpu --dtype=float32"):
        load_config(["config/quickstart.py", "--device=mps"])
    load_config(["config/full_gpt2_1.36b.py", "--device=cpu", "--dtype=float32", "--compile=False"])


@pytest.mark.parametrize(
    ("flag", "here"), [("--start=Hi", "--prompt"), ("--init_from=gpt2-xl", "--hf=openai")]
)
def test_sample_names_its_own_flags(flag, here):
    with pytest.raises(UserError, match=f"{flag.partition('=')[0]} is nanoGPT's; here: .*{here}"):
        sample.parse(["--out_dir=out", flag])


def test_a_checkpoint_of_nanogpt_is_named_as_its(tmp_path):
    with pytest.raises(UserError) as error:
        find_checkpoint(tmp_path)
    assert "nanoGPT" not in str(error.value)
    (tmp_path / "ckpt.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"ckpt.pt is nanoGPT's, .* --init_weights=hf:FOLDER"):
        find_checkpoint(tmp_path)


# --- other programs ---


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_another_program_is_named_with_what_it_is_here(name):
    assert name not in KEYS
    with pytest.raises(UserError) as error:
        load_config(["config/quickstart.py", f"--{name}=1"])
    assert FLAGS[name][0] in str(error.value) and FLAGS[name][1] in str(error.value)


@pytest.mark.parametrize(
    ("flag", "program"),
    [("--training.compile", "torchtitan"), ("--train.lr_warmup_steps=1", "litgpt"), ("--x.y=1", "")],
)
def test_a_flag_with_a_dot_names_the_program_that_has_such_flags(flag, program):
    with pytest.raises(UserError) as error:
        load_config(["config/quickstart.py", flag])
    assert (f"looks like {program}'s" in str(error.value)) == bool(program)
    assert "python train.py --help lists every key" in str(error.value)


def test_the_hint_is_what_a_user_sees(tmp_path):
    path = write_config(tmp_path / "run.py", **TINY, dataset="x")
    command = [sys.executable, "train.py", str(path), "--depth=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2 and "nanochat's; here: n_layer" in done.stderr, done.stderr
