"""Where input files are: on disk, or on the Hugging Face hub, which a unit's files come from when it is made.

The trap: the hub library's snapshot_download takes a folder that was half downloaded for the whole data set
when the hub cannot be reached. Here the names, sizes and hashes of one commit's files are listed once and
kept, the work is planned from that list, and a file is compared with it before it is read.
"""

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.pipeline.token_files import DataError

LISTING = "hub.json"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
]
RETRY_SECONDS = (1, 5, 20, 60, 120)  # between tries, on top of the library's own
ABANDONED_SECONDS = 3600  # without a write
REFUSED = (401, 403, 404)  # statuses that no retry changes


@dataclass(frozen=True)
class Disk:
    """Files that are there, and stay."""

    def size(self, path: str | Path) -> int:
        return os.path.getsize(path)

    def fetch(self, paths: Iterable[str]):
        pass

    def release(self, paths: Iterable[str]):
        pass


ON_DISK = Disk()


@dataclass(frozen=True)
class Hub:
    """The data files of one commit of a data set, below `folder` in the hub's layout once fetched."""

    repository: str
    commit: str
    files: dict[str, tuple[int, str | None]]  # name: (size, sha256)
    folder: Path
    keep: bool  # the text after its tokens are made

    def paths(self) -> list[Path]:
        return sorted(self.folder / name for name in self.files)

    def size(self, path: str | Path) -> int:
        return self.files[self._name(path)][0]

    def fetch(self, paths: Iterable[str]):
        for path in paths:
            if not self._is_whole(path):
                Path(path).unlink(missing_ok=True)
                self._download(self._name(path))
                if not self._is_whole(path):
                    raise DataError(
                        f"{path} is not the file that {LISTING} lists; run the same command again"
                    )

    def release(self, paths: Iterable[str]):
        if not self.keep:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def sweep(self):
        """Delete what killed downloads left: the library begins a file again under another name."""
        for path in (self.folder / ".cache").rglob("*.incomplete"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def _name(self, path: str | Path) -> str:
        return Path(path).relative_to(self.folder).as_posix()

    def _is_whole(self, path: str | Path) -> bool:
        size, sha256 = self.files[self._name(path)]
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            return False
        if sha256 is None:
            return True
        with open(path, "rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return digest.hexdigest() == sha256

    def _download(self, name: str):
        """A connection that breaks is taken up where it broke; a killed process begins its file again."""
        library = _library()
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # one a file of each worker
        for seconds in (*RETRY_SECONDS, None):
            try:
                library.hf_hub_download(
                    self.repository, name, repo_type="dataset", revision=self.commit, local_dir=self.folder
                )
                return
            except Exception as error:  # httpx's, requests' and the hub's own
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                if seconds is None or _is_final(error):
                    raise ConnectionError(
                        f"{name} of {self.repository} could not be downloaded {_brief(error)}"
                    ) from error
                time.sleep(seconds)


def open_hub(repository: str, folder: Path, listing: Path, keep: bool) -> Hub:
    """The data set as `listing` has it, which is asked for and written if it is not there."""
    folder = folder.resolve()
    if not listing.is_file():
        commit, files = _ask(repository)
        listing.parent.mkdir(parents=True, exist_ok=True)
        temporary = listing.with_name(f"{listing.name}.tmp{os.getpid()}")
        content = {"repository": repository, "commit": commit, "files": files}
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, listing)
    content = json.loads(listing.read_text(encoding="utf-8"))
    if content["repository"] != repository:
        raise DataError(f"{listing} is of {content['repository']}, not of {repository}; delete it")
    files = {name: (size, sha256) for name, (size, sha256) in content["files"].items()}
    return Hub(repository, content["commit"], files, folder, keep)


def _ask(repository: str) -> tuple[str, dict]:
    library = _library()
    try:
        hub = library.HfApi()
        commit = hub.dataset_info(repository).sha
        tree = hub.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        files = {
            entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else None)
            for entry in tree
            if entry.path.endswith(SUFFIXES) and hasattr(entry, "size")
        }
    except Exception as error:
        raise DataError(
            f"{repository} could not be downloaded {_brief(error)}. Run the same command again to go on, or "
            f"get the files elsewhere and pass --input DIR"
        ) from error
    if not files:
        raise DataError(f"{repository} holds no file that ends in {', '.join(SUFFIXES)}")
    return commit, files


def download_tokenizer(repository: str) -> str:
    """The folder of its files, in the hub's cache."""
    library = _library()
    try:
        return library.snapshot_download(repository, allow_patterns=TOKENIZER_FILES)
    except Exception as error:
        licence = f"https://huggingface.co/{repository}"
        raise DataError(
            f"the tokenizer of {repository} could not be downloaded {_brief(error)}. If it asks for a "
            f"licence, accept that at {licence} and run: hf auth login"
        ) from error


def _library():
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            "downloading needs huggingface_hub: pip install -r requirements-data.txt; or get the files "
            "elsewhere and pass --input DIR"
        ) from None
    return huggingface_hub


def _is_final(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in REFUSED or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def _brief(error: Exception) -> str:
    return f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
