"""Hugging Face transformers with liger-kernel's kernels: RMSNorm, rotation, SwiGLU, and the loss in one with
the head. It runs without torch.compile. https://github.com/linkedin/Liger-Kernel"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from bench.peers.hugging_face import Transformers
from bench.peers.program import need
from model_config import ModelConfig
from training.batches.sources import Source
from training.configuration.keys import TrainConfig
from training.process.world import World


class Liger(Transformers):
    name = "liger"

    def require(self) -> None:
        super().require()
        need("liger_kernel", self.name, "pip install liger-kernel")

    def of_model(self, config: TrainConfig, model: ModelConfig) -> str | None:
        if config.device != "cuda":
            return "liger-kernel's kernels need a GPU"
        if model.position_encoding != "rope":
            return "liger-kernel has no kernels for GPT-2"
        return super().of_model(config, model)

    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        import liger_kernel.transformers as liger

        model = config.model_config()
        if model.qk_norm:
            liger.apply_liger_kernel_to_qwen3()
        elif model.qkv_bias:
            liger.apply_liger_kernel_to_qwen2()
        else:
            liger.apply_liger_kernel_to_llama()
        found = super().train(dataclasses.replace(config, compile=False), world, sources)
        version = importlib.metadata.version("liger-kernel")
        return {**found, "peer": f"liger-kernel {version}, {found['peer']}"}
