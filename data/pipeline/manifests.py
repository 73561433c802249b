"""Reads manifests: which token files of a preparation are complete. A manifest that is damaged counts as
none, so its token files are made again."""

import re
from pathlib import Path

from common.json_file import read_json
from data.pipeline.document_lengths import SUFFIX
from data.pipeline.meta_file import wrong_token_file
from data.pipeline.token_files import is_count
from data.pipeline.units import Unit
from data.pipeline.verified import damaged_files, wrong_size

COUNTS = ("documents", "empty", "bad")


def read_manifests(units: list[Unit], folder: Path, dtype: str) -> list[dict | None]:
    """The units' manifests; None for a unit that has none, or whose token files are not what it says."""
    patterns = {unit.manifest_path(folder): rf"(train|val)_{unit.number:06d}_\d+\.bin" for unit in units}
    return read_checked(patterns, folder, dtype)


def read_checked(patterns: dict[Path, str], folder: Path, dtype: str) -> list[dict | None]:
    """As read_manifests. patterns: {path of a manifest: what the names of its token files look like}"""
    manifests = [_read(path, pattern, folder, dtype) for path, pattern in patterns.items()]
    files = {name: file for manifest in manifests if manifest for name, file in manifest["files"].items()}
    damaged = {name.removesuffix(SUFFIX) for name in damaged_files(folder, dtype, files)}
    for name in sorted(damaged):
        print(f"{folder / name} is damaged; it is made again")
    return [
        None if manifest is None or damaged & manifest["files"].keys() else manifest for manifest in manifests
    ]


def _read(path: Path, pattern: str, folder: Path, dtype: str) -> dict | None:
    """The manifest, if its fields are possible and its token files are there and have the sizes it says."""
    try:
        manifest = read_json(path)
        if not _is_possible(manifest, pattern):
            return None
        if wrong_size(folder, dtype, manifest["files"]):
            return None
        return manifest
    except (OSError, ValueError):
        return None


def _is_possible(manifest: dict, pattern: str) -> bool:
    files, bad_records = manifest.get("files"), manifest.get("bad_records")
    return (
        isinstance(files, dict)
        and all(re.fullmatch(pattern, name) for name in files)
        and not any(wrong_token_file(name, file) for name, file in files.items())
        and all(None not in map(file.get, ("tokens", "sha256", "max_id")) for file in files.values())
        and isinstance(bad_records, list)
        and all(isinstance(line, str) for line in bad_records)
        and all(is_count(manifest.get(name)) for name in COUNTS)
    )
