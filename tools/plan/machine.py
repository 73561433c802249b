"""How many FLOPs a machine computes in an hour: its GPUs, their peak, and a stated or measured MFU."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.text import one_line, shown
from plots.run_record import METHODS, Run, load_run, recounted, spread
from training.hardware.gpu_memory import find_card
from training.hardware.peaks import table_peak

MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class Machine:
    gpus: int
    name: str
    peak_flops: float  # per second, of one GPU, dense
    mfu: float  # a fraction
    mfu_source: str

    @property
    def flops_per_hour(self) -> float:
        return 3600 * self.gpus * self.peak_flops * self.mfu

    def hours(self, flops: float) -> float:
        return flops / self.flops_per_hour

    def __str__(self) -> str:
        return (
            f"{self.gpus} x {self.name}, peak {self.peak_flops / 1e12:,.5g} TFLOPS each, "
            f"MFU {100 * self.mfu:.4g} % ({self.mfu_source})"
        )


def parse_gpus(text: str) -> tuple[int, str]:
    """(8, 'H200') of '8xH200'. Raises UserError."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*[x*]\s*(\S.*)", text)
    if not found:
        raise UserError(f"--gpus={shown(text)} is not a number and a GPU; write it as 8xH200")
    gpus, name = int(found[1]), found[2].strip()
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus={shown(text)} has {gpus:,} GPUs; state 1 to {MOST_GPUS:,}")
    return gpus, name


def make_machine(gpus: str | None, mfu: float | None, records: list[Path]) -> Machine | None:
    """The machine that the flags describe, None if they describe none. Raises UserError."""
    if mfu is not None and records:
        raise UserError("--mfu and --records both state the MFU; leave one of them out")
    if mfu is not None and not 0 < mfu <= 1:
        raise UserError(
            f"--mfu={mfu:g} is not a fraction above 0 and at most 1"
            + (f"; write {mfu:g} % as {mfu / 100:g}" if 1 < mfu <= 100 else "")
        )
    measured = [_measured(path) for path in records]
    if gpus is None:
        if mfu is not None:
            raise UserError(f"--mfu={mfu:g} is the share of a peak: state the GPUs, too, as in --gpus=8xH200")
        return _machine_of(measured) if measured else None
    number, name = parse_gpus(gpus)
    card = find_gpu(name)
    peak = table_peak(card, "bfloat16")
    if peak.flops is None:
        raise UserError(f"--gpus={shown(gpus)}: no bf16 peak is known for the {card}")
    if mfu is None and not measured:
        raise UserError(
            f"--gpus={shown(gpus)} needs an MFU: state it, as in --mfu=0.6, or name records of runs that "
            "measured it, as in --records=out/run_*.json"
        )
    short = card.removeprefix("NVIDIA ")
    if mfu is not None:
        return Machine(number, short, peak.flops, mfu, "stated")
    value, source = _median(measured)
    others = sorted({each.machine for each in measured} - {f"{number} x {card}"})
    if others:
        source += f", on {', '.join(others)}"
    return Machine(number, short, peak.flops, value, source)


def find_gpu(name: str) -> str:
    """The device name of a GPU in the table of peaks. Raises UserError."""
    try:
        return find_card(name).device
    except UserError as error:
        raise UserError(f"--gpus: {str(error).removeprefix('gpu=')}") from None


def _measured(path: Path) -> Run:
    """A record with an MFU by v3 of a dense peak. Raises UserError."""
    run = recounted(load_run(path), METHODS["v3"])
    if spread(run, "mfu_percent") is None:
        raise UserError(
            f"{path} has no measured MFU after warm-up: {run.why_no_mfu}; name another, or state --mfu"
        )
    if run.sparse:
        raise UserError(f"{path} states its MFU of the 2:4 sparse peak, half of the dense one; state --mfu")
    if run.peak_tflops_per_gpu is None:
        raise UserError(f"{path} does not say of how many GPUs and of which peak its MFU is; state --mfu")
    return run


def _median(runs: list[Run]) -> tuple[float, str]:
    """(MFU, where it is from): the median of the records' medians."""
    values = [found[0] / 100 for run in runs if (found := spread(run, "mfu_percent"))]
    if not all(0 < value <= 1 for value in values):
        raise UserError("the records have an MFU that is not above 0 % and at most 100 %; state --mfu")
    if len(values) == 1:
        return values[0], f"measured by {runs[0].name}"
    low, high = 100 * min(values), 100 * max(values)
    return statistics.median(values), f"measured by {len(values)} runs, {low:.4g} to {high:.4g} %"


def _machine_of(runs: list[Run]) -> Machine:
    """The machine on which the records were made. Raises UserError if they are of several."""
    machines = {(run.num_gpus, str(run.hardware.get("gpu_name")), run.peak_tflops_per_gpu) for run in runs}
    if len(machines) > 1:
        names = ", ".join(sorted({run.machine for run in runs}))
        raise UserError(f"the records are of several machines or peaks ({names}); state --gpus, as in 8xH200")
    ((gpus, name, tflops),) = machines
    assert gpus and tflops, machines
    value, source = _median(runs)
    return Machine(gpus, one_line(name), tflops * 1e12, value, source)
