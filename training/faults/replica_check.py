"""The replica check: finds replicas that differ. What several ranks hold must stay equal bit for bit, because
they start with the same values and make the same updates. A fault of a GPU or its memory changes one replica,
and training would continue without an error, with a different model on each rank. So every
drift_check_interval iterations each rank makes a checksum of each tensor's bits, and these are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from common.errors import RunError
from training.checkpoints.train_state import TrainState
from training.configuration.keys import TrainConfig
from training.optimization.second_look import checksums
from training.process.world import all_gather
from training.records.clock import Clock
from training.records.run_record import RunRecord

NAMED = 5  # tensors named in a message, at most


class ReplicasDiffer(RunError):
    """Ranks that must hold the same values hold different ones."""


class ReplicaCheck:
    """Compares at log rows, where the run waits for the device anyway, and before a checkpoint is saved,
    which takes its parts from all ranks. The time counts as no iteration's time. All ranks."""

    def __init__(
        self, state: TrainState, config: TrainConfig, clock: Clock, record: RunRecord | None, start: int
    ):
        self.state, self.interval = state, config.drift_check_interval
        self.clock, self.record = clock, record
        self.agreed = start  # number of updates after which the replicas were last equal, or loaded

    def after_update(self, iteration: int) -> None:
        """Compares after the update of `iteration`, if that is due. Raises ReplicasDiffer on all ranks."""
        done = iteration + 1
        if self.interval and done // self.interval != self.agreed // self.interval:
            self.compare(done)

    def compare(self, done: int) -> None:
        """Compares after `done` updates. Raises ReplicasDiffer on all ranks."""
        if not self.interval or done == self.agreed:
            return
        with self.clock.paused():
            ranks, tensors = differences(self.state)
        if not tensors:
            self.agreed = done
            return
        more = f" and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
        what = (
            f"the replicas have drifted apart: after iteration {done - 1} rank {', '.join(map(str, ranks))} "
            f"{'holds' if len(ranks) == 1 else 'hold'} different bits of {', '.join(tensors[:NAMED])}{more}"
        )
        if self.record is not None:
            self.record.add_event(done - 1, "drift", ranks=ranks, tensors=tensors, message=what)
        raise ReplicasDiffer(
            f"{what}. A GPU or its memory is the likely cause: test that machine. The replicas were last "
            f"equal at iteration {self.agreed:,}: resume from a checkpoint that is not newer"
        )


def differences(state: TrainState) -> tuple[list[int], list[str]]:
    """(ranks that differ, names of the tensors in which they differ). Ranks that should hold the same part
    are compared with their majority; without a majority, all of them differ. All ranks. Sync point."""
    world, held = state.world, replicated(state)
    if world.size == 1 or not held:
        return [], []
    mine = checksums(held)[0]
    everyone = mine.new_empty(world.size * len(mine))
    all_gather(everyone, mine)
    groups: dict[int, list[int]] = defaultdict(list)  # ranks that hold the same part
    for rank in range(world.size):
        groups[rank % state.strategy.parts].append(rank)
    ranks: set[int] = set()
    tensors: list[str] = []
    for name, sums in zip(held, everyone.view(world.size, -1).t().tolist(), strict=True):
        odd = [rank for group in groups.values() for rank in _odd_ones(group, sums)]
        ranks.update(odd)
        tensors += [name] if odd else []
    return sorted(ranks), tensors


def replicated(state: TrainState) -> dict[str, torch.Tensor]:
    """The tensors that other ranks hold, too: weights, what the optimizer keeps, and working weights."""
    held, copies = {}, state.strategy.working_copies()
    for shard in state.strategy.shards:
        if shard.name in copies:
            held[f"{shard.name} (working weights)"] = copies[shard.name]
        if shard.replicas > 1:
            held[shard.name] = shard.local.data
            kept = state.optimizer.kept(shard)
            held |= {f"{shard.name}.{name}": tensor for name, tensor in kept.items()}
    return held


def _odd_ones(group: list[int], sums: list[int]) -> list[int]:
    (usual, count), *_ = Counter(sums[rank] for rank in group).most_common(1)
    if count == len(group):
        return []
    return [rank for rank in group if sums[rank] != usual or 2 * count <= len(group)]
