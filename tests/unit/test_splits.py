"""Which documents are for validation: never those that train, whatever files there are."""

import gzip
import json
import os
from pathlib import Path

import pytest
from support.preparation import read_texts, run_parts_here, small_bpe, write_jsonl

from common.errors import UserError
from data.pipeline import documents, parts
from data.pipeline.documents import BadRecord, hash_document, read_records
from data.pipeline.input_files import find_input
from data.pipeline.meta_file import read_meta
from data.pipeline.parts import Settings, plan_parts
from data.pipeline.preparation import prepare
from data.pipeline.splits import named_split
from data.pipeline.workers import Job
from data.text import prepare as text_prepare
from data.tokenizers.file_tokenizer import FileTokenizer


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Parts are made in this process; commands are printed for a CPU."""
    monkeypatch.setattr("data.pipeline.preparation.run_parts", run_parts_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    return small_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def make(tmp_path, bpe, monkeypatch, capsys):
    """make(input, *flags): (train, val) as texts, and what the command printed."""

    def make(folder: Path, *flags, out: str = "out") -> tuple[list[str], list[str], str]:
        arguments = ["--input", folder, "--tokenizer", bpe, "--output", tmp_path / out, *flags]
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, arguments)])
        capsys.readouterr()
        text_prepare.main()
        printed = capsys.readouterr().out
        return read_texts(tmp_path / out, "train"), read_texts(tmp_path / out, "val"), printed

    return make


def rows(name: str, count: int = 20) -> list[str]:
    return [f"{name} {i}" for i in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=7)
    else:
        write_jsonl(path, texts)
    return path


# --- names ---

NAMED = {
    "train": ["train.jsonl", "training/a.jsonl", "en-train.00000-of-01024.jsonl.gz", "TRAIN_2.parquet"],
    "val": [
        *("validation-00000-of-00002.parquet", "val.jsonl.zst", "valid/x.parquet", "dev-clean.jsonl"),
        *("my-validation.jsonl", "corpus.eval.jsonl", "validation/chunk1/example_holdout_0.jsonl.zst"),
        *("train-dev.jsonl", "a/val_data/b.parquet"),
    ],
    "test": ["test.jsonl", "a.test-00001.parquet", "heldout.jsonl", "held_out/a.jsonl", "testing3.jsonl"],
    None: [
        *("latest.jsonl", "contest.jsonl", "interval/a.jsonl", "trains.jsonl", "devanagari.parquet"),
        *("my-test-data.jsonl", "train.txt", "val/notes.md", "test/test_all.py"),
    ],
}


@pytest.mark.parametrize("split, name", [(split, name) for split in NAMED for name in NAMED[split]])
def test_the_name_of_a_file_of_many_documents_says_its_split(split, name):
    assert named_split(name) == split


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["{}.{}", "{}/a.{}", "my-{}.{}", "{}-00000-of-00001.{}"])
@pytest.mark.parametrize("val", ["val", "dev"])
def test_files_for_validation_validate_and_those_for_tests_are_left_out(tmp_path, make, suffix, name, val):
    for split in ("train", val, "test"):
        write(tmp_path / "in" / name.format(split, suffix), rows(split))
    train, held_out, printed = make(tmp_path / "in")
    assert (train, held_out) == (rows("train"), rows(val))
    assert list(read_meta(tmp_path / "out")["files"]) == ["train.bin", "val.bin"]  # of one part
    assert "left out 1 (the test split, by their names" in printed and name.format("test", suffix) in printed
    assert f"for validation 1 (named so): {name.format(val, suffix)}\n" in printed


@pytest.mark.parametrize("names", [["corpus", "my-validation"], ["train", "books"], ["val", "test"]])
def test_names_that_leave_open_what_trains_are_refused_until_told_to_ignore_them(tmp_path, make, names):
    for name in names:
        write(tmp_path / "in" / f"{name}.jsonl", rows(name))
    with pytest.raises(UserError, match=rf"{names[1]}\.jsonl.*--splits=ignore"):
        make(tmp_path / "in")
    assert not (tmp_path / "out").exists()
    train, held_out, _ = make(tmp_path / "in", "--splits=ignore")
    assert sorted(train + held_out) == sorted(rows(names[0]) + rows(names[1]))
    with pytest.raises(UserError, match="do not say"):  # nor is it continued by names
        make(tmp_path / "in")


@pytest.mark.parametrize(
    "names", [["train-0", "train-1", "train-2"], ["val-0", "val-1", "val-2"], ["train", "test"]]
)
def test_files_that_are_all_named_alike_but_for_those_of_tests_give_both_splits(tmp_path, make, names):
    for name in names:
        write(tmp_path / "in" / f"{name}.jsonl", rows(name, 40))
    used = [row for name in names for row in rows(name, 40) if name != "test"]
    train, held_out, printed = make(tmp_path / "in", "--val_fraction=0.2")
    assert sorted(train + held_out) == sorted(used) and 2 < len(held_out) < 40
    assert ("left out 1 (the test split" in printed) == ("test" in names)


def test_of_single_documents_names_say_nothing_and_the_split_of_each_is_printed(tmp_path, make):
    (tmp_path / "in").mkdir()
    documents = {name: f"text of {name}" for name in ("train.txt", "val.txt", "test.md", "c.txt")}
    for name, text in documents.items():
        (tmp_path / "in" / name).write_text(text)
    train, held_out, printed = make(tmp_path / "in", "--val_fraction=0.4")
    assert sorted(train + held_out) == sorted(documents.values())
    names = ", ".join(sorted(text.removeprefix("text of ") for text in held_out))
    counts = f"{len(train)} documents are for training, {len(held_out)} for validation"
    assert f"for validation {len(held_out)} (by the hash of their text; {counts}): {names}\n" in printed


def test_the_documents_of_each_split_are_counted_whatever_files_they_are_in(tmp_path, make):
    write(tmp_path / "in" / "a.jsonl", [*rows("row", 30), ""])
    for number in range(20):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}")
    train, held_out, printed = make(tmp_path / "in", "--val_fraction=0.4")
    files = [text for text in held_out if text.startswith("text")]
    assert len(train + held_out) == 50 and 0 < len(files) < len(held_out) < 40
    counts = f"{len(train)} documents are for training, {len(held_out)} for validation"
    assert f"for validation {len(files)} (by the hash of their text; {counts}): " in printed


def test_an_only_document_is_cut_and_so_not_counted_for_validation(tmp_path, make):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one text of an only file")
    printed = make(tmp_path / "in", "--val_fraction=0.99")[2]  # by its hash, all of it
    assert "so its end is for validation" in printed and "by the hash" not in printed


@pytest.mark.parametrize("long", ["train", "val"])
def test_a_long_document_that_gives_validation_more_than_a_fifth_is_warned_of(tmp_path, make, long):
    held_out = set(make(write(tmp_path / "in" / "a.jsonl", rows("x", 60)), "--val_fraction=0.1")[1])
    grown = next(
        n for n in range(10**6) if (hash_document("", [f"{n} " * 90]) < 2**64 / 10) == (long == "val")
    )
    write(tmp_path / "in" / "a.jsonl", [*rows("x", 60), f"{grown} " * 90])
    train, val, printed = make(tmp_path / "in" / "a.jsonl", "--val_fraction=0.1", out="grown")
    assert held_out == {text for text in val if text.startswith("x")}
    sizes = [sum(len(text) + 1 for text in split) for split in (train, val)]
    warning = f"warning: {100 * sizes[1] / sum(sizes):.0f} % of the tokens are for validation, although --val"
    assert (warning in printed) == (long == "val") == ("warning" in printed)
    asked = make(tmp_path / "in" / "a.jsonl", "--val_fraction=0.7", out="asked")[2]
    assert "warning" not in asked  # for more than a fifth


def test_text_that_is_in_training_and_in_validation_files_is_counted(tmp_path, make):
    for number in range(4):
        write(tmp_path / "in" / f"train-{number}.jsonl", rows(f"train{number}"))
        copied = [f"train{number} 3", "train0 4"]
        write(tmp_path / "in" / f"val-{number}.jsonl", rows(f"val{number}", 7) + copied)
    _, held_out, printed = make(tmp_path / "in")
    assert len(held_out) == 36 and "8 of 36 validation documents are training documents, too" in printed
    for number in range(4):
        write(tmp_path / "in" / f"val-{number}.jsonl", rows(f"val{number}", 7))
    assert "training documents, too" not in make(tmp_path / "in", out="clean")[2]


# --- the hash of the text ---


def test_other_files_names_order_and_kinds_move_no_document_and_copies_stay_together(tmp_path, make):
    found = []
    for name, files in {
        "one": {"a.jsonl": rows("x", 900)},
        "added": {"new/a.jsonl": rows("y", 500), "z.jsonl": rows("x", 900), "zz.jsonl": rows("w", 50)},
        "twice": {"a.jsonl": rows("x", 900) + rows("x", 450), "b.jsonl": rows("x", 300)},
        "columns": {"a.parquet": rows("x", 900)},
    }.items():
        for file, lines in files.items():
            write(tmp_path / name / file, lines)
        train, held_out, _ = make(tmp_path / name, "--val_fraction=0.1", out=f"out-{name}")
        assert not set(train) & set(held_out)
        found.append({text for text in held_out if text.startswith("x")})
    assert found[0] == found[1] == found[2] == found[3] and 60 < len(found[0]) < 120
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(rows("x", 60)):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    held_out = make(tmp_path / "texts", "--val_fraction=0.1", out="out-texts")[1]
    assert set(held_out) == found[0] & set(rows("x", 60)) != set()


# --- plans of older versions ---


def test_what_an_older_version_began_by_another_rule_is_refused_and_not_changed(tmp_path, make):
    path, plan = write(tmp_path / "in" / "a.jsonl", rows("a", 60)), tmp_path / "out" / "plan.json"
    make(path, "--val_fraction=0.2")
    record = json.loads(plan.read_text())
    assert record.pop("version") == 2  # older ones, with other rules and files, said nothing
    plan.write_text(json.dumps(record))
    before = {path.name: path.read_bytes() for path in plan.parent.glob("*.*")}
    with pytest.raises(UserError, match="begun with another version of this program.* trains as is"):
        make(path, "--val_fraction=0.2")
    assert before == {path.name: path.read_bytes() for path in plan.parent.glob("*.*")}


# --- large files ---


def spans(size: int, count: int) -> list[tuple[int, int]]:
    return [(size * k // count, size * (k + 1) // count) for k in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 400])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_the_parts_of_a_file_of_lines_hold_each_line_once(tmp_path, count, end, monkeypatch):
    monkeypatch.setattr(documents, "LINE_BYTES", 64)
    lines = [json.dumps({"text": "日本" * (i % 5)}, ensure_ascii=False) for i in range(30)]
    lines[4], lines[11], lines[20] = '{"text": "' + "x" * 500 + '"}', "", "no record"
    path = tmp_path / "a.jsonl"
    path.write_bytes((end or "\n").join(lines).encode() + end.encode())

    def read(span=None) -> list:
        return [None if isinstance(r, BadRecord) else r for _, r in read_records(path, span=span)]

    assert [r for span in spans(path.stat().st_size, count) for r in read(span)] == read()
    bad = [str(r) for span in spans(path.stat().st_size, count) for _, r in read_records(path, span=span)]
    place = path.read_bytes().index(b"no record")
    assert sum(f"a.jsonl, byte {place:,} is not a JSON object" in r for r in bad) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_the_parts_of_a_parquet_file_hold_each_row_once(tmp_path, count):
    path = write(tmp_path / "a.parquet", rows("row", 100))  # in 15 row groups
    divided = spans(path.stat().st_size, count)
    found = [record for span in divided for record in read_records(path, span=span)]
    assert found == list(read_records(path)) and found[41] == (42, ["row 41"])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_large_file_is_divided_and_its_bytes_depend_on_nothing_else(tmp_path, bpe, suffix, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 400)
    path = write(tmp_path / f"a.{suffix}", rows("a document with some text", 200))
    arguments = (FileTokenizer(bpe), Settings(256, None, 0.2, 100), "test")

    def contents(name: str) -> dict:
        paths = [*(tmp_path / name).rglob("[!.]*.bin"), *(tmp_path / name).rglob("[!.]*.json")]
        return {path.name: path.read_bytes() for path in paths}

    prepare([path], tmp_path / "one", *arguments, Job())
    planned, _ = plan_parts([path], arguments[1])
    assert len(planned) > 4 and all(part.text_size <= 400 + 3 for part in planned)
    prepare([path], tmp_path / "two", *arguments, Job(workers=2))
    assert contents("two") == contents("one")
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)
    prepare([path], tmp_path / "whole", *arguments, Job())
    for split in ("train", "val"):
        assert read_texts(tmp_path / "whole", split) == read_texts(tmp_path / "one", split)
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    with pytest.raises(UserError, match="begun with another input"):
        prepare([path], tmp_path / "one", *arguments, Job())


def test_max_tokens_are_shared_by_the_parts_of_a_file(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 400)
    path = write(tmp_path / "a.jsonl", [f"{i} is the number of a document" for i in range(200)])
    settings = Settings(256, None, 0.2, 10**6, max_tokens=999)
    meta = prepare([path], tmp_path / "out", FileTokenizer(bpe), settings, "", Job())
    assert sum(file["tokens"] for file in meta["files"].values()) == 999


def test_a_compressed_file_is_not_divided(tmp_path, make, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 400)
    (tmp_path / "in").mkdir()
    lines = [os.urandom(40).hex() for _ in range(50)]
    content = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in lines)
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(content))
    train, held_out, _ = make(tmp_path / "in", "--val_fraction=0.2")
    assert sorted(train + held_out) == sorted(lines) and (tmp_path / "out" / "train.bin").exists()


# --- copies ---


def test_links_and_compressed_forms_of_files_of_records_are_left_out_and_listed(tmp_path):
    folder = tmp_path / "in"
    a = write(folder / "corpus.jsonl", rows("a"))
    write(folder / "p.parquet", rows("a"))  # the same text in another form is not looked for
    for suffix in (".gz", ".zst"):
        a.with_name(a.name + suffix).write_bytes(gzip.compress(a.read_bytes()))
    (folder / "link.jsonl").symlink_to(a)
    os.link(a, folder / "hard.jsonl")
    (folder / "other").mkdir()
    (folder / "other" / "corpus.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))  # of another folder
    files, left_out = find_input([str(folder)])
    read = ["corpus.jsonl", "other/corpus.jsonl.gz", "p.parquet"]
    assert [str(path.relative_to(folder)) for path in files] == read
    assert {path.name for path in left_out} == {
        *("corpus.jsonl.gz", "corpus.jsonl.zst", "hard.jsonl", "link.jsonl")
    }
    assert set(left_out.values()) == {"copy of another file"}
    files, _ = find_input([str(folder / "*.gz"), str(folder / "corpus*")])
    assert [path.name for path in files] == ["corpus.jsonl.gz"]  # the first that is named
