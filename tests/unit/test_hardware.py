"""The peak belongs to this GPU and this precision, or there is none and the reason says what to do."""

import re

import pytest
import torch

from ops.recipe import CHECKED, NATIVE
from training.configuration.keys import TrainConfig
from training.hardware import peaks as hardware
from training.hardware.capability import TABLE, lookup
from training.hardware.description import describe_hardware
from training.hardware.peaks import GPUS, Peak, agree_on_peak, measure_peak, resolve_peak, table_peak
from training.optimization.low_precision import recipe_class
from training.process.world import World

DATASHEETS = {  # dense bf16 and fp8 TFLOPS: the devices' own names
    (2250, 4500): ("NVIDIA B200", "NVIDIA B300", "NVIDIA B300 SXM6 AC"),
    (2500, 5000): ("NVIDIA GB200", "NVIDIA GB300"),
    (989.4, 1978.9): (
        *("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA GH200 144G HBM3e"),
        *("NVIDIA H100 80GB HBM3", "NVIDIA H800"),
    ),
    (835, 1670.5): ("NVIDIA H200 NVL", "NVIDIA H100 NVL"),
    (756, 1513): ("NVIDIA H100 PCIe", "NVIDIA H800 PCIe"),
    (312, None): (
        *("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"),
        "NVIDIA A100 80GB PCIe",
    ),
    (148, 296): ("NVIDIA H20", "NVIDIA H20-3e"),
    (154.8, None): ("NVIDIA RTX A6000",),
    (70, None): ("NVIDIA A10G",),
    (71, None): ("NVIDIA GeForce RTX 3090",),
    (121, 242.5): ("NVIDIA L4",),
    (362, 733): ("NVIDIA L40S",),
    (165.2, 330.3): ("NVIDIA GeForce RTX 4090",),
    (209.5, 419): ("NVIDIA GeForce RTX 5090",),
    (503.8, 1007.6): ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
    (438.9, 877.9): ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
    (500, 1000): ("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
}
BF16_AND_FP8_TFLOPS = {name: figures for figures, names in DATASHEETS.items() for name in names}
UNSTATED = ("NVIDIA GB10", "Tesla T4")  # in the table for their compute capability
NEIGHBOURS = (  # each of them is another chip, or a part of one, than the entry that its name resembles
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 D"),
    *("NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5080", "NVIDIA H200 MIG 1g.18gb"),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM-64GB", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
    *("NVIDIA H100", "NVIDIA H20 MIG 1g.12gb", "NVIDIA H20Z", "NVIDIA H800 NVL", "NVIDIA B100"),
    *("NVIDIA GB10 Max-Q", "NVIDIA A10", "NVIDIA A100X", "NVIDIA RTX 6000 Ada Generation"),
    *("NVIDIA RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 5000 Blackwell", "NVIDIA GeForce RTX 3090 Ti"),
    *("NVIDIA RTX A5000", "NVIDIA L40", "NVIDIA L20", "Tesla V100-SXM2-32GB", "AMD Instinct MI300X", ""),
)


@pytest.mark.parametrize("name", BF16_AND_FP8_TFLOPS)
def test_the_table_has_the_dense_figures_of_the_design(name):
    bf16, fp8 = BF16_AND_FP8_TFLOPS[name]
    peak = table_peak(name, "bfloat16")
    assert (peak.tflops, peak.flops) == (bf16, bf16 * 1e12)
    assert (peak.reason, peak.sparse, peak.measured) == (None, False, False)
    assert table_peak(name, "float16") == peak
    assert table_peak(name, "fp8").tflops == fp8


def test_every_name_has_one_entry_and_every_entry_a_name_and_the_capabilities_of_its_table():
    names = (*BF16_AND_FP8_TFLOPS, *UNSTATED)
    matches = [[g for g in GPUS if re.fullmatch(f"(NVIDIA )?({g.pattern})", name)] for name in names]
    assert all(len(gpus) == 1 for gpus in matches)
    assert {gpus[0] for gpus in matches} == set(GPUS)
    for gpu in GPUS:
        here = lookup(gpu.compute, gpu.name)
        assert gpu.compute in TABLE or not here.bf16, gpu.name
        if gpu.bf16 is not None:
            assert here.bf16 and here.fp8 == (gpu.fp8 is not None), gpu.name


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_an_unknown_gpu_never_gets_a_neighbours_peak(name):
    for precision in ("bfloat16", "fp8"):
        peak = table_peak(name, precision)
        assert peak.tflops is peak.flops is None and repr(name) in peak.reason
        assert table_peak("NVIDIA B200", precision, compute=(10, 3)).tflops is None, "a B300's capability"


ANOTHER = (
    r"'NVIDIA H200' is the name of a GPU of compute capability 9.0, but this one reports 10.0; "
    ".*--peak_tflops=measure"
)


@pytest.mark.parametrize(
    ("peak", "reason"),
    [
        *((table_peak("NVIDIA H200", p, compute=(10, 0)), ANOTHER) for p in ("bfloat16", "fp8", "float32")),
        (
            table_peak("NVIDIA H200", "float32"),
            ".*no float32 peak for the H200 SXM: .*no TF32.*dense float32 TFLOPS with --peak_tflops=...",
        ),
        (table_peak("NVIDIA A100-SXM4-80GB", "fp8"), "the A100 has no fp8 tensor cores"),
        *(
            (table_peak("NVIDIA GB10", p), rf"the table has no {p} peak for the GB10 \(.*fp4\); .*measure")
            for p in ("bfloat16", "fp8")
        ),
        (table_peak("Tesla T4", "float16"), ".* for the T4 .*65 for fp16.*state its dense float16 TFLOPS"),
        (
            resolve_peak(None, None, "bfloat16", False, "cpu"),
            "no peak for a CPU; .*--peak_tflops=measure",
        ),
    ],
)
def test_what_has_no_peak_has_a_reason_that_says_what_to_do(peak, reason):
    assert peak.tflops is None and re.match(reason, peak.reason)


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_sparse_doubles_the_dense_peak_and_says_so(precision):
    dense, sparse = (table_peak("NVIDIA B200", precision, sparse=flag) for flag in (False, True))
    assert sparse.tflops == 2 * dense.tflops
    assert sparse.sparse and not dense.sparse
    assert "2:4 sparse" in sparse.source and "2:4" not in dense.source


@pytest.mark.parametrize(
    ("name", "dense", "sparse"),
    [
        ("NVIDIA B200", 9000, 18000),
        ("NVIDIA GB200", 10000, 20000),
        ("NVIDIA GB300", 15000, 20000),  # not twice dense
        ("NVIDIA B300", None, None),  # its maker prints two figures
        ("NVIDIA H200", None, None),
    ],
)
def test_the_fp4_peak_is_the_makers_or_none_with_the_reason(name, dense, sparse):
    found = [table_peak(name, "fp4", sparse=flag) for flag in (False, True)]
    assert [peak.tflops for peak in found] == [dense, sparse] and found[1].sparse
    assert all(bool(peak.reason) == (dense is None) for peak in found)
    assert dense or "no fp4 peak for the" in found[0].reason


@pytest.fixture
def looks_like(monkeypatch):
    """looks_like(compute): this machine's device has that compute capability."""
    return lambda compute: monkeypatch.setattr(hardware, "capability", lambda _: lookup(compute, "a GPU"))


@pytest.mark.parametrize("stated", [1000.0, "measure"])
def test_a_stated_or_measured_peak_is_not_that_of_fp4_or_fp8(looks_like, stated):
    looks_like((10, 0))
    assert resolve_peak(stated, "NVIDIA B200", "fp4", False, "cuda").tflops == 9000
    looks_like((9, 0))
    assert resolve_peak(1000.0, "NVIDIA H200", "fp8", False, "cuda").tflops == 1978.9
    peak = resolve_peak(1000.0, "NVIDIA L20", "fp8", False, "cuda")
    assert peak.tflops is None and "state its" not in peak.reason


@pytest.mark.parametrize(
    ("recipe", "found"),
    [("none", {}), ("fp8_delayed", {"fp8": 4500}), ("mxfp8", {"fp8": 4500}), ("nvfp4", {"fp4": 9000})],
)
def test_a_run_has_the_peak_of_the_format_of_its_matmuls(monkeypatch, recipe, found):
    (peak,) = peaks_of_ranks(monkeypatch, "NVIDIA B200", compute=(10, 0), low_precision=recipe)
    assert {name: one.tflops for name, one in peak.of_formats.items()} == found
    assert peak.tflops == 2250
    (hopper,) = peaks_of_ranks(monkeypatch, H100, low_precision=recipe)
    assert list(hopper.of_formats) == (["fp8"] if recipe == "fp8_delayed" else [])


@pytest.mark.parametrize(
    ("stated", "name", "sparse"),
    [(123.5, "NVIDIA L20", False), (0.5, None, True), (1000.0, "NVIDIA H200", True)],
)
def test_a_stated_peak_is_taken_as_it_is(stated, name, sparse):
    peak = resolve_peak(stated, name, "bfloat16", sparse, "cuda" if name else "cpu")
    assert (peak.tflops, peak.source, peak.sparse) == (stated, "stated by peak_tflops", sparse)


def test_a_measured_peak_is_that_of_the_fastest_repeat_after_the_warm_up(monkeypatch):
    ends, calls = iter([7.0, 17.0, 18.0, 20.0]), []
    with monkeypatch.context() as patched:
        patched.setattr(hardware.time, "perf_counter", lambda: next(ends))
        assert hardware._timings(calls.append, 2, 2, torch.device("cpu")) == [1.0, 2.0]
    assert calls == [0, 1, 2, 3]
    monkeypatch.setattr(hardware, "_timings", lambda *_: [0.5, 0.25, 1.0])
    monkeypatch.setattr(hardware, "CPU_GEMM", 100)
    assert measure_peak("float32", "cpu").tflops == 2 * 100**3 / 0.25 / 1e12


def test_a_measured_peak_is_labelled_and_leaves_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    peak = resolve_peak("measure", None, "float32", False, "cpu")
    said = "float32 GEMM on this machine, fastest of 20; an achievable rate, not a datasheet peak"
    assert peak.measured and not peak.sparse
    assert re.fullmatch(f"measured: .*{said}", peak.source)
    assert torch.equal(before, torch.get_rng_state())


def test_fp8_is_measured_with_its_tensor_cores_and_operands_that_every_gpu_takes(looks_like, monkeypatch):
    looks_like((8, 6))
    assert "compute capability of 8.9 or above" in measure_peak("fp8", "cuda").reason
    calls = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *_, **kwargs: calls.append((a, b, kwargs)))
    looks_like((10, 0))
    hardware._gemm("fp8", 32, torch.device("cpu"))(0)
    ((a, b, kwargs),) = calls
    assert kwargs["use_fast_accum"]
    assert (a.stride(), b.stride()) == ((32, 1), (1, 32))  # row-major times column-major, on every GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_measures_below_its_table_peak_and_describes_itself():
    facts = describe_hardware("cuda")
    assert facts["gpu_memory_gb"] > 1
    assert all(facts[key] for key in ("gpu_name", "compute_capability", "cuda", "cudnn", "torch"))
    for precision in ("bfloat16", "fp8"):
        measured = measure_peak(precision, "cuda")
        table = table_peak(facts["gpu_name"], precision)
        print(measured, table)
        if measured.tflops and table.tflops:
            assert 0.3 * table.tflops < measured.tflops < table.tflops


# --- the GPUs of several ranks ---

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def peaks_of_ranks(monkeypatch, *names: str, compute=(9, 0), **keys) -> list[Peak]:
    """What agree_on_peak() gives to each rank of a run on these GPUs."""
    sent = []

    def from_rank_0(mine, world):
        sent.append(mine)
        return sent[0]  # rank 0's comes first

    monkeypatch.setattr(hardware, "_gpu_name", lambda device: names[device.index])
    monkeypatch.setattr(hardware, "capability", lambda device: lookup(compute, names[device.index]))
    monkeypatch.setattr(hardware, "gather_objects", lambda mine, world: list(names))
    monkeypatch.setattr(hardware, "from_rank_0", from_rank_0)
    ranks = [World(rank, rank, len(names), torch.device("cuda", rank)) for rank in range(len(names))]
    config = TrainConfig(**keys)
    recipe = recipe_class(config)
    native = recipe.support(lookup(compute, names[0])) in (NATIVE, CHECKED)  # the check passes
    return [agree_on_peak(config, world, recipe.peak if native else None) for world in ranks]


def test_all_ranks_have_the_peak_of_rank_0_and_unequal_gpus_none_but_a_stated_one(monkeypatch):
    peaks = peaks_of_ranks(monkeypatch, H100, H100, low_precision="fp8_tensorwise")
    assert peaks[0] == peaks[1]
    assert (peaks[0].tflops, peaks[0].of_formats["fp8"].tflops) == (989.4, 1978.9)
    peaks = peaks_of_ranks(monkeypatch, H100, A100, H100)
    assert peaks == peaks[:1] * 3 and peaks[0].flops is None
    assert f"2 x {H100}, 1 x {A100}" in peaks[0].reason and "--peak_tflops" in peaks[0].reason
    stated = peaks_of_ranks(monkeypatch, H100, A100, H100, peak_tflops=763.6)
    assert {(peak.tflops, peak.reason) for peak in stated} == {(763.6, None)}
