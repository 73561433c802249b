"""Weights of Hugging Face's transformers give its logits in our model, and the other way round."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.hf_models import (
    FAMILY,
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

from model_config import model_config
from tools import export_hf
from training.checkpoints.loading import load_weights
from training.pretrained.architecture import read_architecture
from training.pretrained.reading import load_pretrained
from training.pretrained.writing import write_architecture

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
    half = save("qwen3", tmp_path / "half", dtype)
    whole = copy(half, tmp_path / "whole")
    save_file({name: tensor.float() for name, tensor in tensors(half).items()}, whole / "model.safetensors")
    of_half, of_whole = ours(half).state_dict(), ours(whole).state_dict()
    assert all(torch.equal(of_half[name], tensor) for name, tensor in of_whole.items())


def test_files_may_leave_out_the_prefix_and_have_what_a_model_computes_by_itself(four, tmp_path):
    stored = {family: tensors(folder) for family, folder in four.items()}
    for family, content in (
        ("gpt2", {name.removeprefix("transformer."): t for name, t in stored["gpt2"].items()}),
        ("llama", {name.removeprefix("model."): t for name, t in stored["llama"].items()}),
        ("gpt2", stored["gpt2"] | {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().bool()}),
        ("gpt2", stored["gpt2"] | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("llama", stored["llama"] | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("qwen2", stored["qwen2"] | {"lm_head.weight": stored["qwen2"]["model.embed_tokens.weight"].clone()}),
    ):
        folder = copy(four[family], tmp_path / str(len(list(tmp_path.iterdir()))))
        save_file(content, folder / "model.safetensors")
        assert torch.equal(ours(folder)(some_ids()), ours(four[family])(some_ids()))


def test_the_first_positions_of_gpt2_serve_a_shorter_block_size(run, four, tmp_path):
    config = hf_run(tmp_path, block_size=16, max_iters=1, out_dir=tmp_path / "out")
    assert run(config, f"--init_weights=hf:{four['gpt2']}") == 0
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    _, model = load_weights(checkpoint, CPU)
    assert model.positions.weight.shape == (16, 32)
    assert difference(model.positions.weight, tensors(four["gpt2"])["transformer.wpe.weight"][:16]) < 0.05


# --- config.json, old and new ---

QWEN3_4 = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 32768,
"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
"sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
"vocab_size": 151936}"""  # as transformers 4.51 wrote it


def test_both_spellings_of_config_json_mean_the_same():
    qwen3 = json.loads(QWEN3_4)
    new = {name: value for name, value in qwen3.items() if name not in ("rope_theta", "rope_scaling")}
    new |= {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16"}
    old_keys, new_keys = (read_architecture(fields, "config.json").keys for fields in (qwen3, new))
    assert old_keys == new_keys
    assert old_keys["rope_theta"] == 1e6 and old_keys["head_dim"] == 128 and old_keys["weight_tying"]
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    for spelling in ({"type": "yarn"}, {"rope_type": "yarn"}):
        old = read_architecture(qwen3 | {"rope_scaling": yarn | spelling}, "config.json")
        parameters = {**yarn, **spelling, "rope_theta": 1e6}
        assert old.keys == read_architecture(new | {"rope_parameters": parameters}, "config.json").keys
        assert old.keys["rope_scaling"]["factor"] == 4.0


LEFT_OUT = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 8), ("qwen2", 8), ("qwen3", 128)])
def test_what_config_json_leaves_out_has_transformers_default(family, head_dim):
    fields = LEFT_OUT | {"model_type": family, "vocab_size": 64, "max_position_embeddings": 512}
    found = read_architecture(fields | {"rope_parameters": LLAMA3}, "config.json").keys
    assert (found["head_dim"], found["norm_eps"], found["rope_theta"]) == (head_dim, 1e-6, 10_000)
    assert found["rope_scaling"] == LLAMA3 | {"original_max_position_embeddings": 512}


# --- out ---


@pytest.mark.parametrize(("said", "exported"), [(16, 64), (512, 512), (None, 64), ("512", 64)])
def test_an_export_has_the_length_of_the_first_weights_or_that_of_the_run_if_it_is_longer(said, exported):
    """Scaled positions may be more than config.json said."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "d_ff": 32, "vocab_size": 64, "block_size": 64}
    fields = write_architecture(model_config("llama", **sizes), "float32", {"max_position_embeddings": said})
    assert fields["max_position_embeddings"] == exported


def train_and_export(name, run, tmp_path, **keys):
    """(folder of the first weights, folder of the export) of a run that begins with them."""
    source = save(name, tmp_path / "source", shards="20KB")
    config = hf_run(tmp_path, out_dir=tmp_path / "out", **keys)
    assert run(config, f"--init_weights=hf:{source}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    return source, tmp_path / "exported"


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_equal_and_what_save_pretrained_writes(name, run, tmp_path):
    source, exported = train_and_export(name, run, tmp_path, max_iters=1, learning_rate=0.0, min_lr=0.0)
    there, back = tensors(source), tensors(exported)
    assert there.keys() == back.keys()
    for tensor_name, tensor in there.items():
        assert tensor.dtype == back[tensor_name].dtype and torch.equal(tensor, back[tensor_name]), tensor_name
    theirs, mine = (load_reference(folder).config.to_dict() for folder in (source, exported))
    assert {key: value for key, value in theirs.items() if mine[key] != value}.keys() <= {"_name_or_path"}
    if not name.startswith("gpt2"):
        fields = json.loads((exported / "config.json").read_text())
        assert {"torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"} <= fields.keys()
    assert torch.equal(logits_of(exported, some_ids()), logits_of(source, some_ids()))


@pytest.mark.parametrize("name", FAMILY.values())
def test_a_trained_checkpoint_gives_our_logits_in_transformers(name, run, tmp_path):
    source, exported = train_and_export(name, run, tmp_path)
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    _, model = load_weights(checkpoint, CPU)
    with torch.no_grad():
        logits = model.eval()(some_ids())
    assert difference(logits, logits_of(source, some_ids())) > 0.1  # it has learned
    assert difference(logits, logits_of(exported, some_ids())) <= 1e-4
