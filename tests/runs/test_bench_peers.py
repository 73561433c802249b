"""Peers of bench.throughput: which can train what, what is missing is said before any run, and the ratio is
to the best of them."""

import importlib

import pytest
from support.helpers import write_config

from bench import throughput
from bench.figures import relate
from bench.peers.hugging_face import Liger, Transformers
from bench.peers.torchtitan import Torchtitan
from bench.plan import Entry, make_plan
from bench.process import end_with_status
from bench.suites import Variant
from common.errors import UserError
from training.configuration.files_and_flags import load_config

GPT2 = {"arch_preset": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "block_size": 32}
GPT2 |= {"device": "cpu", "dtype": "float32", "compile": False}


class OnlyGpt2(Transformers):
    name = "only_gpt2"

    def of_model(self, config, model):
        return None if model.arch == "gpt2" else f"it has only GPT-2, not {model.arch}"


@pytest.mark.parametrize(
    "flags, version, missing, message",
    [
        (["--peer=nanogpt"], "", [], "which was removed; its own train.py"),
        (["--peer=transformers", "--peer=megatron"], "", [], "'megatron' is not one of transformers, liger"),
        (["--peer=transformers,liger"], "", ["liger_kernel"], "pip install liger-kernel"),
        (["--peer=torchtitan"], "0.2.2", [], "torchtitan 0.3.0, which is 0.2.2 here: pip install -r"),
        (["--peer=torchtitan"], "0.3.0", ["tyro"], "needs tyro: pip install -r requirements/peers.txt"),
    ],
)
def test_missing_peer_is_one_line_before_any_run(
    flags, version, missing, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    command = ["--suite", "quick", f"--output={tmp_path / 'out'}", *flags]
    assert end_with_status(throughput.main, command) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and not (tmp_path / "out").exists()


def test_peer_runs_beside_the_variants_that_it_can_train(tmp_path):
    variants = (
        Variant("GPT-2", str(write_config(tmp_path / "gpt2.py", **GPT2))),
        Variant("Qwen3", "config/quickstart.py"),
    )
    plan = make_plan(variants, [], None, 0, [Transformers(), OnlyGpt2()])
    of = {entry.name: entry for entry in plan}
    assert of["GPT-2"].peers == ["transformers: GPT-2", "only_gpt2: GPT-2"]
    assert of["Qwen3"].peers == ["transformers: Qwen3"]
    assert of["transformers: GPT-2"].program == ["-m", "bench.peer", "--peer=transformers"]
    with pytest.raises(UserError, match="only GPT-2, not qwen3, so it has nothing to train"):
        make_plan(variants[1:], [], None, 0, [OnlyGpt2()])
    with pytest.raises(UserError, match="kernels need a GPU"):
        make_plan(variants[1:], [], None, 0, [Liger()])


GPT2_CONFIG, QWEN3_CONFIG = ["config/full_gpt2_1.36b.py"], ["config/full_qwen3_1.8b_optimal.py"]
QWEN3 = ["config/quickstart.py", "--device=cuda", "--dtype=bfloat16"]
FP8 = "--low_precision=fp8_tensorwise"


@pytest.mark.parametrize(
    ("peer", "flags", "reason"),
    [
        (Transformers, [*QWEN3, "--doc_masking=True"], "over the whole window"),
        (Transformers, [*QWEN3, "--init_from=auto"], "always begins with random weights"),
        (Transformers, [*QWEN3, "--dtype=float16"], "needs a loss scale"),
        (Liger, [*GPT2_CONFIG, "--device=cuda"], "liger-kernel has no kernels for GPT-2"),
        (Liger, QWEN3_CONFIG, None),
        (Torchtitan, QWEN3, None),
        (Torchtitan, [*QWEN3, "--weight_tying=True"], None),
        (Torchtitan, [*QWEN3, FP8], None),
        (Torchtitan, [*QWEN3, "--rope_scaling={'rope_type': 'linear', 'factor': 2.0}"], "without biases"),
        (Torchtitan, [*QWEN3, "--arch_preset=llama3"], "not llama3"),
        (Torchtitan, GPT2_CONFIG, "not gpt2"),
        (Torchtitan, [*QWEN3, "--dropout=0.1"], "dropout"),
        (Torchtitan, [*QWEN3, "--device=cpu"], "in bfloat16, on GPUs"),
        (Torchtitan, [*QWEN3, "--dtype=float32"], "in bfloat16, on GPUs"),
        (Torchtitan, [*QWEN3, "--low_precision=mxfp8"], "not in mxfp8"),
        (Torchtitan, [*QWEN3, FP8, "--low_precision_skip_last=1"], "in all blocks"),
        (Torchtitan, [*QWEN3, "--doc_masking=True"], "over the whole window"),
    ],
)
def test_what_a_peer_cannot_train_is_said_before_any_run(peer, flags, reason, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # torchao
    found = peer().obstacle(load_config(flags))
    assert found is None if reason is None else reason in found


def test_fp8_is_compared_with_a_run_of_its_own_and_needs_torchao(monkeypatch):
    keys = {"device": "cuda", "dtype": "bfloat16"}
    more = {"bf16": {}, "chunks": {"loss_chunks": 2}, "fp8": {"low_precision": "fp8_tensorwise"}}
    variants = tuple(Variant(name, "config/quickstart.py", {**keys, **own}) for name, own in more.items())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    of = {entry.name: entry for entry in make_plan(variants, [], None, 1, [Torchtitan()])}
    assert of["bf16"].peers == of["chunks"].peers == ["torchtitan: bf16"]
    assert of["fp8"].peers == ["torchtitan: fp8"]
    assert of["torchtitan: fp8"].program == ["-m", "bench.peer", "--peer=torchtitan"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Torchtitan().obstacle(load_config([*QWEN3, FP8])).endswith("pip install torchao")


def test_ratio_is_to_the_best_peer_and_each_is_kept():
    def entry(kind, name, rate, **more):
        result = rate and {"tokens_per_sec_per_gpu": {"median": rate}}
        return Entry(kind, name, [], 1, "cuda", result=result, **more)

    ours = entry("variant", "ours", 120.0, peers=["slow", "fast", "failed"])
    relate([ours, entry("peer", "slow", 60.0), entry("peer", "fast", 100.0), entry("peer", "failed", None)])
    assert ours.result["times_peers"] == {"slow": 2.0, "fast": 1.2}
    assert (ours.result["best_peer"], ours.result["times_peer"]) == ("fast", 1.2)
