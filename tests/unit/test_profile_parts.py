"""tools.profile: kernels of real runs in the right parts, tables that add up, a waterfall that is exact."""

import json

import pytest
from support.helpers import ROOT, TINY
from support.profile_traces import GpuTrace, write_rank

from common.errors import RunError
from ops.ranges import BACKWARD, BLOCK, FORWARD, PREFIX
from tools.profile import report
from tools.profile.breakdown import adds_up, breakdown, read_rank
from tools.profile.parts import IDLE, PROFILER, Linears, part_of
from tools.profile.timeline import add_up
from tools.profile.trace import Work, give_places, place_of, read_recording
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
NODE = "autograd::engine::evaluate_function: "
IN_BACKWARD = f"{NODE}CompiledFunctionBackward > CompiledFunctionBackward > ## Call CompiledFxGraph ##"


@pytest.fixture(scope="module")
def kernels():
    """Those of tests/support/profile_kernels.json, by trace."""
    content = json.loads((ROOT / "tests/support/profile_kernels.json").read_text())
    found = {name: [] for name in TRACES}
    for trace, name, path, shapes, phase, part, ms in content["kernels"]:
        found[trace].append((work(name, path, shapes, phase, 1000 * ms), part))
    return found


@pytest.fixture(scope="module")
def linears():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {name: Linears(load_config(argv)) for name, argv in TRACES.items()}


def work(name, path="", shapes=(), phase=FORWARD, us=1, device=True, numbers=None):
    """phase: 'forward', 'backward', or '' before and after them."""
    names = [*[PREFIX + FORWARD] * (phase == FORWARD), *path.split(" > ")] if path else []
    stack = [{"name": each, "args": {"Sequence number": 7}} for each in names]
    if not stack:
        return Work(name, 0, us, device)
    stack[-1]["args"]["Input Dims"] = list(map(list, shapes))
    return Work(name, 0, us, device, place=place_of(stack, phase == BACKWARD, numbers or {}))


def tiny(**keys):
    return TrainConfig(**{**TINY, **keys})


# --- parts ---


@pytest.mark.parametrize("trace", TRACES)
def test_the_kernels_of_a_real_run_have_their_parts(trace, kernels, linears):
    assert len(kernels[trace]) > 10
    for each, part in kernels[trace]:
        assert part_of(each, linears[trace]).name == part, (each.name, each.place)


@pytest.mark.parametrize("trace", ["qwen3_bf16", "gpt2_bf16", "gpt2_eager"])
def test_every_product_of_the_model_is_found_with_its_flops(trace, kernels, linears):
    """One call of each of the 15 products, so the FLOPs are those of one layer and the head."""
    parts = [part_of(each, linears[trace]) for each, _ in kernels[trace]]
    found = {part.name: part.flops for part in parts if part.group == "matmuls"}
    directions = ("forward", "dgrad", "wgrad")
    assert set(found) == {f"{n} {d}" for n in ("qkv", "out", "up", "down", "head") for d in directions}
    config = load_config([*TRACES[trace], "--gradient_accumulation_steps=2"])
    layers, model = config.n_layer, config.model_config()
    of_layers = sum(flops for part, flops in found.items() if not part.startswith("head"))
    of_head = sum(flops for part, flops in found.items() if part.startswith("head"))
    assert of_head == 3 * 2 * config.micro_batch * config.block_size * model.n_embd * model.vocab_size
    assert config.micro_steps * (layers * of_layers + of_head) == model_flops(config).matmul


def test_a_forward_within_the_backward_is_recomputation(linears):
    block = f"{NODE}CompiledFunctionBackward > {PREFIX}{BLOCK} > CompiledFunction"
    shapes = [(32768, 2048), (2048, 4096)]
    for path, dims, part in (
        (f"{block} > aten::mm", shapes, "qkv recompute"),
        (f"{block} > aten::_flash_attention_forward", (), "attention recompute"),
        # by compiled code itself, of which only the operators' names tell
        (f"{IN_BACKWARD} > aten::_cudnn_attention_forward", (), "attention recompute"),
        (f"{IN_BACKWARD} > aten::_cudnn_attention_backward", (), "attention backward"),
        (f"{NODE}BmmBackward0 > BmmBackward0 > aten::bmm", (), "attention backward"),
    ):
        found = part_of(work("kernel", path, dims, BACKWARD), linears["qwen3_bf16"])
        assert found[:2] == (part, "recomputation" if part.endswith("recompute") else "attention")


@pytest.mark.parametrize(
    ("operator", "phase", "shapes", "part"),
    [
        ("add_float8_weight_gradient", BACKWARD, [(12288, 32768), (2048, 32768)], "up wgrad"),
        ("activated_matmul", FORWARD, [(32768, 2048), (12288, 2048)], "up forward"),
        ("activation_backward_matmul", BACKWARD, [(32768, 2048), (2048, 6144)], "down dgrad"),
    ],
)
def test_an_operator_of_ours_is_a_matmul_and_on_a_cpu_only_what_is_within(
    operator, phase, shapes, part, linears
):
    path = f"{IN_BACKWARD if phase == BACKWARD else 'CompiledFunction'} > nanomfu::{operator}"
    found = part_of(work("nvjet", path, shapes, phase), linears["qwen3_fp8"])
    assert found.name == part and found.flops in (2 * 32768 * 2048 * 12288, 2 * 32768 * 2048 * 6144)
    for other in (
        work(f"nanomfu::{operator}", path, shapes, phase, device=False),
        work("Memset (Device)", path, shapes, phase),
    ):
        assert part_of(other, linears["qwen3_fp8"]).group == "memory-bound"


@pytest.mark.parametrize("chunks, rows", [(1, 128), (3, 43), (3, 42)])
def test_the_head_is_found_in_each_part_of_the_loss(chunks, rows):
    model = Linears(tiny(loss_chunks=chunks))
    for direction, shapes in {
        "forward": [(rows, 32), (32, 64)],
        "dgrad": [(rows, 64), (64, 32)],
        "wgrad": [(64, rows), (rows, 32)],
    }.items():
        found = part_of(work("gemm", "LinearCrossEntropy > aten::mm", shapes), model)
        assert found.name == f"head {direction}"


@pytest.mark.parametrize(
    ("shapes", "part"),
    [
        ([(128, 32), (32, 32)], "out/down forward"),
        ([(5, 7), (7, 9)], "other matmul 5x7x9"),
        ([], "other matmul"),
    ],
)
def test_linears_of_equal_shape_are_named_together_and_others_by_their_shape(shapes, part):
    model = Linears(tiny(d_ff=32))  # down is (32, 32), as out is
    assert part_of(work("gemm", "aten::mm", shapes), model)[:2] == (part, "matmuls")


@pytest.mark.parametrize(
    ("name", "path", "phase", "part"),
    [
        # the innermost range, or operator of ours, with all that it launches
        ("_sum_parts", "CompiledFunction > nanomfu::heads_backward > aten::sum", BACKWARD, "heads"),
        ("kernel", f"{PREFIX}cross_entropy > LinearCrossEntropy > aten::fill_", FORWARD, "cross_entropy"),
        ("_quantize", f"{PREFIX}cross_entropy > nanomfu::float8_cast", FORWARD, "float8_cast"),
        # autograd: the range of the operator of this number, else its own name
        ("kernel", f"{NODE}RsqrtBackward0 > RsqrtBackward0 > aten::mul", BACKWARD, "add_norm"),
        ("kernel", f"{NODE}MulBackward0 > nanomfu::swiglu_backward_amax", BACKWARD, "swiglu"),
        # ranges of torch
        ("kernel", "FSDP::pre_forward > FSDP::all_gather > aten::copy_", FORWARD, "FSDP::all_gather"),
        ("_adamw", "Optimizer.step#OnePassAdamW.step", "", "Optimizer.step#OnePassAdamW.step"),
        # no range: what the code calls; compiled code: what a kernel is made of
        ("kernel", "aten::abs > aten::empty", "", "aten::abs"),
        (
            "triton_red_fused__to_copy_add_3",
            "CompiledFunction > triton_red",
            FORWARD,
            "compiled: to_copy_add",
        ),
        ("triton_tem_fused_flex_attention_0", "CompiledFunction > triton", FORWARD, "attention forward"),
        ("_amax", "", "", "_amax"),
    ],
)
def test_a_part_is_what_the_code_names_it(name, path, phase, part):
    assert part_of(work(name, path, (), phase, numbers={7: "add_norm"}), Linears(tiny())).name == part


# --- the timeline ---


def test_each_moment_belongs_to_one_piece_of_work():
    """On a GPU to what computes (0) before copies (1) and communication (2), on a CPU to the innermost."""
    works = [Work("kernel", *times, True) for times in ((0, 10), (5, 20), (8, 30), (18, 24))]
    assert add_up(works, 0, 40, [0, 0, 2, 1]) == ({0: 10, 1: 10, 3: 4, 2: 6}, 10)
    nested = [Work("aten::op", *times, False) for times in ((0, 30), (5, 25), (10, 15), (40, 50))]
    assert add_up(nested, 0, 50, [0] * 4) == ({0: 10, 1: 15, 2: 5, 3: 10}, 10)


# --- recordings of a GPU ---


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
        trace.kernel("Memset (Device)", at + 70, at + 80, at + 90, category="gpu_memset")
    trace.mark(100 * iterations, 100 * iterations + 2)
    return trace


@pytest.fixture
def rank(tmp_path):
    """What three recorded iterations leave, of which the first does not count."""
    write_rank(tmp_path, window(1, operators=True), window(3), 3, seconds=3e-4)
    return read_rank(tmp_path, 0)


def milliseconds(found):
    return {row["part"]: row["ms"] for row in found["parts"]}


def test_a_kernel_gets_the_place_that_it_has_in_the_other_window(rank):
    assert all(work.place is None for work in rank.recording.work), "the window of times has no operators"
    found = breakdown(rank, Linears(tiny()))
    ms = milliseconds(found)
    assert found["iterations"] == 2 and found["wall_ms"] == pytest.approx(0.1)
    assert ms["qkv forward"] == ms["communication: all-reduce"] == pytest.approx(0.020), "what nothing hides"
    assert found["communication_hidden_ms"] == pytest.approx(0.020)
    assert ms["Memset (Device)"] == pytest.approx(0.010) and ms[IDLE] == pytest.approx(0.040)
    assert sum(ms.values()) == pytest.approx(found["wall_ms"]) and adds_up(found)
    (tflops,) = (row["tflops"] for row in found["parts"] if row["part"] == "qkv forward")
    assert tflops == pytest.approx(2 * 128 * 32 * 64 / 20e-6 / 1e12)
    # counts of a kernel's kind that differ leave its place unknown
    places = [work.place for work in rank.work if work.name == "same_name_everywhere"]
    assert [place and place.operator for place in places] == ["nanomfu::rms_norm", None, "nanomfu::rms_norm"]
    assert ms["rms_norm"] == ms["same_name_everywhere"] == pytest.approx(0.005)


def test_kernels_of_which_there_are_more_have_a_place_only_if_the_known_ones_are_alike():
    one, other, more = work("k", "aten::abs"), work("k", "aten::neg"), [work("k")] * 3
    assert {each.place for each in give_places(more, [one, other])} == {None}
    assert {each.place for each in give_places(more, [one, one])} == {one.place}


@pytest.mark.parametrize(
    ("unprofiled", "idle", "own"), [(0.09, 0.03, 0.01), (0.05, 0, 0.04), (0.11, 0.04, 0)]
)
def test_what_only_the_profiler_takes_is_no_idle_time_of_the_training(rank, unprofiled, idle, own):
    """It comes out of the idle time, and never out of the kernels; the waterfall ends without it."""
    found = breakdown(rank, Linears(tiny()), unprofiled)
    ms = milliseconds(found)
    assert ms[IDLE] == pytest.approx(idle) and ms.get(PROFILER, 0) == pytest.approx(own)
    assert sum(ms.values()) == pytest.approx(0.1) and ms["qkv forward"] == pytest.approx(0.020)
    falls = waterfall(model_flops(tiny()), found, 1e12, None, "", None)
    assert falls["mfu_percent"] == pytest.approx(sum(model_flops(tiny())) / 1e12 / (0.1 - own) * 1e5)
    assert falls["steps"][-1]["left_percent"] == pytest.approx(falls["mfu_percent"], abs=1e-9)


def test_a_trace_that_disagrees_with_the_hosts_clock_does_not_add_up(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), 3, seconds=1.02 * 3e-4)
    assert not adds_up(breakdown(read_rank(tmp_path, 0), Linears(tiny())))


def test_a_damaged_trace_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RunError, match="rank 0 has left no profile"):
        read_rank(tmp_path, 0)
    (tmp_path / "trace.json.gz").write_bytes(b"no gzip")
    with pytest.raises(RunError, match="trace.json.gz cannot be read"):
        read_recording(tmp_path / "trace.json.gz")


# --- the text ---


def test_the_text_shows_the_sum_and_puts_small_parts_together(rank):
    found = breakdown(rank, Linears(tiny()))
    content = {
        "device": "NVIDIA H200",
        "processes": 1,
        "unprofiled": {"time_ms": 0.098, "mfu": {"mfu_percent": 41.5}},
        "profiled": found,
        "adds_up": adds_up(found),
        "waterfall": waterfall(model_flops(tiny()), found, 1e12, 1.2, "", 0.02),
    }
    text = "\n".join(report.lines(content))
    assert "The table adds up" in text and "MFU 41.50 %; the profiled iterations take +2.0 %" in text
    assert "all smaller ones" not in text and "qkv forward" in text
    found["parts"][0]["percent"] = 0.01
    text = "\n".join(report.lines(content))
    assert "all smaller ones" in text and "qkv forward" not in text
