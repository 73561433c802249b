"""Where input files come from: this disk, or the Hugging Face hub, from which each part downloads its own.

The trap: when the hub cannot be reached, its library's snapshot_download takes a half downloaded folder for
the whole data set. So the names, sizes and hashes of one commit's files are listed once and kept, the work is
planned from that list, and each file is compared with it before it is read.
"""

import errno
import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from data.folders import is_plain_name
from data.huggingface import hub_library, is_offline, why_no_download
from data.pipeline.token_files import is_count, is_hash

LISTING = "hub.json"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
RETRY_SECONDS = (1, 5, 20, 60, 120)  # waits between tries, each of which has the library's own retries
FINAL_STATUSES = (401, 403, 404)  # of HTTP; trying again does not change them


@dataclass(frozen=True)
class Hub:
    """The data files of one commit of a data set. fetch() puts them into `folder`, with the hub's paths."""

    repository: str
    commit: str
    files: dict[str, tuple[int, str | None]]  # name: (size, sha256)
    folder: Path
    keep: bool  # False: a file is deleted when its tokens are made

    def paths(self) -> list[Path]:
        return sorted(self.folder / name for name in self.files)

    def size(self, path: str | Path) -> int:
        return self.files[self._name(path)][0]

    def fetch(self, paths: Iterable[str]) -> None:
        """Returns when the files are on this disk and equal to the listed ones."""
        for path in paths:
            self._check_no_link(path)
            if not self._is_whole(path):
                Path(path).unlink(missing_ok=True)
                self._download(self._name(path))
                if not self._is_whole(path):
                    raise UserError(
                        f"{path} is not the file that {LISTING} lists; run the same command again"
                    )

    def _check_no_link(self, path: str | Path) -> None:
        """Through a link inside the folder, a download or its deletion would change files elsewhere. The
        folder itself may be a link, to another disk."""
        name = Path(self._name(path)).parent
        for inside in (name, Path(".cache/huggingface/download") / name):  # where the library writes first
            for parent in (inside, *inside.parents[:-1]):
                if (self.folder / parent).is_symlink() and parent.name:
                    raise UserError(
                        f"{self.folder / parent} is a link, through which nothing is written; remove it"
                    )

    def release(self, paths: Iterable[str]) -> None:
        """The files will not be read again."""
        if not self.keep:
            for path in paths:
                Path(path).unlink(missing_ok=True)

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

    def _download(self, name: str) -> None:
        """A broken connection continues where it stopped; after a kill, the file is downloaded again."""
        library = hub_library()
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # there would be one for each file of each worker
        for seconds in (*RETRY_SECONDS, None):
            try:
                library.hf_hub_download(
                    self.repository, name, repo_type="dataset", revision=self.commit, local_dir=self.folder
                )
                return
            except Exception as error:  # of httpx, of requests, and the hub's own
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                if seconds is None or _is_final(error):
                    raise ConnectionError(
                        f"{name} of {self.repository} could not be downloaded {why_no_download(error)}"
                    ) from error
                time.sleep(seconds)


def open_hub(repository: str, folder: Path, listing: Path, keep: bool) -> Hub:
    """The data set as the file `listing` describes it. If there is no such file, the hub is asked for the
    newest commit, and the file is written."""
    folder = folder.resolve()
    if not listing.is_file():
        commit, listed = _ask(repository)
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_json(listing, {"repository": repository, "commit": commit, "files": listed})
    commit, files = _read_listing(listing, repository)
    return Hub(repository, commit, files, folder, keep)


def _read_listing(path: Path, repository: str) -> tuple[str, dict[str, tuple[int, str | None]]]:
    """(commit, {name: (size, sha256)}). Raises UserError."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it") from None
    if content.get("repository") != repository:
        raise UserError(f"{path} is of {content.get('repository')!s:.80}, not of {repository}; delete it")
    commit, files = content.get("commit"), content.get("files")
    if not isinstance(commit, str) or not isinstance(files, dict) or not files:
        raise UserError(f"{path} is damaged (it lists no commit or no files); delete it")
    for name, file in files.items():
        inside = name.endswith(SUFFIXES) and all(map(is_plain_name, name.split("/")))
        size, sha256 = file if isinstance(file, list) and len(file) == 2 else (None, None)
        if not inside or not is_count(size) or not (sha256 is None or is_hash(sha256)):
            raise UserError(f"{path} is damaged (it says {file!r:.80} of {name!r:.80}); delete it")
    return commit, {name: (size, sha256) for name, (size, sha256) in files.items()}


def _ask(repository: str) -> tuple[str, dict]:
    """(commit, {name: (size, sha256)}) of the newest commit."""
    library = hub_library()
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
        raise UserError(
            f"{repository} could not be downloaded {why_no_download(error)}. Run the same command again to "
            "go on, or get the files elsewhere and pass --input DIR"
        ) from error
    if not files:
        raise UserError(f"{repository} holds no file that ends in {', '.join(SUFFIXES)}")
    return commit, files


def _is_final(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in FINAL_STATUSES or is_offline()
