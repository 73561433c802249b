"""The datasets of a run, one or several mixed by weight: opened, checked against each other, described.

The trap: text of one tokenizer is nonsense in another, also where both have as many ids, so a mixture is
refused unless all of its sources name the same tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from training.batches.dataset import open_dataset, overlap_error
from training.batches.mixture import Mixture
from training.batches.packing import PackedWindows, end_of_text_id, pack_documents
from training.batches.token_files import TokenFiles
from training.batches.windows import Split, StreamWindows, Windows
from training.configuration.dataset_name import dataset_folder, parse_dataset
from training.configuration.errors import UserError
from training.configuration.keys import TrainConfig


@dataclass(frozen=True)
class Source:
    name: str
    weight: Fraction  # of all samples; those of a run add up to 1
    folder: Path
    splits: dict[str, TokenFiles]
    meta: dict


def open_sources(config: TrainConfig, scan: bool) -> list[Source]:
    """The datasets that config.dataset names, checked (training/batches/dataset.py). Raises UserError."""
    sources = []
    for name, weight in parse_dataset(config.dataset).items():
        alone = dataclasses.replace(config, dataset=name)
        splits, meta = open_dataset(alone, scan)
        sources.append(Source(name, weight, dataset_folder(alone), splits, meta))
        if scan and config.packing == "truncate":
            for split in splits:
                packing_of(sources[-1], split, config)
    for source in sources[1:]:
        _check_same_tokenizer(sources[0], source)
    _check_apart(sources)
    end_of_text_id(config, sources[0].meta)  # is there one, if the run needs it
    return sources


def make_windows(sources: list[Source], config: TrainConfig) -> dict[str, Split]:
    """{split: what a loader and an evaluation read}."""
    splits: dict[str, Split] = {}
    for split in sources[0].splits:
        parts = {source.name: (source.weight, _windows(source, split, config)) for source in sources}
        splits[split] = Mixture(parts) if len(parts) > 1 else parts[sources[0].name][1]
    return splits


def _windows(source: Source, split: str, config: TrainConfig) -> Windows:
    tokens = source.splits[split]
    if config.packing == "stream":
        return StreamWindows(tokens, config.block_size)
    folder = packing_of(source, split, config)
    return PackedWindows(tokens, config.block_size, _eot_id(source, config), folder)


def packing_of(source: Source, split: str, config: TrainConfig) -> Path:
    """Where it is kept which documents share a window; made if it is not there."""
    eot_id = _eot_id(source, config)
    return pack_documents(source.splits[split], source.folder, split, config.block_size, eot_id)


def _eot_id(source: Source, config: TrainConfig) -> int:
    eot_id = end_of_text_id(config, source.meta)
    assert eot_id is not None, config.packing
    return eot_id


# --- checks between sources ---


def _check_same_tokenizer(one: Source, other: Source) -> None:
    a, b = (_tokenizer(source) for source in (one, other))
    compared = [
        field for field in a if field in b and not (field == "name" and "sha256" in a and "sha256" in b)
    ]
    differing = [field for field in compared if a[field] != b[field]]
    if differing or "name" not in compared and "sha256" not in compared:
        raise UserError(
            f"dataset: {one.name!r} and {other.name!r} cannot be mixed unless one tokenizer made both: "
            f"{one.name} has {_show(a)}, {other.name} has {_show(b)}; prepare both with the same tokenizer"
        )


def _tokenizer(source: Source) -> dict:
    """What tells tokenizers apart, as far as meta.json records it. A name is a folder's; a hash says more."""
    recorded = source.meta.get("tokenizer") or {}
    if not isinstance(recorded, dict):
        recorded = {"name": str(recorded)}
    facts = {field: recorded[field] for field in ("sha256", "chars", "name") if recorded.get(field)}
    return {**facts, "vocab_size": source.meta["vocab_size"], "eot_id": source.meta.get("eot_id")}


def _show(tokenizer: dict) -> str:
    name = tokenizer.get("name", "no tokenizer in its meta.json")
    sha256 = f", sha256 {tokenizer['sha256'][:12]}..." if "sha256" in tokenizer else ""
    return f"{name} ({tokenizer['vocab_size']:,} ids, end-of-text {tokenizer['eot_id']}{sha256})"


def _check_apart(sources: list[Source]) -> None:
    """No folder twice, and no validation file that is a training file, of any source."""
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


def describe_sources(
    sources: list[Source], windows: dict[str, Split], samples: int, fingerprint: str
) -> dict:
    """The record's data entry, without file names, of which there can be thousands. samples: sequences that
    max_iters see."""
    parts = windows["train"].parts.values()
    return {
        "tokens": {
            split: sum(source.splits[split].total for source in sources) for split in sources[0].splits
        },
        "fingerprint": fingerprint,
        "sources": [
            {
                "name": source.name,
                "weight": float(weight),
                "tokens": {split: files.total for split, files in source.splits.items()},
                "files": sum(len(files.paths) for files in source.splits.values()),
                "epochs": float(weight) * samples / split.count,
                **({"packing": split.description} if isinstance(split, PackedWindows) else {}),
                "meta": {key: value for key, value in source.meta.items() if key != "files"},
            }
            for source, (weight, split) in zip(sources, parts, strict=True)
        ],
    }
