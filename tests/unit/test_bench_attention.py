"""bench.attention: a line for every kernel, with figures or the reason why there are none."""

import json
import sys
import types

import torch
from support.helpers import ROOT

from bench.attention import main, varlen
from model import manual_attention
from ops.documents import dense_mask
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
    assert masked["kernel"] == "dense mask" and PACKAGE in by_length["reason"]


def test_sequences_of_any_length_are_the_documents_that_a_mask_keeps_apart(monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert causal and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        edges = cu_seqlens_q.tolist()
        assert max_seqlen_q == max_seqlen_k >= max(b - a for a, b in zip(edges, edges[1:], strict=False))
        parts = [
            manual_attention(*(t[None, a:b] for t in (q, k, v)))[0]
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        return torch.cat(parts), None

    module = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    starts = torch.zeros(2, 32, dtype=torch.bool)
    starts[0, [5, 6, 20]] = starts[1, 31] = True
    q, k, v = (torch.randn(2, 32, heads, 16) for heads in (4, 2, 2))
    expected = manual_attention(q, k, v, 0.0, dense_mask(starts.cumsum(-1)))
    torch.testing.assert_close(varlen(starts)(q, k, v, 0.0), expected, atol=1e-5, rtol=1e-5)
