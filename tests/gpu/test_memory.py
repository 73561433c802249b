"""On a GPU: the memory of a run by part, and the estimate beside it."""

import json
import pickle

import pytest
from support.helpers import TINY, make_dataset, run_train, write_config

from tools.profile.memory import MEMORY_KEYS, memory_lines
from training.records import memory_parts as parts
from training.records.memory_snapshot import snapshot_path, table_path

pytestmark = pytest.mark.gpu

# large enough for activations and logits to be most of it
SHAPE = {"n_layer": 4, "n_head": 8, "num_key_value_heads": 4, "n_embd": 512, "d_ff": 1536}
KEYS = {**TINY, **SHAPE, **MEMORY_KEYS, "vocab_size": 16384, "block_size": 512, "batch_size": 16}
KEYS |= {
    "gradient_accumulation_steps": 2,
    "device": "cuda",
    "dtype": "bfloat16",
    "eval_interval": 0,
    "always_save_checkpoint": False,
}
GPT2 = {"compile": True, "arch_preset": "gpt2", "num_key_value_heads": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"compile": False},
        {"compile": True, "activation_checkpointing": "full", "loss_chunks": 8},
        {"compile": False, "activation_checkpointing": "full", "loss_chunks": 8},
        {"compile": True, "activation_checkpointing": "memory_bound", "loss_chunks": 8},
        {"compile": False, "activation_checkpointing": "memory_bound", "loss_chunks": 8},
        {"compile": True, "activation_checkpointing": "attention", "loss_chunks": 8},
        {"compile": False, "activation_checkpointing": "attention", "loss_chunks": 8},
        {
            "compile": True,
            "arch_preset": "gpt2",
            "activation_checkpointing": "memory_bound",
            "loss_chunks": 8,
        },
        {"compile": True, "activation_checkpointing": "selective", "loss_chunks": 8},
        {"compile": True, "low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head"},
    ],
)
def test_the_parts_add_up_to_the_peak_and_agree_with_the_estimate(tmp_path, changes):
    """Each in a process of its own, so that nothing of another run is on the GPU."""
    tokens = make_dataset(tmp_path / "tokens", vocab_size=16384, train_tokens=200_000, val_tokens=20_000)
    out_dir = tmp_path / "out"
    config = write_config(tmp_path / "run.py", **{**KEYS, **changes}, dataset=tokens, out_dir=out_dir)
    done = run_train(config, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(table_path(out_dir, 0).read_text())
    print("\n".join(memory_lines(out_dir)))
    measured, peak = facts["parts"], facts["peak_gib"]
    assert sum(measured.values()) == pytest.approx(peak)
    assert sum(facts["estimate"].values()) == pytest.approx(peak, rel=0.03)
    estimated = parts.estimated_parts(facts["estimate"])
    for part in (parts.WEIGHTS, parts.WORKING, parts.ADAM, parts.GRADIENTS):
        assert measured[part] == pytest.approx(estimated[part], rel=0.01), part
    assert measured.get(parts.UNKNOWN, 0) < 0.02 * peak, facts["unknown"]
    assert pickle.loads(snapshot_path(out_dir, 0).read_bytes())["device_traces"]
