"""Hugging Face transformers training our model, as GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM or
Qwen3ForCausalLM; and the same with liger-kernel's kernels.

https://github.com/huggingface/transformers · https://github.com/linkedin/Liger-Kernel
The recipe is the usual one: fp32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW,
clip_grad_norm_, DDP under torchrun. The trap: a comparison with a model that is almost the same says nothing.
check_parameters refuses such a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.peers.program import NOT_COUNTED, Program, Rows, check_parameters, need
from model_config import ModelConfig
from training.batches.loader import Loader
from training.batches.sources import Source, make_windows
from training.configuration.keys import TrainConfig
from training.configuration.seeds import DROPOUT, stream_seed
from training.optimization.schedule import learning_rate
from training.pretrained.writing import write_architecture
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
        parameters = check_parameters(model, config.model_config(), self.name)
        torch.manual_seed(stream_seed(config.seed, DROPOUT, world.rank))
        loader = Loader(make_windows(sources, config)["train"], config, world)
        step, rows = make_step(model, config, world), Rows(config, world)
        for iteration in range(config.max_iters):
            loss = step(*loader.next(), learning_rate(iteration, config))
            if rows.due(iteration):
                rows.add(iteration, loss.item())
        loader.close()
        return {
            "peer": f"transformers {transformers.__version__}",
            "class": type(model).__name__,
            "parameters": parameters,
            "compile": config.compile,
            "attention": f"sdpa, as {type(model).__name__} calls it",
            "precision": f"{config.dtype}{' autocast' * (config.dtype == 'bfloat16')}, float32 weights",
            "training_iterations": rows.close(self.name),
        }


class Liger(Transformers):
    """RMSNorm, rotation, SwiGLU, and the loss in one with the head, without torch.compile."""

    name = "liger"

    def require(self) -> None:
        super().require()
        need("liger_kernel", self.name, "pip install liger-kernel")

    def of_model(self, config: TrainConfig, model: ModelConfig) -> str | None:
        if config.device != "cuda":
            return "liger-kernel's kernels need a GPU"
        return None if model.position_encoding == "rope" else "liger-kernel has no kernels for GPT-2"

    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        import liger_kernel.transformers as liger

        model = config.model_config()
        family = "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
        getattr(liger, f"apply_liger_kernel_to_{family}")()
        found = super().train(dataclasses.replace(config, compile=False), world, sources)
        version = importlib.metadata.version("liger-kernel")
        return {**found, "peer": f"liger-kernel {version}, {found['peer']}"}


def make_step(model: torch.nn.Module, config: TrainConfig, world: World) -> Step:
    """The step makes one iteration as most training scripts do."""
    ddp = None
    if world.size > 1:
        ids = [world.local_rank] if world.device.type == "cuda" else None
        model = ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    forward = torch.compile(model) if config.compile else model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    optimizer = torch.optim.AdamW(parameters, config.learning_rate, betas, weight_decay=decay, fused=True)
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
    """Their model with our shape, as an export states it, and random weights, on torch's current default
    device. Raises UserError if they have no such model."""
    like = dataclasses.replace(config, bias=config.bias or is_gpt2(config))
    fields = write_architecture(like, "float32", dict.fromkeys(("bos_token_id", "eos_token_id"), SPECIAL_ID))
    theirs = transformers.AutoConfig.for_model(**fields, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa")
    if is_gpt2(config) and not config.bias:  # theirs always has biases: they stay 0, and have no gradients
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))
    return model


def is_gpt2(config: ModelConfig) -> bool:
    return config.position_encoding == "learned"
