"""tools.profile: kernels of real runs in the right parts, tables that add up."""

import json

import pytest
from support.helpers import ROOT, TINY
from support.profile_traces import GpuTrace, write_rank

from common.errors import RunError
from ops.ranges import BACKWARD, BLOCK, FORWARD, PREFIX
from tools.profile import report
from tools.profile.breakdown import add_up, breakdown, give_parts, read_recording
from tools.profile.parts import COMMUNICATION, IDLE, MATMUL, MEMORY, PROFILER, Part, Parts
from tools.profile.trace import Work, place_of
from tools.profile.waterfall import model_flops, waterfall
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig

QWEN3, GPT2 = "config/full_qwen3_1.8b_optimal.py", "config/full_gpt2_1.36b.py"
TRACES = {
    "qwen3_bf16": [QWEN3, "--batch_size=16"],
    "qwen3_fp8": [QWEN3, "--batch_size=16", "--low_precision=fp8_tensorwise"],
    "qwen3_fsdp": [QWEN3, "--batch_size=16"],
    "gpt2_bf16": [GPT2, "--batch_size=8"],
    "gpt2_eager": [GPT2, "--batch_size=4"],
}
MICRO_STEPS = "--gradient_accumulation_steps=2"
NODE = "autograd::engine::evaluate_function: "
IN_BACKWARD = f"{NODE}CompiledFunctionBackward > CompiledFunctionBackward > ## Call CompiledFxGraph ##"


@pytest.fixture(scope="module")
def models():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {name: Parts(load_config([*argv, MICRO_STEPS])) for name, argv in TRACES.items()}


def part(model, name, path="", shapes=(), phase=FORWARD, on_gpu=True, numbers=None):
    """phase: FORWARD, BACKWARD, or another one before and after them."""
    names = [*[PREFIX + phase] * (phase in (FORWARD, BACKWARD)), *path.split(" > ")] if path else []
    stack = [{"name": each, "args": {"Sequence number": 7}} for each in names]
    if not stack:
        return model.of(name, None, on_gpu)
    stack[-1]["args"]["Input Dims"] = list(map(list, shapes))
    return model.of(name, place_of(stack, numbers or {}), on_gpu)


def tiny(**keys):
    return TrainConfig(**{**TINY, **keys})


# --- parts ---


@pytest.mark.parametrize("trace", TRACES)
def test_the_kernels_of_a_real_run_have_their_parts(trace, models):
    """Those of tests/support/profile_kernels.json; each of the 15 products is in them, with its FLOPs."""
    content = json.loads((ROOT / "tests/support/profile_kernels.json").read_text())
    found = {}
    for _, name, path, shapes, phase, expected, _ in (row for row in content["kernels"] if row[0] == trace):
        found[expected] = part(models[trace], name, path, shapes, phase)
        assert found[expected].name == expected, (name, path)
    assert len(found) > 10
    products = {name: one.flops for name, one in found.items() if one.step == MATMUL}
    if trace in ("qwen3_bf16", "gpt2_bf16", "gpt2_eager"):
        directions = ("forward", "dgrad", "wgrad")
        assert set(products) == {f"{n} {d}" for n in ("qkv", "out", "up", "down", "head") for d in directions}
        config = load_config([str(ROOT / TRACES[trace][0]), *TRACES[trace][1:], MICRO_STEPS])
        assert sum(products.values()) == model_flops(config)[0]


@pytest.mark.parametrize(
    ("path", "shapes", "name"),
    [
        # a forward within the backward
        (f"CompiledFunctionBackward > {PREFIX}{BLOCK} > aten::mm", [(32768, 2048), (2048, 4096)], "qkv"),
        (f"CompiledFunctionBackward > {PREFIX}{BLOCK} > aten::_flash_attention_forward", (), "attention"),
        # by compiled code itself, of which only the operators' names tell
        ("CompiledFunctionBackward > aten::_cudnn_attention_forward", (), "attention"),
    ],
)
def test_a_forward_within_the_backward_is_recomputation(path, shapes, name, models):
    found = part(models["qwen3_bf16"], "kernel", NODE + path, shapes, BACKWARD)
    assert found == Part(f"{name} recompute", "recomputation")


@pytest.mark.parametrize(
    ("operator", "phase", "shapes", "name"),
    [
        ("add_float8_weight_gradient", BACKWARD, [(12288, 32768), (2048, 32768)], "up wgrad"),
        ("activated_matmul", FORWARD, [(32768, 2048), (12288, 2048)], "up forward"),
        ("activation_backward_matmul", BACKWARD, [(32768, 2048), (2048, 6144)], "down dgrad"),
    ],
)
def test_an_operator_of_ours_is_a_matmul(operator, phase, shapes, name, models):
    path = f"{IN_BACKWARD if phase == BACKWARD else 'CompiledFunction'} > nanomfu::{operator}"
    assert part(models["qwen3_fp8"], "nvjet", path, shapes, phase).name == name
    assert part(models["qwen3_fp8"], "Memset (Device)", path, shapes, phase).step == MEMORY


@pytest.mark.parametrize("chunks, rows", [(1, 128), (3, 43), (3, 42)])
def test_the_head_is_found_in_each_part_of_the_loss(chunks, rows):
    model = Parts(tiny(loss_chunks=chunks))
    for direction, shapes in {
        "forward": [(rows, 32), (32, 64)],
        "dgrad": [(rows, 64), (64, 32)],
        "wgrad": [(64, rows), (rows, 32)],
    }.items():
        assert part(model, "gemm", "LinearCrossEntropy > aten::mm", shapes).name == f"head {direction}"


CASES = [
    # products of equal shapes, one that is no Linear's, and one without shapes
    ("gemm", "aten::mm", FORWARD, [(128, 32), (32, 32)], "out forward/down forward"),
    ("gemm", "aten::mm", FORWARD, [(5, 7), (7, 9)], "other matmul 5x7 7x9"),
    ("gemm", "aten::mm", FORWARD, [], "other matmul"),
    # the innermost range, or operator of ours, with all that it launches
    ("_sum", "CompiledFunction > nanomfu::heads_backward > aten::sum", BACKWARD, (), "heads"),
    ("kernel", f"{PREFIX}cross_entropy > LinearCrossEntropy > aten::fill_", FORWARD, (), "cross_entropy"),
    ("_quantize", f"{PREFIX}cross_entropy > nanomfu::float8_cast", FORWARD, (), "float8_cast"),
    # autograd: the range of the operator of this number, else its own name
    ("kernel", f"{NODE}RsqrtBackward0 > RsqrtBackward0 > aten::mul", BACKWARD, (), "add_norm"),
    ("kernel", f"{NODE}MulBackward0 > nanomfu::swiglu_backward_amax", BACKWARD, (), "swiglu"),
    ("kernel", f"{NODE}BmmBackward0 > BmmBackward0 > aten::bmm", BACKWARD, (), "attention backward"),
    # ranges of torch
    ("kernel", "FSDP::pre_forward > FSDP::all_gather > aten::copy_", FORWARD, (), "FSDP::all_gather"),
    ("_adamw", "Optimizer.step#OnePassAdamW.step", "", (), "Optimizer.step#OnePassAdamW.step"),
    ("nccl:_all_gather_base", "FSDP::all_gather", FORWARD, (), "communication: all-gather"),
    ("ncclDevKernel_SendRecv", "", "", (), "communication: other"),
    # no range: what the code calls; compiled code: what a kernel is made of
    ("kernel", "aten::abs > aten::empty", "", (), "aten::abs"),
    (
        "triton_red_fused__to_copy_add_3",
        "CompiledFunction > triton_red",
        FORWARD,
        (),
        "compiled: to_copy_add",
    ),
    ("triton_tem_fused_flex_attention_0", "CompiledFunction > triton", FORWARD, (), "attention forward"),
    ("_amax", "", "", (), "_amax"),
]


@pytest.mark.parametrize(("name", "path", "phase", "shapes", "expected"), CASES)
def test_a_part_is_what_the_code_names_it(name, path, phase, shapes, expected):
    model = Parts(tiny(d_ff=32))  # down is (32, 32), as out is
    assert part(model, name, path, shapes, phase, numbers={7: "add_norm"}).name == expected


def test_on_a_cpu_operators_compute_and_python_is_idle():
    model = Parts(tiny())
    for name, step in (
        ("aten::abs", MEMORY),
        (f"{PREFIX}heads", "idle"),
        ("## Call CompiledFxGraph", MEMORY),
        ("gloo:all_reduce", COMMUNICATION),
    ):
        assert part(model, name, name, on_gpu=False).step == step


# --- recordings of a GPU ---


def test_each_moment_belongs_to_one_piece_of_work():
    """On a GPU to what computes before copies and communication, on a CPU to the innermost."""
    kernel, copy = Part("kernel", MEMORY), Part("communication: all-reduce", COMMUNICATION)
    times = {(0, 10): kernel, (5, 20): kernel, (8, 30): copy, (18, 24): kernel}
    works = [
        Work("Memcpy" if start == 18 else "k", start, end, "", one) for (start, end), one in times.items()
    ]
    assert add_up(works, 0, 40) == ([10, 10, 6, 4], 10)
    nested = [Work("op", start, end, None, kernel) for start, end in ((0, 30), (5, 25), (10, 15), (40, 50))]
    assert add_up(nested, 0, 50) == ([10, 15, 5, 10], 10)


def window(iterations, operators=False):
    """Iterations of 100 microseconds: a matmul, a norm on the same stream, a collective beside and after."""
    trace = GpuTrace()
    for number in range(iterations):
        at = 100 * number
        trace.mark(at, at + 2)
        if operators:
            trace.operator("aten::mm", at + 3, at + 6, [(128, 32), (32, 64)])
            trace.operator("nanomfu::rms_norm", at + 6, at + 9, [(128, 32)])
        trace.kernel("gemm", at + 4, at + 10, at + 30)
        trace.kernel("same_name_everywhere", at + 7, at + 30, at + 40, grid=(number % 2, 1, 1))
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32", at + 8, at + 20, at + 60, stream=9)
        trace.kernel("Memset (Device)", at + 10, at + 80, at + 90, category="gpu_memset")
    trace.mark(100 * iterations, 100 * iterations + 2)
    return trace


@pytest.fixture
def recording(tmp_path):
    """What three recorded iterations leave, of which the first does not count."""
    write_rank(tmp_path, window(1, operators=True), window(3), 3, seconds=3e-4)
    return read_recording(tmp_path, Parts(tiny()))[:3]


def milliseconds(found):
    return {row["part"]: row["ms"] for row in found["parts"]}


def test_a_kernel_gets_the_part_that_it_has_in_the_other_window(recording):
    found = breakdown(*recording)
    ms = milliseconds(found)
    assert found["iterations"] == 2 and found["wall_ms"] == pytest.approx(0.1)
    assert ms["qkv forward"] == ms["communication: all-reduce"] == pytest.approx(0.020), "what nothing hides"
    assert found["communication_hidden_ms"] == pytest.approx(0.020)
    assert ms["Memset (Device)"] == pytest.approx(0.010) and ms[IDLE.name] == pytest.approx(0.040)
    assert sum(ms.values()) == pytest.approx(found["wall_ms"]) and found["adds_up"]
    (tflops,) = (row["tflops"] for row in found["parts"] if row["part"] == "qkv forward")
    config = tiny()
    flops = 2 * 128 * 32 * 64 * config.n_layer * config.micro_steps
    assert tflops == pytest.approx(flops / 20e-6 / 1e12)
    # one of the two iterations has this kernel in another kind, of which nothing is known
    assert ms["rms_norm"] == ms["same_name_everywhere"] == pytest.approx(0.005)


def test_kernels_of_which_there_are_more_have_a_part_only_if_the_known_ones_are_alike():
    one, other, own = (Work("k", 0, 1, "", Part(name, MEMORY)) for name in ("one", "other", "k"))
    for placed, expected in (([one, other], "k"), ([one, one], "one"), ([], "k")):
        assert {work.part.name for work in give_parts([own] * 3, placed)} == {expected}
    assert [work.part.name for work in give_parts([own] * 2, [one, other])] == ["one", "other"]


@pytest.mark.parametrize(
    ("unprofiled", "idle", "own"), [(0.09, 0.03, 0.01), (0.05, 0, 0.04), (0.11, 0.04, 0)]
)
def test_what_only_the_profiler_takes_is_no_idle_time_of_the_training(recording, unprofiled, idle, own):
    """It comes out of the idle time, and never out of the kernels; the waterfall ends without it."""
    found = breakdown(*recording, unprofiled)
    ms = milliseconds(found)
    assert ms.get(IDLE.name, 0) == pytest.approx(idle) and ms.get(PROFILER.name, 0) == pytest.approx(own)
    assert sum(ms.values()) == pytest.approx(0.1) and ms["qkv forward"] == pytest.approx(0.020)
    falls = waterfall(model_flops(tiny()), found, 1e12, None, None)
    assert falls["mfu_percent"] == pytest.approx(sum(model_flops(tiny())) / 1e12 / (0.1 - own) * 1e5)
    assert falls["steps"][-1]["left_percent"] == pytest.approx(falls["mfu_percent"], abs=1e-9)


def test_a_trace_that_disagrees_with_the_hosts_clock_does_not_add_up(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), 3, seconds=1.02 * 3e-4)
    assert not breakdown(*read_recording(tmp_path, Parts(tiny()))[:3])["adds_up"]


def test_a_missing_or_damaged_trace_is_one_error(tmp_path):
    with pytest.raises(RunError, match="no profile can be read"):
        read_recording(tmp_path, Parts(tiny()))
    write_rank(tmp_path, window(1, operators=True), window(0), 3, seconds=3e-4)
    with pytest.raises(RunError, match="1 marks of iterations; it needs two"):
        read_recording(tmp_path, Parts(tiny()))
    (tmp_path / "profile_times_rank0.json.gz").write_bytes(b"no gzip")
    with pytest.raises(RunError, match="BadGzipFile"):
        read_recording(tmp_path, Parts(tiny()))


def test_the_text_shows_the_sum_and_puts_small_parts_together(recording):
    content = {
        "device": "NVIDIA H200",
        "processes": 2,
        "unprofiled": {"time_ms": 0.098, "mfu_percent": 41.5},
        "profiled": breakdown(*recording),
    }
    content["waterfall"] = waterfall(model_flops(tiny()), content["profiled"], 1e12, 1.2, 0.02)
    text = "\n".join(report.lines(content))
    assert "The table adds up" in text and "MFU 41.50 %; with it +2.0 %" in text and "hide" in text
    assert "qkv forward" in text and "2 processes, rank 0" in text
    content["profiled"]["parts"][0]["percent"] = 0.01
    text = "\n".join(report.lines(content))
    assert "qkv forward" not in text and "0.020" in text.partition("all smaller ones")[2].partition("\n")[0]
