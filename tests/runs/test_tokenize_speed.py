"""bench.tokenize: a run of it, and what its table says of given rates."""

import json

import pytest
from support.preparation import small_bpe, write_jsonl

from bench import tokenize
from common.errors import UserError
from data.tokenizers import fast_encoder


@pytest.mark.slow
def test_the_benchmark_runs_and_saves_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fast_encoder, "CHARACTERS", range(0x2200))
    text = write_jsonl(tmp_path / "a.jsonl", ["some words of a text " * 20] * 2000)
    out = tmp_path / "out"
    options = ["--input", text, "--tokenizer", f"small={small_bpe(tmp_path / 'bpe')}", "--output", out]
    assert tokenize.main([*map(str, options), "--repeats", "2", "--mb", "0.3"]) == 0
    found = json.loads((out / "table.json").read_text())["tokenizers"]["small"]
    assert list(found["rates"]) == ["library", "1 worker", "2 workers"] and found["tokens"] > 10_000
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found["rates"].values())
    assert (out / "table.md").read_text() in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["runs", "table.json", "table.md"]


def test_ratios_are_of_medians_to_the_library_and_hours_follow_from_the_rate():
    rates = {"library": [9e5, 1e6, 1.1e6], "1 worker": [2e6, 2.5e6, 2.4e6], "2 workers": [4.56e6]}
    result = {"fast": True, "tokens": 1_000_000, "rates": rates}
    library, one, two = tokenize.table_rows("x", result, size=4_000_000)
    assert library == ["x", "library", "1,000,000 (900,000 to 1,100,000)", "4.00", "100", "174"]
    assert one[1] == "1 worker, fast encoder" and one[4:] == ["240", "73"]
    assert two[3:] == ["18.24", "456", "38"]


def test_two_tokenizers_of_one_name_must_be_named_apart(tmp_path):
    path = small_bpe(tmp_path / "bpe_tokenizer")
    folder = str(path.parent)
    assert tokenize.named_paths(["gpt2", str(path)]) == {"gpt2": "gpt2", "bpe_tokenizer": str(path)}
    with pytest.raises(UserError, match="NAME=PATH"):
        tokenize.named_paths([str(path), folder])
    assert tokenize.named_paths([str(path), f"b={folder}"]) == {"bpe_tokenizer": str(path), "b": folder}


def test_a_sample_is_taken_from_every_file_and_a_bad_one_is_refused(tmp_path):
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [f"{i} " * 500] * 100) for i in range(4)]
    texts = tokenize.read_sample(files, 0.02)
    assert {text[0] for text in texts} == set("0123") and 20 <= len(texts) < 40
    files[0].write_text("{}\n")
    with pytest.raises(UserError, match="line 1"):
        tokenize.read_sample(files, 0.02)
