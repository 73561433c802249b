"""Builds the model and counts its FLOPs, formula v3: every matmul its own line, nothing else counted.

    cp mfu_versions/model_builder_v3.py model_builder.py

makes it the active formula; the model, its weights and its loss stay the same. The count equals what torch's
FlopCounterMode sees on the real model; train.py checks that at every start.

    S sequence · H width · A attention width, n_head head_dim, mostly equal to H · L layers
    G query heads per key/value head · F feed-forward width · V vocabulary
"""

from __future__ import annotations

import torch

from model import Attend, Transformer, manual_attention
from model_config import ModelConfig

CALCULATION_METHOD = "component_summation_v2025"
EXACT = True  # the total must equal FlopCounterMode's; train.py refuses to run on a mismatch
BACKWARD_FACTOR = 3  # forward, gradient of the input, gradient of the weight: one matmul each


def build_model(config: ModelConfig, attend: Attend = manual_attention, dtype=torch.float32) -> Transformer:
    """The model on the meta device, without memory; init_weights(device, seed) makes it real."""
    with torch.device("meta"):
        return Transformer(config, attend, dtype)


def count_flops(config: ModelConfig, seq_len: int) -> dict:
    """FLOPs of one model. A multiply-add is 2 FLOPs; no recomputation is counted.

    Per layer, q and out are 2 S H A each, k and v 2 S H A / G each, scores and context 2 S^2 A each. Biases
    are no matmuls.

    Returns
        components              forward FLOPs of one sequence of seq_len tokens, whole model, by matmul
        flops_per_token         training (3 x forward) FLOPs per token, the full S x S score matrix
        flops_per_token_causal  the same with the causal half of the score matrix
        attention_flops_per_layer, ffn_flops_per_layer, logit_flops   forward FLOPs of one sequence
        attention_to_ffn_ratio  the quotient of those two
    """
    S, H, A, G = seq_len, config.n_embd, config.attention_width, config.gqa_group_size
    F, V, L = config.d_ff, config.vocab_size, config.n_layer
    attention = {
        "q_proj": 2 * S * H * A,
        "k_proj": 2 * S * H * A // G,
        "v_proj": 2 * S * H * A // G,
        "attention_scores": 2 * S * S * A,
        "attention_context": 2 * S * S * A,
        "out_proj": 2 * S * A * H,
    }
    if config.ffn_type == "swiglu":
        ffn = {"ffn_gate": 2 * S * H * F, "ffn_up": 2 * S * H * F, "ffn_down": 2 * S * F * H}
    else:
        ffn = {"ffn_up": 2 * S * H * F, "ffn_down": 2 * S * F * H}
    logits = 2 * S * H * V  # a matmul whether the weight is tied or not
    forward = L * (sum(attention.values()) + sum(ffn.values())) + logits
    causal_saving = L * (attention["attention_scores"] + attention["attention_context"]) // 2
    return {
        "components": {**{name: L * n for name, n in {**attention, **ffn}.items()}, "logits": logits},
        "flops_per_token": BACKWARD_FACTOR * forward // S,
        "flops_per_token_causal": BACKWARD_FACTOR * (forward - causal_saving) // S,
        "attention_flops_per_layer": sum(attention.values()),
        "ffn_flops_per_layer": sum(ffn.values()),
        "logit_flops": logits,
        "attention_to_ffn_ratio": sum(attention.values()) / sum(ffn.values()),
    }
