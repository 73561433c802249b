"""tools.profile: kernels of real runs in the right parts, tables that add up, a waterfall that is exact."""

import json
from collections import Counter

import pytest
from support.helpers import ROOT, TINY
from support.profile_traces import GpuTrace, write_rank

from common.errors import RunError
from tools.profile import report
from tools.profile.breakdown import adds_up, breakdown, read_rank, split_waits
from tools.profile.parts import LOST_MATMUL, UNKNOWN, WAITING, Classifier, group_of
from tools.profile.timeline import BETWEEN, DATA, LAUNCH, NO_CAUSE, add_up
from tools.profile.trace import Place, Work, read_events
from tools.profile.waterfall import model_work, waterfall
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


@pytest.fixture(scope="module")
def kernels():
    """Those of tests/support/profile_kernels.json, by trace."""
    content = json.loads((ROOT / "tests/support/profile_kernels.json").read_text())
    found = {name: [] for name in TRACES}
    for trace, name, path, shapes, phase, part, ms in content["kernels"]:
        place = place_of(path, shapes, phase)
        found[trace].append((Work(name, 0, 1000 * ms, 7, True, place=place), part))
    return found


@pytest.fixture(scope="module")
def classifiers(monkeypatch_module):
    return {name: Classifier(load_config(argv)) for name, argv in TRACES.items()}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield patch


def place_of(path, shapes=(), phase="forward", call=0):
    return Place(path.split(" > ")[-1], path, tuple(map(tuple, shapes)), phase, call)


def part_of(classify, name, path, shapes=(), phase="forward"):
    return classify(Work(name, 0, 1, 7, True, place=place_of(path, shapes, phase))).part


def tiny(**keys):
    return TrainConfig(**{**TINY, **keys})


# --- rules ---


@pytest.mark.parametrize("trace", TRACES)
def test_rules_sort_the_kernels_of_a_real_run(trace, kernels, classifiers):
    assert len(kernels[trace]) > 20
    for work, part in kernels[trace]:
        assert classifiers[trace](work).part == part, (work.name, work.place)
        assert part != UNKNOWN


@pytest.mark.parametrize("trace", ["qwen3_bf16", "gpt2_bf16", "gpt2_eager"])
def test_every_product_of_the_model_is_found_with_its_flops(trace, kernels, classifiers):
    """One call of each of the 15 products, so the FLOPs are those of one layer and the head."""
    classify = classifiers[trace]
    found = {part: classify(work).flops for work, part in kernels[trace] if group_of(part) == "matmuls"}
    directions = ("forward", "dgrad", "wgrad")
    assert set(found) == {f"{n} {d}" for n in ("qkv", "out", "up", "down", "head") for d in directions}
    config = load_config([*TRACES[trace], "--gradient_accumulation_steps=2"])
    layers, model = config.n_layer, config.model_config()
    of_layers = sum(flops for part, flops in found.items() if not part.startswith("head"))
    of_head = sum(flops for part, flops in found.items() if part.startswith("head"))
    assert of_head == 3 * 2 * config.micro_batch * config.block_size * model.n_embd * model.vocab_size
    steps = config.micro_steps
    assert steps * (layers * of_layers + of_head) == model_work(config).matmul


def test_a_forward_within_the_backward_is_recomputation(classifiers):
    shapes = [(32768, 2048), (2048, 4096)]
    path = "autograd::engine::evaluate_function: CompiledFunctionBackward > CompiledFunction > aten::mm"
    assert part_of(classifiers["qwen3_bf16"], "nvjet", path, shapes, "recompute") == "qkv recompute"
    attention = "CompiledFunctionBackward > CompiledFunction > aten::_flash_attention_forward"
    assert part_of(classifiers["qwen3_bf16"], "flash", attention, (), "recompute") == "attention recompute"
    assert group_of("qkv recompute") == group_of("attention recompute") == "recomputation"


def test_an_fp8_wgrad_that_adds_by_itself_is_a_matmul_and_on_a_cpu_only_what_is_within(classifiers):
    classify, operator = classifiers["qwen3_fp8"], "nanomfu::add_float8_weight_gradient"
    shapes = [(12288, 32768), (2048, 32768), (), (), (12288, 2048)]
    place = place_of(f"CompiledFunctionBackward > {operator}", shapes, "backward")
    found = classify(Work("nvjet_sm90_qrsss_128x128_128x6_1x2_h_badd_coopA_TNT", 0, 1, 7, True, place=place))
    assert (found.part, found.flops) == ("up wgrad", 2 * 12288 * 32768 * 2048)
    assert classify(Work(operator, 0, 1, 0, False, place=place)).part == "gradient sums"
    assert classify(Work("Memset (Device)", 0, 1, 7, True, place=place)).part == "zeros"


@pytest.mark.parametrize("trace", ["qwen3_bf16", "gpt2_bf16"])
def test_quacks_matmuls_are_known_by_their_operators(trace, classifiers):
    classify, kernel = classifiers[trace], "kernel_cutlass_kernel_quackgemm_sm90_GemmSm90_object_at_"
    config = load_config(TRACES[trace])
    tokens, C, F = config.micro_batch * config.block_size, config.n_embd, config.model_config().d_ff
    N = 2 * F if config.model_config().ffn_type == "swiglu" else F
    forward, backward = "nanomfu::activated_matmul", "nanomfu::activation_backward_matmul"
    for operator, phase, shapes, part, flops in [
        (forward, "forward", [(tokens, C), (N, C)], "up forward", 2 * tokens * C * N),
        (forward, "recompute", [(tokens, C), (N, C)], "up recompute", 2 * tokens * C * N),
        (backward, "backward", [(tokens, C), (C, F), (tokens, N)], "down dgrad", 2 * tokens * C * F),
    ]:
        place = place_of(f"CompiledFunction > {operator}", shapes, phase)
        found = classify(Work(kernel, 0, 1, 7, True, place=place))
        assert (found.part, found.flops) == (part, flops)
        # on a CPU, the operators within compute
        inside = f"CompiledFunction > {operator} > aten::sigmoid"
        assert part_of(classify, "aten::sigmoid", inside, [(tokens, F)], phase) == "activation"
        assert group_of(classify(Work(operator, 0, 1, 0, False, place=place)).part) != "matmuls"


def test_a_width_that_two_linears_share_does_not_hide_which_matmul_is_quacks():
    classify = Classifier(tiny(d_ff=32))  # down is (32, 32), as out is
    path = "FusedFeedForwardBackward > nanomfu::activation_backward_matmul"
    shapes = [(128, 32), (32, 32), (128, 64)]
    assert part_of(classify, "kernel_cutlass", path, shapes, "backward") == "down dgrad"


@pytest.mark.parametrize("chunks, rows", [(1, 128), (3, 43), (3, 42)])
def test_the_head_is_found_in_each_part_of_the_loss(chunks, rows):
    classify = Classifier(tiny(loss_chunks=chunks))
    for direction, shapes in {
        "forward": [(rows, 32), (32, 64)],
        "dgrad": [(rows, 64), (64, 32)],
        "wgrad": [(64, rows), (rows, 32)],
    }.items():
        assert part_of(classify, "gemm", "LinearCrossEntropy > aten::mm", shapes) == f"head {direction}"


def test_linears_of_equal_shape_are_named_together():
    classify = Classifier(tiny(d_ff=32))  # down is (32, 32), as out is
    assert part_of(classify, "gemm", "aten::mm", [(128, 32), (32, 32)]) == "out/down forward"


def test_a_product_of_no_linear_is_shown_with_its_shape():
    assert part_of(Classifier(tiny()), "gemm", "aten::mm", [(5, 7), (7, 9)]) == "other matmul 5x7x9"


@pytest.mark.parametrize(
    "name, part",
    [
        ("triton_red_fused__to_copy_abs_add_amax_native_layer_norm_3", "norms and residual sums, casts"),
        ("triton_poi_fused_cat_transpose_2", "copies"),
        ("triton_poi_fused__to_copy_1", "casts"),
        ("triton_tem_fused_flex_attention_0", "attention forward"),
        ("triton_poi_fused__unsafe_view_add_exp2_mul_reciprocal_rsub_sub_0", "activation"),
        ("triton_poi_fused_scatter_where_0", UNKNOWN),
    ],
)
def test_a_fused_kernel_has_the_names_of_all_its_parts(name, part):
    classify = Classifier(tiny())
    assert part_of(classify, name, f"CompiledFunction > {name}") == part
    assert classify(Work(name, 0, 1, 7, True)).part == part, "also where nothing else is known"


@pytest.mark.parametrize(
    "kernel, operator, part",
    [
        ("_amax", "nanomfu::amax", "casts"),
        ("_sum_parts", "nanomfu::add_norm_backward", "norms and residual sums"),
        ("_sum_parts", "nanomfu::heads_backward", "QK-norm and rotary"),
        ("_subtract_one_hot", "nanomfu::cross_entropy_float8", "loss"),
    ],
)
def test_a_small_kernel_belongs_to_the_operation_that_needs_it(kernel, operator, part):
    classify = Classifier(tiny(qk_norm=True))
    assert part_of(classify, kernel, f"CompiledFunctionBackward > {operator}") == part


def test_the_amax_of_weights_is_a_cast():
    assert part_of(Classifier(tiny()), "_amax", "", phase="update") == "casts"


def test_the_update_and_the_norm_are_the_optimizer_and_fills_are_zeros():
    """In the eager step, too; before the kernel that also writes the working copies, that was a cast."""
    classify = Classifier(tiny())
    for name, path, part in (
        ("_adamw", "Optimizer.step#OnePassAdamW.step", "optimizer"),
        ("CatArrayBatchedCopy", "Optimizer.step#OnePassAdamW.step > aten::stack > aten::cat", "optimizer"),
        ("reduce_kernel<512, 1, NormTwoOps", "aten::linalg_vector_norm", "optimizer"),
        ("vectorized_elementwise_kernel<4, FillFunctor", "aten::zero_ > aten::fill_", "zeros"),
    ):
        assert part_of(classify, name, path, phase="update") == part, name


def test_rotary_without_qk_norm_has_its_own_name():
    for qk_norm, part in ((True, "QK-norm and rotary"), (False, "rotary")):
        assert part_of(Classifier(tiny(qk_norm=qk_norm)), "_heads_forward", "nanomfu::heads") == part


def test_a_kernel_without_a_place_is_sorted_by_its_name_alone():
    classify = Classifier(tiny())
    for name, part in (
        ("nvjet_sm90_tst", LOST_MATMUL),
        ("Memset (Device)", "zeros"),
        ("_adamw", "optimizer"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps",
            "optimizer",
        ),
        ("new_kernel", UNKNOWN),
    ):
        assert classify(Work(name, 0, 1, 7, True)).part == part


# --- the timeline ---


def level(work):
    return lambda index: {"compute": 0, "copy": 1, "nccl": 2}[work[index].name]


def test_each_moment_belongs_to_one_piece_of_work():
    work = [
        Work("compute", 0, 10, 7, True),
        Work("compute", 5, 20, 8, True),
        Work("nccl", 8, 30, 9, True),
        Work("copy", 18, 24, 10, True),
    ]
    line = add_up(work, 0, 40, level(work))
    assert line.own == {0: 10, 1: 10, 3: 4, 2: 6}
    assert sum(line.idle.values()) == 10 and line.total == line.wall == 40


def test_a_gap_has_the_cause_that_the_launch_after_it_shows():
    work = [
        Work("compute", 0, 10, 7, True, launched=0),
        Work("compute", 12, 20, 7, True, launched=5),  # had been launched: the device needed the time
        Work("compute", 50, 60, 7, True, launched=48),  # launched late; the host waited from 25 to 40
        Work("compute", 61, 70, 7, True, launched=5),
        Work("compute", 77, 80, 7, True),  # the trace does not say
    ]
    line = add_up(work, 0, 100, level(work), [(25, 40), (80, 85)], end_launched=95)
    assert line.idle == {BETWEEN: 3, DATA: 20, LAUNCH: 30, NO_CAUSE: 7}


# --- recordings of a GPU ---


def window(iterations, operators=False, launch_delay=0.0, nccl=(20, 60)):
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
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32", at + 8, at + nccl[0], at + nccl[1], stream=9)
        trace.kernel("Memset (Device)", at + 70 + launch_delay, at + 80, at + 90, category="gpu_memset")
    trace.mark(100 * iterations, 100 * iterations + 2)
    return trace


def seconds(iterations, scale=1.0):
    return [scale * 1e-4 * number for number in range(iterations + 1)]


def test_a_kernel_gets_the_place_that_it_has_in_the_other_window(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), seconds(3))
    rank, classify = read_rank(tmp_path, 0), Classifier(tiny())
    assert all(work.place is None for work in rank.recording.work), "the window of times has no operators"
    found = breakdown(rank, split_waits([rank], classify)[0][0], classify)
    rows = {row["part"]: row for row in found["parts"]}
    assert found["iterations"] == 2 and found["wall_ms"] == pytest.approx(0.1)
    assert rows["qkv forward"]["ms"] == pytest.approx(0.020)
    assert rows["qkv forward"]["tflops"] == pytest.approx(2 * 128 * 32 * 64 / 20e-6 / 1e12)
    assert rows["communication: all-reduce"]["ms"] == pytest.approx(0.020), "what nothing hides"
    assert found["communication_hidden_ms"] == pytest.approx(0.020)
    assert rows["zeros"]["ms"] == pytest.approx(0.010)
    assert rows[LAUNCH]["ms"] == pytest.approx(0.040) and NO_CAUSE not in rows
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["wall_ms"])
    assert adds_up(found)


def test_counts_that_differ_leave_the_place_unknown(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), seconds(3))
    places = [work.place for work in read_rank(tmp_path, 0).work if work.name == "same_name_everywhere"]
    assert [place and place.operator for place in places] == ["nanomfu::rms_norm", None, "nanomfu::rms_norm"]
    found = breakdown(rank := read_rank(tmp_path, 0), rank.work, Classifier(tiny()))
    assert found["unknown"] == {"same_name_everywhere": pytest.approx(0.005)}


def test_a_rank_that_comes_early_waits_for_the_others(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3, nccl=(40, 70)), seconds(3), rank=0)
    write_rank(tmp_path, window(1, operators=True), window(3, nccl=(55, 70)), seconds(3), rank=1)
    ranks, classify = [read_rank(tmp_path, rank) for rank in (0, 1)], Classifier(tiny())
    works, known = split_waits(ranks, classify)
    assert known
    found = [breakdown(rank, work, classify) for rank, work in zip(ranks, works, strict=True)]
    rows = [{row["part"]: row["ms"] for row in each["parts"]} for each in found]
    assert rows[0][WAITING] == pytest.approx(0.015) and WAITING not in rows[1]
    for each in rows:
        assert each["communication: all-reduce"] == pytest.approx(0.015)


def test_ranks_with_different_collectives_keep_their_waiting_in_the_communication(tmp_path):
    fewer = window(3)
    fewer.events = [event for event in fewer.events if not event["name"].startswith("nccl")]
    write_rank(tmp_path, window(1, operators=True), window(3), seconds(3), rank=0)
    write_rank(tmp_path, window(1, operators=True), fewer, seconds(3), rank=1)
    ranks = [read_rank(tmp_path, rank) for rank in (0, 1)]
    works, known = split_waits(ranks, Classifier(tiny()))
    assert not known and works == [rank.work for rank in ranks]


def test_the_host_waiting_for_a_batch_is_told_from_a_slow_launch(tmp_path):
    times = window(3, launch_delay=8)  # the last kernel of each iteration is launched 8 before it starts
    write_rank(tmp_path, window(1, operators=True), times, seconds(3), waited=[0, 6e-6, 12e-6, 18e-6])
    rank = read_rank(tmp_path, 0)
    assert [round(stop - start, 3) for start, stop in rank.data_waits()] == [6, 6, 6]
    found = breakdown(rank, rank.work, Classifier(tiny()))
    rows = {row["part"]: row["ms"] for row in found["parts"]}
    assert rows[LAUNCH] > 0 and rows[DATA] == pytest.approx(0.005), "4 and 6 microseconds of it in gaps"


def test_a_trace_that_disagrees_with_the_hosts_clock_does_not_add_up(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), seconds(3, scale=1.02))
    rank = read_rank(tmp_path, 0)
    assert not adds_up(breakdown(rank, rank.work, Classifier(tiny())))


def test_a_damaged_trace_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RunError, match="rank 0 has left no profile"):
        read_rank(tmp_path, 0)
    (tmp_path / "trace.json.gz").write_bytes(b"no gzip")
    with pytest.raises(RunError, match="trace.json.gz cannot be read"):
        read_events(tmp_path / "trace.json.gz")


# --- the text ---


def test_the_text_shows_the_unknown_with_names_and_the_largest_loss_first(tmp_path):
    write_rank(tmp_path, window(1, operators=True), window(3), seconds(3))
    rank, classify = read_rank(tmp_path, 0), Classifier(tiny())
    found = breakdown(rank, rank.work, classify)
    content = {
        "device": "NVIDIA H200",
        "processes": 1,
        "unprofiled": {"time_ms": 0.098, "mfu_percent": 41.5},
        "profiled": found,
        "ranks": [{"rank": 0}],
        "waits_known": True,
        "adds_up": adds_up(found),
        "waterfall": waterfall(model_work(tiny()), found, 1e12, (1500.0, None), (1830.0, None), 0.02),
    }
    text = "\n".join(report.lines(content))
    assert "The table adds up" in text and "MFU 41.50 %; the profiled iterations take +2.0 %" in text
    assert "not known (1 names" in text and "same_name_everywhere" in text
    advice = text.partition("What could be done")[2].splitlines()
    ms = Counter({step["label"]: step["ms"] for step in content["waterfall"]["steps"]})
    assert advice[1].strip().startswith(ms.most_common(1)[0][0])
    assert max(map(len, text.partition("not known")[0].splitlines())) < 160
