"""Hugging Face transformers training our model, as GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM or
Qwen3ForCausalLM.

https://github.com/huggingface/transformers
The recipe is the usual one: fp32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW,
clip_grad_norm_, DDP under torchrun. The trap: a comparison with a model that is almost the same says nothing.
check_parameters refuses such a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.peers.program import NOT_COUNTED, Program, Rows, check_parameters, need, precision
from common.errors import UserError
from model_config import ModelConfig
from training.batches.loader import Loader
from training.batches.sources import Source, make_windows
from training.configuration.keys import TrainConfig
from training.configuration.seeds import DROPOUT, stream_seed
from training.optimization.schedule import learning_rate
from training.process.world import World

Step = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # (x, y, learning rate) -> mean loss
SPECIAL_ID = 0  # transformers requires ids for the begin and the end of text; training does not use them


class Transformers(Program):
    name = "transformers"

    def require(self) -> None:
        need("transformers", self.name, "pip install -r requirements.txt")

    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(config.seed)
        with world.device:
            model = build(transformers, config.model_config())
        torch.manual_seed(stream_seed(config.seed, DROPOUT, world.rank))
        found = {
            "peer": f"transformers {transformers.__version__}",
            "class": type(model).__name__,
            "parameters": check_parameters(model, config.model_config(), self.name),
            "compile": config.compile,
            "attention": f"sdpa, as {type(model).__name__} calls it",
            "precision": precision(config),
        }
        loader = Loader(make_windows(sources, config)["train"], config, world)
        step, rows = make_step(model, config, world), Rows(config, world)
        for iteration in range(config.max_iters):
            loss = step(*loader.next(), learning_rate(iteration, config))
            if rows.due(iteration):
                rows.add(iteration, loss.item())
        loader.close()
        return {**found, "training_iterations": rows.close(self.name)}


def make_step(model: torch.nn.Module, config: TrainConfig, world: World) -> Step:
    """The step makes one iteration as most training scripts do."""
    ddp = None
    if world.size > 1:
        ids = [world.local_rank] if world.device.type == "cuda" else None
        model = ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    forward = torch.compile(model) if config.compile else model
    parameters = list(model.parameters())
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay, fused=True
    )
    use_bf16 = config.dtype == "bfloat16"

    def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
        losses = []
        targets = torch.where(y < 0, NOT_COUNTED, y)  # negative: padding of packed documents
        for i, ids in enumerate(x):
            # gradients are reduced once for each iteration, after its last micro-step
            with ddp.no_sync() if ddp and i < len(x) - 1 else contextlib.nullcontext():
                with torch.autocast(world.device.type, torch.bfloat16, enabled=use_bf16):
                    # labels alone would be shifted: without the target of each window's last token
                    loss = forward(input_ids=ids, labels=targets[i], shift_labels=targets[i]).loss
                (loss / len(x)).backward()
            losses.append(loss.detach())
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return step


# --- the model ---


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
        rope_parameters=rope,
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
