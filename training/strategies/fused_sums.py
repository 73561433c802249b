"""FSDP's gradients, summed in fp32 by the matmuls that compute them, as DDP's and ZeRO-1's are.

By itself, FSDP lets autograd write each weight gradient in the compute dtype, and then adds it, in another
pass, to a sum of the earlier micro-steps in reduce_dtype. Here the sums are buckets that live as long as the
run (4 bytes a parameter on every rank), and the last backward sends them as FSDP sends its own sums.

FSDP has no public way to say where its sums are, so two of its own attributes are set: the sum itself, and
the dtype in which it travels, which FSDP takes from the sum if reduce_dtype is the compute dtype. Where they
are missing, as they may be in a later torch, the run sums as FSDP does, and the start-up report says so.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from model import Transformer
from training.configuration.keys import TrainConfig
from training.strategies.replicated import Bucket
from training.strategies.strategy import offer_sums


def fusion_obstacle() -> str | None:
    """Why this version of torch cannot be told where to sum; None if it can."""
    package = "torch.distributed.fsdp._fully_shard"
    try:
        parameter = import_module(f"{package}._fsdp_param").FSDPParam
        group = import_module(f"{package}._fsdp_param_group").FSDPParamGroup
        found = "unsharded_accumulated_grad" in parameter.__annotations__
        found = found and "_reduce_dtype" in group.__annotations__
    except (ImportError, AttributeError):
        found = False
    return None if found else f"FSDP of torch {torch.__version__} keeps its sums of gradients elsewhere"


def fuses_gradient_sums(config: TrainConfig) -> bool:
    return config.fuses_sums and fusion_obstacle() is None


def describe_fusion(config: TrainConfig) -> dict[str, dict[str, str | None]]:
    """The record's startup_info.gradient_sums, with FSDP."""
    if not config.use_fsdp:
        return {}
    asked, used = config.fuses_sums, fuses_gradient_sums(config)
    where = {True: "in the matmul", False: "by FSDP"}
    reason = fusion_obstacle() if asked and not used else None
    return {"gradient_sums": {"asked": where[asked], "used": where[used], "reason": reason}}


def group_of(unit: FSDPModule):
    """FSDP's object for the parameters of a unit."""
    group = unit._get_fsdp_state()._fsdp_param_group
    assert group is not None, unit
    return group


class FusedSums:
    """A bucket for each FSDP unit. Matmuls and the embedding add to its matrices; FSDP itself adds what
    autograd finds for its vectors."""

    def __init__(self, model: Transformer, units: list[FSDPModule], policy: MixedPrecisionPolicy):
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.buckets: list[Bucket] = []
        self.views: dict[str, torch.Tensor] = {}  # parameter -> its sum
        self.groups: list = []  # FSDP's object for each unit
        self.sums: list[tuple] = []  # FSDP's object for each parameter, and the parameter's sum
        self.reduce_dtype = policy.reduce_dtype
        of_weight: dict[torch.Tensor, torch.Tensor] = {}
        for unit in units:
            group = group_of(unit)
            self.groups.append(group)
            of_unit = {names[p.sharded_param]: p for p in group.fsdp_params if p.sharded_param.requires_grad}
            sharded = {name: p.sharded_param for name, p in of_unit.items()}
            bucket = Bucket(sharded, 1, next(model.parameters()).device)
            self.buckets.append(bucket)
            for name, parameter in of_unit.items():
                self.sums.append((parameter, bucket.views[name]))
                of_weight[parameter.sharded_param] = bucket.views[name]
            self.views |= bucket.views
        offer_sums(model, of_weight)
        model.register_forward_pre_hook(lambda module, inputs: self._attach())  # after FSDP's own hook

    def _attach(self) -> None:
        """Before each forward: FSDP forgets a sum when it has sent it."""
        for group in self.groups:
            group._reduce_dtype = self.reduce_dtype
        for parameter, total in self.sums:
            parameter.unsharded_accumulated_grad = total

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()
