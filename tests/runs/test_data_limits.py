"""What data/slimpajama_*/prepare.py promise where something is limited: tokens, memory, disk, a record."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.corpora import make, tokens_and_meta, write_corpus
from support.helpers import HANG_S, ROOT
from support.preparation import shared, small_bpe, write_jsonl

from common.errors import UserError
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.part_writer import write_part
from data.pipeline.parts import File, Part, Settings, plan_parts
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import open_tokenizer


@pytest.fixture
def bpe(tmp_path) -> Path:
    return small_bpe(tmp_path / "bpe")


# --- tokens ---


def test_max_tokens_is_exact_and_taken_from_every_file(tmp_path, bpe):
    files = write_corpus(tmp_path / "in")
    parts, _ = plan_parts(files, Settings(256, None, 0.1, 3000, 6001), part_bytes=1)
    assert len(parts) == 6 and sum(part.max_tokens for part in parts) == 6001
    meta = make(files, tmp_path / "out", bpe, max_tokens=6001)
    assert sum(file["tokens"] for file in meta["files"].values()) == 6001
    for part in parts:
        found = [np.fromfile(path, dtype="<u2") for path in (tmp_path / "out").glob(f"*_{part.number:06d}*")]
        assert sum(map(len, found)) == part.max_tokens
        assert all(ids[-1] == 256 for ids in found)  # also the document that was cut ends

    make(files, tmp_path / "two", bpe, max_tokens=6001, workers=2)
    wanted = tokens_and_meta(tmp_path / "out")
    assert tokens_and_meta(tmp_path / "two") == wanted
    all_of_it = make(files, tmp_path / "all", bpe)
    assert make(files, tmp_path / "more", bpe, max_tokens=10**6)["files"] == all_of_it["files"]


class Sizes:
    """Files that are not there."""

    def size(self, path) -> int:
        return {".jsonl": 10**11, ".zst": 15_100_000}[Path(path).suffix]


def test_very_much_text_is_a_few_thousand_parts():
    settings = Settings(256, None, 0.1, 3000, splits="ignore")
    parts, _ = plan_parts([Path("in/a.jsonl")], settings, Sizes())  # 100 GB
    assert len(parts) == 2981 and max(part.size for part in parts) <= 32 << 20
    assert all(one.span[1] == next_one.span[0] for one, next_one in zip(parts, parts[1:], strict=False))
    slimpajama = [Path(f"in/{number}.jsonl.zst") for number in range(59_166)]  # 893 GB
    assert 4000 < len(plan_parts(slimpajama, settings, Sizes())[0]) < 4300


def part_of(*paths: Path, split: str | None = "train", max_tokens: int | None = None) -> Part:
    files = [File(str(path), path.name, split, path.stat().st_size) for path in paths]
    (paths[0].parent / "out" / "parts").mkdir(parents=True, exist_ok=True)
    return Part(0, tuple(files), max_tokens=max_tokens)


def test_of_the_files_of_a_part_each_gives_its_share_and_a_document_is_only_cut_where_it_is_much_more(
    tmp_path, bpe
):
    """A file of many documents gives whole ones; of long texts, each is cut."""
    lines = [write_jsonl(tmp_path / f"{n}.jsonl", [f"{n}" * 99] * 90) for n in range(3)]
    small = [tmp_path / f"{n}.txt" for n in range(300)]
    for n, path in enumerate(small):
        path.write_text(f"{n % 10}" * 999)
    books = [tmp_path / f"book{n}.txt" for n in range(3)]
    for n, path in enumerate(books):
        path.write_text(f"{n}" * 90_000)
    for paths, most, wanted in (
        (lines, 3000, {"0": (990, 1089), "1": (990, 1089), "2": (800, 1089)}),
        (books, 9000, {"0": (3000, 3035), "1": (2960, 3035), "2": (2900, 3035)}),
        (small, 270_000, {}),
    ):
        part, settings = part_of(*paths, max_tokens=most), Settings(256, None, 0.1, 10**6)
        manifest = write_part(part, tmp_path / "out", FileTokenizer(bpe), settings, 0)
        ids = np.fromfile(tmp_path / "out" / "train_000000.bin", "<u2")
        text = FileTokenizer(bpe).decode(ids.tolist())
        assert len(ids) == most and ids[-1] == 256
        for char, (least, largest) in wanted.items():
            assert least <= text.count(char) <= largest, (char, text.count(char))
    assert 268 < manifest["documents"] < 272  # whole ones


@pytest.mark.parametrize(
    ("share", "text"),
    {1: "|", 2: "a|", 4: "abc|", 5: "abc||", 7: "abc|de|", 8: "abc|def|", 9: "abc|def|"}.items(),
)
def test_a_share_of_one_token_is_an_end_of_text(tmp_path, bpe, share, text):
    part, told = part_of(write_jsonl(tmp_path / "a.jsonl", ["abc", "def"]), max_tokens=share), []
    settings = Settings(256, None, 0.1, 3000)
    count = lambda *counts: told.append(counts)  # noqa: E731
    manifest = write_part(part, tmp_path / "out", FileTokenizer(bpe), settings, 0, count)
    ids = np.fromfile(tmp_path / "out" / "train_000000.bin", dtype="<u2")
    assert np.sum(told, axis=0).tolist() == [manifest["documents"], len(ids)]
    assert FileTokenizer(bpe).decode(ids).replace("<|endoftext|>", "|") == text


# --- memory ---

PEAK = """
import sys
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
def grown(work):
    work(sys.argv[1])  # libraries and buffers
    before = peak()
    work(sys.argv[2])
    print(peak() - before)
"""


def peak_growth(script: str, *arguments) -> float:
    """MiB that `script`'s work(path) adds for the second path, after the first."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to measure memory")
    command = [sys.executable, "-c", PEAK + script + "\ngrown(work)", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.splitlines()[-1])


def test_a_huge_document_takes_no_memory_of_its_size(tmp_path, bpe):
    pytest.importorskip("fastokens", reason="needs fastokens, to read 44 MB in seconds")
    (tmp_path / "small.txt").write_text("some words " * 100_000)
    (tmp_path / "large.txt").write_text("some words " * 4_000_000)  # 44 MB in one line
    script = """
from pathlib import Path
from data.pipeline import document_pieces, part_documents, part_writer, parts
from data.tokenizers.file_tokenizer import FileTokenizer, use_fastokens
document_pieces.PIECE_CHARS = part_documents.PIECE_CHARS = 1 << 17
tokenizer = FileTokenizer(sys.argv[3])
use_fastokens(tokenizer)
folder = Path(sys.argv[1]).parent / "out"
(folder / "parts").mkdir(parents=True)
def work(path):
    part = parts.Part(0, (parts.File(path, "a.txt", "train", 1),))
    part_writer.write_part(part, folder, tokenizer, parts.Settings(256, None, 0.1, 1 << 30), 0)
"""
    assert peak_growth(script, tmp_path / "small.txt", tmp_path / "large.txt", bpe) < 16


def test_a_huge_row_group_takes_no_memory_of_its_size(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rng = np.random.default_rng(0)
    rows = [rng.bytes(4096).hex() for _ in range(8000)]  # 65 MB that do not compress to nothing
    parquet.write_table(pyarrow.table({"text": rows[:64]}), tmp_path / "small.parquet")
    options = {"row_group_size": 8000, "write_batch_size": 16}  # small pages in one large group
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "large.parquet", **options)
    script = """
from pathlib import Path
from data.pipeline.documents import read_records
def work(path):
    for _ in read_records(Path(path)):
        pass
"""
    assert peak_growth(script, tmp_path / "small.parquet", tmp_path / "large.parquet") < 20


# --- the disk ---


def write_uneven_corpus(folder: Path) -> list[Path]:
    folder.mkdir()
    return [
        write_jsonl(folder / f"{i}.jsonl", [f"{i}.{line:03} " + "word " * 19 for line in range(lines)])
        for i, lines in enumerate([20, 20, 900, 20])
    ]


def test_a_disk_that_takes_no_more_leaves_what_was_complete(tmp_path, bpe, monkeypatch):
    files = write_uneven_corpus(tmp_path / "in")
    make(files, tmp_path / "whole", bpe, shard_tokens=1 << 20)
    out, limit = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limit[1]))  # a worker's write() fails, really
    try:
        with pytest.raises(UserError, match="File too large.*what was complete is kept"):
            make(files, out, bpe, shard_tokens=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name for path in out.glob("parts/*")} >= {"000000.json", "000001.json"}
    assert not list(out.glob("*_000002*")) and not (out / "meta.json").exists()
    make(files, out, bpe, shard_tokens=1 << 20)
    assert tokens_and_meta(out) == tokens_and_meta(tmp_path / "whole")


def test_a_disk_that_is_much_too_small_is_refused_before_work_starts(tmp_path, bpe, monkeypatch, capsys):
    files, usage = write_corpus(tmp_path / "in", lines=400), shutil.disk_usage(tmp_path)
    needed = 2 * sum(path.stat().st_size for path in files) / 4  # of uint16, one for four bytes

    def disk_with(free: float):
        monkeypatch.setattr(
            "data.pipeline.preparation.shutil.disk_usage", lambda path: usage._replace(free=int(free))
        )

    disk_with(needed / 3.1)
    with pytest.raises(UserError, match="will take about .* GB free; make room"):
        make(files, tmp_path / "small", bpe)
    assert not list((tmp_path / "small").glob("*.bin"))
    make(files, tmp_path / "small", bpe, max_tokens=int(needed / 5), resume=False)  # what fits is made
    for share, warns in ((2.9, True), (0.6, True), (0.4, False)):
        disk_with(needed / share)
        capsys.readouterr()
        make(files, tmp_path / str(share), bpe)
        assert ("warning: the token files will take" in capsys.readouterr().out) == warns


# --- records ---


def write_parquet(path: Path, column: list | object, name="text", **options) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({name: column}), path, **options)
    return path


@pytest.mark.parametrize("kind", ["string", "binary", "large_string", "large_binary"])
def test_the_rows_of_a_parquet_file_are_documents_also_of_bytes(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    path, kind = tmp_path / "a.parquet", getattr(pyarrow, kind)()
    assert list(read_records(write_parquet(path, pyarrow.array([], kind)))) == []
    texts = pyarrow.array(["naïve", None, "日本"]).cast(kind)
    for values in (texts, texts.dictionary_encode()):
        records = [record for _, record in read_records(write_parquet(path, values))]
        assert records[0::2] == [["naïve"], ["日本"]] and "row 2 has no text" in str(records[1])
    path.write_bytes(path.read_bytes()[:50])
    [(_, damaged)] = read_records(path)
    assert "is damaged" in str(damaged)


def test_a_column_of_another_type_is_named_and_only_columns_that_can_be_read_are_advised(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    nested = pyarrow.array([["a", "b"], ["c"]])
    write_parquet(path, nested)
    with pytest.raises(UserError, match=r"the column 'text' of .* holds list<.*string>, not text$"):
        list(read_records(path))
    table = {"text": nested, "more": pyarrow.array([{"text": "a"}, {"text": "b"}]), "body": ["x", "y"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    with pytest.raises(UserError, match="not text; use --text_key=body"):
        list(read_records(path))
    assert [record for _, record in read_records(path, text_key="body")] == [["x"], ["y"]]
    with pytest.raises(UserError, match="no column 'more.text' .* it has: text, more, body; use"):
        list(read_records(path, text_key="more.text"))


def test_damage_in_a_parquet_file_takes_no_good_rows_with_it(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i} " + "x" * i for i in range(600)]
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    path = write_parquet(
        tmp_path / "a.parquet", rows, row_group_size=200, data_page_size=2000, write_batch_size=10, **options
    )
    group = parquet.read_metadata(path).row_group(1).column(0)
    content, middle = bytearray(path.read_bytes()), group.data_page_offset + group.total_compressed_size // 2
    content[middle : middle + 100] = bytes(100)
    path.write_bytes(content)
    records = list(read_records(path))
    assert [number for number, _ in records] == list(range(1, 601))
    bad = [number for number, record in records if isinstance(record, BadRecord)]
    # one for each row that is lost: the rest of the row group, from the page with the damage on
    assert bad == list(range(bad[0], 401)) and 201 < bad[0] < 400
    assert all(record == [rows[number - 1]] for number, record in records if number not in bad)
    message = str(dict(records)[bad[0]])
    assert message.startswith(f"{path}, row {bad[0]} cannot be read, as this part of the file is damaged")


def test_one_bad_row_of_a_parquet_file_is_one_bad_record(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr("data.pipeline.documents.LINE_BYTES", 1000)
    values = pyarrow.array([b"a", b"\xff", b"x" * 2000, b"d"]).view(pyarrow.string())
    path = write_parquet(tmp_path / "a.parquet", values.dictionary_encode())
    records = [record for _, record in read_records(path)]
    assert [records[0], records[3]] == [["a"], ["d"]]
    assert all(isinstance(record, BadRecord) for record in records[1:3])
    with pytest.raises(UserError, match=r"no column .text. in .*; it has: body; use --text_key=body"):
        list(read_records(write_parquet(path, ["a"], "body")))


def test_a_disk_that_fails_to_read_is_no_bad_record(tmp_path, monkeypatch):
    class Broken:
        def readline(self, size):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("data.pipeline.documents.open_decompressed", lambda raw, codec: Broken())
    with pytest.raises(OSError, match="Input/output"):
        list(read_records(write_jsonl(tmp_path / "a.jsonl", ["a"])))


@pytest.mark.parametrize("kind", ["lines", "files"])
def test_a_text_that_the_library_cannot_encode_is_one_bad_record(tmp_path, bpe, kind):
    class Fails(FileTokenizer):
        def encode_arrays(self, texts):
            if any("overflow" in text for text in texts):
                raise EncodeError("it overflows")
            return super().encode_arrays(texts)

    texts = ["abc", "some words " * 200_000 + "overflow", "def"]
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    if kind == "lines":
        paths = [write_jsonl(tmp_path / "a.jsonl", texts)]
    record = write_part(part_of(*paths), tmp_path / "out", Fails(bpe), Settings(256, None, 0.1, 3000), 1)
    assert (record["documents"], record["bad"]) == (2, 1)
    place = f"{paths[0]}, record 2" if kind == "lines" else f"{paths[1]}, record 1"
    assert record["bad_records"] == [f"{place}: it overflows"]
    ids = np.fromfile(tmp_path / "out" / "train_000000.bin", dtype="<u2").tolist()
    assert FileTokenizer(bpe).decode(ids) == "abc<|endoftext|>def<|endoftext|>"


def test_a_part_of_nothing_but_bad_records_is_not_read_to_its_end(tmp_path, bpe):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 3}\n' * 1000)
    part, settings = part_of(path), Settings(256, None, 0.1, 3000)
    with pytest.raises(UserError, match="more than --max_bad=5 bad records, such as: .* line 26 is not"):
        write_part(part, tmp_path / "out", FileTokenizer(bpe), settings, 5)
    assert write_part(part, tmp_path / "out", FileTokenizer(bpe), settings, 980)["bad"] == 1000


def test_a_million_blank_lines_are_a_bad_record_for_tiktoken(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    with pytest.raises(EncodeError, match="cannot encode it .* tokenizer.json with the same ids can"):
        open_tokenizer("gpt2").encode_arrays(["\n" * 1_200_000 + "x"])
