"""bench.tokenize: a run of it, and what its table says of given rates."""

import importlib.util
import json

import pytest
from support.preparation import small_bpe, write_jsonl

from bench import tokenize
from bench.tokenization import read_sample
from common.errors import UserError
from data.tokenizers import fast_encoder


def rates(*tokens_per_sec: float, cpu: float = 1.0) -> list[dict]:
    return [
        {"tokens": 10, "tokens_per_sec": rate, "cpu_tokens_per_sec": rate * cpu, "mb_per_sec": rate / 1e5}
        for rate in tokens_per_sec
    ]


RESULT = {
    "path": "x",
    "fast": True,
    "rates": {
        "library": rates(900_000, 1_000_000, 1_100_000),
        "1 worker": rates(2_000_000, 2_500_000, 2_400_000, cpu=1.25),
        "2 workers": rates(4_560_000),
    },
}


def test_the_benchmark_runs_and_saves_what_it_prints(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zstandard")
    monkeypatch.setattr(fast_encoder, "CHARACTERS", range(0x2200))
    text = write_jsonl(tmp_path / "a.jsonl", ["some words of a text " * 20] * 2000)
    out = tmp_path / "out"
    options = ["--input", text, "--tokenizer", f"small={small_bpe(tmp_path / 'bpe')}", "--output", out]
    assert tokenize.main([*map(str, options), "--repeats", "1", "--mb", "0.3"]) == 0
    saved = json.loads((out / "table.json").read_text())
    found = saved["tokenizers"]["small"]["rates"]
    peer = importlib.util.find_spec("datasets") is not None
    assert list(found) == ["library", "1 worker", "2 workers"] + ["datasets.map"] * peer
    for (rate,) in found.values():  # each encodes the same text, so a token has the same number of bytes
        bytes_per_token = 1e6 * rate["mb_per_sec"] / rate["tokens_per_sec"]
        assert bytes_per_token == pytest.approx(saved["bytes"] / found["library"][0]["tokens"], rel=0.01)
        assert rate["cpu_tokens_per_sec"] > 0
    printed = capsys.readouterr().out
    assert (out / "table.md").read_text() in printed
    assert "small, 128 cores: 6 B tokens" in printed
    assert ("datasets.map was not measured" in printed) is not peer
    assert sorted(path.name for path in out.iterdir()) == ["runs", "table.json", "table.md"]


def test_ratios_are_of_medians_to_the_library_and_to_one_worker():
    library, one, two = tokenize.table_rows("x", RESULT)
    assert library[2] == "1,000,000 (900,000 to 1,100,000)" and library[4:] == ["100", "100", ""]
    assert one[1] == "1 worker, fast encoder" and one[4:] == ["240", "300", ""]
    assert two[6] == "1.90"


def test_hours_follow_from_one_worker_and_say_that_they_are_extrapolated():
    [line] = tokenize.extrapolation("x", RESULT)
    assert "6 B tokens 19.5 s" in line and "627 B tokens 34.0 min" in line and "extrapolated" in line
    assert 627e9 / 2.4e6 / 128 / 60 == pytest.approx(34.0, abs=0.05)
    assert tokenize.extrapolation("x", {**RESULT, "rates": {}}) == []


def test_two_tokenizers_of_one_name_must_be_named_apart(tmp_path):
    path = small_bpe(tmp_path / "bpe_tokenizer")
    folder = str(path.parent)
    assert tokenize.named_paths(["gpt2", str(path)]) == {"gpt2": "gpt2", "bpe_tokenizer": str(path)}
    with pytest.raises(UserError, match="NAME=PATH"):
        tokenize.named_paths([str(path), folder])
    assert tokenize.named_paths([str(path), f"b={folder}"]) == {"bpe_tokenizer": str(path), "b": folder}


def test_a_sample_is_taken_from_every_file_and_a_bad_one_is_refused(tmp_path):
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [f"{i} " * 500] * 100) for i in range(4)]
    texts = read_sample(files, 0.02)
    assert {text[0] for text in texts} == set("0123") and 20 <= len(texts) < 40
    files[0].write_text("{}\n")
    with pytest.raises(UserError, match="line 1"):
        read_sample(files, 0.02)
