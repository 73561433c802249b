"""Chooses where a run starts: from scratch, or from which checkpoint and with which settings.

It takes the newest checkpoint whose files are what was written. It renames and reports a damaged one, and
never uses or deletes it. A change that would silently make it another run (other data, another batch, another
schedule) is refused, field by field, unless allow_changes names the field. An evaluation alone trains
nothing: it refuses only another architecture.

The trap is torchrun --max-restarts, which starts the same command line again. A run that began from scratch,
or from one certain checkpoint, must then resume from the newest checkpoint that it saved itself: it must not
begin again, and it must not take a checkpoint that was there before it. So the first start makes a token, and
each checkpoint has that of the run which saved it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shlex
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.durable_file import write_bytes
from common.errors import UserError
from common.json_file import read_regular
from common.run_records import load_record
from common.text import shown
from model_config import ModelConfig
from training.batches.fingerprint import data_differences
from training.checkpoints.folder import (
    DAMAGED,
    OTHER,
    check_others,
    find_checkpoint,
    named_step,
    set_aside,
    step_folders,
)
from training.checkpoints.loading import load_checkpoint
from training.checkpoints.plan import plan_saves
from training.checkpoints.saved_state import SavedState, read_state
from training.checkpoints.train_state import Progress, TrainState
from training.checkpoints.verification import damage, damaged
from training.configuration.batch import EVAL_BATCH
from training.configuration.keys import FACTORS, GUARDED, KEYS, TrainConfig
from training.configuration.other_names import removed_settings
from training.optimization.optimizer import optimizer_class
from training.optimization.schedule import end_after_epochs, fix_schedule
from training.process.agreement import from_main
from training.process.launch import launch_record, may_restart, restart_count
from training.process.redaction import redact, redact_all, without_logins
from training.process.world import World

log = logging.getLogger("nanomfu")

# where and how a run is started does not change what it computes
NOT_COMPARED = ("init_from", "resume_from", "allow_changes", "out_dir")
FREE_TO_CHANGE = ("arch", "dropout")  # ModelConfig fields that do not change what the weights mean
BEFORE = {"optimizer": KEYS["optimizer"].default}  # what checkpoints have that are older than a guarded key
TOKEN = "run.token"  # in out_dir, of a run that torchrun may restart


# --- from scratch, or from a checkpoint ---


def choose_start(config: TrainConfig, world: World) -> tuple[TrainConfig, str]:
    """The configuration, with init_from decided: 'scratch' or 'resume'; and the token of the checkpoints that
    this run saves. All ranks."""
    return from_main(world, _choose_start, config)


def _choose_start(config: TrainConfig) -> tuple[TrainConfig, str]:
    root, token = Path(config.out_dir) / "checkpoints", _token(config)
    if restart_count():
        log.info(f"Restart {restart_count()} by torchrun: a process of this run had failed")
        if any(_has_token(folder, token) for folder in reversed(step_folders(root))):
            return replace(config, init_from="resume", resume_from="latest"), token
        log.info("It had saved no checkpoint, so it begins again as it began")
    if config.init_from == "auto":  # damaged ones count: beside them, it does not begin from scratch
        names = [path.name for path in named_step(root)]
        there = any(".tmp-" not in name and OTHER not in name for name in names)
        config = replace(config, init_from="resume" if there else "scratch")
    return config, token


def _token(config: TrainConfig) -> str:
    """A new one, or that of the start which torchrun now repeats. It begins with the launch, because a kill
    may have left the file of another launch."""
    path, launch = Path(config.out_dir) / TOKEN, (launch_record() or {"id": ""})["id"]
    begin = hashlib.sha256(launch.encode()).hexdigest()[:8]
    try:
        if restart_count() and path.exists() and (found := read_regular(path, 99).decode()).startswith(begin):
            return found
        token = f"{begin}-{uuid.uuid4()}"
        if may_restart() and not config.eval_only:  # an evaluation saves nothing
            write_bytes(path, token.encode())
        return token
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}); remove it: rm {shlex.quote(str(path))}") from None


def _has_token(folder: Path, token: str) -> bool:
    """Whether the run of this token saved the checkpoint. Earlier versions stored none: then the record that
    the checkpoint names says which torchrun started its run."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or there is no record
        saved = read_state(folder)
        if saved.token is None and (launch := launch_record()):
            record = load_record(folder.parents[1] / f"{Path(saved.run).name}.json")
            return record["startup_info"]["launch"]["id"] == redact(launch["id"])
        return saved.token == token
    return False


# --- from which checkpoint ---


@dataclass(frozen=True)
class Resume:
    """Where a run continues, and with which settings; checkpoint is None for a run from scratch."""

    config: TrainConfig  # with the schedule's lengths as numbers
    checkpoint: Path | None = None
    changed: dict[str, list] = field(default_factory=dict)  # setting -> [in the checkpoint, now]
    is_other_run: bool = False  # whether allow_changes accepted one of GUARDED
    renamed: list[dict[str, str]] = field(default_factory=list)  # damaged ones: checkpoint, problem, renamed
    run: str | None = None  # name of the record of the run that saved the checkpoint
    start: int = 0  # the first iteration
    pretrained: dict[str, Any] | None = None  # the weights that the run began with


def find_resume(config: TrainConfig, world: World, data: dict, epoch: int = 0) -> Resume:
    """The verified checkpoint that the configuration asks for. epoch: number of its samples, for max_epochs.
    All ranks. Raises UserError."""
    per_iteration = config.samples_per_iter(world.size)
    resume = Resume(fix_schedule(end_after_epochs(_with_windows(config, {}), epoch, per_iteration), {}))
    if config.init_from == "resume":
        checkpoint, saved, renamed = _choose_checkpoint(config, world)
        check_architecture(checkpoint, saved.model_config, config.model_config())
        check_optimizer(checkpoint, BEFORE | saved.config, config)
        config = _with_windows(config, saved.config)
        config = end_after_epochs(config, epoch, per_iteration, saved.iteration, saved.samples_seen)
        config = fix_schedule(config, saved.config)
        is_other_run = not config.eval_only and refuse_changes(checkpoint, saved, config, world.size, data)
        if world.is_main:
            for line in removed_settings(saved.config):
                log.warning(f"{checkpoint.name} was made with a setting that is gone: {line}")
        changed = changed_settings(saved, config)
        facts = saved.run, saved.iteration, saved.pretrained
        resume = Resume(config, checkpoint, changed, is_other_run, renamed, *facts)
    if plan_saves(resume.config, resume.start).most != 0 and not restart_count():
        from_main(world, check_others, Path(config.out_dir) / "checkpoints", resume.start)
    return resume


def load_resume(resume: Resume, state: TrainState) -> Progress:
    """Where the run continues: at its beginning, or at the checkpoint, which is loaded here. All ranks.
    Raises UserError."""
    if resume.checkpoint is None:
        return Progress(0, 0)
    afresh = "optimizer" in resume.changed and not resume.config.eval_only
    if afresh:
        log.warning("The other optimizer begins with moments of zero")
    weights_alone = afresh or resume.config.eval_only
    progress = load_checkpoint(resume.checkpoint, state, without_optimizer=weights_alone)
    if resume.is_other_run and state.update_guard:
        state.update_guard.forget()  # losses and norms may be others now, and no spikes
    return progress


def _choose_checkpoint(config: TrainConfig, world: World) -> tuple[Path, SavedState, list[dict[str, str]]]:
    """The first checkpoint that can be trusted, what it says, and those that were renamed. All ranks. Raises
    UserError."""
    bad: dict[Path, str] = {}  # damaged checkpoint -> problem
    for folder in from_main(world, _candidates, config):
        problems = damage(folder, world)
        if not problems:
            saved = from_main(world, read_state, folder)
            return folder, saved, [_rename(one, bad[one], folder, config, world) for one in bad]
        if not from_main(world, damage, folder):
            raise UserError(
                f"rank 0 finds {folder} whole, another rank does not: {'; '.join(problems)}; do all machines "
                "see this disk, and the same on it?"
            )
        if config.resume_from != "latest":
            raise damaged(folder, problems)
        bad[folder] = "; ".join(problems)
    named = "\n".join(f"  {folder}: {problem}" for folder, problem in bad.items())
    raise UserError(
        f"none of the checkpoints can be trusted, so there is nothing to resume:\n{named}\n"
        "Restore one from a copy, or start again with --init_from=scratch"
    )


def _candidates(config: TrainConfig) -> list[Path]:
    """The newest first. Folders without a manifest are included: they, too, are damaged checkpoints."""
    chosen = find_checkpoint(Path(config.out_dir), config.resume_from)
    return [chosen] if config.resume_from != "latest" else step_folders(chosen.parent)[::-1]


def _rename(folder: Path, problem: str, instead: Path, config: TrainConfig, world: World) -> dict[str, str]:
    """Renames a damaged checkpoint, but not in an evaluation alone: it holds no lock, so a training run may
    be using that folder."""
    renamed = folder if config.eval_only else from_main(world, set_aside, folder, DAMAGED)
    log.warning("%s is damaged: %s. It is now %s; %s is used", folder, problem, renamed.name, instead.name)
    return {"checkpoint": str(folder), "problem": problem, "renamed": str(renamed)}


# --- settings ---


def check_architecture(folder: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raises UserError that names every field in which the saved model differs from the configured one."""
    was = saved.to_dict()
    differences = [
        f"{name}: checkpoint {was[name]!r}, configuration {value!r}"
        for name, value in wanted.to_dict().items()
        if was[name] != value and name not in FREE_TO_CHANGE
    ]
    if differences:
        raise UserError(
            f"{folder} holds another architecture: {'; '.join(differences)}; restore these keys, or choose "
            "another --out_dir for the new model"
        )


def check_optimizer(folder: Path, saved: dict[str, Any], config: TrainConfig) -> None:
    """Raises UserError if this run's optimizer keeps its tensors in another form than the checkpoint has, and
    cannot convert them. Another optimizer begins with its own, and an evaluation needs none."""
    if config.eval_only or saved["optimizer"] != config.optimizer:
        return
    for key, values in optimizer_class(config).unconverted.items():
        was, now = saved.get(key, KEYS[key].default), getattr(config, key)
        if was != now and (was in values or now in values):
            raise UserError(
                f"{folder} has what the optimizer keeps with {key}={shown(was)}, but this run has "
                f"{key}={now!r}, and that is not converted; go on with --{key}={was}"
            )


def _with_windows(config: TrainConfig, saved: dict[str, Any]) -> TrainConfig:
    """With an eval_batch_size: if none is stated, that of the checkpoint, whose evaluations then go on with
    the same windows."""
    number = config.eval_batch_size or saved.get("eval_batch_size") or EVAL_BATCH
    return replace(config, eval_batch_size=number)


def changed_settings(saved: SavedState, config: TrainConfig) -> dict[str, list]:
    """{key: [value in the checkpoint, value now]} for every setting that both know and that differs."""
    old, now = BEFORE | saved.config, redact_all(config.to_dict(), without_logins)
    return {
        name: [old[name], value]
        for name, value in now.items()
        # redacted, because earlier versions saved no other settings
        if name in old and redact_all(old[name]) != redact_all(value) and name not in NOT_COMPARED
    }


def refuse_changes(folder: Path, saved: SavedState, config: TrainConfig, processes: int, data: dict) -> bool:
    """Raises UserError that names every guarded field that changed, and the flag that accepts the changes.
    Returns whether there are any, all accepted."""
    changed = changed_settings(saved, config)
    found = {name: changed[name] for name in GUARDED if name in changed}
    found.pop("dataset", None)  # the folder may have another name if its content is the same
    found.pop("tokens_per_iter", None)  # what counts is the product: however it is divided or was stated
    was = _factors(saved.config["batch_size"], saved.config["gradient_accumulation_steps"], saved.world_size)
    now = _factors(config.micro_batch, config.micro_steps, processes)
    if math.prod(was.values()) != math.prod(now.values()):
        found["tokens_per_iter"] = [_product(numbers, config.block_size) for numbers in (was, now)]
    if different := data_differences(saved.data, data):
        found["dataset"] = [f"sha256 {saved.data['sha256'][:12]}", "; ".join(different)]
    stated = set((config.allow_changes or "").split(","))
    allowed = set(stated)
    if allowed.issuperset(name for name in FACTORS if was[name] != now[name]):
        allowed.add("tokens_per_iter")
    refused = {name: values for name, values in found.items() if name not in allowed}
    if refused:
        differences = [f"{name}: checkpoint {old}, now {new}" for name, (old, new) in refused.items()]
        flag = ",".join(sorted({*refused, *stated} - {""}))
        raise UserError(
            f"{folder} was saved with other settings: {'; '.join(differences)}. It would be another run; "
            f"restore them, or accept the change with --allow_changes={flag}"
        )
    for name, (old, new) in found.items():
        log.warning("allow_changes: %s was %s in the checkpoint, is %s now", name, old, new)
    return bool(found)


def _factors(*numbers: int) -> dict[str, int]:
    return dict(zip(FACTORS, numbers, strict=True))


def _product(factors: dict[str, int], block_size: int) -> str:
    """'524,288 (batch_size 8 x ...)'; block_size is no factor that can change: the architecture has it."""
    listed = " x ".join(f"{name} {number}" for name, number in factors.items())
    return f"{math.prod(factors.values()) * block_size:,} ({listed} x block_size {block_size})"
