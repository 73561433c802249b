"""Weights in Hugging Face's format that are not what they should be: one message each, nothing written."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_parts import make_state
from support.helpers import make_dataset, run_train
from support.hf_models import change_config, copy, hf_run, logits_of, save, save_four, some_ids, tensors

import sample
from common.errors import UserError
from tools import export_hf
from training.pretrained import reading
from training.pretrained.settings import load_run_config
from training.process.world import World

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One model of every family in one file each, and one in shards."""
    folder = tmp_path_factory.mktemp("made")
    return save_four(folder) | {"shards": save("qwen3", folder / "shards", shards="20KB")}


def store(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")


# --- what may be wrong with a folder; each gets a copy of one ---


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def name_twice_in_the_index(folder):
    text = (folder / INDEX).read_text()
    line = next(line for line in text.splitlines() if "model.norm.weight" in line)
    (folder / INDEX).write_text(text.replace(line, f"{line.rstrip(',')},\n{line}"))


def tensor_in_two_files(folder):
    norm = {NORM: tensors(folder)[NORM]}
    save_file(norm, folder / "model-00001-of-00007.safetensors")


def pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def stored(change):
    """Damage that changes the tensors by their names, or gives others."""

    def damage(folder):
        found = tensors(folder)
        store(folder, change(found) or found)

    return damage


def without_up(found):
    del found[UP]


def prefixed(found):
    return {f"net.{name}": tensor for name, tensor in found.items()}


def not_finite(found):
    found[UP][3, 4] = float("nan")


def with_tensor(name: str, tensor: torch.Tensor):
    return stored(lambda found: found.update({name: tensor}))


NORM, UP, HEAD = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"
SHARD = "model-00002-of-00007.safetensors"
LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int64)
FOLDERS = [  # (which model, what is done to it, what the message says)
    ("qwen3", lambda f: (f / "config.json").unlink(), "holds no config.json, so it is not a model"),
    ("qwen3", lambda f: (f / "model.safetensors").unlink(), "holds no weights: neither model.safe"),
    ("qwen3", only_a_pickle, "as a pickle (pytorch_model.bin), which can run any code and is not read"),
    ("shards", lambda f: (f / SHARD).unlink(), "00002-of-00007.safetensors is missing"),
    ("shards", name_twice_in_the_index, "it names 'model.norm.weight' twice"),
    ("shards", tensor_in_two_files, "model.norm.weight is there twice, in model-00001"),
    ("qwen3", pointer, "is a pointer to the weights, not the weights; run: git lfs pull"),
    ("qwen3", with_tensor(NORM, torch.ones(33)), "is float32 and (33,), but config.json asks for"),
    *(("qwen3", with_tensor(UP, torch.ones(64, 32).to(dtype)), "up_proj.weight is ") for dtype in LOW),
    ("qwen3", stored(without_up), f"lacks {UP}"),
    ("qwen3", stored(prefixed), "more tensors; it has net.model.embed_tokens.weight, "),
    ("qwen3", with_tensor("model.layers.2.x", torch.ones(32)), "holds model.layers.2.x, for which a"),
    ("qwen3", stored(not_finite), "blocks.1.ffn.up.weight of the weights has a value that is NaN"),
    ("qwen3", with_tensor(HEAD, torch.ones(64, 32)), "lm_head.weight is not equal to model.embed"),
]


@pytest.mark.security
@pytest.mark.parametrize(("model", "damage", "message"), FOLDERS, ids=[case[2][:40] for case in FOLDERS])
def test_a_damaged_folder_is_one_message_and_leaves_nothing(
    model, damage, message, made, run, tmp_path, capsys
):
    folder = copy(made[model], tmp_path / "model")
    damage(folder)
    config = hf_run(tmp_path, out_dir=tmp_path / "out")
    capsys.readouterr()
    assert run(config, f"--init_weights=hf:{folder}") == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    if "up_proj.weight is" in message:
        assert "the weights are quantized" in error and "as save_pretrained of transformers writes" in error
        assert "is damaged" not in error and "again" not in error
    assert not list(tmp_path.glob("out/run_*.json")) and not (tmp_path / "out/checkpoints").exists()


@pytest.mark.dead_rank
def test_what_one_rank_finds_ends_all_ranks_with_one_message(made, tmp_path):
    folder = copy(made["qwen3"], tmp_path / "model")
    head = tensors(folder)["model.embed_tokens.weight"].clone()
    head[63, 0] = float("inf")  # a row that rank 1 alone reads
    with_tensor(HEAD, head)(folder)
    change_config(folder, tie_word_embeddings=False)
    config = hf_run(tmp_path, out_dir=tmp_path / "out")
    done = run_train(config, f"--init_weights=hf:{folder}", "--use_fsdp=True", processes=2)
    assert done.returncode == 1  # torchrun's
    assert "head.lm_head.weight of the weights has a value that is NaN or infinite" in done.stderr
    assert not (tmp_path / "out/checkpoints").exists()


def test_every_machine_hashes_every_file(tmp_path):
    folder = save("qwen3", tmp_path / "model", shards="20KB")
    config = load_run_config([str(hf_run(tmp_path)), f"--init_weights=hf:{folder}"])
    names = []
    for rank in (2, 3):  # the second of two machines
        world = World(rank, rank - 2, 4, torch.device("cpu"), local_size=2)
        names += reading._read(config, make_state(config, world=world))["files"]
    assert sorted(names) == sorted(reading.list_files(folder)) and len(names) > 4


@pytest.mark.parametrize("other", [{"files": {"a": {"sha256": "2"}}}, {"config": {"rope_theta": 5.0}}])
def test_ranks_that_read_different_files_are_told_so(monkeypatch, other):
    mine = {"source": "hf:x", "files": {"a": {"sha256": "1"}}, "config": {}}
    theirs = mine | other
    monkeypatch.setattr(reading, "gather_objects", lambda value, world: [value, theirs])
    with pytest.raises(UserError, match="rank 1 reads another a of hf:x than other ranks; copy the same"):
        reading._compare(mine, World(0, 0, 2, torch.device("cpu")))


# --- config.json ---

HALF = ["full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 63}  # of 64 positions
DERIVED = SLIDING | {"layer_types": None}  # None: not in the file
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED = [  # (which model, fields of config.json, what the message names)
    ("qwen3", {"model_type": "bert"}, "the families that can be read are gpt2, llama, qwen2, qwen3"),
    ("qwen3", DERIVED | {"max_window_layers": 1}, "use_sliding_window=True, sliding_window=63"),
    ("qwen2", DERIVED | {"max_window_layers": "2"}, "attend to all 64 positions"),
    ("qwen2", SLIDING | {"layer_types": HALF}, "use_sliding_window=True"),
    ("qwen2", {"layer_types": HALF, "sliding_window": 64}, "use_sliding_window=False"),
    ("qwen2", {"layer_types": HALF}, "layer_types=['full_attention', 'sliding_attention']"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types=['chunked_attention'"),
    ("qwen3", {"is_causal": False}, "is_causal is False"),
    ("gpt2", {"is_causal": False}, "is_causal is False"),
    ("qwen3", {"rope_scaling": YARN}, "rope_type='default' in rope_parameters and 'yarn' in rope_scaling"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "of 'full_attention'"),
    ("qwen2", {"rope_parameters": YARN | {"truncate": False}}, "has no field 'truncate'"),
    ("qwen2", {"compression_config": {"bits": 4}}, "compression_config; quantized"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu' or 'swish'"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "needs factor"),
    ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3", {"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
    ("qwen3", {"hidden_size": "32"}, "hidden_size is '32', not a whole number above 0"),
    ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("qwen3", {"vocab_size": 10**12}, "vocab_size=1000000000000"),
    ("llama", {"attention_bias": True}, "attention_bias=True, mlp_bias=False"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
]


@pytest.mark.parametrize(("model", "fields", "message"), REFUSED)
def test_what_the_model_cannot_compute_is_refused_by_its_name(model, fields, message, made, tmp_path):
    folder = change_config(copy(made[model], tmp_path / "model"), **fields)
    with pytest.raises(UserError) as refusal:
        load_run_config([str(hf_run(tmp_path)), f"--init_weights=hf:{folder}"])
    assert message in str(refusal.value)


WITHOUT_EFFECT = [  # fields that change nothing of what transformers computes
    ("qwen3", {"use_sliding_window": False, "sliding_window": 16}),
    ("llama", SLIDING | {"layer_types": HALF}),
    # a window that no layer uses, or that is as wide as all positions
    ("qwen3", DERIVED | {"max_window_layers": 2}),
    ("qwen2", DERIVED | {"max_window_layers": None}),
    ("qwen2", SLIDING | {"max_window_layers": 0}),
    ("qwen2", DERIVED | {"sliding_window": 64, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": HALF}),
    ("llama", {"pretraining_tp": 2, "hidden_act": "swish", "attention_dropout": 0.0}),
    ("gpt2", {"activation_function": "gelu_fast", "reorder_and_upcast_attn": True}),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None}),
    ("qwen2", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "default"}}),
]


@pytest.mark.parametrize(("model", "fields"), WITHOUT_EFFECT)
def test_a_field_without_effect_changes_no_logits(model, fields, made, tmp_path):
    folder = change_config(copy(made[model], tmp_path / "model"), **fields)
    ids = some_ids(1)
    ours = reading.load_pretrained(f"hf:{folder}", torch.device("cpu"))[1].eval()(ids)
    assert (ours - logits_of(folder, ids)).abs().max() <= 1e-4
    assert (ours - logits_of(made[model], ids)).abs().max() <= 1e-4


def test_a_window_as_wide_as_config_json_s_positions_is_too_narrow_for_those_of_yarn(made, tmp_path):
    folder = change_config(copy(made["qwen2"], tmp_path / "model"), rope_parameters=None, rope_theta=1e4)
    change_config(folder, rope_scaling=YARN | {"original_max_position_embeddings": 64})
    change_config(folder, use_sliding_window=True, sliding_window=64, layer_types=HALF)
    with pytest.raises(UserError, match="attend to all 256 positions"):
        load_run_config([str(hf_run(tmp_path)), f"--init_weights=hf:{folder}"])


@pytest.mark.parametrize("wrapped", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "in each block"])
def test_weights_that_were_saved_with_a_wrapper_s_name_give_the_same_logits(wrapped, made, tmp_path):
    folder, ids = copy(made["qwen3"], tmp_path / "model"), some_ids(1)
    deep = lambda name: name.replace(".self_attn.", "._orig_mod.self_attn._fsdp_wrapped_module.")  # noqa: E731
    name_of = deep if wrapped == "in each block" else wrapped.format
    store(folder, {name_of(name): tensor for name, tensor in tensors(folder).items()})
    names = [f"hf:{path}" for path in (folder, made["qwen3"])]
    models = [reading.load_pretrained(name, torch.device("cpu"))[1].eval() for name in names]
    assert torch.equal(*(model(ids) for model in models))


def test_yarn_as_a_model_card_has_it_serves_all_of_its_positions(made, tmp_path):
    folder = change_config(copy(made["qwen2"], tmp_path / "model"), rope_parameters=None, rope_theta=1e4)
    change_config(folder, rope_scaling=YARN | {"original_max_position_embeddings": 64}, sliding_window=None)
    ids = some_ids(1, 256)
    ours = reading.load_pretrained(f"hf:{folder}", torch.device("cpu"))[1].eval()
    assert ours.config.block_size == 4 * 64  # config.json still says 64
    assert (ours(ids) - logits_of(folder, ids)).abs().max() <= 1e-4
    config, weights = str(hf_run(tmp_path)), f"--init_weights=hf:{folder}"
    assert load_run_config([config, weights, "--block_size=256"]).block_size == 256
    with pytest.raises(UserError, match="block_size=257 .* longer than the 256 positions"):
        load_run_config([config, weights, "--block_size=257"])


# --- what the user states ---


CONTRADICTIONS = {
    "--n_layer=3": "n_layer=3 in the flag --n_layer contradicts {}/config.json, which says n_layer=2",
    "--intermediate_size=65": "d_ff=65 in the flag --intermediate_size contradicts",
    "--arch_preset=gpt2": "arch_preset='gpt2' in the flag --arch_preset contradicts",
    "--rope_theta=5e5": "rope_theta=500000.0 in the flag --rope_theta contradicts",
    "--rope_scaling={'rope_type': 'linear', 'factor': 2}": "rope_scaling=",
    "--weight_tying=False": "weight_tying=False in the flag --weight_tying contradicts",
    "--block_size=65": "block_size=65 in the flag --block_size is longer than the 64 positions",
}


@pytest.mark.parametrize("stated", CONTRADICTIONS)
def test_a_key_that_contradicts_the_weights_is_an_error_with_both_values(stated, made, tmp_path):
    with pytest.raises(UserError) as refusal:
        load_run_config([str(hf_run(tmp_path)), f"--init_weights=hf:{made['qwen3']}", stated])
    assert CONTRADICTIONS[stated].format(made["qwen3"]) in str(refusal.value)


def test_a_key_that_agrees_may_be_stated_and_the_message_names_the_line_of_one_that_does_not(made, tmp_path):
    flags = ["--n_layer=2", "--arch_preset=qwen3", "--weight_tying=True", "--head_dim=16", "--dropout=0.1"]
    weights = f"--init_weights=hf:{made['qwen3']}"
    config = load_run_config([str(hf_run(tmp_path)), weights, *flags])
    assert (config.n_layer, config.n_head, config.dropout) == (2, 4, 0.1)
    file = hf_run(tmp_path, n_head=8)
    with pytest.raises(UserError, match=rf"n_head=8 in {file}:\d+ contradicts .*, which says n_head=4"):
        load_run_config([str(file), weights])


@pytest.mark.data_check
def test_a_vocabulary_smaller_than_the_ids_of_the_dataset(made, run, tmp_path, capsys):
    config = hf_run(tmp_path, out_dir=tmp_path / "out", dataset=make_dataset(tmp_path / "large", 65))
    assert run(config, f"--init_weights=hf:{made['qwen3']}") == 2
    error = capsys.readouterr().err
    assert "has a vocabulary of 65" in error and "the model's vocab_size=64" in error
    assert "--vocab_size" not in error  # it would contradict the weights


@pytest.mark.parametrize("value", ["model", "hf:", "/tmp", "hf:/no/such/folder", "hf:a b/c", "hf:1/2/3"])
def test_what_names_no_weights_is_refused(value, tmp_path):
    with pytest.raises(UserError, match="init_weights="):
        load_run_config([str(hf_run(tmp_path)), f"--init_weights={value}"])


# --- the hub ---


@pytest.mark.security
def test_an_unreachable_hub_is_one_message(run, tmp_path, capsys, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert run(hf_run(tmp_path, out_dir=tmp_path / "out"), "--init_weights=hf:Owner/no-such-model@main") == 2
    error = capsys.readouterr().err
    assert "the model Owner/no-such-model of the Hugging Face hub could not be downloaded" in error
    assert "HF_HUB_OFFLINE is set" in error and "write --init_weights=hf:FOLDER" in error
    assert "Traceback" not in error and not (tmp_path / "out").exists()


def fake_hub(monkeypatch, cache: Path, model: Path, commit: str):
    """The hub library with one model, which it downloads into a folder of its commit, as the real one."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, revision))
        to = cache / "snapshots" / commit
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(model / name, to / name)
        return str(to / name)

    def snapshot(repository, revision, allow_patterns, max_workers):
        asked.append((repository, revision))
        shutil.copytree(model, cache / "snapshots" / revision, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_a_model_of_the_hub_is_read_at_one_commit(made, run, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked = fake_hub(monkeypatch, tmp_path / "cache", made["shards"], commit)
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    assert run(config, "--init_weights=hf:Owner/Name@v1") == 0
    assert ("Owner/Name", "v1") in asked and ("Owner/Name", commit) in asked
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "state.json").read_text())["pretrained"]
    assert (saved["source"], saved["commit"]) == ("hf:Owner/Name@v1", commit)
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    assert (tmp_path / "exported" / "model.safetensors").is_file()


# --- sample.py ---


def test_sampling_from_a_folder_without_a_tokenizer_says_so(made):
    with pytest.raises(UserError, match="holds no tokenizer.json"):
        sample.main([f"--hf={made['qwen3']}", "--device=cpu"])
