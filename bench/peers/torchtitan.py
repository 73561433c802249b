"""torchtitan's own Trainer training Qwen3 of our shape.

https://github.com/pytorch/torchtitan
The model, torch.compile, CUDA graphs, mixed precision by FSDP (on one GPU, too), the optimizer and the loop
are torchtitan's, with the settings that are fastest: blocks and loss compiled, nothing recomputed, weights
that stay gathered after the forward, SDPA over whole windows, unless ours ask for less memory. Three parts
are ours: a model of our shape from its own layers, a data loader that returns our batches, and a metrics
processor that keeps rows. Its own line of each row stays in the log; MFU there is by another formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from bench.peers.program import NOT_COUNTED, Program, Rows, check_parameters, need
from common.errors import UserError
from model_config import ModelConfig
from training.batches.loader import Loader
from training.batches.sources import Source, make_windows
from training.configuration.keys import TrainConfig
from training.optimization.schedule import warmup_and_decay_iters
from training.process.launch import is_launched, launch_info, machine_size
from training.process.world import World

VERSION = "0.3.0"  # as in requirements/peers.txt
IMPORTS = ("torchdata", "datasets", "tensorboard", "tyro", "spmd_types")  # also where its data are not used
INSTALL = "pip install -r requirements/peers.txt"
HEAD = "lm_head"  # what its documentation of float8 leaves in bfloat16
# What torchrun tells its processes; torchtitan reads it in a run of one process, too. Port 0: any free one.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
START_TIMEOUT_S = 3600  # for joining: one rank may have to scan a large dataset first


class Torchtitan(Program):
    name = "torchtitan"

    def require(self) -> None:
        try:
            version = importlib.metadata.version("torchtitan")
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version != VERSION:
            needs = f"--peer=torchtitan runs torchtitan {VERSION}"
            raise UserError(f"{needs}, which is {version} here: {INSTALL}")
        for module in IMPORTS:
            need(module, self.name, INSTALL)

    def of_model(self, config: TrainConfig, model: ModelConfig) -> str | None:
        fp8 = config.low_precision == "fp8_tensorwise"
        if not model.qk_norm or model.bias or model.dropout or model.rope_scaling:
            same = "Qwen3 without biases, dropout and rope_scaling"
            return f"torchtitan is compared in {same}, not {model.arch}"
        if (config.device, config.dtype) != ("cuda", "bfloat16"):
            return "torchtitan's trainer is compared in bfloat16, on GPUs"
        if config.low_precision != "none" and not fp8:
            return f"torchtitan is compared in bfloat16 and fp8_tensorwise, not in {config.low_precision}"
        skipped = config.low_precision_skip_first + config.low_precision_skip_last
        if fp8 and (config.low_precision_scope != "layers" or skipped):
            return "torchtitan's float8 is in all blocks alone; leave out low_precision_scope and _skip"
        if fp8 and importlib.util.find_spec("torchao") is None:
            return "torchtitan's float8 needs torchao: pip install torchao"
        return None

    def follows(self, config: TrainConfig) -> tuple:
        return (config.low_precision, config.activation_checkpointing, config.reshard_after_forward)

    def join(self, config: TrainConfig) -> World:
        """torchtitan's process group, of one process, too."""
        rank, local_rank, size = launch_info()
        world = World(rank, local_rank, size, torch.device(config.device, local_rank), machine_size())
        if not is_launched():
            os.environ.update(ALONE)
        torch.cuda.set_device(world.device)
        fill_in()
        from torchtitan.config.configs import CommConfig
        from torchtitan.distributed.utils import init_distributed
        from torchtitan.tools.logging import init_logger

        init_logger()
        init_distributed(CommConfig(init_timeout_seconds=START_TIMEOUT_S), base_folder=config.out_dir)
        return world

    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        from torchtitan.trainer import Trainer

        # its trainer takes batches from the host, and copies each micro-batch itself
        on_host = dataclasses.replace(world, device=torch.device("cpu"))
        with contextlib.ExitStack() as stack:
            loader = Loader(make_windows(sources, config)["train"], config, on_host)
            stack.callback(loader.close)
            trainer = Trainer(job(config, world, loader))
            stack.callback(trainer.close)
            (model,) = trainer.model_parts
            parameters = check_parameters(model, config.model_config(), self.name)
            trainer.metrics_processor.rows = rows = Rows(config, world)
            trainer.train()
        float8 = ", float8 of torchao but in the head" * (config.low_precision != "none")
        return {
            "peer": f"torchtitan {VERSION}",
            "class": type(model).__name__,
            "parameters": parameters,
            "compile": config.compile,
            "attention": "sdpa, as torchtitan calls it",
            "recomputation": recomputation(config),
            "precision": f"bfloat16 by FSDP, float32 weights{float8}",
            "training_iterations": rows.close(self.name),
        }

    def end(self, world: World) -> None:
        if world.size == 1:
            torch.distributed.destroy_process_group()  # NCCL warns about groups that are left open
        super().end(world)


def fill_in() -> None:
    """Two names that torchtitan imports and older versions of torch lack: one is unused here, the other is
    torch's own function by its later name."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed.distributed_c10d import _set_pg_timeout

    vars(fsdp).setdefault("DataParallelMeshDims", type("DataParallelMeshDims", (), {}))
    vars(torch.distributed).setdefault("set_timeout", _set_pg_timeout)


def batches(loader: Loader) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Ours, in the form that its trainer takes: one micro-batch after another, on the host."""
    while True:
        x, y = loader.next()  # (A, B, T)
        targets = torch.where(y < 0, NOT_COUNTED, y)  # negative: padding of packed documents
        for i in range(len(x)):
            yield {"input": x[i].contiguous()}, targets[i].contiguous()


class RowLog:
    """Comes before torchtitan's MetricsProcessor in a class of both; its steps are numbered from 1."""

    rows: Rows

    def should_log(self, step: int) -> bool:
        return self.rows.due(step - 1)

    def log(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        self.rows.add(step - 1, float(global_avg_loss))
        super().log(step, global_avg_loss, *others, **more)  # type: ignore[misc]  # sets the peak memory to 0


# --- our configuration as torchtitan's ---


def job(config: TrainConfig, world: World, loader: Loader) -> Any:
    """Its Trainer.Config with our batch, optimizer and schedule. What it only builds is a function here."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.trainer import Trainer

    metrics = type("Metrics", (RowLog, MetricsProcessor), {"Config": MetricsProcessor.Config})
    quiet = MetricsProcessor.Config(log_freq=config.log_interval, disable_color_printing=True)
    levels = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    warmup, end = warmup_and_decay_iters(config)
    adamw = {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
    batch = {"local_batch_size": config.micro_batch, "global_batch_size": config.samples_per_iter(world.size)}
    most = config.grad_clip or float("inf")  # it always clips
    after_forward = "always" if config.reshard_after_forward else "never"
    # partial_dtensor is plain FSDP; its default needs a newer torch
    plain = {"spmd_backend": "partial_dtensor", "fsdp_reshard_after_forward": after_forward}
    # our warm-up and its decay, which has no rate beyond its end; speed does not depend on the rate
    schedule = {"warmup_steps": warmup, "total_steps": max(end, config.max_iters)}
    return Trainer.Config(
        model_spec=model_spec(config),
        dump_folder=config.out_dir,
        loss=CrossEntropyLoss.Config(global_vocab_size=config.model_config().vocab_size),
        tokenizer=SimpleNamespace(build=lambda **_: None),  # the batches are tokens already
        dataloader=SimpleNamespace(build=lambda **_: batches(loader)),
        metrics=SimpleNamespace(build=lambda **parts: metrics(quiet, **parts)),
        optimizer=default_adamw(lr=config.learning_rate, **adamw),
        lr_scheduler=LRSchedulersContainer.Config(**schedule),
        training=TrainingConfig(**batch, seq_len=config.block_size, steps=config.max_iters, max_norm=most),
        parallelism=ParallelismConfig(**plain),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=levels[recomputation(config)],
        compile=CompileConfig(enable=config.compile),
        debug=DebugConfig(seed=config.seed, enable_structured_logging=False),
    )


def recomputation(config: TrainConfig) -> str:
    """Its level: where ours keeps a part, its choice of operations whose results it keeps."""
    level = config.activation_checkpointing
    return level if level in ("none", "full") else "selective"


def model_spec(config: TrainConfig) -> Any:
    """A Qwen3 of our shape, from its own layers with their own initialization."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.protocols.model_spec import ModelSpec

    model = config.model_config()
    width, vocabulary = model.n_embd, model.vocab_size
    rope = CosSinRoPE.Config(dim=model.head_dim, max_seq_len=config.block_size, theta=model.rope_theta)
    heads = {"n_heads": model.n_head, "n_kv_heads": model.n_kv_head, "head_dim": model.head_dim}
    shape = {"n_layers": model.n_layer, "dim": width, "hidden_dim": model.d_ff, **heads}
    layers = qwen3._build_qwen3_layers(**shape, attn_backend="flex", rope=rope)
    for layer in layers:  # its loaders pack documents and so need masks; ours do not
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    start = qwen3._EMBEDDING_SKIP_INIT if model.weight_tying else qwen3._EMBEDDING_INIT
    head = {"in_features": width, "out_features": vocabulary, "param_init": qwen3._LINEAR_INIT}
    built = qwen3.Qwen3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=start),
        lm_head=Linear.Config(**head),
        norm=qwen3._qwen3_norm(width),
        enable_weight_tying=model.weight_tying,
    )
    for _, norm, _, _ in built.traverse(RMSNorm.Config):
        norm.eps = model.norm_eps
    if config.low_precision == "fp8_tensorwise":  # a recipe of torchao's that torchtitan 0.3 takes, unnamed
        from torchtitan.components.quantization import Float8LinearConverter

        scaled = {"recipe_name": "tensorwise", "filter_fqns": [HEAD]}
        converter = Float8LinearConverter.Config(**scaled, model_compile_enabled=config.compile)
        built = converter.build().convert(built)
    # what is None: pipelines, experts, weights in a folder
    return ModelSpec("qwen3", "ours", built, qwen3.parallelize_qwen3, None, None, None)
