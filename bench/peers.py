"""The programs that bench.throughput can run beside train.py, and what each of them needs.

Every peer is a module of bench/ that takes train.py's arguments, trains the same shape on the same number of
tokens, and prints rows as bench.peer does. What a peer cannot do is found before any run starts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from common.errors import UserError
from model_config import ModelConfig
from training.configuration.keys import AUTO, TrainConfig

PEERS = ("transformers", "liger", "nanogpt", "torchtitan")
NANOGPT_FILES = ("train.py", "model.py", "configurator.py")
TORCHTITAN_VERSION = "0.2.2"  # as in requirements-peers.txt
TORCHTITAN_IMPORTS = ("torchdata", "datasets", "tensorboard", "tyro")  # also where its data are not used


def program(peer: str, nanogpt: Path | None) -> list[str]:
    """What runs it: '-m', a module, and the module's own options."""
    if peer == "nanogpt":
        return ["-m", "bench.peer_nanogpt", f"--nanogpt={nanogpt}"]
    if peer == "torchtitan":
        return ["-m", "bench.peer_torchtitan"]
    return ["-m", "bench.peer", *["--liger"] * (peer == "liger")]


def require(peers: list[str], nanogpt: Path | None) -> None:
    """Raises UserError if a peer is unknown or not installed."""
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peer: {peer!r} is not one of {', '.join(PEERS)}")
        if peer == "nanogpt":
            check_folder(nanogpt)
        elif peer == "torchtitan":
            check_torchtitan()
        elif importlib.util.find_spec("transformers") is None:
            raise UserError(f"--peer={peer} needs transformers: pip install -r requirements.txt")
        if peer == "liger" and importlib.util.find_spec("liger_kernel") is None:
            raise UserError("--peer=liger needs liger-kernel: pip install liger-kernel")


def check_folder(nanogpt: Path | None) -> None:
    """Raises UserError if this is no folder of nanoGPT."""
    if nanogpt is None:
        raise UserError(
            "--peer=nanogpt runs nanoGPT's own train.py: git clone https://github.com/karpathy/nanoGPT, "
            "then --nanogpt=FOLDER"
        )
    if missing := [name for name in NANOGPT_FILES if not (nanogpt / name).is_file()]:
        raise UserError(f"--nanogpt={nanogpt} has no {', '.join(missing)}, so it is no checkout of nanoGPT")


def check_torchtitan() -> None:
    """Raises UserError if torchtitan, or what it imports, is not installed, or is of another version."""
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if version != TORCHTITAN_VERSION:
        raise UserError(
            f"--peer=torchtitan runs torchtitan {TORCHTITAN_VERSION}, which is {version} here: "
            "pip install -r requirements-peers.txt"
        )
    if missing := [name for name in TORCHTITAN_IMPORTS if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"--peer=torchtitan: torchtitan imports {', '.join(missing)}, which it lacks here: "
            "pip install -r requirements-peers.txt"
        )


def depends_on(peer: str, config: TrainConfig) -> tuple:
    """The values of the keys that this peer follows beside shape, batch, dtype and compile."""
    if peer == "torchtitan":
        return (config.low_precision, config.activation_checkpointing, config.reshard_after_forward)
    return ()


def obstacle(peer: str, config: TrainConfig, processes: int = 1) -> str | None:
    """Why this peer cannot train this configuration with so many processes; None if nothing known here speaks
    against it."""
    model = config.model_config()
    if peer == "liger" and config.device != "cuda":
        return "liger-kernel's kernels need a GPU"
    if peer == "liger" and model.position_encoding != "rope":
        return "liger-kernel has no kernels for GPT-2"
    if peer == "nanogpt":
        return _of_nanogpt(config, model)
    if peer == "torchtitan":
        return _of_torchtitan(config, model, processes)
    return None


def _of_nanogpt(config: TrainConfig, model: ModelConfig) -> str | None:
    style = (model.position_encoding, model.normalization, model.ffn_type, model.activation)
    if style != ("learned", "layernorm", "mlp", "gelu") or not model.weight_tying:
        return f"nanoGPT has only GPT-2, not {model.arch}"
    if model.d_ff != 4 * model.n_embd or model.n_kv_head != model.n_head:
        return "nanoGPT's feed-forward is four times as wide as the model, and all its heads have keys"
    if model.vocab_size > 65536:
        return "nanoGPT reads tokens of 16 bits"
    if AUTO in (config.batch_size, config.gradient_accumulation_steps):
        return "nanoGPT needs numbers: state --batch_size and --gradient_accumulation_steps"
    if config.dtype == "float16":
        return "bench.peer_nanogpt compares bfloat16 and float32"
    return None


def _of_torchtitan(config: TrainConfig, model: ModelConfig, processes: int) -> str | None:
    style = (model.position_encoding, model.normalization, model.ffn_type, model.activation)
    if style != ("rope", "rmsnorm", "swiglu", "silu") or model.bias or model.qkv_bias:
        return f"torchtitan has Qwen3 and LLaMA 3, without biases, not {model.arch} of this shape"
    if model.dropout:
        return "torchtitan's models have no dropout; use --dropout=0"
    if model.weight_tying and processes > 1:
        return "torchtitan's FSDP does not shard tied weights; use one GPU or --weight_tying=False"
    return _of_its_model(model) or _of_its_trainer(config)


def _of_its_model(model: ModelConfig) -> str | None:
    scaling = model.rope_scaling and model.rope_scaling.rope_type
    if model.qk_norm:
        return "torchtitan's Qwen3 has no rope_scaling" if scaling else None
    if model.weight_tying:
        return "torchtitan's LLaMA has an output head of its own; use --weight_tying=False"
    if model.head_dim * model.n_head != model.n_embd:
        return "the heads of torchtitan's LLaMA are together as wide as the model; leave out --head_dim"
    if scaling not in (None, "llama3"):
        return f"torchtitan's LLaMA has rope_scaling of type llama3, not {scaling}"
    return None


def _of_its_trainer(config: TrainConfig) -> str | None:
    if config.device != "cuda":
        return "torchtitan's trainer needs a GPU"
    if config.dtype != "bfloat16":
        return "bench.peer_torchtitan compares bfloat16, and fp8_tensorwise beside it"
    if config.doc_masking:
        return "bench.peer_torchtitan attends to the whole window; use --doc_masking=False for both"
    if config.init_from != "scratch" or config.init_weights is not None:
        return "bench.peer_torchtitan always starts with random weights and the first batch"
    if config.max_iters < 1:
        return "max_iters=0 leaves nothing to time"
    if config.low_precision == "none":
        return None
    if config.low_precision != "fp8_tensorwise":
        return f"bench.peer_torchtitan has fp8_tensorwise, not {config.low_precision}"
    if (
        config.low_precision_scope != "layers"
        or config.low_precision_skip_first + config.low_precision_skip_last
    ):
        return (
            "torchtitan's float8 is in all blocks, not in the head; leave out low_precision_scope and _skip"
        )
    if importlib.util.find_spec("torchao") is None:
        return "torchtitan's float8 needs torchao: pip install torchao"
    return None
