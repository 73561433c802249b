"""bench.attention: a line for every kernel, with figures or the reason why there are none."""

import json
import sys

from support.helpers import ROOT

from bench.attention import main
from ops.flash_attn_4 import PACKAGE
from training.hardware.attention_kernels import CHAIN

SIZES = {
    "device": "cpu",
    "dtype": "float32",
    "n_head": 4,
    "num_key_value_heads": 2,
    "n_embd": 64,
    "head_dim": 16,
}


def test_a_cpu_times_what_it_has_and_says_why_it_has_no_others(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # not installed
    assert (
        main([str(ROOT / "config/full_qwen3_1.8b_optimal.py"), *(f"--{k}={v}" for k, v in SIZES.items())])
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    dense = [(row["tokens"], row["asked"]) for row in rows if not row["documents"]]
    assert dense == [(length, name) for length in (64, 128) for name in CHAIN if name != "manual"]
    for row in rows:
        timed = row["asked"] == "sdpa"
        assert ("reason" in row) != timed
        assert (
            timed == bool(row.get("kernel")) == (min(row.get("causal_tflops", {"forward": 0}).values()) > 0)
        )
    masked, by_length = (row for row in rows if row["documents"])
    assert masked["kernel"] == "dense mask" and "flash-attn 4 needs a CUDA GPU" in by_length["reason"]
