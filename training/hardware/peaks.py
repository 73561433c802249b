"""Finds the peak that MFU divides by, for the GPU of this machine.

Trap: the peak of another GPU, or the 2:4-sparse figure instead of the dense one, gives a plausible but wrong
MFU. So the whole device name must match and the compute capability must agree, an unknown GPU gets a reason
instead of a peak, and a sparse peak is marked as sparse.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from training.configuration.keys import TrainConfig
from training.hardware.capability import capability, dotted
from training.process.world import World, from_rank_0, gather_objects

FORMATS = ("fp8", "fp4")  # of matmuls, apart from the training dtype
PRECISIONS = ("bfloat16", "float16", "float32", *FORMATS)
CUDA_GEMM = 8192  # a 16-bit operand is 134 MB, more than the L2 of any GPU below
CUDA_WARMUP, CUDA_REPEATS = 50, 20  # the warm-up is long enough for an idle GPU to raise its clock
CPU_GEMM = 1024
CPU_WARMUP, CPU_REPEATS = 2, 20


@dataclass(frozen=True)
class Peak:
    """The highest rate of one GPU. tflops is None if it is not known; reason then says why, and the fix."""

    tflops: float | None  # 1e12 FLOPs per second; dense, or 2:4 sparse if `sparse`
    source: str
    reason: str | None = None
    sparse: bool = False
    measured: bool = False
    # the 'fp8' or 'fp4' peak, for a run whose matmuls are of that kind
    of_formats: Mapping[str, Peak] = field(default_factory=dict)

    @property
    def flops(self) -> float | None:
        return None if self.tflops is None else self.tflops * 1e12


@dataclass(frozen=True)
class Gpu:
    pattern: str  # regex for the whole device name after 'NVIDIA '; upper and lower case are the same
    name: str
    compute: tuple[int, int]  # capability; a row of training/hardware/capability.py
    bf16: float | None  # dense TFLOPS with fp32 accumulation; fp16 is the same figure; None: none is stated
    fp8: float | None  # dense TFLOPS with fp32 accumulation; None: no fp8 tensor cores, or none is stated
    source: str  # what the sheet prints for bf16 and fp8, in TFLOPS; dense is half of sparse


# Dense and 2:4 sparse TFLOPS of fp4: pages of the HGX B200, GB200 NVL72 and GB300 NVL72. NVIDIA's figures for
# eight B300s disagree, 105,000 or 108,000 dense, so that the B300 has none here.
FP4 = {"B200": (9000, 18000), "GB200": (10000, 20000), "GB300": (15000, 20000)}
PRO, PRO_SHEET = "RTX PRO 6000 Blackwell", "RTX Blackwell PRO whitepaper"
# Checked in November 2026 against public pages that quote the NVIDIA documents, not against the PDFs.
# NVIDIA rounds: half of 1,979 is the whitepaper's 989.4; half of 1,671 is the 835 printed for sparse TF32.
# The RTX PRO 6000 Server Edition's 1 and 2 PFLOPS are rounded most. Table 4 has the two workstation cards.
GPUS = (
    Gpu("B200", "B200", (10, 0), 2250, 4500, "HGX B200 datasheet: 4,500 and 9,000 sparse"),
    Gpu("B300( SXM6 AC)?", "B300", (10, 3), 2250, 4500, "HGX B300 page: 36,000 and 72,000 sparse for 8 GPUs"),
    Gpu("GB300", "GB300", (10, 3), 2500, 5000, "GB300 NVL72 page: 360,000 and 720,000 sparse for 72 GPUs"),
    Gpu("GB200", "GB200", (10, 0), 2500, 5000, "GB200 NVL72 datasheet: 5,000 and 10,000 sparse for one GPU"),
    Gpu("H200", "H200 SXM", (9, 0), 989.4, 1978.9, "H200 datasheet: 1,979 and 3,958 sparse"),
    Gpu("H200 NVL", "H200 NVL", (9, 0), 835, 1670.5, "H200 datasheet: 1,671 and 3,341 sparse"),
    # The memory in a GH200's name is the CPU's (480GB, 120GB) or the GPU's (144G); all have one Hopper chip.
    Gpu("GH200 (480GB|120GB|144G HBM3e)", "GH200", (9, 0), 989.4, 1978.9, "GH200 datasheet: 990 and 1,979"),
    Gpu("H100 80GB HBM3", "H100 SXM", (9, 0), 989.4, 1978.9, "H100 whitepaper: 989.4 and 1978.9 dense"),
    Gpu("H100 PCIe", "H100 PCIe", (9, 0), 756, 1513, "H100 datasheet: 1,513 and 3,026 sparse"),
    Gpu("H100 NVL", "H100 NVL", (9, 0), 835, 1670.5, "H100 datasheet: 1,671 and 3,341 sparse"),
    # The same chip and tensor cores as in the H100, with fewer links and hardly any fp64.
    Gpu("H800", "H800 SXM", (9, 0), 989.4, 1978.9, "H800 datasheet: 1,979 and 3,958 sparse"),
    Gpu("H800 PCIe", "H800 PCIe", (9, 0), 756, 1513, "H800 PCIe, Lenovo LP1814: 1,513 and 3,026 sparse"),
    Gpu("H20(-3e)?", "H20", (9, 0), 148, 296, "H20 sheet, as server makers quote it: 148 and 296 dense"),
    Gpu("A100(-SXM4-[48]0GB|-PCIE-40GB| 80GB PCIe)", "A100", (8, 0), 312, None, "A100 datasheet: 312 dense"),
    Gpu("RTX A6000", "RTX A6000", (8, 6), 154.8, None, "GA102 whitepaper v2, table 3: 154.8 dense"),
    Gpu("A10G", "A10G", (8, 6), 70, None, "NVIDIA's A10G datasheet for AWS: 70 dense; an A10 has 125"),
    Gpu("GeForce RTX 3090", "RTX 3090", (8, 6), 71, None, "GA102 whitepaper v2, appendix A: 71 dense"),
    Gpu("L4", "L4", (8, 9), 121, 242.5, "L4 datasheet: 242 and 485 sparse"),
    # The sheet's bf16 disagrees with itself by 1 % (362.05 dense, 733 sparse) and names no accumulator.
    Gpu("L40S", "L40S", (8, 9), 362, 733, "L40S datasheet: 362.05 and 733 dense"),
    # A GeForce has half the rate when it accumulates in fp32; for fp8 the Ada whitepaper says so since v2.02.
    Gpu("GeForce RTX 4090", "RTX 4090", (8, 9), 165.2, 330.3, "Ada whitepaper v2.02: 165.2 and 330.3 dense"),
    Gpu("GeForce RTX 5090", "RTX 5090", (12, 0), 209.5, 419, "RTX Blackwell whitepaper: 209.5 and 419 dense"),
    Gpu(f"{PRO} Workstation Edition", PRO, (12, 0), 503.8, 1007.6, f"{PRO_SHEET}: 503.8 dense"),
    Gpu(f"{PRO} Max-Q Workstation Edition", f"{PRO} Max-Q", (12, 0), 438.9, 877.9, f"{PRO_SHEET}: 438.9"),
    Gpu(f"{PRO} Server Edition", f"{PRO} Server", (12, 0), 500, 1000, "datasheet: 1,000 and 2,000 sparse"),
    Gpu("GB10", "GB10", (12, 1), None, None, "NVIDIA states one figure, 1,000 for sparse fp4"),
    Gpu("Tesla T4", "T4", (7, 5), None, None, "it has no bf16; its datasheet has 65 for fp16"),
)


def find_gpu(name: str) -> Gpu | None:
    """The row of this torch.cuda.get_device_name()."""
    return next((g for g in GPUS if re.fullmatch(f"(NVIDIA )?({g.pattern})", name, re.I)), None)


def table_peak(
    gpu_name: str, precision: str, sparse: bool = False, compute: tuple[int, int] | None = None
) -> Peak:
    """The datasheet peak for a torch.cuda.get_device_name(). Raises ValueError for an unknown precision.

    compute is the capability that the device reports; None leaves it unchecked.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} has no peak; use one of {', '.join(PRECISIONS)}")
    fix = "time a GEMM with --peak_tflops=measure"
    if precision not in FORMATS:  # see resolve_peak: a stated number is never the peak of a format
        fix = f"state its dense {precision.replace('bfloat', 'bf')} TFLOPS with --peak_tflops=..., or {fix}"
    gpu = find_gpu(gpu_name)
    if gpu is None:
        return Peak(None, "none", f"no peak is known for the GPU {gpu_name!r}; {fix}", sparse)
    if compute not in (None, gpu.compute):
        named = f"{gpu_name!r} is the name of a GPU of compute capability {dotted(gpu.compute)}"
        return Peak(None, "none", f"{named}, but this one reports {dotted(compute)}; {fix}", sparse)
    if precision == "float32":
        why = "it has those of tensor cores, which float32 does not use here (no TF32)"
        return Peak(None, "none", f"the table has no float32 peak for the {gpu.name}: {why}; {fix}", sparse)
    if gpu.bf16 is None:
        missing = f"the table has no {precision} peak for the {gpu.name} ({gpu.source})"
        return Peak(None, "none", f"{missing}; {fix}", sparse)
    if precision == "fp4":
        if gpu.name not in FP4:
            return Peak(None, "none", f"the table has no fp4 peak for the {gpu.name}", sparse)
        return Peak(float(FP4[gpu.name][sparse]), f"{gpu.name}, fp4 (its page)", sparse=sparse)
    tflops = gpu.fp8 if precision == "fp8" else gpu.bf16
    if tflops is None:
        return Peak(None, "none", f"the {gpu.name} has no fp8 tensor cores; train it in bfloat16", sparse)
    kind = "2:4 sparse, twice dense" if sparse else "dense"
    return Peak(float(2 * tflops if sparse else tflops), f"{gpu.name}, {kind} ({gpu.source})", sparse=sparse)


def resolve_peak(
    peak_tflops: float | str | None, gpu_name: str | None, precision: str, sparse: bool, device
) -> Peak:
    """The peak that the settings ask for; gpu_name is None on a CPU.

    A stated number is used as it is, also with sparse=True. It is the rate of the training dtype, so the peak
    of fp8 or fp4 still comes from the table. fp4 is not measured.
    """
    if peak_tflops == "measure" and precision != "fp4":
        return measure_peak(precision, device)
    if peak_tflops is not None and precision not in FORMATS:
        return Peak(float(peak_tflops), "stated by peak_tflops", sparse=sparse)
    if gpu_name is None:
        fix = "state its TFLOPS with --peak_tflops=..., or time a GEMM with --peak_tflops=measure"
        return Peak(None, "none", f"no peak for a CPU; {fix}", sparse)
    return table_peak(gpu_name, precision, sparse, capability(device).compute)


def measure_peak(precision: str, device) -> Peak:
    """The measured rate of a large n x n GEMM (2 n^3 FLOPs); float32 at the current matmul precision."""
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    if precision == "fp8" and not capability(device).fp8:
        return Peak(None, "none", "an fp8 GEMM needs a compute capability of 8.9 or above")
    n = CUDA_GEMM if on_cuda else CPU_GEMM
    warmup, repeats = (CUDA_WARMUP, CUDA_REPEATS) if on_cuda else (CPU_WARMUP, CPU_REPEATS)
    # the fastest, because a peak is a maximum: other work on the machine can only make a repeat slower
    seconds = min(_timings(_gemm(precision, n, device), warmup, repeats, device))
    if on_cuda:  # the buffers are freed; this also removes them from the run's memory figures
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    gemm = f"{n}x{n}x{n} {precision} GEMM on this machine, fastest of {repeats}"
    source = f"measured: {gemm}; an achievable rate, not a datasheet peak"
    return Peak(2 * n**3 / seconds / 1e12, source, measured=True)


def _gemm(precision: str, n: int, device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function of the repeat's number that multiplies two pairs of random n x n matrices in turn."""
    # Random: zeros draw less power, so the clock is higher. An own generator does not change the run's.
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float8_e4m3fn if precision == "fp8" else getattr(torch, precision)
    pairs = torch.randn(2, 2, n, n, device=device, generator=generator).to(dtype)
    one = torch.ones((), device=device)  # the scale of each fp8 operand

    def multiply(repeat: int) -> torch.Tensor:
        a, b = pairs[repeat % 2]
        if precision != "fp8":
            return torch.mm(a, b)
        # b.t(), because the second operand must be column-major; fast accumulation is Ada's and Hopper's
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return multiply


def _timings(multiply: Callable, warmup: int, repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call after the warm-up, which must have at least one call."""
    events: list[torch.cuda.Event] = []
    seconds: list[float] = []  # at the end of each call
    for repeat in range(warmup + repeats):
        multiply(repeat)
        if device.type == "cuda":
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(torch.cuda.current_stream(device))
        else:
            seconds.append(time.perf_counter())
    if events:
        events[-1].synchronize()  # sync point
        seconds = [events[0].elapsed_time(event) / 1e3 for event in events]
    return [end - start for start, end in zip(seconds[warmup - 1 :], seconds[warmup:], strict=False)]


def agree_on_peak(config: TrainConfig, world: World, low: str | None = None) -> Peak:
    """Rank 0's peak: from the table, stated or measured. Unequal GPUs have none but a stated one. low: 'fp8'
    or 'fp4', if matmuls are of that kind. All ranks."""
    gpus = Counter(gather_objects(_gpu_name(world.device), world))
    if len(gpus) == 1:
        return from_rank_0(_find_peak(config, world.device, low) if world.is_main else None, world)
    if isinstance(config.peak_tflops, float):
        return Peak(config.peak_tflops, "stated by peak_tflops", sparse=config.use_sparse_specs)
    named = ", ".join(f"{count} x {name}" for name, count in gpus.items())
    fix = "state the mean of their dense peaks with --peak_tflops=..."
    return Peak(None, "none", f"unequal GPUs, {named}: {fix}", config.use_sparse_specs)


def _gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _find_peak(config: TrainConfig, device: torch.device, low: str | None) -> Peak:
    stated, sparse, name = config.peak_tflops, config.use_sparse_specs, _gpu_name(device)
    peak = resolve_peak(stated, name, config.dtype, sparse, device)
    if low is None:
        return peak
    return replace(peak, of_formats={low: resolve_peak(stated, name, low, sparse, device)})
