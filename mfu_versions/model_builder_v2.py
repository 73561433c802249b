"""Builds the model and counts its FLOPs, formula v2: attention combined into one expression.

    cp mfu_versions/model_builder_v2.py model_builder.py

makes it the active formula; the model, its weights and its loss stay the same. The total equals v3's. Only
attention_to_ffn_ratio differs: see count_flops.

    S sequence · H width · A attention width, n_head head_dim, mostly equal to H · L layers
    G query heads per key/value head · F feed-forward width · V vocabulary
"""

from __future__ import annotations

import torch

from model import Attend, Transformer, manual_attention
from model_config import ModelConfig

CALCULATION_METHOD = "combined_formula_v2"
EXACT = True  # the total must equal FlopCounterMode's; train.py refuses to run on a mismatch
BACKWARD_FACTOR = 3  # forward, gradient of the input, gradient of the weight: one matmul each


def build_model(config: ModelConfig, attend: Attend = manual_attention, dtype=torch.float32) -> Transformer:
    """The model on the meta device, without memory; init_weights(device, seed) makes it real."""
    with torch.device("meta"):
        return Transformer(config, attend, dtype)


def count_flops(config: ModelConfig, seq_len: int) -> dict:
    """FLOPs of one model. A multiply-add is 2 FLOPs; no recomputation is counted.

    Per layer, attention = 2 S H A (2 + 2/G) + 4 S^2 A, plus the feed-forward and the logits. With A = H it is
    the published 2 S H^2 (2 + 2/G) + 4 S^2 H. Biases are no matmuls.

    Returns
        components              forward FLOPs of one sequence of seq_len tokens, whole model, by part
        flops_per_token         training (3 x forward) FLOPs per token, the full S x S score matrix
        flops_per_token_causal  the same with the causal half of the score matrix
        attention_flops_per_layer, ffn_flops_per_layer, logit_flops   forward FLOPs of one sequence
        attention_to_ffn_ratio  as it was published: its score term is multiplied by n_head once more,
                                2 n_head S^2 A, so it is NOT the quotient of the two figures above. It is
                                kept because users have logs to compare with; v3 has the true quotient.
    """
    S, H, A, G = seq_len, config.n_embd, config.attention_width, config.gqa_group_size
    F, V, L = config.d_ff, config.vocab_size, config.n_layer
    projections = 4 * S * H * A + 4 * S * H * A // G  # 2 S H A (2 + 2/G)
    attention = projections + 4 * S * S * A
    ffn = (6 if config.ffn_type == "swiglu" else 4) * S * H * F
    logits = 2 * S * H * V
    forward = L * (attention + ffn) + logits
    return {
        "components": {"attention": L * attention, "ffn": L * ffn, "logits": logits},
        "flops_per_token": BACKWARD_FACTOR * forward // S,
        "flops_per_token_causal": BACKWARD_FACTOR * (forward - L * 2 * S * S * A) // S,
        "attention_flops_per_layer": attention,
        "ffn_flops_per_layer": ffn,
        "logit_flops": logits,
        "attention_to_ffn_ratio": (projections + 2 * config.n_head * S * S * A) / ffn,
    }
