"""Our model's shape as one of Hugging Face transformers: GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM.

transformers is one of the development packages, so it is imported where it is used. The trap: a comparison
with a model that is almost the same says nothing. check_parameters refuses such a model.
"""

from __future__ import annotations

import importlib.metadata

import torch

import model_builder
from common.errors import UserError
from model_config import ModelConfig

SPECIAL_ID = 0  # transformers requires ids for the begin and the end of text; training does not use them


def import_transformers():
    try:
        import transformers
    except ImportError:
        raise UserError("this needs transformers: pip install -r requirements.txt") from None
    transformers.logging.set_verbosity_error()
    return transformers


def use_liger(config: ModelConfig) -> str:
    """Replaces parts of transformers' models by liger-kernel's, and returns its name and version. The model
    must be built afterwards. Raises UserError."""
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        raise UserError("this needs liger-kernel: pip install liger-kernel") from None
    if config.qk_norm:
        liger.apply_liger_kernel_to_qwen3()
    elif config.qkv_bias:
        liger.apply_liger_kernel_to_qwen2()
    else:
        liger.apply_liger_kernel_to_llama()
    return f"liger-kernel {importlib.metadata.version('liger-kernel')}, "


def build(transformers, config: ModelConfig) -> torch.nn.Module:
    """Their model with our shape and random weights, on torch's current default device. Raises UserError."""
    common = dict(
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.weight_tying,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=SPECIAL_ID,
        eos_token_id=SPECIAL_ID,
    )
    style = (config.position_encoding, config.normalization, config.ffn_type, config.activation)
    if style == ("learned", "layernorm", "mlp", "gelu") and config.n_kv_head == config.n_head:
        return _build_gpt2(transformers, config, common)
    if style != ("rope", "rmsnorm", "swiglu", "silu"):
        raise UserError(
            f"transformers has no model with {', '.join(style)}; bench.peer knows GPT-2, LLaMA, Qwen2, Qwen3"
        )
    scaling = {} if config.rope_scaling is None else config.rope_scaling.to_dict()
    rope = {"rope_type": "default", **scaling, "rope_theta": config.rope_theta}
    sizes = dict(
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim,
        hidden_size=config.n_embd,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.block_size,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,  # read by transformers 4
        rope_scaling=scaling or None,  # the same
        rope_parameters=rope,  # read from 5 on
        attention_bias=config.bias,
        attention_dropout=config.dropout,
    )
    if config.qkv_bias and not config.qk_norm:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **common))
    if config.qk_norm:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **common))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(mlp_bias=config.bias, **sizes, **common))


def _build_gpt2(transformers, config: ModelConfig, common: dict) -> torch.nn.Module:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            n_inner=config.d_ff,
            n_positions=config.block_size,
            activation_function="gelu_new",
            layer_norm_epsilon=config.norm_eps,
            **dropouts,
            **common,
        )
    )
    if not config.bias:
        _remove_biases(model, transformers.pytorch_utils.Conv1D)
    return model


def _remove_biases(model: torch.nn.Module, conv1d: type) -> None:
    """Their GPT-2 always has biases, and its Conv1D does not work without one, so a Linear, as in their other
    models, replaces each Conv1D. Otherwise the peer would compute gradients of biases that we do not have."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, conv1d):
                weight = child.get_parameter("weight")
                inputs, outputs = weight.shape
                linear = torch.nn.Linear(inputs, outputs, bias=False, device=weight.device)
                with torch.no_grad():
                    linear.weight.copy_(weight.t())
                setattr(parent, name, linear)
            elif isinstance(child, torch.nn.LayerNorm):
                child.register_parameter("bias", None)


def check_parameters(model: torch.nn.Module, config: ModelConfig, program: str = "transformers") -> int:
    """Their number of parameters. Raises UserError if ours is another one: then the models differ."""
    theirs = sum(parameter.numel() for parameter in model.parameters())
    ours = model_builder.build_model(config).count_parameters()["total"]
    if theirs != ours:
        raise UserError(
            f"{type(model).__name__} has {theirs:,} parameters, our {config.arch} {ours:,}; "
            f"a key asks for a shape that {program} does not have"
        )
    return theirs
