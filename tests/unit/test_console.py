"""What a run shows while it trains: lines that users look for, units that fit the size, and the time left."""

import re
import unicodedata
from unittest.mock import Mock

import pytest
from support.helpers import TINY, last_run, make_dataset, write_config

from common import units
from training.records import rows
from training.records.console_lines import ProgressText, console_lines

ZERO = re.compile(r"(?<![\d.,])0(?:\.0+)? (?:[TGMk]F|[BMK] tokens|[TGM]i?B\b)")

ROW = {
    "iter": 10,
    "loss": 10.7652,
    "time_ms": 1838.0,
    "lr": 1.65e-06,
    "tokens_per_sec": 213958.0,
    "mfu": {
        **{"mfu_percent": 41.76, "hfu_percent": 41.76, "sparse_mode": False},
        **{"flops_achieved": 1879.4e12, "hardware_peak_flops": 4500e12},
    },
    "mfu_reason": None,
    "memory": {"allocated_gb": 13.53, "max_allocated_gb": 103.26, "reserved_gb": 111.23},
}


@pytest.fixture
def trained(run, tmp_path, capfd):
    """trained(*flags): what a tiny run printed, without a terminal."""

    def trained(*flags: str) -> str:
        keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
        assert run(write_config(tmp_path / "run.py", **keys), *flags) == 0
        return capfd.readouterr().out

    return trained


def test_the_lines_that_users_look_for_keep_their_form():
    assert console_lines(ROW) == [
        "📍 Iter     10 │ Loss: 10.7652 │ Time: 1838ms │ LR: 1.65e-06",
        "⚡ MFU: 41.76% │ Achieved: 1879.4 TF │ Peak: 4500.0 TF",
        "   Tokens/s: 213958",
        "💾 Memory: 13.53 GiB alloc │ 103.26 GiB peak │ 111.23 GiB reserved",
    ]
    assert console_lines(ROW, "3 %, 45 s left")[2] == "   Tokens/s: 213958 │ 3 %, 45 s left"


def columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) == "W" else 1 for letter in text)


def test_no_row_is_wider_than_80_columns_and_nothing_is_cut_off():
    """Of the largest run that there may be, with everything that a row can have."""
    mfu = {"mfu_percent": 141.76, "hfu_percent": 100.01, "sparse_mode": True, "mfu_fp8_percent": 120.88}
    mfu |= {"document_length_per_token": 900.0, "mfu_causal_percent": 100.02}
    mfu |= {"flops_achieved": 987_654e12, "hardware_peak_flops": 2_250_000e12}
    memory = dict.fromkeys(ROW["memory"], 1103.26)
    row = {**ROW, "iter": 12_345_678, "time_ms": 1_234_567.0, "tokens_per_sec": 123_456_789.0, "mfu": mfu}
    row |= {"memory": memory, "padding_percent": 12.34, "skipped_updates": 10}
    reason = "computed 114.7 % of the peak, which is impossible: " + "a measured peak " * 15
    for lines in (
        console_lines(row, "34 %, 1234:05:06 left"),
        console_lines({**row, "mfu": None, "mfu_reason": reason.strip()}),
    ):
        assert max(map(columns, lines)) <= 80, lines
        assert all("\n" not in line for line in lines)
        for word in ("Loss:", "MFU:", "Tokens/s:"):
            assert sum(word in line for line in lines) == 1, word
    text = "\n".join(console_lines(row))
    for part in ("2:4 sparse", "Of the fp8 peak: 120.88%", "by document: 100.02%", "HFU: 100.01%"):
        assert part in text
    assert reason.strip() in re.sub(r"\n +", " ", "\n".join(lines))


def test_a_log_shows_how_far_the_run_is_and_once_why_there_is_no_mfu(trained, tmp_path):
    output = trained()
    progress = re.findall(r"^   Tokens/s: \d+ │ (.*)$", output, re.M)
    assert [text.partition(" %")[0] for text in progress] == ["25", "50", "75", "100"]
    assert [text.endswith(" left") for text in progress] == [False, True, True, False]
    reason = last_run(tmp_path / "out")["training_iterations"][-1]["mfu_reason"]
    assert len(reason) > 60 and output.count(reason) == 1
    shown = re.findall(r"^⚡ MFU: (.*)$", output, re.M)
    assert shown == ["n/a (the first iteration includes compilation and warm-up)", "n/a", "n/a", "n/a"]
    log = next((tmp_path / "out").glob("run_*.log")).read_text()
    assert log.count(reason) == 1


def test_no_quantity_of_a_small_run_is_rounded_to_zero(trained):
    output = trained("--peak_tflops=0.04", "--max_iters=5")
    assert "Peak per GPU:                40.0 GFLOPS" in output
    assert "Iterations:                  5 (640 tokens)" in output
    assert len(re.findall(r"FLOPs/token: +\d+\.\d\d kF \(component", output)) == 1, "once, at the start"
    assert re.search(r"Achieved: \d+\.\d [MG]F │ Peak: 40\.0 GF", output)
    assert ZERO.search(output) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (units.flops(1879.4e12), "1879.4 TF"),
        (units.flops(112e9), "112.0 GF"),
        (units.flops(8_784_170_496, 2, "GMk"), "8.78 GF"),
        (units.flops(13.278e12, 2, "GMk"), "13278.00 GF"),
        (units.flops(307_968, 2, "GMk"), "307.97 kF"),
        (units.flops(7), "7 F"),
        (units.tokens(81_727_000_000), "81.727 B tokens"),
        (units.tokens(614_400), "614.400 K tokens"),
        (units.tokens(640), "640 tokens"),
        (units.memory(103.26), "103.26 GiB"),
        (units.memory(0.003), "3.07 MiB"),
    ],
)
def test_units_fit_the_size(text, wanted):
    assert text == wanted


def test_progress_counts_the_time_since_the_first_row():
    progress = ProgressText(300)
    assert progress.text(1, now=1000.0) == "0 %", "its iteration includes compilation"
    assert progress.text(101, now=1050.0) == "34 %, 01:40 left"
    assert progress.text(201, now=1150.0) == "67 %, 01:14 left"
    assert progress.text(300, now=1200.0) == "100 %"


def test_the_bar_shows_the_loss(trained, monkeypatch):
    shown = []
    bar = Mock(set_postfix_str=lambda text, refresh: shown.append((text, refresh)))
    monkeypatch.setattr(rows, "tqdm", lambda **_: bar)
    losses = re.findall(r"Iter +\d+ │ Loss: (\S+)", trained())
    assert shown == [(f"loss {loss}", False) for loss in losses] and len(losses) == 4
