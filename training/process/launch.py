"""What torchrun says of the processes that it started: no other file reads its environment, but
training/process/world.py who hosts its store."""

from __future__ import annotations

import os

from common.errors import UserError
from training.configuration.keys import TrainConfig


def launch_info() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as torchrun set them; (0, 0, 1) without it. A dry run takes a WORLD_SIZE
    without torchrun, too; check_launch() refuses what else is there."""
    return _number("RANK", 0), _number("LOCAL_RANK", 0), _number("WORLD_SIZE", 1)


def _number(name: str, alone: int) -> int:
    """The variable's value; `alone`, which it has in a run of one process, if it is not a number."""
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else alone


def check_launch(config: TrainConfig) -> None:
    """Raises UserError if the environment speaks of several processes, but torchrun has not started this one:
    it would wait for processes that nobody starts."""
    if is_launched():
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if config.dry_run and launch_info()[2] > 0:
        alone["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")
    stray = [name for name, value in alone.items() if os.environ.get(name, value) != value]
    if stray:
        listed = ", ".join(f"{name}={os.environ[name]!r}" for name in stray)
        raise UserError(
            f"the environment has {listed}, but torchrun did not start this process; for several processes: "
            f"torchrun --standalone --nproc_per_node=N train.py ...; for one: unset {' '.join(stray)}"
        )


def machine_size() -> int:
    """Processes of this machine, as torchrun set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def machine_number() -> tuple[int, int]:
    """(number of this machine, number of machines): torchrun's, one for each torchrun of the run."""
    return int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))


def restart_count() -> int:
    """How often torchrun has restarted these processes because one had failed (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_launched() else 0


def may_restart() -> bool:
    """Whether torchrun restarts these processes if one fails."""
    return is_launched() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def is_launched() -> bool:
    """Whether torchrun started this process, and will stop it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch_record() -> dict | None:
    """Which torchrun started the processes, and how often it restarted them; None without torchrun."""
    return {"id": os.environ["TORCHELASTIC_RUN_ID"], "restarts": restart_count()} if is_launched() else None


def store_address() -> tuple[str, int]:
    """(host, port) of torchrun's store."""
    return os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
