"""Builds the model and counts its FLOPs, formula v1: 6N + 12 L A S, as in nanoGPT and PaLM.

    cp mfu_versions/model_builder_v1.py model_builder.py

makes it the active formula; the model, its weights and its loss stay the same. It overcounts: an untied input
embedding is a lookup, yet its parameters are in N, so a model with a large vocabulary looks up to 18 % busier
than it is (LLaMA 3, Qwen3). It exists to compare with logs that were counted this way.

    S sequence · A attention width, n_head head_dim · L layers · N parameters less learned positions
"""

from __future__ import annotations

import torch

from model import Attend, Transformer, manual_attention
from model_config import ModelConfig

CALCULATION_METHOD = "nanogpt_legacy_v1"
EXACT = False  # an approximation: train.py logs its deviation from FlopCounterMode


def build_model(config: ModelConfig, attend: Attend = manual_attention, dtype=torch.float32) -> Transformer:
    """The model on the meta device, without memory; init_weights(device, seed) makes it real."""
    with torch.device("meta"):
        return Transformer(config, attend, dtype)


def count_flops(config: ModelConfig, seq_len: int) -> dict:
    """FLOPs of one model: 6N + 12 L n_head head_dim S a token (Chowdhery et al. 2022, appendix B). N has all
    parameters but learned positions, so norms and biases are counted as if they were matrices.

    Returns
        components              forward FLOPs of one sequence of seq_len tokens, whole model, by term
        flops_per_token         training FLOPs per token, the full S x S score matrix
        flops_per_token_causal  the same with the causal half of the score matrix
        attention_flops_per_layer   forward FLOPs of one sequence: the score term, all that v1 calls attention
        ffn_flops_per_layer, logit_flops, attention_to_ffn_ratio   None: v1 has one N for all parameters
    """
    S, A, L = seq_len, config.attention_width, config.n_layer
    N = build_model(config).count_parameters()["non_embedding"]
    scores = 12 * L * A * S  # per token, forward and backward
    return {
        "components": {"parameters": 2 * N * S, "attention_scores": scores * S // 3},
        "flops_per_token": 6 * N + scores,
        "flops_per_token_causal": 6 * N + scores // 2,
        "attention_flops_per_layer": scores * S // (3 * L),
        "ffn_flops_per_layer": None,
        "logit_flops": None,
        "attention_to_ffn_ratio": None,
    }
