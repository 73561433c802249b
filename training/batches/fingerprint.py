"""Identifies a dataset by a few numbers: a checkpoint stores them, and a resume must find the same ones.

The trap is a folder of the same name that holds other tokens, or the same tokens in another order: the
position in the data would mean other text, and no error would show it. The path of the folder is not part of
the fingerprint.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.errors import UserError
from training.batches.sources import Source, hash_json, same_tokenizer, show_tokenizer, tokenizer_identity
from training.batches.token_files import TokenFiles
from training.process.world import World, from_rank_0, gather_objects

FACTS = ("dtype", "vocab_size", "eot_id")
OF_A_FILE = ("tokens", "sha256", "probe", "lengths")
PROBES, PROBE_BYTES = 64, 4096  # read from a file whose hash meta.json does not record


def data_fingerprint(
    meta: dict, splits: dict[str, TokenFiles], packings: dict[str, str] | None = None
) -> dict:
    """Tokenizer, storage format, files of each split and hashes of packings, and one hash of all of these."""
    content = {
        "tokenizer": tokenizer_identity(meta.get("tokenizer") or {}),
        **{name: meta.get(name) for name in FACTS},
        "splits": {
            split: {path.name: _file(path, i, files, meta) for i, path in enumerate(files.paths)}
            for split, files in splits.items()
        },
        **({"packings": packings} if packings else {}),
    }
    return {"sha256": hash_json(content), **content}


def run_fingerprint(sources: list[Source]) -> dict:
    """The fingerprint of the one dataset, or of a mixture's sources in their order, with their weights."""
    prints = [data_fingerprint(source.meta, source.splits, source.packings) for source in sources]
    if len(prints) == 1:
        return prints[0]
    prints = [{**p, "weight": str(source.weight)} for p, source in zip(prints, sources, strict=True)]
    return {"sha256": hash_json(prints), "sources": prints}


def agree_on_data(sources: list[Source], world: World) -> dict:
    """Rank 0's fingerprint. Raises UserError if another machine has another dataset under the same name. All
    ranks."""
    mine = run_fingerprint(sources) if world.local_rank == 0 else None
    main = from_rank_0(mine, world)  # megabytes, if there are many files
    for rank, different in enumerate(gather_objects(mine and data_differences(main, mine), world)):
        if different:
            raise UserError(
                f"the machines do not have the same dataset: compared with rank 0's, that of rank {rank} has "
                f"{'; '.join(different)}. Copy it anew"
            )
    return main


def data_differences(saved: dict, now: dict) -> list[str]:
    """Names every difference between two fingerprints. A value that only one of them has is ignored, such as
    a split that was not opened, or a hash that a meta.json written by hand leaves out."""
    was, is_now = (each.get("sources", [each]) for each in (saved, now))
    if len(was) != len(is_now):
        return [f"{len(is_now)} sources instead of {len(was)}"]
    if len(was) == 1:
        return _dataset_differences(saved, now)
    return [
        f"source {number + 1}: {difference}"
        for number, pair in enumerate(zip(was, is_now, strict=True))
        for difference in _dataset_differences(*pair)
    ]


def _dataset_differences(saved: dict, now: dict) -> list[str]:
    was, is_now = (each.get("tokenizer") or tokenizer_identity({}) for each in (saved, now))
    differences = []
    if same_tokenizer(was, is_now) is False:
        differences.append(f"tokenizer {show_tokenizer(is_now)} instead of {show_tokenizer(was)}")
    for name in (*FACTS, "weight"):
        if _differ(saved.get(name), now.get(name)):
            differences.append(f"{name} {now[name]} instead of {saved[name]}")
    was, is_now = (each.get("splits", {}) for each in (saved, now))
    for split in was.keys() & is_now.keys():
        differences += _file_differences(was[split], is_now[split])
    was, is_now = (each.get("packings", {}) for each in (saved, now))
    changed = sorted(name for name in was.keys() & is_now.keys() if was[name] != is_now[name])
    return differences + [f"another packing .packed-{name}" for name in changed]


def _differ(was: object, is_now: object) -> bool:
    return None not in (was, is_now) and was != is_now


def _file_differences(saved: dict, now: dict) -> list[str]:
    def changed(name: str) -> bool:
        return any(_differ(saved[name].get(fact), now[name].get(fact)) for fact in OF_A_FILE)

    found = {
        "no": saved.keys() - now.keys(),
        "in addition": now.keys() - saved.keys(),
        "other tokens in": [name for name in saved.keys() & now.keys() if changed(name)],
    }
    more = {what: f" and {len(names) - 1} more" * (len(names) > 1) for what, names in found.items()}
    return [f"{what} {min(names)}{more[what]}" for what, names in found.items() if names]


def _file(path: Path, number: int, files: TokenFiles, meta: dict) -> dict:
    tokens = int(files.starts[number + 1] - files.starts[number])
    sha256 = meta["files"].get(path.name, {}).get("sha256")
    probe = None if sha256 else _probe(path, tokens * files.dtype.itemsize)
    lengths = meta["files"].get(path.name, {}).get("lengths")  # where documents end, without an id for it
    return {
        **{"tokens": tokens, "sha256": sha256, "probe": probe},
        **({"lengths": lengths["sha256"]} if lengths else {}),
    }


def _probe(path: Path, size: int) -> str:
    """A hash of samples from the whole file: it detects another file, but not every edit of the same file."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        for i in range(PROBES):
            file.seek(i * max(size - PROBE_BYTES, 0) // (PROBES - 1))
            sha256.update(file.read(PROBE_BYTES))
    return sha256.hexdigest()
