"""Finds the files of a model in Hugging Face's format, on this disk or on the hub, and checks that they are
whole and fit the model. Only safetensors are read: a pickle could run any code.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from common.errors import UserError
from common.json_file import read_json
from common.schema import Check, naming, read
from common.text import shown
from data.folders import is_plain_name
from data.huggingface import hub_library, why_no_download
from model_config import ModelConfig
from training.checkpoints.tensor_files import SUFFIX, Part, Place, mapped, read_header
from training.checkpoints.tensor_reader import TensorFiles
from training.pretrained.architecture import Architecture, read_architecture
from training.pretrained.names import COMPUTED, HEAD, Piece, pieces, without_prefix

PREFIX = "hf:"
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
# what a user of the model needs; other formats of the same weights stay on the hub
HUB_FILES = ["*.json", SINGLE, "model-*-of-*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]
ShardName = Annotated[
    str, Check(f"a {SUFFIX} file beside it", lambda name: is_plain_name(name) and name.endswith(SUFFIX))
]
MAX_CONFIG, MAX_INDEX = 1 << 24, 1 << 28  # bytes
# what torch.compile, DDP, FSDP and checkpoint_wrapper put into the names of a model's tensors
WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LFS_POINTER = b"version https://git-lfs"
READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXPECTED = "expected are the weights as save_pretrained of transformers writes them, in fp32, bf16 or fp16"
MOST_NAMED = 4  # tensors in a message

Tensors = dict[str, tuple[Part, Place]]  # {Hugging Face's name: the tensor and its place}


@dataclass(frozen=True)
class Weights:
    """Where the weights are. Of a model of the hub, config.json is on this disk; the rest after fetch()."""

    source: str  # as the user stated it
    folder: Path
    commit: str | None = None  # on the hub
    repository: str | None = None

    def architecture(self) -> Architecture:
        path = self.folder / CONFIG
        if not os.path.lexists(path):
            raise UserError(
                f"{self.folder} holds no {CONFIG}, so it is not a model in Hugging Face's format; name the "
                "folder that save_pretrained or a download has made"
            )
        return read_architecture(_read_fields(path), str(path))


# --- finding ---


def locate(source: str) -> Weights:
    """The weights that 'hf:FOLDER' or 'hf:OWNER/NAME[@REVISION]' names. Raises UserError."""
    name = source.removeprefix(PREFIX)
    if name == source or not name:
        raise UserError(
            f"init_weights={shown(source)} does not begin with {PREFIX!r}; write hf:FOLDER for a folder, or "
            "hf:OWNER/NAME for a model of the Hugging Face hub"
        )
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return Weights(source, folder)
    match = REPOSITORY.fullmatch(name)
    if match is None or folder.is_absolute():
        raise UserError(
            f"init_weights={shown(source)} (--hf of other commands): there is no folder {shown(name)}; name "
            "the folder of a model, or OWNER/NAME of a model of the Hugging Face hub"
        )
    return _locate_on_hub(source, match[1], match[2])


@functools.cache  # a process asks once, so that all it reads is of one commit
def _locate_on_hub(source: str, repository: str, revision: str | None) -> Weights:
    library = hub_library("write --init_weights=hf:FOLDER")
    try:
        config = Path(library.hf_hub_download(repository, CONFIG, revision=revision))
    except Exception as error:  # of httpx, of requests, and the hub's own
        raise _not_downloaded(repository, error) from error
    return Weights(source, config.parent, config.parent.name, repository)


def recall(source: str, commit: str | None) -> Weights | None:
    """Weights that a run began with earlier, if they are still on this disk: the hub is not asked."""
    name = source.removeprefix(PREFIX)
    if commit is None:
        folder = Path(os.path.expanduser(name))
        return Weights(source, folder) if folder.is_dir() else None
    match = REPOSITORY.fullmatch(name)
    try:
        library = hub_library()
        config = library.try_to_load_from_cache(match[1], CONFIG, revision=commit) if match else None
    except (UserError, ValueError):  # without the library there is no cache; or a name that is none
        return None
    return Weights(source, Path(config).parent, commit) if isinstance(config, str) else None


def fetch(weights: Weights) -> None:
    """Returns when all files are on this disk. Raises UserError. One process of each machine."""
    if weights.repository is None:
        return
    library = hub_library("write --init_weights=hf:FOLDER")
    try:
        library.snapshot_download(
            weights.repository, revision=weights.commit, allow_patterns=HUB_FILES, max_workers=4
        )
    except Exception as error:
        raise _not_downloaded(weights.repository, error) from error


def _not_downloaded(repository: str, error: Exception) -> UserError:
    return UserError(
        f"there is no folder {repository}, and the model {repository} of the Hugging Face hub could not be "
        f"downloaded {why_no_download(error)}. The same command goes on where it stopped. If the model asks "
        f"for a license, accept it at https://huggingface.co/{repository} and run: hf auth login. Without a "
        "network, copy the folder here and write --init_weights=hf:FOLDER"
    )


# --- the files ---


@dataclass
class _Index:
    weight_map: dict[str, ShardName]  # of each tensor


def _read_fields(path: Path) -> dict[str, Any]:
    with naming(path):
        return read_json(path, MAX_CONFIG)


def read_generation(folder: Path) -> dict[str, Any]:
    """The content of generation_config.json; {} if the folder has none. Raises UserError."""
    path = folder / GENERATION
    return _read_fields(path) if os.path.lexists(path) else {}


def list_files(folder: Path) -> list[str]:
    """The names of the files that are read. Raises UserError."""
    if (folder / SINGLE).is_file():
        return [CONFIG, SINGLE]
    if os.path.lexists(folder / INDEX):
        index = read(_Index, folder / INDEX, MAX_INDEX)
        return [CONFIG, INDEX, *sorted(set(index.weight_map.values()))]
    if pickles := sorted(path.name for suffix in ("*.bin", "*.pt*") for path in folder.glob(suffix)):
        raise UserError(
            f"{folder} holds weights as a pickle ({pickles[0]}), which can run any code and is not read. If "
            "you trust it, make safetensors of it: from_pretrained and save_pretrained of transformers"
        )
    raise UserError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")


def list_tensors(folder: Path) -> Tensors:
    """Every tensor of the files, from their headers, without the names of wrappers. Raises UserError."""
    files = [name for name in list_files(folder) if name.endswith(SUFFIX)]
    found: Tensors = {}
    for file in files:
        path = folder / file
        for part, place in _read_header(path).items():
            name = WRAPPERS.sub("", part.name)
            if name in found:
                other = found[name][1].path.name
                raise UserError(f"{folder}: {name[:100]} is there twice, in {other} and in {file}")
            found[name] = part, place
    return found


def _read_header(path: Path) -> dict[Part, Place]:
    if not path.is_file():
        raise UserError(f"{path} is missing; copy the whole folder, or download it again")
    with naming(path), open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path} is a pointer to the weights, not the weights; run: git lfs pull")
    return read_header(path, whole=True)


# --- do they fit the model? ---


def match(
    weights: Weights, architecture: Architecture, model: ModelConfig, compare_tied: bool = False
) -> TensorFiles:
    """A reader of our parameters; in the files, every name is used once and none is left over. compare_tied:
    also compares the embedding with the output head, if they are one tensor in the model and two in the
    files. Raises UserError."""
    found, expected = list_tensors(weights.folder), pieces(model)
    if not any(piece.name in found for piece in expected if piece.name != HEAD):
        expected = without_prefix(expected)
    names = {piece.name for piece in expected}
    computed = {name for name in found if COMPUTED.fullmatch(name)}
    for name in sorted(found.keys() - computed):
        part, place = found[name]
        if part.dtype not in READ:
            why = "so the weights are quantized, or of another program"
            raise UserError(f"{place.path}: {name[:100]} is {_kind(part)}, {why}; {EXPECTED}")
    if missing := [name for name in names if name not in found]:
        more = found.keys() - names - computed
        has = f"; it has {_some(more)} instead" if more else ""
        raise UserError(f"{weights.folder} lacks {_some(missing)}{has}")
    tied_head = {HEAD} if model.weight_tying else set()
    if left := found.keys() - names - computed - tied_head:
        raise UserError(
            f"{weights.folder} holds {_some(left)}, for which a model of this {CONFIG} has no place"
        )
    in_pairs = {piece.ours for piece in expected if piece.rows.step == 2}
    reader = TensorFiles([_place(piece, found, architecture) for piece in expected], in_pairs)
    if compare_tied and tied_head & found.keys():
        _check_tied(weights, found, next(one.name for one in expected if one.ours == "embed.weight"))
    return reader


def _check_tied(weights: Weights, found: Tensors, name: str) -> None:
    head, embedding = found[HEAD], found[name]
    if head[0].shape != embedding[0].shape or not torch.equal(mapped(*head), mapped(*embedding)):
        raise UserError(
            f"{weights.folder}: {CONFIG} says tie_word_embeddings=true, but {HEAD} is not equal to {name}; "
            "one of them would be lost. If both were trained, set tie_word_embeddings to false there"
        )


def _place(piece: Piece, found: Tensors, architecture: Architecture) -> tuple[Part, Place]:
    part, place = found[piece.name]
    shape = piece.stored_shape
    if piece.ours == "positions.weight":  # a shorter block_size uses the first of them
        shape = (architecture.longest, *shape[1:])
    if part.shape != shape:
        raise UserError(f"{place.path}: {piece.name} is {_kind(part)}, but {CONFIG} asks for {shape}")
    # pairs of rows are two halves here, which TensorFiles joins
    start = piece.rows.start * (len(piece.rows) if piece.rows.step == 2 else 1)
    offsets = (start, *(0 for _ in piece.shape[1:]))
    return Part(piece.ours, offsets, piece.shape, part.dtype), place._replace(transposed=piece.transposed)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(name[:100] for name in names)
    more = f" and {len(ordered) - MOST_NAMED:,} more tensors" if len(ordered) > MOST_NAMED else ""
    return ", ".join(ordered[:MOST_NAMED]) + more


def _kind(part: Part) -> str:
    return f"{str(part.dtype).removeprefix('torch.')} and {part.shape}"


def describe(weights: Weights, architecture: Architecture, files: dict[str, Any]) -> dict[str, Any]:
    """What the run record and the checkpoints say of the weights that the run began with."""
    return {
        "source": weights.source,
        "commit": weights.commit,
        "files": dict(sorted(files.items())),
        "config": architecture.fields,
        "generation": read_generation(weights.folder),
    }
