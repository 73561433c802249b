"""Each list about settings, entry by entry: what a resume guards, what an architecture and the data share,
which settings conflict. A new entry needs a line in a table here."""

import contextlib
import dataclasses
import functools
import json
from dataclasses import replace

import pytest

from common.errors import UserError
from model_config import ModelConfig
from training.batches.fingerprint import data_differences
from training.checkpoints.resume import changed_settings, check_architecture, refuse_changes
from training.checkpoints.saved_state import FORMAT, SavedState
from training.configuration import rules
from training.configuration.keys import FACTORS, GUARDED, KEYS, TrainConfig

# --- what a resume guards ---

GUARDED_KEYS = """
    seed doc_masking packing optimizer muon_momentum learning_rate min_lr lr_schedule warmup_iters
    lr_decay_iters wsd_decay_fraction wsd_decay_shape weight_decay beta1 beta2 grad_clip low_precision
    low_precision_scope low_precision_skip_first low_precision_skip_last fp8_gradients amax_history
    amax_algorithm
""".split()
COMPUTED = {"dataset", "tokens_per_iter"}  # compared by content and as a product, not as they are stated


def saved(config: TrainConfig, world_size: int = 1) -> SavedState:
    data = {"sha256": "0" * 64, "splits": {}}
    content = json.loads(json.dumps(config.to_dict()))
    facts = {"config": content, "model_config": config.model_config(), "data": data, "run": "run_1"}
    facts |= {"best_val_loss": None, "val_loss": None}
    return SavedState(10, 100, format=FORMAT, world_size=world_size, **facts)


def other_value(name: str):
    """Another value than the key's default."""
    was, kind = KEYS[name].default, KEYS[name].types[0]
    return {bool: not was, int: 3, float: 0.25, str: "other", dict: {"factor": 2.0}}[kind]


def test_every_guarded_key_is_in_the_list():
    assert set(GUARDED) == {*GUARDED_KEYS} | COMPUTED


@pytest.mark.parametrize("name", GUARDED_KEYS)
def test_a_changed_guarded_key_is_refused_by_name_and_allowed_by_name(name, tmp_path, caplog):
    before, now = TrainConfig(), TrainConfig(**{name: other_value(name)})
    data = saved(before).data
    with pytest.raises(UserError, match=f"{name}: checkpoint .*--allow_changes={name}$"):
        refuse_changes(tmp_path, saved(before), now, 1, data)
    refuse_changes(tmp_path, saved(before), replace(now, allow_changes=name), 1, data)
    assert f"allow_changes: {name} was" in caplog.text
    others = ",".join(key for key in GUARDED_KEYS if key != name)
    all_changed = TrainConfig(**{key: other_value(key) for key in GUARDED_KEYS}, allow_changes=others)
    with pytest.raises(UserError, match="was saved with other settings") as error:
        refuse_changes(tmp_path, saved(before), all_changed, 1, data)
    assert f"settings: {name}: checkpoint" in str(error.value), "and no other one is named"


def test_a_changed_key_that_is_not_guarded_is_noted_and_not_refused(tmp_path):
    silent = {"init_from", "resume_from", "allow_changes", "out_dir"}
    for name in KEYS.keys() - {*GUARDED, *FACTORS}:  # the product of the factors is guarded
        other = other_value(name)
        now = TrainConfig(**{name: other})
        refuse_changes(tmp_path, saved(TrainConfig()), now, 1, saved(TrainConfig()).data)
        expected = {} if name in silent else {name: [KEYS[name].default, other]}
        assert changed_settings(saved(TrainConfig()), now) == expected, name


BEFORE = TrainConfig(batch_size=8, gradient_accumulation_steps=2)


def test_the_samples_of_an_iteration_may_be_divided_otherwise(tmp_path):
    data = saved(BEFORE).data
    for batch_size, steps, processes in ((8, 1, 2), (16, 1, 1), (4, 1, 4), (2, 8, 1)):
        now = TrainConfig(batch_size=batch_size, gradient_accumulation_steps=steps)
        refuse_changes(tmp_path, saved(BEFORE), now, processes, data)
    with pytest.raises(UserError) as error:
        refuse_changes(tmp_path, saved(BEFORE), BEFORE, 4, data)
    one, other = (
        f"{tokens} (batch_size 8 x gradient_accumulation_steps 2 x processes {n} x block_size 1024)"
        for tokens, n in (("16,384", 1), ("65,536", 4))
    )
    assert f"tokens_per_iter: checkpoint {one}, now {other}" in str(error.value)
    assert str(error.value).endswith("--allow_changes=tokens_per_iter")


@pytest.mark.parametrize(
    ("allowed", "is_enough"),
    [
        ("tokens_per_iter", True),
        ("batch_size,processes", True),  # as the flag was written before tokens_per_iter was a key
        ("batch_size", False),
        ("processes,gradient_accumulation_steps", False),
    ],
)
def test_other_tokens_in_an_iteration_are_allowed_by_their_name_or_by_each_factor(
    allowed, is_enough, tmp_path
):
    now = replace(BEFORE, batch_size=4, allow_changes=allowed)
    rules.check(now, 4)
    with contextlib.nullcontext() if is_enough else pytest.raises(UserError, match="tokens_per_iter"):
        refuse_changes(tmp_path, saved(BEFORE), now, 4, saved(BEFORE).data)


def test_tokens_that_were_stated_in_another_way_are_no_change(tmp_path):
    """A checkpoint from before tokens_per_iter was a key has no such setting; one of 'auto' has numbers."""
    old = saved(BEFORE)
    del old.config["tokens_per_iter"], old.config["eval_batch_size"], old.config["gpu"]
    now = TrainConfig(batch_size=4, gradient_accumulation_steps=4, tokens_per_iter=16 * 1024)
    refuse_changes(tmp_path, old, now, 1, old.data)
    refuse_changes(tmp_path, saved(now), replace(now, tokens_per_iter=None), 1, old.data)


SHAPE = {  # field of the model -> another value
    **{"n_layer": 3, "n_head": 8, "n_embd": 8, "n_kv_head": 2, "d_ff": 12, "vocab_size": 9, "block_size": 5},
    **{"normalization": "rmsnorm", "norm_eps": 1e-3, "activation": "silu", "position_encoding": "rope"},
    **{"rope_theta": 5.0, "ffn_type": "swiglu", "bias": True, "weight_tying": False, "qk_norm": True},
    **{"head_dim": 6, "qkv_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
FREE = {"arch": "llama", "dropout": 0.5}


def test_another_architecture_is_refused_field_by_field(tmp_path):
    was = ModelConfig(n_layer=2, n_head=4, n_kv_head=4, n_embd=16, d_ff=32, vocab_size=16, block_size=16)
    assert {field.name for field in dataclasses.fields(ModelConfig)} == SHAPE.keys() | FREE.keys()
    for name, value in SHAPE.items():
        was = replace(was, position_encoding="rope") if name == "rope_scaling" else was
        with pytest.raises(UserError, match=f"another architecture: {name}: checkpoint"):
            check_architecture(tmp_path, was, replace(was, **{name: value}))
    for name, value in FREE.items():
        check_architecture(tmp_path, was, replace(was, **{name: value}))


FINGERPRINT = {
    "tokenizer": {"name": "a", "sha256": None},
    "dtype": "uint16",
    "vocab_size": 100,
    "eot_id": 0,
    "weight": "1/2",
    "splits": dict.fromkeys(("train", "val"), {"0.bin": {"tokens": 9, "sha256": "a" * 64, "probe": None}}),
    "packings": {"train-32": "a", "val-32": "b"},
}


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("tokenizer", "name"), "b", "tokenizer b"),
        (("dtype",), "uint32", "dtype uint32"),
        (("vocab_size",), 99, "vocab_size 99"),
        (("eot_id",), 1, "eot_id 1"),
        (("weight",), "1/3", "weight 1/3"),
        (("splits", "train", "0.bin", "tokens"), 8, "other tokens in 0.bin"),
        (("splits", "val", "0.bin", "tokens"), 8, "other tokens in 0.bin"),
        (("splits", "val", "0.bin", "sha256"), "b" * 64, "other tokens in 0.bin"),
        (("splits", "train", "1.bin"), {"tokens": 1}, "in addition 1.bin"),
        (("packings", "train-32"), "c", "another packing .packed-train-32"),
        (("packings", "val-32"), "c", "another packing .packed-val-32"),
    ],
)
def test_every_field_of_the_data_s_fingerprint_is_compared(place, value, named):
    now = json.loads(json.dumps(FINGERPRINT))
    *path, last = place
    functools.reduce(dict.__getitem__, path, now)[last] = value
    (difference,) = data_differences(FINGERPRINT, now)
    assert named in difference
    assert data_differences(FINGERPRINT, json.loads(json.dumps(FINGERPRINT))) == []


def test_a_probe_is_compared_where_no_hash_is_recorded():
    def of(probe: str) -> dict:
        return {"splits": {"val": {"0.bin": {"tokens": 9, "sha256": None, "probe": probe}}}}

    assert data_differences(of("a"), of("b")) == ["other tokens in 0.bin"]


# --- which settings conflict ---

BF16_MOMENTS = {"adam_dtype": "bfloat16", "dtype": "bfloat16"}
FP8_RECOMPUTED = {"low_precision": "fp8_tensorwise", "activation_checkpointing": "memory_bound"}
FP8_RECOMPUTED |= {"arch_preset": "qwen3", "dtype": "bfloat16", "n_head": 4, "n_embd": 128}
WITH_BIASES = {**FP8_RECOMPUTED, "arch_preset": "llama", "qkv_bias": True}
QUACK = {"ffn_backend": "quack", "arch_preset": "qwen3"}
NOTHING_SAVED = "saves nothing here.* set activation_checkpointing='attention'"
BF16_SUMS = {"param_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
CONFLICTS = [  # keys, processes, what the message names
    ({"use_zero1": True, "use_fsdp": True}, 2, "use_zero1=True and use_fsdp=True"),
    ({"use_fsdp": True}, 1, "use_fsdp=True shards over processes"),
    ({"fsdp_sharding": "hybrid"}, 2, "fsdp_sharding='hybrid' .* use_fsdp=False"),
    ({"reshard_after_forward": True}, 2, "reshard_after_forward=True .* use_fsdp=False"),
    ({**BF16_MOMENTS, "beta1": 0.995, "beta2": 0.9}, 1, "adam_dtype='bfloat16' .* beta1=0.995"),
    ({**BF16_MOMENTS, "beta1": 0.9, "beta2": 0.995}, 1, "adam_dtype='bfloat16' .* beta2=0.995"),
    ({**BF16_MOMENTS, "beta1": 0.995}, 1, "adam_dtype='bfloat16' rounds away .* set both to at most 0.99"),
    ({**BF16_SUMS, "use_fsdp": True}, 2, "sums gradients in reduce_dtype; set reduce_dtype='bfloat16'"),
    ({**BF16_SUMS, "param_dtype": "float32"}, 1, "param_dtype='float32'.*set param_dtype='bfloat16'"),
    ({**BF16_SUMS, "low_precision": "fp8_tensorwise"}, 1, "fp8_tensorwise'.*set low_precision='none'"),
    (
        {"muon_momentum": 0.9},
        1,
        "muon_momentum=0.9 does nothing with optimizer='adamw'; set --optimizer=muon",
    ),
    ({"optimizer": "muon", "muon_momentum": 1.0}, 1, "muon_momentum=1.0 must be below 1"),
    (
        {"weight_rounding": "stochastic"},
        1,
        "weight_rounding='stochastic' .* param_dtype='float32' and adam_dtype='float32'; set one of them",
    ),
    ({"param_dtype": "bfloat16", "dtype": "float32"}, 1, "param_dtype='bfloat16' .* dtype='float32'"),
    ({"param_dtype": "bfloat16", "dtype": "float16"}, 1, "param_dtype='bfloat16' .* dtype='float16'"),
    ({"low_precision": "fp8_tensorwise", "dtype": "float16"}, 1, "low_precision=.* dtype='float16'"),
    ({"low_precision": "fp8_tensorwise", "dtype": "float32"}, 1, "low_precision=.* dtype='float32'"),
    *(
        (
            {**QUACK, "activation_checkpointing": level},
            1,
            f"{level}' makes again .* set activation_checkpointing",
        )
        for level in ("memory_bound", "attention")
    ),
    (WITH_BIASES, 1, NOTHING_SAVED),
    ({**FP8_RECOMPUTED, "doc_masking": True}, 1, NOTHING_SAVED),
    ({"backend": "nccl", "device": "cpu"}, 1, "backend='nccl' needs device='cuda'"),
    ({"trackers": "wandb"}, 1, "trackers='wandb' needs wandb"),
    ({"price": -1.0}, 1, "price=-1.0 must be at least 0"),
    ({"peak_tflops": "guess"}, 1, "peak_tflops='guess' is neither"),
    ({"peak_tflops": 0.0}, 1, "peak_tflops=0.0 is neither"),
    ({"peak_tflops": float("nan")}, 1, "peak_tflops=nan is not a finite number"),
    ({"peak_tflops": "measure", "use_sparse_specs": True}, 1, "peak_tflops='measure' .* use_sparse_specs"),
    ({"min_lr": 1.0}, 1, "min_lr=1.0 is above learning_rate"),
    ({"warmup_iters": 9, "lr_decay_iters": 9}, 1, "warmup_iters=9 is not below lr_decay_iters=9"),
    ({"wsd_decay_fraction": 0.0}, 1, "wsd_decay_fraction=0.0 is not in"),
    ({"wsd_decay_fraction": 1.5}, 1, "wsd_decay_fraction=1.5 is not in"),
    ({"resume_from": "best"}, 1, "resume_from='best' .* --init_from=resume"),
    ({"resume_from": "best", "init_from": "auto"}, 1, "resume_from='best' .* --init_from=resume"),
    ({"allow_changes": "seed,out_dir"}, 1, "allow_changes: 'out_dir' is not one of"),
    ({"checkpoint_interval": "30 minutes"}, 1, "checkpoint_interval='30 minutes' is neither"),
    ({"checkpoint_interval": -1}, 1, "checkpoint_interval=-1 must be at least 0"),
    ({"beta1": 1.0}, 1, "beta1=1.0 must be below"),
    ({"beta2": 1.0}, 1, "beta2=1.0 must be below"),
    *(({name: ""}, 1, f"{name} is empty") for name in ("out_dir", "dataset")),
    *(({name: "s3://a"}, 1, f"{name}=.* is a URL") for name in ("out_dir", "dataset")),
    *(({name: "a\nb"}, 1, f"{name}=.* control character") for name in ("out_dir", "dataset")),
]


@pytest.mark.parametrize(("keys", "processes", "named"), CONFLICTS, ids=lambda item: str(item)[:60])
def test_settings_in_conflict_are_refused_and_named(keys, processes, named, monkeypatch):
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=named):
        rules.check(TrainConfig(**keys), processes)


ALLOWED = [  # what is near a conflict and is none
    ({"use_zero1": True}, 2),
    ({"use_fsdp": True, "fsdp_sharding": "hybrid", "reshard_after_forward": True}, 2),
    ({"use_fsdp": True, "dry_run": True}, 1),
    ({**BF16_MOMENTS, "param_dtype": "bfloat16", "beta1": 0.99, "beta2": 0.99}, 1),
    ({**BF16_MOMENTS, "weight_rounding": "stochastic", "beta1": 0.995, "beta2": 0.999}, 1),
    ({"param_dtype": "bfloat16", "weight_rounding": "stochastic", "beta2": 0.999}, 1),
    ({"optimizer": "muon", "muon_momentum": 0.9}, 1),
    ({"low_precision": "fp8_tensorwise", "dtype": "bfloat16"}, 1),
    (FP8_RECOMPUTED, 1),
    ({**FP8_RECOMPUTED, "arch_preset": "llama", "head_dim": 24}, 1),
    ({**WITH_BIASES, "activation_checkpointing": "attention"}, 1),
    ({**WITH_BIASES, "low_precision_skip_first": 1}, 1),
    ({"backend": "gloo", "device": "cpu"}, 1),
    ({"backend": "nccl", "device": "cuda"}, 8),
    ({"peak_tflops": "measure"}, 1),
    ({"peak_tflops": 100.0, "use_sparse_specs": True}, 1),
    ({"min_lr": 1.0, "lr_schedule": "constant"}, 1),
    ({"wsd_decay_fraction": 1.0}, 1),
    ({"resume_from": "best", "init_from": "resume"}, 1),
    ({"allow_changes": ",".join(GUARDED)}, 1),
    ({"checkpoint_interval": "1.5h"}, 1),
    ({"beta1": 0.0, "beta2": 0.0}, 1),
]


@pytest.mark.parametrize(("keys", "processes"), ALLOWED, ids=lambda item: str(item)[:60])
def test_what_is_near_a_conflict_is_allowed(keys, processes):
    rules.check(TrainConfig(**keys), processes)


def test_times_of_checkpoints_are_in_seconds_minutes_or_hours():
    found = {text: rules.checkpoint_interval(TrainConfig(checkpoint_interval=text)) for text in ("2s", "2 m")}
    assert found == {"2s": (0, 2.0), "2 m": (0, 120.0)}
    assert rules.checkpoint_interval(TrainConfig(checkpoint_interval="1.5h")) == (0, 5400.0)
    assert rules.checkpoint_interval(TrainConfig(checkpoint_interval=7)) == (7, 0.0)
