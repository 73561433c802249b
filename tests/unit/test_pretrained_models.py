"""Weights of Hugging Face's transformers give its logits in our model, and the other way round."""

import json

import pytest
import torch
from support.hf_models import (
    MODELS,
    copy,
    hf_run,
    load_reference,
    logits_of,
    make,
    save,
    save_four,
    some_ids,
    tensors,
)

from tools import export_hf
from training.checkpoints.loading import load_weights
from training.pretrained.architecture import read_architecture
from training.pretrained.reading import load_pretrained

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return save_four(tmp_path_factory.mktemp("four"))


def ours(folder):
    return load_pretrained(f"hf:{folder}", CPU)[1].eval()


def difference(a, b):
    return (a - b).abs().max().item()


# --- in ---


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    ids = some_ids()
    with torch.no_grad():
        expected, logits = theirs(input_ids=ids).logits, ours(tmp_path / "model")(ids)
    assert expected.std() > 0.5  # the comparison is not one of zeros
    assert difference(logits, expected) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_the_same_numbers_in_fp32(dtype, tmp_path):
    folder = save("qwen3", tmp_path / "half", dtype)
    stored = tensors(folder)
    model = ours(folder)
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"].float())
    q = stored["model.layers.1.self_attn.q_proj.weight"].float()
    assert torch.equal(model.blocks[1].attn.qkv.weight[: len(q)], q)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_files_of_the_bare_model_have_no_prefix(family, four, tmp_path):
    from safetensors.torch import save_file

    folder = copy(four[family], tmp_path / "bare")
    stored = tensors(folder)
    prefix = "transformer." if family == "gpt2" else "model."
    bare = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    save_file(bare, folder / "model.safetensors")
    ids = some_ids()
    assert torch.equal(ours(folder)(ids), ours(four[family])(ids))


def test_what_a_model_computes_by_itself_may_be_in_the_files(four, tmp_path):
    from safetensors.torch import save_file

    for family, extra in (
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().bool()}),
        ("gpt2", {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("qwen2", {"lm_head.weight": tensors(four["qwen2"])["model.embed_tokens.weight"].clone()}),
    ):
        folder = copy(four[family], tmp_path / next(iter(extra)))
        save_file(tensors(folder) | extra, folder / "model.safetensors")
        assert torch.equal(ours(folder)(some_ids()), ours(four[family])(some_ids()))


def test_the_first_positions_of_gpt2_serve_a_shorter_block_size(run, four, tmp_path):
    config = hf_run(tmp_path, block_size=16, max_iters=1, out_dir=tmp_path / "out")
    assert run(config, f"--init_weights=hf:{four['gpt2']}") == 0
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    _, model = load_weights(checkpoint, CPU)
    assert model.positions.weight.shape == (16, 32)
    assert difference(model.positions.weight, tensors(four["gpt2"])["transformer.wpe.weight"][:16]) < 0.05


# --- config.json, old and new ---

QWEN3_4 = {  # as transformers 4.51 wrote it
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_both_spellings_of_config_json_mean_the_same():
    new = {name: value for name, value in QWEN3_4.items() if name not in ("rope_theta", "rope_scaling")}
    new |= {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16"}
    old_keys, new_keys = (read_architecture(fields, "config.json").keys for fields in (QWEN3_4, new))
    assert old_keys == new_keys
    assert old_keys["rope_theta"] == 1e6 and old_keys["head_dim"] == 128 and old_keys["weight_tying"]
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    for spelling in ({"type": "yarn"}, {"rope_type": "yarn"}):
        old = read_architecture(QWEN3_4 | {"rope_scaling": yarn | spelling}, "config.json")
        parameters = {**yarn, **spelling, "rope_theta": 1e6}
        assert old.keys == read_architecture(new | {"rope_parameters": parameters}, "config.json").keys
        assert old.keys["rope_scaling"]["factor"] == 4.0


# --- out ---


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_equal_and_what_save_pretrained_writes(name, run, tmp_path):
    source = save(name, tmp_path / "source")
    still = {"max_iters": 1, "learning_rate": 0.0, "min_lr": 0.0}
    config = hf_run(tmp_path, **still, out_dir=tmp_path / "out")
    assert run(config, f"--init_weights=hf:{source}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    there, back = tensors(source), tensors(tmp_path / "exported")
    assert there.keys() == back.keys()
    for tensor_name, tensor in there.items():
        assert tensor.dtype == back[tensor_name].dtype and torch.equal(tensor, back[tensor_name]), tensor_name
    theirs, mine = (load_reference(tmp_path / f).config.to_dict() for f in ("source", "exported"))
    assert {key: value for key, value in theirs.items() if mine[key] != value}.keys() <= {"_name_or_path"}
    fields = json.loads((tmp_path / "exported/config.json").read_text())
    assert (
        name.startswith("gpt2")
        or {"torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"} <= fields.keys()
    )
    assert torch.equal(logits_of(tmp_path / "exported", some_ids()), logits_of(source, some_ids()))


def every_second(names):
    """The others are slow tests: each takes a second."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (place % 2)) for place, name in enumerate(names)]


@pytest.mark.parametrize("name", every_second(MODELS))
def test_a_trained_checkpoint_gives_our_logits_in_transformers(name, run, tmp_path):
    source = save(name, tmp_path / "source")
    config = hf_run(tmp_path, out_dir=tmp_path / "out")
    assert run(config, f"--init_weights=hf:{source}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    _, model = load_weights(checkpoint, CPU)
    with torch.no_grad():
        logits = model.eval()(some_ids())
    assert difference(logits, logits_of(source, some_ids())) > 0.1  # it has learned
    assert difference(logits, logits_of(tmp_path / "exported", some_ids())) <= 1e-4
