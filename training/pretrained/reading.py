"""Reads Hugging Face weights into a run's tensors, as its strategy divides them. Each rank reads the rows
that it holds from the mapped files, tensor by tensor, so nothing is in memory twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import model_builder
from common.errors import UserError
from common.schema import naming
from data.pipeline.meta_file import read_meta
from model import Attend, Transformer, manual_attention
from training.batches.sources import show_tokenizer, tokenizer_identity
from training.checkpoints.folder import step_folders
from training.checkpoints.resume import Resume
from training.checkpoints.tensor_files import is_finite
from training.checkpoints.train_state import TrainState, part_of, whole_parts
from training.checkpoints.verification import digest
from training.configuration.dataset_name import first_folder
from training.configuration.keys import TrainConfig
from training.pretrained.folder import Weights, describe, fetch, list_files, locate, match
from training.pretrained.tokenizer_hash import VOCABULARIES, another_tokenizer
from training.process.agreement import agree
from training.process.world import World, gather_objects

log = logging.getLogger("nanomfu")


def check_weights(config: TrainConfig) -> None:
    """Downloads and checks the weights of a run that will begin with them: every error that can be found
    without a device. One process of each machine. Raises UserError."""
    root = Path(config.out_dir) / "checkpoints"
    begins = config.init_from == "scratch" or (config.init_from == "auto" and not step_folders(root))
    if config.init_weights is None or not begins:
        return
    weights = locate(config.init_weights)
    fetch(weights)
    match(weights, weights.architecture(), config.model_config(), compare_tied=True)
    check_same_tokenizer(weights, config)


def check_same_tokenizer(weights: Weights, config: TrainConfig) -> None:
    """Raises UserError if there is a tokenizer beside the weights, and the tokens are of another one."""
    folder = first_folder(config.dataset)
    if not (folder / "meta.json").exists():  # the dataset is refused later
        return
    here = any((weights.folder / name).is_file() for name in VOCABULARIES)
    try:
        another = another_tokenizer(weights.folder, folder)
        reason = "they are stored in two forms, or its hash is not recorded"
    except UserError as error:
        another, reason = None, str(error)
    if another:
        found = show_tokenizer(tokenizer_identity(read_meta(folder)["tokenizer"] or {}))
        raise UserError(
            f"{folder} has the tokenizer {found}, and {weights.source} has another: the same ids would be "
            f"other text; prepare the dataset with --tokenizer={weights.folder}"
        )
    if another is None and here:
        log.warning(f"Whether {folder} and {weights.source} have one tokenizer is not known: {reason}")


def begin_with_weights(config: TrainConfig, resume: Resume, state: TrainState) -> dict[str, Any] | None:
    """Reads init_weights into the tensors of a new run. Returns what the record says of the weights that this
    run began with, in its first attempt. All ranks. Raises UserError, on every rank if on any."""
    if resume.checkpoint is not None or config.init_weights is None:
        if config.init_weights is not None:
            log.info(f"init_weights={config.init_weights} is not read: the weights are the checkpoint's")
        return resume.pretrained
    began = time.monotonic()
    read = agree(state.world, _read, config, state)
    agree(state.world, _check_finite, [(shard.name, shard.local) for shard in state.strategy.shards])
    state.strategy.publish()
    facts = _compare(read, state.world)
    log.info(f"Weights of {config.init_weights} read in {time.monotonic() - began:.1f} s")
    return facts


def load_pretrained(
    source: str, device: torch.device, attend: Attend = manual_attention
) -> tuple[Weights, Transformer]:
    """The weights and a model that has them, in one process, for sampling. Raises UserError."""
    weights = locate(source)
    fetch(weights)
    architecture = weights.architecture()
    config = TrainConfig(**architecture.keys, block_size=architecture.longest).model_config()
    reader = match(weights, architecture, config, compare_tied=True)
    model = model_builder.build_model(config, attend).init_weights(device, seed=0)
    parameters = [(name, p.detach()) for name, p in model.named_parameters()]
    reader.load_all(whole_parts(dict(parameters)), weights.folder)
    _check_finite(parameters)
    return weights, model


def _read(config: TrainConfig, state: TrainState) -> dict[str, Any]:
    """Reads this rank's part, and hashes its share of the files that its machine reads. Returns what is to be
    compared with the other ranks. Raises UserError."""
    assert config.init_weights is not None
    world, weights = state.world, locate(config.init_weights)
    with naming(weights.folder):
        architecture = weights.architecture()
        reader = match(weights, architecture, config.model_config())
        shards = [(shard, shard.local.detach()) for shard in state.strategy.shards]
        reader.load_all({part_of(s, s.name, tensor): tensor for s, tensor in shards}, weights.folder)
        mine = list_files(weights.folder)[world.local_rank :: world.local_size]
        return describe(weights, architecture, {name: digest(weights.folder / name) for name in mine})


def _check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if not is_finite(tensor.detach()):
            raise UserError(
                f"{name} of the weights has a value that is NaN or infinite, or that "
                f"{str(tensor.dtype).removeprefix('torch.')} cannot hold; get the weights again"
            )


def _compare(read: dict[str, Any], world: World) -> dict[str, Any]:
    """The same with the hashes of all files. Raises UserError if two machines have read different ones."""
    files: dict[str, dict[str, Any]] = {}
    for rank, theirs in enumerate(gather_objects(read, world)):
        for name, facts in theirs["files"].items():
            if files.setdefault(name, facts) != facts or theirs["config"] != read["config"]:
                raise UserError(
                    f"rank {rank} reads another {name} of {read['source']} than other ranks; copy the same "
                    "folder to every machine, or name a revision of the hub: hf:OWNER/NAME@COMMIT"
                )
    return {**read, "files": dict(sorted(files.items()))}
