"""Where input files come from: this disk, or the Hugging Face hub, from which each part downloads its own.

The trap: when the hub cannot be reached, its library's snapshot_download takes a half downloaded folder for
the whole data set. So the names and sizes of one commit's files are listed once and kept, the work is planned
from that list, and the size of each file is compared with it before it is read.
"""

import errno
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from data.folders import is_plain_name
from data.huggingface import hub_library, is_offline, why_no_download
from data.pipeline.meta_file import is_text, wrong_field
from data.pipeline.token_files import is_count

LISTING = "hub.json"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
RETRY_SECONDS = (1, 5, 20, 60, 120)  # waits between tries, each of which has the library's own retries
LISTED = {"repository": is_text, "commit": is_text, "files": lambda value: isinstance(value, dict) and value}
FINAL_STATUSES = (401, 403, 404)  # of HTTP; trying again does not change them


@dataclass(frozen=True)
class Hub:
    """The data files of one commit of a data set. fetch() puts them into `folder`, with the hub's paths."""

    repository: str
    commit: str
    files: dict[str, int]  # name: bytes
    folder: Path
    keep: bool  # False: a file is deleted when its tokens are made

    def paths(self) -> list[Path]:
        return sorted(self.folder / name for name in self.files)

    def size(self, path: str | Path) -> int:
        return self.files[Path(path).relative_to(self.folder).as_posix()]

    def fetch(self, paths: Iterable[str]) -> None:
        """Returns when the files are on this disk and have the listed sizes."""
        for path in map(Path, paths):
            name = path.relative_to(self.folder)
            # the folder may be a link, to another disk; one inside would lead the library to files elsewhere
            for place in (path, self.folder / ".cache/huggingface/download" / name):  # where it writes first
                if not place.parent.resolve().is_relative_to(self.folder):
                    raise UserError(f"{place.parent} leads elsewhere by a link; remove that")
            if not self._is_whole(path):
                path.unlink(missing_ok=True)
                self._download(name.as_posix())
                if not self._is_whole(path):
                    raise UserError(f"{path} has not the listed size ({LISTING}); run the same command again")

    def release(self, paths: Iterable[str]) -> None:
        """The files will not be read again."""
        if not self.keep:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def _is_whole(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.size(path)

    def _download(self, name: str) -> None:
        """A broken connection continues where it stopped; after a kill, the file is downloaded again."""
        library = hub_library()
        library.utils.disable_progress_bars()  # there would be one for each file of each worker
        for seconds in (*RETRY_SECONDS, None):
            try:
                options = {"repo_type": "dataset", "revision": self.commit, "local_dir": self.folder}
                library.hf_hub_download(self.repository, name, **options)
                return
            except Exception as error:  # of httpx, of requests, and the hub's own
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                status = getattr(getattr(error, "response", None), "status_code", None)
                if seconds is None or status in FINAL_STATUSES or is_offline():
                    raise ConnectionError(
                        f"{name} of {self.repository} could not be downloaded {why_no_download(error)}"
                    ) from error
                time.sleep(seconds)


def open_hub(repository: str, folder: Path, listing: Path, keep: bool) -> Hub:
    """The data set as the file `listing` describes it. If there is no such file, the hub is asked for the
    newest commit, and the file is written. Raises UserError."""
    if not listing.is_file():
        commit, listed = _ask(repository)
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_json(listing, {"repository": repository, "commit": commit, "files": listed})
    try:
        content = read_json(listing)
        if wrong := wrong_field(" in it", content, LISTED, LISTED):
            raise ValueError(wrong)
        if bad := [each for each in content["files"].items() if not _is_listed(*each)]:
            raise ValueError(f"it says {bad[0][1]!r:.80} of {bad[0][0]!r:.80}")
    except (OSError, ValueError) as error:
        raise UserError(f"{listing} is damaged ({error}); delete it") from None
    if content["repository"] != repository:
        raise UserError(f"{listing} is of {content['repository']:.80}, not of {repository}; delete it")
    sizes = {name: file[0] if isinstance(file, list) else file for name, file in content["files"].items()}
    return Hub(repository, content["commit"], sizes, folder.resolve(), keep)


def _is_listed(name: str, file: Any) -> bool:
    """Whether this is a name inside of the folder, and its size; earlier versions wrote [size, hash]."""
    size = file[0] if isinstance(file, list) and file else file
    return name.endswith(SUFFIXES) and all(map(is_plain_name, name.split("/"))) and is_count(size)


def _ask(repository: str) -> tuple[str, dict[str, int]]:
    """(commit, {name: size}) of the newest commit."""
    hub = hub_library().HfApi()
    try:
        commit = hub.dataset_info(repository).sha
        tree = hub.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        files = {
            file.path: file.size for file in tree if file.path.endswith(SUFFIXES) and hasattr(file, "size")
        }
    except Exception as error:
        raise UserError(
            f"{repository} could not be downloaded {why_no_download(error)}. Run the same command again to "
            "go on, or get the files elsewhere and pass --input DIR"
        ) from error
    if not files:
        raise UserError(f"{repository} holds no file that ends in {', '.join(SUFFIXES)}")
    return commit, files
