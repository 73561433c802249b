"""Joins the token files of a small dataset into train.bin and val.bin: one file for each split.

Units are made side by side, each with token files of its own. When all are made, and no split has more tokens
than a file may hold, their files become one. If the process is killed before units/joined.json is written,
the files of the units are still there and are joined again; from then on, joined.json says what the two files
hold, and what is left of the units is deleted.
"""

import os
from pathlib import Path

import numpy as np

from common.durable_file import sync, sync_folder, write_json
from common.errors import UserError
from data.pipeline.bad_records import BAD_LISTED
from data.pipeline.document_lengths import LENGTH_DTYPE, lengths_name, with_lengths
from data.pipeline.manifests import COUNTS, read_checked
from data.pipeline.token_files import SPLITS, is_of_split, smallest_dtype, stored_dtype
from data.pipeline.token_writer import LengthsWriter, TokenWriter
from data.pipeline.verified import remember_files

CHUNK = 1 << 24  # tokens that are read at once


def read_joined(folder: Path, dtype: str) -> dict | None:
    """What train.bin and val.bin hold, if the files of the units have become these. If the two are damaged,
    joined.json is deleted, so that all units are made again."""
    path = _manifest_path(folder)
    if not os.path.lexists(path):
        return None
    (joined,) = read_checked({path: r"(train|val)\.bin"}, folder, dtype)
    if joined is None or len(joined["files"]) < len(SPLITS):
        (folder / "meta.json").unlink(missing_ok=True)  # first: it describes files that are replaced
        path.unlink()
        return None
    _delete_units(folder)
    return joined


def join(manifests: list[dict], folder: Path, shard_tokens: int, vocab_size: int) -> dict | None:
    """Joins the token files of all units; returns the manifest of the two files. None if a split has too many
    tokens for one file, or none at all."""
    dtype = smallest_dtype(vocab_size)
    written = {split: _files_of(manifests, split) for split in SPLITS}
    totals = [sum(file["tokens"] for _, file in files) for files in written.values()]
    if not 0 < min(totals) <= max(totals) <= shard_tokens:
        return None
    temporary = [folder / f"{name}.tmp" for s in SPLITS for name in (f"{s}.bin", lengths_name(f"{s}.bin"))]
    joined: dict[str, dict] = {}
    try:
        for number, (split, files) in enumerate(written.items()):
            names = [name for name, _ in files]
            writer = TokenWriter(temporary[2 * number], dtype, vocab_size)
            joined[f"{split}.bin"] = _copy([folder / name for name in names], dtype, writer)
            if all("lengths" in file for _, file in files):
                paths = [folder / lengths_name(name) for name in names]
                lengths = _copy(paths, LENGTH_DTYPE, LengthsWriter(temporary[2 * number + 1]))
                joined[f"{split}.bin"]["lengths"] = lengths
        if [file["tokens"] for file in joined.values()] != totals:
            raise UserError(f"the token files in {folder} were changed meanwhile; run the same command again")
        for name in with_lengths(joined):
            sync(folder / f"{name}.tmp")
        for name in with_lengths(joined):
            os.replace(folder / f"{name}.tmp", folder / name)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    sync_folder(folder)
    counts = {name: sum(manifest[name] for manifest in manifests) for name in COUNTS}
    bad_records = [line for manifest in manifests for line in manifest["bad_records"]]
    manifest = {**counts, "bad_records": bad_records[:BAD_LISTED], "files": joined}
    write_json(_manifest_path(folder), manifest)
    remember_files(folder, dtype, joined)
    _delete_units(folder)
    return manifest


def _manifest_path(folder: Path) -> Path:
    return folder / "units" / "joined.json"


def _files_of(manifests: list[dict], split: str) -> list[tuple[str, dict]]:
    return [
        (name, manifest["files"][name])
        for manifest in manifests
        for name in sorted(manifest["files"])
        if is_of_split(name, split)
    ]


def _copy(paths: list[Path], dtype: str, writer: TokenWriter | LengthsWriter) -> dict:
    """Writes what the files hold, one after the other; what meta.json says of the new file."""
    try:
        for path in paths:
            with open(path, "rb") as file:
                while len(numbers := np.fromfile(file, stored_dtype(dtype), CHUNK)):
                    writer.write(numbers)
        return writer.finish()
    finally:
        writer.file.close()


def _delete_units(folder: Path) -> None:
    """Deletes the units' files and manifests."""
    for split in SPLITS:
        for path in folder.glob(f"{split}_[0-9]*"):
            path.unlink()
    for path in (*folder.glob("units/[0-9]*.json*"), *folder.glob("units/[0-9]*.hashes*")):
        path.unlink()
