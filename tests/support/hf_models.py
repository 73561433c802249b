"""Tiny random models of every family, made and saved by Hugging Face's transformers, and runs that begin with
them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.helpers import TINY, make_dataset, write_config

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may ask the hub
VOCAB, T = 64, 32
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(n_layer=2, n_head=4, n_embd=32, n_positions=T, vocab_size=VOCAB, bos_token_id=2, eos_token_id=2)
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5)
LLAMA3 |= dict(original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e6)
MODELS = {  # name -> (class, what its configuration says)
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied, wide": ("GPT2", GPT2 | dict(tie_word_embeddings=False, n_inner=96)),
    "llama2": ("Llama", SIZES | dict(num_key_value_heads=4, tie_word_embeddings=False)),
    "llama3.2": ("Llama", SIZES | dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=16)),
    "llama with biases": ("Llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "smollm2": ("Llama", SIZES | dict(tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "qwen2": ("Qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen2.5 untied": ("Qwen2", SIZES | dict(tie_word_embeddings=False, rope_parameters=YARN)),
    "qwen3": ("Qwen3", SIZES | dict(tie_word_embeddings=True, head_dim=16)),
    "qwen3 untied": ("Qwen3", SIZES | dict(tie_word_embeddings=False, head_dim=8)),
}
FAMILY = {"gpt2": "gpt2", "llama": "llama2", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> one of these
# keys of the model, which a run that begins with weights leaves out
MODEL_KEYS = ("arch_preset", "n_layer", "n_head", "num_key_value_heads", "n_embd", "d_ff", "vocab_size")


def make(name: str, dtype: torch.dtype = torch.float32):
    """Hugging Face's model with random weights: norms not 1, biases not 0, logits of order 1."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    family, keys = MODELS[name]
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**keys, attn_implementation="eager")
    model = getattr(transformers, f"{family}{suffix}")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            norm = p.ndim == 1 and parameter_name.endswith("weight")
            std = 0.3 if p.ndim == 1 else 0.15
            p.copy_(float(norm) + std * torch.randn(p.shape, generator=generator))
    return model.to(dtype).eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "5GB") -> Path:
    """The folder that its save_pretrained writes."""
    make(name, dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def save_four(folder: Path) -> dict[str, Path]:
    """{model_type: folder} of one model of every family."""
    return {family: save(name, folder / family) for family, name in FAMILY.items()}


def change_config(folder: Path, **keys) -> Path:
    """Its config.json with these fields; None removes one."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the safetensors library and not by our code."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        more = load_file(path)
        assert not found.keys() & more.keys()
        found |= more
    return found


def hf_run(folder: Path, **keys) -> Path:
    """A config file without the model's keys, and its dataset."""
    plain = {key: value for key, value in TINY.items() if key not in MODEL_KEYS}
    data = folder / "data"
    if not data.exists():
        make_dataset(data, VOCAB)
    settings = {**plain, "dataset": data, "peak_tflops": 1.0, "max_iters": 3, **keys}
    return write_config(folder / "run.py", **settings)


def load_reference(folder: Path):
    """The model as transformers loads it."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(about.values()), about  # no missing, unexpected or mismatched name
    return model.eval()


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """By transformers."""
    with torch.no_grad():
        return load_reference(folder)(input_ids=ids).logits


def some_ids(count: int = 2, length: int = T) -> torch.Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(2))


def gather(found: list, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{our parameter: tensor} of Hugging Face's tensors: weights, or their gradients."""
    rows: dict[str, list[torch.Tensor]] = {}
    for piece in found:
        if not piece.is_zero:
            tensor = theirs[piece.name]
            rows.setdefault(piece.ours, []).append(tensor.t() if piece.transposed else tensor)
    pairs = {piece.ours for piece in found if piece.rows.step == 2}
    return {
        name: torch.stack(parts, dim=1).flatten(0, 1) if name in pairs else torch.cat(parts)
        for name, parts in rows.items()
    }
