"""What data/pipeline/hub.py promises of downloads, against a hub of our own on this machine: as much of the
hub's protocol as the client library speaks, and connections that stop in the middle."""

import errno
import hashlib
import json
import shutil
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import warm_python
from support.helpers import HANG_S, ROOT
from support.preparation import ENVIRONMENT, prepare_command, run_prepare, shared, small_bpe, write_jsonl

from common.errors import UserError
from data.pipeline.hub import Hub, open_hub
from data.tokenizers.choice import open_or_download_tokenizer
from data.tokenizers.families import FAMILIES, open_family

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "c0ffee" + "0" * 34
NAME = "DKYoon/SlimPajama-6B"


class FakeHub(ThreadingHTTPServer):
    """Serves the files of a folder as one data set. `log` has the name and first byte of every download;
    `troubles`, "cut" or "stall", befall those of the large file, one each, after 15 MB."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.log, self.troubles = folder, [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.server_port}"
        home = str(self.folder.parent / "hf_home")
        hub = {"HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        return {**ENVIRONMENT, **hub}

    def names(self) -> list[str]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == f"/api/datasets/{NAME}":
            self.send_json({"id": NAME, "sha": COMMIT})
        elif path == f"/api/datasets/{NAME}/tree/{COMMIT}":
            self.send_json([self.describe(name) for name in self.server.names()])
        elif path.startswith(start := f"/datasets/{NAME}/resolve/{COMMIT}/"):
            self.send_file(path.removeprefix(start))
        else:
            self.send_error(404)

    def describe(self, name: str) -> dict:
        content = (self.server.folder / name).read_bytes()
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}

    def send_json(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, name: str):
        content = (self.server.folder / name).read_bytes()
        wanted = self.headers.get("Range")
        first = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.log.append((name, first))
        if len(content) < 15_000_000 or not self.server.troubles:
            self.wfile.write(content[first:])
            return
        trouble = self.server.troubles.pop(0)
        self.wfile.write(content[first:15_000_000])
        self.wfile.flush()
        if trouble == "stall":
            time.sleep(30)  # the client is killed before that
        self.close_connection = True

    def log_message(self, *arguments):
        pass


def fill(folder: Path):
    """Five train files and one each of the other splits; the first holds 24 MB of nothing, to be cut in."""
    for split, count in (("train", 5), ("validation", 1), ("test", 1)):
        (folder / split).mkdir(parents=True)
        for i in range(count):
            write_jsonl(folder / split / f"{i}.jsonl", [f"{split} {i}, {j}" for j in range(20)])
    (folder / "README.md").write_text("not text to train on")
    first = folder / "train" / "0.jsonl"
    first.write_text((" " * 1_000_000 + "\n") * 24 + first.read_text())


@pytest.fixture
def hub(tmp_path):
    fill(tmp_path / "hub")
    shared("tiktoken_cache")
    server = FakeHub(tmp_path / "hub")
    yield server
    server.shutdown()
    server.server_close()


def prepare(*arguments, env=ENVIRONMENT) -> subprocess.CompletedProcess:
    return run_prepare("slimpajama_6b_gpt2", *arguments, env=env, part_bytes=1000)


def tokens(folder: Path) -> list[bytes]:
    """Of each split, in the order of training; the parts differ, as downloads are not divided."""
    names = sorted(json.loads((folder / "meta.json").read_text())["files"])
    splits = [[name for name in names if name.startswith(split)] for split in ("train", "val")]
    return [b"".join((folder / name).read_bytes() for name in split) for split in splits]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> list[bytes]:
    """The token files as they are when the files are on disk already."""
    folder = tmp_path_factory.mktemp("local")
    fill(folder / "hub")
    shared("tiktoken_cache")
    out = folder / "out"
    assert prepare("--input", folder / "hub", "--output", out).returncode == 0
    return tokens(out)


@pytest.mark.slow
def test_a_cut_download_goes_on_in_the_middle_and_a_killed_run_with_what_is_missing(hub, wanted, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    arguments = ["--text", text, "--output", out, "--workers", "2"]
    command = prepare_command("slimpajama_6b_gpt2", *arguments, part_bytes=1000)
    hub.troubles = ["cut", "stall"]
    process = warm_python.Popen(
        command, cwd=ROOT, env=hub.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + HANG_S
    while len(hub.log) < 7 or len(list(out.glob("parts/*.json"))) < 1:  # of 2: all but the large file's
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut, resumed = [first for name, first in hub.log if name == "train/0.jsonl"]
    assert cut == 0 and resumed >= 10_000_000  # the library writes blocks of 10 MB
    names = [name for name, _ in hub.log if name != "train/0.jsonl"]
    assert len(names) == len(set(names)) == 5 and "test/0.jsonl" not in names

    hub.log.clear()
    result = prepare(*arguments, env=hub.environment)
    assert result.returncode == 0, result.stderr
    assert hub.log == [("train/0.jsonl", 0)]
    assert tokens(out) == wanted
    assert COMMIT in json.loads((out / "meta.json").read_text())["source"]

    hub.log.clear()
    env = {**hub.environment, "HF_HUB_OFFLINE": "1"}  # the text is here, and nothing is asked of the hub
    assert prepare(*arguments, "--no-resume", env=env).returncode == 0
    assert hub.log == [] and tokens(out) == wanted


# --- one file ---


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A Hub of one file, and the list of what hf_hub_download does next: an error to raise, or a content."""
    (tmp_path / "source.jsonl").write_text("right")
    listing = {"a.jsonl": 5}
    acts = []

    def download(repository, name, repo_type, revision, local_dir):
        assert (repository, repo_type, revision) == ("o/n", "dataset", COMMIT)
        act = acts.pop(0)
        if isinstance(act, Exception):
            raise act
        Path(local_dir).mkdir(exist_ok=True)
        (Path(local_dir) / name).write_text(act)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # tests of models set it
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("data.pipeline.hub.time.sleep", lambda seconds: None)
    return Hub("o/n", COMMIT, listing, tmp_path / "text", keep=True), acts


def test_a_file_is_fetched_once_and_again_if_it_was_damaged(files):
    hub, acts = files
    path = str(hub.paths()[0])
    acts += [OSError("connection reset"), "right"]
    hub.fetch([path])
    hub.fetch([path])
    assert acts == [] and Path(path).read_text() == "right"
    Path(path).write_text("cut")
    acts += ["right"]
    hub.fetch([path])
    assert Path(path).read_text() == "right"


@pytest.mark.parametrize(
    ("answers", "left", "error", "message"),
    [
        (["longer"], 0, UserError, "a.jsonl has not the listed size .hub.json"),
        ([TimeoutError("no answer")] * 6, 0, ConnectionError, "a.jsonl of o/n could not be downloaded .Time"),
        ([OSError(errno.ENOSPC, "No space left on device"), "right"], 1, OSError, "No space"),
    ],
    ids=["another file", "no answer", "full disk"],
)
def test_what_cannot_be_downloaded_ends_the_run_and_a_full_disk_at_once(files, answers, left, error, message):
    hub, acts = files
    acts += answers
    with pytest.raises(error, match=message):
        hub.fetch([str(hub.paths()[0])])
    assert len(acts) == left


def test_a_listing_is_kept_and_one_of_another_data_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data.pipeline.hub._ask", lambda repository: (COMMIT, {"a.jsonl": 5}))
    first = open_hub("o/n", tmp_path / "text", tmp_path / "hub.json", keep=True)
    monkeypatch.setattr("data.pipeline.hub._ask", None)
    assert open_hub("o/n", tmp_path / "text", tmp_path / "hub.json", keep=True) == first
    with pytest.raises(UserError, match="is of o/n, not of o/other"):
        open_hub("o/other", tmp_path / "text", tmp_path / "hub.json", keep=True)


# --- tokenizers of the hub ---


def cache_tokenizer(folder: Path, repository: str, source: Path):
    """The hub library's cache with a repository of the one file in it."""
    home = folder / f"models--{repository.replace('/', '--')}"
    (home / "snapshots" / COMMIT).mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    shutil.copy(source, home / "blobs" / "abc")
    (home / "snapshots" / COMMIT / source.name).symlink_to("../../blobs/abc")


def test_a_tokenizer_of_the_hub_is_taken_from_its_cache_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache_tokenizer(tmp_path / "cache", "owner/small", small_bpe(tmp_path / "bpe"))
    tokenizer = open_or_download_tokenizer("hf:owner/small")
    assert tokenizer.meta["name"] == "owner/small"
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"

    cache_tokenizer(tmp_path / "cache", "owner/qwen", shared("tokenizers/hf/qwen3/tokenizer.json"))
    assert open_family(FAMILIES["qwen3"], "hf:owner/qwen").vocab_size == 151669
    with pytest.raises(UserError, match="owner/absent could not be downloaded"):
        open_or_download_tokenizer("hf:owner/absent")


def test_a_gated_tokenizer_says_where_its_licence_is_and_how_to_log_in(monkeypatch):
    def refuse(repository, allow_patterns):
        raise OSError("401 Client Error. Cannot access gated repo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError) as caught:
        open_family(FAMILIES["llama3"], "hf:meta-llama/Meta-Llama-3-8B")
    message = str(caught.value)
    parts = ("https://huggingface.co/meta-llama/Meta-Llama-3-8B", "hf auth login", "./llama3_tokenizer")
    assert all(part in message for part in parts)
