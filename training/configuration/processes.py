"""Rules of the keys that spread a run over several processes: what is sharded, and how it is communicated."""

from __future__ import annotations

from common.errors import UserError
from training.configuration.keys import KEYS, TrainConfig

OF_FSDP = ("fsdp_sharding", "reshard_after_forward", "gradient_accumulation_fusion")
OF_SHARDING = (*OF_FSDP, "overlap_param_gather")
OF_NCCL = ("nccl_max_ctas", "nccl_high_priority_stream", "sm_carveout")


def check_processes(config: TrainConfig, world_size: int) -> None:
    """Raises UserError naming the settings in conflict."""
    if config.use_zero1 and config.use_fsdp:
        raise UserError(
            "use_zero1=True and use_fsdp=True both shard the optimizer state; set one of them to False"
        )
    if config.use_fsdp and world_size == 1 and not config.dry_run:
        raise UserError(
            "use_fsdp=True shards over processes, but this run has one; start it with "
            "torchrun --standalone --nproc_per_node=N, or set --use_fsdp=False"
        )
    for name in _changed(config, OF_FSDP):
        if not config.use_fsdp:
            raise UserError(
                f"{_stated(config, name)} does nothing with use_fsdp=False; "
                f"set use_fsdp=True, or {name}={KEYS[name].default!r}"
            )
    quantizes = config.use_fsdp and config.low_precision != "none"
    if config.overlap_param_gather and not (config.use_zero1 or quantizes):
        raise UserError(
            "overlap_param_gather=True does nothing with use_zero1=False, unless FSDP has weights in low "
            "precision (others it always gathers so); set use_zero1=True, or overlap_param_gather=False"
        )
    _check_nccl(config)


def _check_nccl(config: TrainConfig) -> None:
    asked = [name for name in OF_NCCL if getattr(config, name)]
    for name in asked:
        if config.device == "cpu" or config.backend == "gloo":
            because = "device='cpu'" if config.device == "cpu" else "backend='gloo'"
            raise UserError(
                f"{_stated(config, name)} is for GPUs that communicate by NCCL, but {because}; "
                f"set device='cuda' and backend=None, or {name}={KEYS[name].default!r}"
            )
    of_groups = [name for name in asked if name.startswith("nccl_")]
    if of_groups and config.fsdp_sharding == "hybrid":  # whose process groups torch makes, without options
        raise UserError(
            f"{_stated(config, of_groups[0])} does not reach the process groups of fsdp_sharding='hybrid'; "
            f"set fsdp_sharding='full', or {of_groups[0]}={KEYS[of_groups[0]].default!r}"
        )


def _changed(config: TrainConfig, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(config, name) != KEYS[name].default]


def _stated(config: TrainConfig, name: str) -> str:
    return f"{name}={getattr(config, name)!r}"
