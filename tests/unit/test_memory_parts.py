"""Where the memory of a run is: what was there at the fullest moment, and to which part it belongs."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from support.helpers import ROOT, TINY, last_run, make_dataset, run_train, write_config

import model
from common.errors import RunError
from tools.profile.memory import MEMORY_KEYS, memory_lines
from training.records import memory_parts as parts
from training.records.memory_parts import Allocation, alive_at_peak, part_of, sort_into_parts
from training.records.memory_snapshot import CudaRecording, read_trace, table_path

TORCH = "/venv/lib/site-packages/torch"
COMPILED = (f"{TORCH}/_inductor/output_code.py", 721, "__call__")  # below it, the code that was compiled
AUTOGRAD = f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py"
ENGINE = (AUTOGRAD, 2300, "backward")


def in_model(thing) -> parts.Frame:
    """A frame of the function or of the class's forward."""
    return model.__file__, inspect.getsourcelines(thing)[1] + 1, "forward"


def in_repository(path: str, function: str) -> parts.Frame:
    return str(ROOT / path), 50, function


def part(*frames: parts.Frame, size: int = 7, widths=None) -> str:
    return part_of(Allocation(1, size, frames), widths or {})


# --- the fullest moment ---


def test_the_fullest_moment_is_found_and_what_was_alive_then():
    base = [Allocation(1, 10), Allocation(2, 5)]
    events = [
        Allocation(3, 20, ()),
        Allocation(2, -5),  # there before, freed
        Allocation(4, 8, ()),  # 38: the most
        Allocation(3, -20),
        Allocation(3, 15, ()),  # the address again
        Allocation(9, -99),  # never seen
    ]
    alive = alive_at_peak(base, events)
    assert sorted((block.address, block.size) for block in alive) == [(1, 10), (3, 20), (4, 8)]
    assert alive_at_peak(base, events[3:4]) == base  # nothing is more than what was there before


def test_tensors_that_live_as_long_as_the_run_are_known_by_their_address():
    """A block of the allocator may begin before the tensor that is in it."""
    blocks = [Allocation(100, 50), Allocation(200, 50), Allocation(300, 50)]
    table = sort_into_parts(blocks, {100: parts.WEIGHTS, 210: parts.ADAM, 260: parts.FP8}, {})
    assert table.parts == {parts.WEIGHTS: 50, parts.ADAM: 50, parts.UNKNOWN: 50}


def test_what_no_rule_knows_is_shown_with_its_name():
    before, strange = Allocation(1, 4), Allocation(2, 6, (("", 0, "aten::sort"), ("/x/y/z.py", 3, "sort")))
    assert sort_into_parts([before, strange], {}, {}).unknown == {
        "allocated before the recording": 4,
        "sort (y/z.py:3)": 6,
    }


# --- rules ---


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([in_repository("ops/linear.py", "forward"), in_model(model.FeedForward)], parts.FEED_FORWARD),
        ([in_repository("ops/linear.py", "forward"), in_model(model.Attention)], parts.ATTENTION),
        ([in_repository("ops/linear.py", "backward")], parts.BACKWARD),
        ([in_repository("ops/norm.py", "_add_norm"), in_model(model.Head)], parts.NORMS),
        ([in_repository("ops/cross_entropy.py", "_loss"), in_model(model.Head)], parts.LOSS),
        ([in_repository("ops/cross_entropy.py", "backward")], parts.LOSS),
        ([in_repository("ops/triton_kernels/heads.py", "triton_heads_backward")], parts.BACKWARD),
        ([in_repository("ops/heads.py", "heads_forward"), COMPILED], parts.ATTENTION),
        ([in_repository("ops/swiglu.py", "swiglu_backward"), COMPILED, ENGINE], parts.BACKWARD),
        ([COMPILED, ENGINE], parts.BACKWARD),
        ([COMPILED, (AUTOGRAD, 3459, "forward"), in_model(model.Transformer)], parts.STREAM),
        # a recomputed block's forward runs inside of a backward
        ([in_model(model.FeedForward), in_model(model.Block), ENGINE], parts.FEED_FORWARD),
        ([in_model(model.manual_attention), in_model(model.Attention)], parts.ATTENTION),
        ([in_model(model.Transformer)], parts.EMBEDDING),
        ([("model.py", *in_model(model.Block)[1:])], parts.STREAM),  # as torch.profiler names it
        ([in_repository("training/strategies/replicated.py", "_reduce")], parts.GRADIENTS),
        ([in_repository("training/strategies/replicated.py", "publish")], parts.WORKING),
        ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "allocate"),
          (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_all_gather")],
         parts.WORKING),
        ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_reduce")],
         parts.GRADIENTS),
        ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py", 1, "to_accumulated_grad_if_needed")],
         parts.GRADIENTS),
        ([("", 0, "GeluBackward0"), (f"{TORCH}/autograd/graph.py", 966, "_engine_run_backward"),
          in_repository("training/optimization/step.py", "_forward_and_backward")], parts.BACKWARD),
        ([], parts.BACKWARD),  # no Python ran: autograd's own thread
        ([("/elsewhere/plugin.py", 1, "run")], parts.UNKNOWN),
    ],
)  # fmt: skip
def test_the_innermost_frame_that_a_rule_knows_decides(frames, expected):
    assert part(*frames) == expected


def test_tensors_of_a_compiled_block_are_told_apart_by_their_width():
    config = SimpleNamespace(attention_width=4, n_kv_head=1, head_dim=2, d_ff=12, n_embd=4)
    widths = parts.widths_of(config, tokens=10, item_sizes=[2])
    block = [COMPILED, in_model(model.Block)]
    found = {columns: part(*block, size=10 * 2 * columns, widths=widths) for columns in (2, 4, 8, 12, 24, 5)}
    assert found == {
        2: parts.ATTENTION,
        4: parts.STREAM,
        8: parts.ATTENTION,
        12: parts.FEED_FORWARD,
        24: parts.FEED_FORWARD,
        5: parts.STREAM,
    }
    assert part(in_model(model.Block), size=160, widths=widths) == parts.STREAM  # not compiled


# --- a GPU's recording, without a GPU ---


def test_the_allocators_trace_is_read_as_what_was_asked_for():
    frame = {"filename": "/a/b.py", "line": 3, "name": "f"}
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21},
        {"action": "alloc", "addr": 16, "size": 8, "frames": [frame]},
        {"action": "free_requested", "addr": 16, "size": 8, "frames": []},
        {"action": "free_completed", "addr": 16, "size": 8, "frames": []},
    ]
    assert list(read_trace(trace)) == [Allocation(16, 8, (("/a/b.py", 3, "f"),)), Allocation(16, -8)]


def test_a_gpus_recording_knows_what_was_there_before_and_the_workspaces(monkeypatch):
    """memory_snapshot lists the blocks of each segment; clearing cuBLAS's workspaces shows which they are."""

    def segments(workspace: str):
        free, active = ({"state": state, "size": 512} for state in ("inactive", "active_allocated"))
        blocks = [free, active, {"state": workspace, "size": 1024}]
        mine = {"device": 1, "address": 4096, "blocks": blocks}
        return [mine, {"device": 0, "address": 0, "blocks": [active]}]

    calls = []
    states = iter([segments("active_allocated"), segments("active_allocated"), segments("inactive")])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: next(states))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [["wrong"], []]})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **flags: calls.append(flags))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    recording = CudaRecording(torch.device("cuda", 1))
    assert recording.base == [Allocation(4608, 512), Allocation(5120, 1024)]
    assert recording.stop() == []
    assert recording.workspaces == {5120: parts.WORKSPACES}
    assert [flags.get("enabled", "all") for flags in calls] == ["all", None]


# --- the table ---


def facts(**more) -> dict:
    measured = {parts.WEIGHTS: 2.0, parts.ATTENTION: 3.0, parts.NORMS: 1.0, parts.UNKNOWN: 0.5}
    estimate = {"weights (float32)": 2.0, "activations": 3.6, "workspaces (cuBLAS)": 0.1}
    unknown = {"a": 0.3, **{f"name {i}": 0.02 for i in range(10)}}
    common = {"rank": 0, "device": "cuda", "iteration": 6, "snapshot": "memory_rank0.pickle"}
    return {
        **common,
        **{"peak_gib": 6.5, "parts": measured, "unknown": unknown, "estimate": estimate},
        **{"max_allocated_gib": 6.6, "max_reserved_gib": 6.75, "outside_gib": 0.625, **more},
    }


def test_the_table_shows_each_part_beside_its_estimate_and_hides_nothing(tmp_path):
    table_path(tmp_path, 0).write_text(json.dumps(facts()))
    table_path(tmp_path, 1).write_text(json.dumps(facts(rank=1, peak_gib=6.25)))
    *lines, other = memory_lines(tmp_path, processes=2)
    assert other == "rank 1: 6.250"
    rows = {line[:34].strip(): line[34:].split() for line in lines[2:]}
    assert rows["weights"] == ["2.000", "2.000", "+0.0", "%"]
    assert rows["activations"] == ["4.000", "3.600", "-10.0", "%"]
    assert rows["attention"] == ["3.000"] and rows["norms"] == ["1.000"]
    assert rows["workspaces"] == ["0.000", "0.100"]
    assert rows["sum"] == ["6.500", "5.700", "-12.3", "%"]
    assert rows["unknown"][0] == "0.500"
    assert "  unknown: 0.300 a" in lines and "  unknown: 0.060 in 3 others" in lines
    assert max(map(len, lines[:-1])) <= 100
    assert lines[-3].endswith("6.600 allocated, 6.750 reserved") and lines[-2].endswith(": 0.625")
    assert str(tmp_path / "memory_rank0.pickle") in lines[-1] and "memory_viz" in lines[-1]


def test_a_run_on_a_cpu_measures_its_memory_by_part(tmp_path):
    """Weights, Adam moments and gradient sums to the byte; the rest with names, and nothing of it unknown.
    In a process of its own: after other recordings, torch's profiler may take memory without end."""
    tokens = make_dataset(tmp_path / "tokens")
    config = write_config(tmp_path / "run.py", **TINY, dataset=tokens, out_dir=tmp_path / "out")
    keys = {**MEMORY_KEYS, "eval_interval": 0, "always_save_checkpoint": False}
    done = run_train(config, *(f"--{key}={value}" for key, value in keys.items()))
    assert done.returncode == 0, done.stderr
    facts = json.loads(table_path(tmp_path / "out", 0).read_text())
    measured = {name: size * 2**30 for name, size in facts["parts"].items()}
    parameters = last_run(tmp_path / "out")["startup_info"]["model"]["total_params"]
    assert measured[parts.WEIGHTS] == 4 * parameters
    assert measured[parts.ADAM] == pytest.approx(8 * parameters, rel=1e-2)  # and the number of its steps
    assert measured[parts.GRADIENTS] == pytest.approx(4 * parameters, rel=1e-2)  # and room for the loss
    assert measured[parts.LOSS] > 4 * 4 * 32 * 64  # logits in float32
    assert {parts.ATTENTION, parts.FEED_FORWARD} <= measured.keys()
    assert measured.get(parts.UNKNOWN, 0) < 0.01 * facts["peak_gib"] * 2**30
    assert sum(measured.values()) == pytest.approx(facts["peak_gib"] * 2**30)
    assert facts["snapshot"] is None and "The estimate is for a GPU" in memory_lines(tmp_path / "out")[-1]


def test_without_a_recording_the_fix_is_named(tmp_path):
    with pytest.raises(RunError, match=r"--profile=memory .* run 8 iterations or more"):
        memory_lines(tmp_path)
