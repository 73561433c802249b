"""Opens the datasets of a run, one or several mixed by weight; checks them against each other.

The trap: the ids of one tokenizer are nonsense to another, even if both have the same number of ids. So a
mixture is refused unless all of its sources name the same tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from common.errors import UserError
from data.folders import dataset_folder
from data.pipeline.meta_file import LENGTHS_FORMAT
from training.batches.dataset import check_targets, open_dataset, overlap_error
from training.batches.document_starts import DocumentStarts, find_documents
from training.batches.mixture import Mixture
from training.batches.packing import PackedWindows, pack_documents
from training.batches.token_files import TokenFiles
from training.batches.windows import Split, StreamWindows, Windows
from training.configuration.dataset_name import parse_dataset
from training.configuration.keys import TrainConfig


@dataclass(frozen=True)
class Source:
    name: str
    weight: Fraction  # share of all samples; the weights of a run add up to 1
    folder: Path
    splits: dict[str, TokenFiles]
    meta: dict
    documents: dict[str, DocumentStarts]  # by split; {} if the run does not need them
    # hashes of its packings by split and length, such as 'train-1024'; known where the data was scanned
    packings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunData:
    """What a run reads, once all machines have agreed on it."""

    sources: list[Source]
    fingerprint: dict  # training/batches/fingerprint.py
    windows: dict[str, Split]  # by split: what the loader and the evaluation read


def open_sources(config: TrainConfig, scan: bool) -> list[Source]:
    """Opens and checks the datasets that config.dataset names (training/batches/dataset.py). Raises
    UserError."""
    sources = []
    for name, weight in parse_dataset(config.dataset).items():
        alone = dataclasses.replace(config, dataset=name)
        splits, meta = open_dataset(alone, scan)
        check_targets(meta, alone)
        documents = {}
        if config.doc_masking or config.packing == "truncate":
            documents = {split: find_documents(alone, meta, tokens) for split, tokens in splits.items()}
        sources.append(Source(name, weight, dataset_folder(name), splits, meta, documents))
        if scan and config.packing == "truncate":
            hashes = config.verify_data == "hash"
            for split in splits:
                _, index = packing_of(sources[-1], split, config, hashes)
                sources[-1].packings[f"{split}-{config.block_size}"] = index["sha256"]
    for source in sources[1:]:
        _check_same_tokenizer(sources[0], source)
    _check_no_overlap(sources)
    return sources


def make_windows(sources: list[Source], config: TrainConfig) -> dict[str, Split]:
    """{split: what the loader and the evaluation read}."""
    splits: dict[str, Split] = {}
    for split in sources[0].splits:
        by_source = {source.name: (source.weight, _windows(source, split, config)) for source in sources}
        splits[split] = Mixture(by_source) if len(by_source) > 1 else by_source[sources[0].name][1]
    return splits


def _windows(source: Source, split: str, config: TrainConfig) -> Windows:
    if config.packing == "stream":
        return StreamWindows(source.splits[split], config.block_size, source.documents.get(split))
    packing = packing_of(source, split, config, hashes=False)  # open_sources() has compared them
    return PackedWindows(source.documents[split], config.block_size, *packing, marked=config.doc_masking)


def packing_of(source: Source, split: str, config: TrainConfig, hashes: bool) -> tuple[Path, dict]:
    """The folder that says which documents share a window, and its index; made here if there is none."""
    return pack_documents(source.documents[split], source.folder, split, config.block_size, hashes)


# --- which tokenizer made the tokens ---


def tokenizer_identity(recorded: dict) -> dict:
    """The name and the hash of the tokenizer that a meta.json describes."""
    chars = recorded.get("chars")
    sha256 = recorded.get("sha256") or (hash_json(chars) if chars else None)
    return {"name": recorded.get("name"), "sha256": sha256}


def same_tokenizer(one: dict, other: dict) -> bool | None:
    """Whether two tokenizers, each a name and a sha256, are one; None if that is not known. A name is only a
    folder name."""
    key = "sha256" if one["sha256"] and other["sha256"] else "name"
    return None if None in (one[key], other[key]) else one[key] == other[key]


def show_tokenizer(tokenizer: dict) -> str:
    return f"{tokenizer['name']} ({(tokenizer['sha256'] or 'no hash recorded')[:16]})"


def hash_json(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- checks between sources ---


def _check_same_tokenizer(one: Source, other: Source) -> None:
    """Tokens with document lengths beside them name no end-of-text id."""
    both = (one, other)
    sizes = {source.meta["vocab_size"] for source in both}
    ends = {source.meta["eot_id"] for source in both if source.meta.get("format") != LENGTHS_FORMAT}
    is_same = same_tokenizer(*(tokenizer_identity(source.meta["tokenizer"] or {}) for source in both))
    if not is_same or len(sizes) > 1 or len(ends) > 1:
        raise UserError(
            f"dataset: {one.name!r} and {other.name!r} cannot be mixed unless one tokenizer made both: "
            f"{one.name} has {_show(one)}, {other.name} has {_show(other)}; prepare both with the same "
            "tokenizer"
        )


def _show(source: Source) -> str:
    tokenizer = tokenizer_identity(source.meta["tokenizer"] or {})
    name, sha256 = tokenizer["name"] or "no tokenizer in its meta.json", tokenizer["sha256"]
    known = f", sha256 {sha256[:12]}..." if sha256 else ""
    return f"{name} ({source.meta['vocab_size']:,} ids, end-of-text {source.meta['eot_id']}{known})"


def _check_no_overlap(sources: list[Source]) -> None:
    """Refuses a folder that is named twice, and a validation file that is a training file of any source."""
    folders: dict[Path, Source] = {}
    for source in sources:
        twin = folders.setdefault(source.folder.resolve(), source)
        if twin is not source:
            raise UserError(
                f"dataset: {twin.name!r} and {source.name!r} are one folder; add their weights up"
            )
    training = {sha256: path for source in sources for path, sha256 in _hashes(source, "train")}
    for source in sources:
        for path, sha256 in _hashes(source, "val"):
            if sha256 in training:
                raise overlap_error(path, training[sha256])


def _hashes(source: Source, split: str) -> Iterator[tuple[Path, str]]:
    for path in source.splits[split].paths if split in source.splits else []:
        if sha256 := source.meta["files"].get(path.name, {}).get("sha256"):
            yield path, sha256


# --- what the record says ---


def describe_data(data: RunData, samples: int) -> dict:
    """The record's data entry. It lists no file names, because there can be thousands. samples: number of
    sequences in max_iters iterations."""
    sources, by_source = data.sources, data.windows["train"].by_source.values()
    parts = data.fingerprint.get("sources", [data.fingerprint])
    return {
        "tokens": {
            split: sum(source.splits[split].total for source in sources) for split in sources[0].splits
        },
        "fingerprint": data.fingerprint["sha256"],
        "val_fingerprint": hash_json([part.get("splits", {}).get("val") for part in parts]),
        "sources": [
            {
                "name": source.name,
                "weight": float(weight),
                "tokens": {split: files.total for split, files in source.splits.items()},
                "files": sum(len(files.paths) for files in source.splits.values()),
                "epochs": float(weight) * samples / split.count,
                "samples_per_epoch": split.count,
                **({"packing": split.description} if isinstance(split, PackedWindows) else {}),
                "meta": {key: value for key, value in source.meta.items() if key != "files"},
            }
            for source, (weight, split) in zip(sources, by_source, strict=True)
        ],
    }
