"""The levels of activation_checkpointing that make parts of every block again, and what they cannot be
combined with."""

from __future__ import annotations

from common.errors import UserError
from training.configuration.keys import TrainConfig

REMAKING = ("memory_bound", "attention")  # ops/remade.py


def check_recomputation(config: TrainConfig) -> None:
    """Raises UserError for a level that cannot do anything."""
    level, model = config.activation_checkpointing, config.model_config()
    if level not in REMAKING:
        return
    asked = f"activation_checkpointing={level!r}"
    if config.ffn_backend == "quack":
        raise UserError(
            f"{asked} makes again what the layers of ffn_backend='quack' keep; set "
            "activation_checkpointing='selective', or ffn_backend='torch'"
        )
    blocks_in_bf16 = config.low_precision_skip_first + config.low_precision_skip_last
    D = model.head_dim
    copies = model.position_encoding == "rope" and (model.qk_norm or D & (D - 1)) and not config.doc_masking
    if level == "memory_bound" and config.low_precision != "none" and not (blocks_in_bf16 or copies):
        raise UserError(
            f"{asked} saves nothing here: in low precision, inputs of matmuls are kept quantized, and this "
            "model has no copies of q and k to make again; set activation_checkpointing='attention' or 'none'"
        )
