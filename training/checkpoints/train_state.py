"""Defines what a checkpoint holds. A checkpoint is one folder, complete or absent:

    out_dir/checkpoints/step-00001000/  tensors-RANK-N.safetensors  weights, what the optimizer keeps, RNG
                                        state.json     iteration, samples seen, losses, configurations, data
                                        manifest.json  sha256 and size of every file above
    out_dir/checkpoints/latest, best    the names of the newest complete one and of the best

saver.py writes a checkpoint under a temporary name, hashes, syncs and renames it; only then does it update
the pointers and delete older ones (folder.py). Tensors are stored by parameter name and by position in the
whole tensor, so any strategy at any world size loads what any other saved. Nothing in a checkpoint can
execute code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.errors import UserError
from common.schema import Count
from ops.recipe import Recipe
from training.checkpoints.tensor_files import NAMES, Part
from training.optimization.optimizer import Optimizer
from training.optimization.precision import LossScale
from training.optimization.update_guard import UpdateGuard
from training.process.world import World
from training.strategies.strategy import Shard, Strategy

WEIGHT = "model."  # begins the names of weights in a checkpoint


def kept_name(weight: str, name: str) -> str:
    """In a checkpoint, of what the optimizer keeps of a weight."""
    return f"optimizer.{weight}.{name}"


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """As state.json lists a tensor: 'F32 (128, 64)'."""
    return f"{NAMES[dtype]} {tuple(shape)}"


def part_of(shard: Shard, name: str, tensor: torch.Tensor) -> Part:
    """The place of a tensor that has the rows of shard.local, or of a number."""
    return Part.of(name, tensor, shard.start // shard.parameter.shape[1:].numel())


def whole_parts(tensors: dict[str, torch.Tensor]) -> dict[Part, torch.Tensor]:
    return {Part.of(name, tensor): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything a resume needs that is not a tensor."""

    iteration: Count  # optimizer updates done
    samples_seen: Count  # sequences, over all GPUs
    best_val_loss: float | None = None
    val_loss: float | None = None
    # what these losses are the mean of (training/evaluation.py), and since which iteration; earlier versions
    # did not save it
    measure: str | None = None
    measured_since: Count = 0


class TrainState:
    """The tensors of a run, as far as this rank holds them. Loading is in place."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        loss_scale: LossScale,
        world: World,
        update_guard: UpdateGuard | None = None,
        recipe: Recipe | None = None,
    ):
        self.strategy, self.optimizer, self.loss_scale, self.world = strategy, optimizer, loss_scale, world
        self.update_guard, self.recipe = update_guard, recipe

    def parts(self) -> dict[Part, torch.Tensor]:
        """Weights and what the optimizer keeps of them, each with its place in the whole tensor."""
        held = [(shard, name, tensor) for shard in self.strategy.shards for name, tensor in self._of(shard)]
        return {part_of(*one): one[-1] for one in held}

    def _of(self, shard: Shard) -> list[tuple[str, torch.Tensor]]:
        kept = [(kept_name(shard.name, name), t) for name, t in self.optimizer.kept(shard).items()]
        return [(f"{WEIGHT}{shard.name}", shard.local.detach()), *kept]

    def described(self) -> dict[str, str]:
        """{name: dtype and shape} of the same tensors, whole."""
        return {
            name: described(tensor.dtype, (*shard.parameter.shape[: min(1, tensor.ndim)], *tensor.shape[1:]))
            for shard in self.strategy.shards
            for name, tensor in self._of(shard)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {part.name: tensor for part, tensor in self.parts().items()}

    def all_parts(self) -> dict[Part, torch.Tensor]:
        """What this rank has for a checkpoint."""
        return self.parts() | whole_parts(self.optional_tensors())

    def optional_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint may lack: this rank's random generators, float16's loss scale, the update
        guard's spike window, what low precision keeps."""
        tensors = {f"loss_scale.{name}": t for name, t in self.loss_scale.state().items()}
        if self.update_guard:  # "health" is its name in checkpoints
            tensors |= {f"health.{name}": t for name, t in self.update_guard.state().items()}
        if self.recipe:
            tensors |= {f"low_precision.{name}": t for name, t in self.recipe.state().items()}
        tensors[f"rng.{self.world.rank}.cpu"] = torch.get_rng_state()
        if self.world.device.type == "cuda":
            tensors[f"rng.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.world.device)
        return tensors

    def after_load(self, loaded: dict[str, torch.Tensor]) -> None:
        """Gives all ranks the loaded weights, and sets this rank's random generators."""
        self.strategy.publish()
        cpu, cuda = (loaded.get(f"rng.{self.world.rank}.{kind}") for kind in ("cpu", "cuda"))
        try:
            if cpu is not None:
                torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self.world.device)
        except RuntimeError as error:
            raise UserError(f"the random generators in the checkpoint are refused: {error}") from None
