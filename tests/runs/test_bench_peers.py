"""Peers of bench.throughput: which can train what, what is missing is said before any run, and the ratio is
to the best of them. nanoGPT itself is not here: a stand-in reads the configuration that we write for it, as
its configurator does, and prints lines in its form."""

import importlib
import json

import pytest
from support.helpers import ROOT, make_dataset, write_config

from bench import peer, throughput
from bench.peers import registry
from bench.peers.liger import Liger
from bench.peers.nanogpt import NanoGPT, commit_of
from bench.plan import Entry, make_plan
from bench.process import end_with_status
from bench.results import relate
from bench.suites import Variant
from common.errors import UserError
from training.configuration.files_and_flags import load_config

GPT2 = {
    "arch_preset": "gpt2", "device": "cpu", "dtype": "float32", "compile": False, "n_layer": 2, "n_head": 2,
    "n_embd": 32, "vocab_size": 64, "block_size": 32, "batch_size": 3, "gradient_accumulation_steps": 2,
    "peak_tflops": 1.0, "max_iters": 4,
}  # fmt: skip
TRAIN = """
import json, os, sys
for line in open(sys.argv[1]):
    exec(line)
exec(open("configurator.py").read())
import model
settings = {k: v for k, v in globals().items() if isinstance(v, (int, float, str)) and k[0] != "_"}
bytes_of = {split: os.path.getsize(f"data/{dataset}/{split}.bin") for split in ("train", "val")}
json.dump({**settings, "bytes": bytes_of, "theirs": model.NANOGPT}, open(os.environ["STAND_IN"], "w"))
print("step 0: train loss 10.9, val loss 10.9")
for i in range(max_iters + 1):
    print(f"iter {i}: loss {4.5 - i:.4f}, time {100 + i:.2f}ms, mfu -100.00%")
"""


@pytest.fixture
def nanogpt(tmp_path):
    """A folder with the files of nanoGPT."""
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    for name, text in (("train.py", TRAIN), ("model.py", "NANOGPT = True"), ("configurator.py", "")):
        (folder / name).write_text(text)
    return folder


def test_nanogpt_gets_our_shape_and_its_log_is_read(nanogpt, tmp_path, monkeypatch, capsys):
    import model as our_model

    tokens = make_dataset(tmp_path / "tokens")
    config = str(write_config(tmp_path / "gpt2.py", **GPT2, dataset=tokens))
    monkeypatch.setenv("STAND_IN", str(tmp_path / "seen.json"))
    assert peer.main(["--peer=nanogpt", f"--nanogpt={nanogpt}", config]) == 0
    printed = capsys.readouterr().out.splitlines()
    seen, result = json.loads((tmp_path / "seen.json").read_text()), json.loads(printed[-1])
    wanted = {"batch_size": 3, "gradient_accumulation_steps": 2, "block_size": 32, "n_layer": 2, "n_embd": 32}
    assert {name: seen[name] for name in wanted} == wanted and seen["bias"] is False
    assert seen["bytes"]["train"] == (tokens / "train.bin").stat().st_size and seen["theirs"] is True
    rows = result["training_iterations"]
    assert [row["time_ms"] for row in rows] == [100.0, 101.0, 102.0, 103.0]
    assert rows[1]["tokens_per_sec"] == pytest.approx(3 * 2 * 32 / 0.101) and rows[1]["mfu"]["mfu"] > 0
    assert (result["peer"], result["commit"]) == ("nanoGPT unknown", "unknown")
    assert commit_of(ROOT / "docs") == "unknown", "a folder in our checkout has not its commit"
    import model as model_now

    assert model_now is our_model  # nanoGPT's module of this name does not stay


def test_nanogpt_that_ends_early_is_no_figure(nanogpt, tmp_path, monkeypatch):
    (nanogpt / "train.py").write_text('print("iter 0: loss 4.5000, time 100.00ms, mfu 1.00%")')
    config = str(write_config(tmp_path / "gpt2.py", **GPT2, dataset=make_dataset(tmp_path / "tokens")))
    with pytest.raises(UserError, match="logged 1 iterations of 4"):
        peer.main(["--peer=nanogpt", f"--nanogpt={nanogpt}", config])


@pytest.mark.parametrize(
    "flags, version, missing, message",
    [
        (["--peer=nanogpt"], "", [], "git clone"),
        (
            ["--peer=transformers", "--peer=megatron"],
            "",
            [],
            "'megatron' is not one of transformers, liger, nano",
        ),
        (["--peer=nanogpt", "--nanogpt=docs"], "", [], "has no train.py, model.py, configurator.py"),
        (["--peer=transformers,liger"], "", ["liger_kernel"], "pip install liger-kernel"),
        (["--peer=torchtitan"], "0.2.2", [], "torchtitan 0.3.0, which is 0.2.2 here: pip install -r"),
        (["--peer=torchtitan"], "0.3.0", ["tyro"], "needs tyro: pip install -r requirements-peers.txt"),
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


def test_peer_runs_beside_the_variants_that_it_can_train(nanogpt, tmp_path):
    variants = (
        Variant("GPT-2", str(write_config(tmp_path / "gpt2.py", **GPT2))),
        Variant("Qwen3", "config/quickstart.py"),
    )
    plan = make_plan(variants, [], None, 0, registry.require(["transformers", "nanogpt"], nanogpt))
    of = {entry.name: entry for entry in plan}
    assert of["GPT-2"].peers == ["transformers: GPT-2", "nanogpt: GPT-2"]
    assert of["Qwen3"].peers == ["transformers: Qwen3"]
    assert of["nanogpt: GPT-2"].program == ["-m", "bench.peer", "--peer=nanogpt", f"--nanogpt={nanogpt}"]
    with pytest.raises(UserError, match="nanoGPT has only GPT-2, not qwen3"):
        make_plan(variants[1:], [], None, 0, [NanoGPT(nanogpt)])
    with pytest.raises(UserError, match="kernels need a GPU"):
        make_plan(variants[1:], [], None, 0, [Liger()])


@pytest.mark.parametrize(
    ("peer", "flags", "reason"),
    [
        (NanoGPT(), ["config/full_gpt2_1.36b.py"], "--batch_size and --gradient_accumulation_steps"),
        (Liger(), ["config/full_gpt2_1.36b.py", "--device=cuda"], "liger-kernel has no kernels for GPT-2"),
        (Liger(), ["config/full_qwen3_1.8b_optimal.py"], None),
    ],
)
def test_what_a_peer_cannot_train_is_said_before_any_run(peer, flags, reason):
    found = peer.obstacle(load_config(flags), 1)
    assert found is None if reason is None else reason in found


def test_ratio_is_to_the_best_peer_and_each_is_kept():
    def entry(kind, name, rate, **more):
        result = rate and {"tokens_per_sec_per_gpu": {"median": rate}}
        return Entry(kind, name, [], 1, "cuda", result=result, **more)

    ours = entry("variant", "ours", 120.0, peers=["slow", "fast", "failed"])
    relate([ours, entry("peer", "slow", 60.0), entry("peer", "fast", 100.0), entry("peer", "failed", None)])
    assert ours.result["times_peers"] == {"slow": 2.0, "fast": 1.2}
    assert (ours.result["best_peer"], ours.result["times_peer"]) == ("fast", 1.2)
