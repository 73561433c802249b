"""Run by test_health.py under torchrun, two processes: bad numbers on rank 1 alone, with every strategy.

health_worker.py CONFIG.py RESULTS.json
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch
import torch.distributed as dist
from support.bad_losses import changed, no_gradient, times
from support.graphed_runs import build_run

import train
from training.configuration.files_and_flags import load_config
from training.faults import liveness
from training.faults.anomalies import Diverged
from training.faults.replica_check import ReplicaCheck, ReplicasDiffer, differences
from training.optimization import update_guard
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import World, another_connection, gather_objects, init_world, meet
from training.records.clock import Clock

update_guard.SPIKE_WINDOW = 16
STRATEGIES = {
    "ddp": [],
    "ddp in bf16": ["--dtype=bfloat16", "--reduce_dtype=bfloat16"],
    "zero1": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True"],
    "hybrid": ["--use_fsdp=True", "--fsdp_sharding=hybrid"],  # two machines of one process
}


FAULTS = {
    "nan loss": changed(lambda loss: loss + float("nan")),  # with a gradient that is finite
    "infinite loss": changed(lambda loss: loss + float("inf")),
    "nan gradient": no_gradient,  # with a loss that is finite
    "spike": times(1000),
}


class Run:
    """One strategy's parts, and a forward that spoils its first micro-step on rank 1 where it is told to."""

    def __init__(self, config_path: str, strategy: str, world: World):
        local_size = 1 if strategy == "hybrid" else world.size
        self.world = dataclasses.replace(world, local_size=local_size)
        parts = build_run([config_path, *STRATEGIES[strategy], "--skip_spikes=6"], self.world)
        self.step, self.state, self.config = parts.step, parts.state, parts.config
        self.strategy = self.state.strategy
        self.model = self.strategy.module
        self.generator, self.fault = torch.Generator().manual_seed(world.rank), None
        self.strategy.forward, self.agree = self.forward, self.strategy.loss_and_norm
        self.strategy.loss_and_norm = self.noted

    def noted(self):
        loss, norm = self.agree()
        self.agreed = loss.item(), norm.item()
        return loss, norm

    def forward(self, *arguments):
        fault, self.fault = self.fault, None
        if fault and self.world.rank == 1:
            return FAULTS[fault](self.model, *arguments)
        return self.model(*arguments)

    def iterate(self, fault: str | None = None):
        self.fault = fault
        ids = torch.randint(self.config.model_config().vocab_size, (2, 4, 33), generator=self.generator)
        return self.step(ids[..., :-1], ids[..., 1:], 1e-2)

    def tensors(self) -> list[torch.Tensor]:
        """All that an update changes on this rank."""
        held = [*self.state.tensors().values(), *self.state.update_guard.state().values()]
        held += [shard.parameter.data for shard in self.strategy.shards]
        return [tensor.clone() for tensor in held]

    def suffer(self, fault: str) -> dict:
        """What an iteration with the fault does, on all ranks."""
        before = self.tensors()
        result = self.iterate(fault)
        unchanged = all(map(torch.equal, before, self.tensors()))
        everyone = gather_objects((result.verdict.item(), result.loss.item(), unchanged), self.world)
        verdicts, losses, unchanged = zip(*everyone, strict=True)
        return {
            "verdicts": verdicts,
            "losses": [str(loss) for loss in losses],
            "unchanged": unchanged,
            "drifted": differences(self.state),
        }

    def drift(self) -> dict:
        """What is found after rank 1 has changed one weight that others hold, too."""
        check = ReplicaCheck(self.state, self.config, Clock(self.world.device), record=None, start=0)
        check.interval = 10
        check.after_update(9)
        held = [shard for shard in self.strategy.shards if shard.replicas > 1]
        if self.world.rank == 1 and held:
            weight = held[-1].local.data.view(-1)
            weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
        try:
            check.after_update(15)  # not due
            check.after_update(21)
            message = None
        except ReplicasDiffer as error:
            message = str(error)
        return {"held": [shard.name for shard in held][-1:], "messages": gather_objects(message, self.world)}


def strategy_results(config_path: str, strategy: str, world: World) -> dict:
    run = Run(config_path, strategy, world)
    good = [run.iterate().verdict.item() for _ in range(17)]  # fills the window
    numbers = gather_objects((run.iterate().loss.item(), *run.agreed), world)
    found = {"good": good, "losses, agreed losses, agreed norms": list(zip(*numbers, strict=True))}
    found["faults"] = {fault: run.suffer(fault) for fault in FAULTS}
    before = run.tensors()
    found["then"] = run.iterate().verdict.item()
    found["goes on"] = not any(map(torch.equal, before, run.tensors()))
    return {**found, "drift": run.drift()}


def whole_run(config_path: str, world: World) -> list[str]:
    """How a run ends, on each rank, in which the replicas are compared after its first iteration, and rank 1
    has a loss that is no number in the second."""
    make = train.EagerStep

    def with_a_fault(strategy, *arguments, **options):
        model, count = strategy.forward, iter(range(1000))

        def forward(*arguments):
            bad = next(count) == 3 and world.rank == 1
            return model(*arguments) + (float("nan") if bad else 0)

        strategy.forward = forward
        return make(strategy, *arguments, **options)

    train.EagerStep, train.init_world = with_a_fault, lambda config, store: world
    try:
        train.main([config_path, "--max_iters=20", "--log_interval=5", "--drift_check_interval=1"])
        end = "completed"
    except Diverged as error:
        end = str(error)
    return gather_objects(end, world)


def limits_of_groups() -> list[float]:
    """Minutes that a collective of each group of this process may take."""
    cpu = torch.device("cpu")
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(cpu).options._timeout.total_seconds() / 60 for group in groups]


def main(config_path: str, results: str) -> None:
    store = meet(launch_info()[0])

    def meet_again(rank, about):
        found = dist.PrefixStore("run", another_connection(store))
        found.set(f"process/{rank}", about)
        return found

    liveness.meet = meet_again
    world = init_world(load_config([config_path], 2), store)
    found = {name: strategy_results(config_path, name, world) for name in STRATEGIES}
    found["run"] = whole_run(config_path, world)  # with the group of the consensus
    found["limits"] = limits_of_groups()
    if world.is_main:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    end_process(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
