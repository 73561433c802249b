"""The programs that bench.throughput can run beside train.py, and what each of them needs.

Every peer is a module of bench/ that takes train.py's arguments, trains the same shape on the same number of
tokens, and prints rows as bench.peer does. What a peer cannot do is found before any run starts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from common.errors import UserError
from training.configuration.keys import AUTO, TrainConfig

PEERS = ("transformers", "liger", "nanogpt")
NANOGPT_FILES = ("train.py", "model.py", "configurator.py")


def program(peer: str, nanogpt: Path | None) -> list[str]:
    """What runs it: '-m', a module, and the module's own options."""
    if peer == "nanogpt":
        return ["-m", "bench.peer_nanogpt", f"--nanogpt={nanogpt}"]
    return ["-m", "bench.peer", *["--liger"] * (peer == "liger")]


def require(peers: list[str], nanogpt: Path | None) -> None:
    """Raises UserError if a peer is unknown or not installed."""
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peer: {peer!r} is not one of {', '.join(PEERS)}")
        if peer == "nanogpt":
            check_folder(nanogpt)
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


def obstacle(peer: str, config: TrainConfig) -> str | None:
    """Why this peer cannot train this configuration; None if nothing known here speaks against it."""
    model = config.model_config()
    if peer == "liger" and config.device != "cuda":
        return "liger-kernel's kernels need a GPU"
    if peer == "liger" and model.position_encoding != "rope":
        return "liger-kernel has no kernels for GPT-2"
    if peer == "nanogpt":
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
