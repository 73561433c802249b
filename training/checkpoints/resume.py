"""Going on: from which checkpoint, and with which settings.

The newest checkpoint whose files are what was written is taken; a damaged one is renamed and named, never
used and never deleted. What would silently make it another run (other data, another batch, another schedule)
is refused, field by field, unless allow_changes names the field.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from training.batches.fingerprint import data_differences
from training.checkpoints.folder import (
    damage,
    damage_of_share,
    damaged,
    find_checkpoint,
    read_state,
    step_folders,
)
from training.checkpoints.retention import rename_damaged
from training.checkpoints.train_state import check_architecture
from training.configuration.errors import UserError
from training.configuration.keys import GUARDED, TrainConfig
from training.process.redaction import redact_all
from training.process.world import World, gather_objects

log = logging.getLogger("nanomfu")

# where and how a run is started says nothing about what it computes
NOT_COMPARED = ("init_from", "resume_from", "allow_changes", "out_dir")


@dataclass(frozen=True)
class Resume:
    """Where a run goes on; checkpoint is None for a run from scratch."""

    checkpoint: Path | None = None
    changed: dict[str, list] = field(default_factory=dict)  # setting -> [in the checkpoint, now]
    set_aside: list[dict] = field(default_factory=list)  # damaged ones: checkpoint, problem, renamed
    run: str | None = None  # name of the record of the run that saved it


def find_resume(config: TrainConfig, world: World, data: dict) -> Resume:
    """The verified checkpoint that the configuration asks for. All ranks. Raises UserError."""
    if config.init_from != "resume":
        return Resume()
    checkpoint, set_aside = _choose(config, world)
    saved = read_state(checkpoint)
    check_architecture(checkpoint, saved["model_config"], config.model_config())
    refuse_changes(checkpoint, saved, config, world.size, data)
    return Resume(checkpoint, changed_settings(saved, config), set_aside, saved.get("run"))


def _choose(config: TrainConfig, world: World) -> tuple[Path, list[dict]]:
    candidates = gather_objects(_candidates(config) if world.is_main else None, world)[0]
    bad = {}
    for folder in candidates:
        problems = damage(folder, world)
        if problems and not gather_objects(damage_of_share(folder) if world.is_main else None, world)[0]:
            raise UserError(
                f"rank 0 finds {folder} whole, another rank does not: {'; '.join(problems)}; do all machines "
                "see this disk, and the same on it?"
            )
        if not problems:
            return folder, [_set_aside(one, bad[one], folder, config, world) for one in bad]
        if config.resume_from != "latest":
            raise damaged(folder, problems)
        bad[folder] = "; ".join(problems)
    named = "\n".join(f"  {folder}: {problem}" for folder, problem in bad.items())
    raise UserError(f"none of the checkpoints can be trusted, so there is nothing to resume:\n{named}")


def _candidates(config: TrainConfig) -> list[Path]:
    """The newest first. Folders without a manifest are among them: they, too, are damaged checkpoints."""
    chosen = find_checkpoint(Path(config.out_dir), config.resume_from)
    return [chosen] if config.resume_from != "latest" else step_folders(chosen.parent)[::-1]


def _set_aside(folder: Path, problem: str, instead: Path, config: TrainConfig, world: World) -> dict:
    """Not by an evaluation, which holds no lock: a training run may be at work in that folder."""
    renames = world.is_main and not config.eval_only
    renamed = gather_objects(rename_damaged(folder) if renames else folder, world)[0]
    log.warning("%s is damaged: %s. It is now %s; %s is used", folder, problem, renamed.name, instead.name)
    return {"checkpoint": str(folder), "problem": problem, "renamed": str(renamed)}


# --- settings ---


def changed_settings(saved: dict, config: TrainConfig) -> dict[str, list]:
    """{key: [value in the checkpoint, value now]} for every setting that differs and that it knew."""
    old, now = saved["config"], redact_all(config.to_dict())
    return {
        name: [old[name], value]
        for name, value in now.items()
        if name in old and old[name] != value and name not in NOT_COMPARED
    }


def refuse_changes(folder: Path, saved: dict, config: TrainConfig, processes: int, data: dict) -> None:
    """Raises UserError naming every guarded field that changed, and the flag to go on all the same."""
    changed = changed_settings(saved, config)
    found = {name: changed[name] for name in GUARDED if name in changed}
    found.pop("dataset", None)  # a folder may be called otherwise, if its content is the same
    old = saved["config"]
    per_iteration = [
        old["batch_size"] * old["gradient_accumulation_steps"] * saved["world_size"],
        config.samples_per_iter(processes),
    ]
    if per_iteration[0] != per_iteration[1]:
        found |= {"processes": [saved["world_size"], processes]} if saved["world_size"] != processes else {}
    else:  # the same samples in each iteration, however they are divided
        for name in ("batch_size", "gradient_accumulation_steps"):
            found.pop(name, None)
    if "data" in saved and (different := data_differences(saved["data"], data)):
        found["dataset"] = [f"sha256 {saved['data']['sha256'][:12]}", "; ".join(different)]
    if "data" not in saved and "dataset" in changed:
        found["dataset"] = changed["dataset"]
    allowed = set((config.allow_changes or "").split(","))
    refused = {name: values for name, values in found.items() if name not in allowed}
    if refused:
        differences = [f"{name}: checkpoint {was}, now {now}" for name, (was, now) in refused.items()]
        if per_iteration[0] != per_iteration[1]:
            differences.append("an iteration had {} samples, now {}".format(*per_iteration))
        flag = ",".join(sorted({*refused, *allowed} - {""}))
        raise UserError(
            f"{folder} was saved with other settings: {'; '.join(differences)}. It would be another run; "
            f"restore them, or accept the change with --allow_changes={flag}"
        )
    for name, (was, now) in found.items():
        log.warning("allow_changes: %s was %s in the checkpoint, is %s now", name, was, now)
