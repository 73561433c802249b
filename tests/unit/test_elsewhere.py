"""Coming from another program: what has another name here is named."""

from pathlib import Path

import pytest

import sample
import train
from common.errors import UserError
from training.checkpoints.folder import find_checkpoint
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS
from training.configuration.other_names import OTHER_FLAGS
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
    with pytest.raises(UserError, match=f"weights of others are --init_weights=hf:openai-community/{value}"):
        load_config(["config/quickstart.py", f"--init_from={value}"])


def test_mps_is_refused_by_name():
    with pytest.raises(UserError, match="device='mps' .* it is not supported; .*--device=cpu --dtype"):
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
    with pytest.raises(UserError, match=r"ckpt.pt is nanoGPT's, .* docs/coming_from"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("flag", "key"),
    {
        "device_batch_size": "batch_size",
        "eval_every": "eval_interval",
        "train.max_seq_length": "block_size",
        "training.global_batch_size": "tokens_per_iter",
        "optimizer.lr": "learning_rate",
        "run": "wandb_run_name",
    }.items(),
)
def test_a_flag_of_another_program_is_answered_by_the_key_that_means_it(flag, key):
    assert key in KEYS and set(OTHER_FLAGS.values()) <= KEYS.keys()
    with pytest.raises(UserError, match=f"; here it is {key}, .*docs/coming_from"):
        load_config(["config/quickstart.py", f"--{flag}=1"])


@pytest.mark.parametrize("flag", ["--job.config_file=1", "--x.y=1", "--zzz=1"])
def test_an_unknown_flag_that_is_near_no_key_names_where_all_are(flag):
    with pytest.raises(UserError, match=r"train.py --help lists every key, docs/coming_from\.md what other"):
        load_config(["config/quickstart.py", flag])
