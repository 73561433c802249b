"""Run records for the plots: the JSON that train.py writes, and the older field logs of the same shape.

Everything is read once into columns, with NaN for whatever a log lacks, so the plots need no case for older
logs. A record may come from anybody: each text of it becomes one line that a terminal can show.

Trap: not every time_ms is that of a plain step. Warm-up includes compilation, older logs include evaluation,
and a run that was stopped and resumed may have changed its hardware. Medians use only the rows in
`Run.timed`: plain steps of the last attempt.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import units
from common.arguments import matching_files
from common.errors import UserError
from common.run_records import is_old_seal, load_record
from common.text import one_line
from common.time_to_loss import Progress
from plots.record_values import as_dict, as_float, dicts

METHODS = {
    "v1": "nanogpt_legacy_v1",
    "v2": "combined_formula_v2",
    "v3": "component_summation_v2025",
}
OLD_WARMUP_ITERS = 5  # in older logs, which do not mark warm-up: compilation and autotuning end by then


@dataclass(frozen=True, eq=False)
class Run:
    path: Path
    record: dict
    columns: dict[str, np.ndarray]  # one value per logged iteration; see _row_values
    warmup: np.ndarray  # bool: timing includes compilation or warm-up
    with_evaluation: np.ndarray  # bool: timing includes an evaluation (older logs)
    earlier_attempt: np.ndarray  # bool: made by an attempt before the last
    mfu_methods: tuple[str, ...]  # FLOPs formulas behind the MFU column; empty without MFU, normally one

    @property
    def timed(self) -> np.ndarray:
        return ~self.warmup & ~self.with_evaluation & ~self.earlier_attempt

    @property
    def label(self) -> str:
        """With the folder, because the names of most records are only times."""
        return one_line(f"{self.path.resolve().parent.name}/{self.path.stem}")

    @property
    def status(self) -> str:
        status = self.record.get("status")
        if status == "running" and not self.record.get("end_time"):
            return "running, or killed (no end recorded)"
        return one_line(str(status or "status not recorded"))

    @property
    def warmup_spans(self) -> list[tuple[float, float]]:
        """First and last iteration of each series of warm-up rows."""
        rows = np.flatnonzero(self.warmup)
        series = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
        iters = self.columns["iter"]
        return [(iters[each[0]], iters[each[-1]]) for each in series if len(each)]

    @property
    def attempt_starts(self) -> list[float]:
        """The iterations at which the run was resumed."""
        attempts = dicts(self.record, "attempts")[1:]
        return list(finite(np.array([as_float(attempt.get("start_iter")) for attempt in attempts])))

    @property
    def startup(self) -> dict:
        return as_dict(self.record.get("startup_info"))

    @property
    def config(self) -> dict:
        return as_dict(self.record.get("config"))

    @property
    def model(self) -> str:
        facts = as_dict(self.startup.get("model"))
        names = (facts.get("architecture"), self.hardware.get("architecture"), self.config.get("arch_preset"))
        found = (one_line(name) for name in names if name and isinstance(name, str))
        name, params = next(found, "model not recorded"), as_float(facts.get("total_params"))
        scale, unit = (1e9, "B") if params >= 1e9 else (1e6, "M")
        return name if math.isnan(params) else f"{name}, {params / scale:.3g} {unit} parameters"

    @property
    def machine(self) -> str:
        name = self.hardware.get("gpu_name") or self.config.get("device") or "device not recorded"
        return one_line(f"{self.num_gpus} x {name}" if self.num_gpus else str(name))

    @property
    def num_gpus(self) -> int | None:
        number = as_float(self.hardware.get("num_gpus"), 0)
        return int(number) or None

    @property
    def precision(self) -> str:
        precision = self.hardware.get("precision") or self.config.get("dtype") or "precision not recorded"
        low = as_dict(self.startup.get("low_precision")).get("recipe")
        return one_line(", ".join(str(name) for name in (precision, low) if name))

    @property
    def hardware(self) -> dict:
        """The mfu fields of the last measured row; what was found at start-up replaces them."""
        rows = [_measured(row) for row in self.record["training_iterations"]]
        last: dict = next((mfu for mfu in reversed(rows) if mfu), {})
        found = as_dict(self.startup.get("hardware"))
        return {**last, **{key: value for key, value in found.items() if value is not None}}

    @property
    def peak_tflops_per_gpu(self) -> float | None:
        peaks = finite(self.columns["peak_flops"])
        return float(peaks[-1]) / self.num_gpus / 1e12 if len(peaks) and self.num_gpus else None

    @property
    def peak(self) -> str:
        """'989.4 TFLOPS per GPU'; 'measured' if it was timed on the machine, where the next start may find
        half as much if it is a CPU, as in '229.7 GFLOPS, measured'."""
        kind = ", 2:4 sparse" * bool(self.hardware.get("sparse_mode"))
        kind += ", measured" * bool(as_dict(self.hardware.get("peak")).get("measured"))
        if not (tflops := self.peak_tflops_per_gpu):
            return ""
        if self.config.get("device") == "cpu":
            return f"{units.flops(tflops * 1e12)}LOPS{kind}"
        return f"{tflops:,.6g} TFLOPS per GPU{kind}"

    @property
    def tokens_per_iter(self) -> float | None:
        """Of all GPUs; None where the log does not say."""
        logged = finite(self.columns["tokens_per_iter"])
        stated = as_float(self.startup.get("tokens_per_iter"), float(logged[-1]) if len(logged) else 0.0)
        return stated if stated > 0 else None

    @property
    def progress(self) -> Progress | None:
        """None if the record, which may be anybody's, does not tell."""
        try:
            with np.errstate(all="ignore"):
                return Progress(self.record)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return None

    @property
    def flops_per_token(self) -> float:
        """Of training, by the formula of its MFU, or else of its start-up report."""
        flops = as_dict(self.startup.get("flops"))
        method = next(iter(self.mfu_methods), flops.get("calculation_method"))
        return as_float(as_dict(flops.get("totals")).get(str(method)))

    @property
    def best_val_loss(self) -> float | None:
        """Since the validation losses are of what they are of now (training/evaluation.py, `measure`)."""
        summary, events = as_dict(self.record.get("summary")), dicts(self.record, "events")
        changes = [as_float(e.get("attempt"), 1) for e in events if e.get("kind") == "other_measure"]
        losses = evaluations(self, "val_loss", since_attempt=max(changes, default=0))[1]
        seen = [*losses, as_float(summary.get("best_val_loss"))]
        return min((loss for loss in seen if loss < 1e9), default=None)  # older logs: nothing was evaluated

    @property
    def why_no_mfu(self) -> str:
        rows = self.record["training_iterations"]
        reasons = [row.get("mfu_reason") for row in rows if row.get("mfu_reason")]
        return one_line(str(reasons[-1])) if reasons else "the log holds no measured MFU and gives no reason"


# --- reading ---


def expand_globs(patterns: list[str]) -> list[Path]:
    """The files that paths and globs name, in this order, each once. A shell expands no quoted glob."""
    paths = {}
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)
        matches = [Path(pattern)] if Path(pattern).exists() else matching_files(pattern)
        if not matches:
            raise UserError(f"nothing matches {pattern}; run records are OUT_DIR/run_YYYYMMDD_HHMMSS.json")
        paths.update({match.resolve(): match for match in matches})
    # run_*.json takes a seal of the earlier name, run_*.seal.json, with the record that it seals
    sealed = {full: full.with_suffix("").with_suffix(".json") for full in paths if is_old_seal(full)}
    return [path for full, path in paths.items() if sealed.get(full) not in paths]


def load_run(path: Path) -> Run:
    """Reads one run record, or that within a seal; UserError names the file when it is neither."""
    try:
        record = load_record(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name run records") from None
    except ValueError as error:
        raise UserError(f"{path} is no run record: {error}") from None
    if "seal" in record:  # which `tools.seal --verify` checks
        record = as_dict(record.get("record"))
    rows = record.get("training_iterations")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is not a run record: it has no list of training_iterations")

    progress = {as_float(row.get("iter")): row for row in dicts(record, "training_progress")}
    values = [_row_values(row, index, progress) for index, row in enumerate(rows)]
    names = _row_values({}, 0, {}).keys()
    columns = {name: np.array([value[name] for value in values], dtype=float) for name in names}
    measured = [mfu for row in rows if (mfu := _measured(row))]
    methods = {one_line(str(mfu.get("calculation_method") or "method not stated")) for mfu in measured}
    masks = _warmup_and_evaluation(rows, columns["iter"], record)
    attempts = np.array([as_float(row.get("attempt"), 1) for row in rows])
    earlier_attempt = attempts < as_float(record.get("attempt"), 1)
    return Run(path, record, columns, *masks, earlier_attempt, tuple(sorted(methods)))


def _row_values(row: dict, index: int, progress: dict) -> dict[str, float]:
    """One logged iteration as numbers, NaN where the log has none."""
    mfu, memory = _measured(row), as_dict(row.get("memory"))
    iteration = as_float(row.get("iter"), index)
    sources = (row, mfu, progress.get(iteration, {}))
    tokens_per_sec = (source.get("tokens_per_sec") for source in sources)
    peak_tflops = as_float(mfu.get("hardware_peak_tflops"))
    known = ("loss", "lr", "time_ms", "sm_clock_mhz", "power_w", "temperature_c")
    return {
        "iter": iteration,
        **{name: as_float(row.get(name)) for name in known},
        "tokens_per_sec": as_float(next((value for value in tokens_per_sec if value is not None), None)),
        "mfu_percent": _mfu_percent(mfu),
        "mfu_causal_percent": as_float(mfu.get("mfu_causal_percent")),
        "tokens_per_iter": as_float(mfu.get("tokens_per_iter")),
        "peak_flops": as_float(mfu.get("hardware_peak_flops"), 1e12 * peak_tflops),
        "memory_gb": as_float(memory.get("max_allocated_gb"), as_float(memory.get("allocated_gb"))),
        "grad_norm": as_float(as_dict(row.get("gradients")).get("global_norm")),
    }


def _warmup_and_evaluation(
    rows: list[dict], iters: np.ndarray, record: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Masks (warmup, with_evaluation) of the rows whose timing is not that of a plain step."""
    nothing = np.zeros(len(rows), dtype=bool)
    if any("warmup" in row for row in rows):  # by our logger, whose timings do not include evaluation
        return np.array([bool(row.get("warmup")) for row in rows]), nothing
    with_evaluation = np.isin(iters, [as_float(step.get("iter")) for step in dicts(record, "eval_steps")])
    return iters < sum(iters[:1]) + OLD_WARMUP_ITERS, with_evaluation


def _measured(row: dict) -> dict:
    """The row's mfu fields, {} if it has none; older logs hold -100.0 until the first measurement."""
    mfu = as_dict(row.get("mfu"))
    return mfu if _mfu_percent(mfu) >= 0 else {}


def _mfu_percent(mfu: dict) -> float:
    return as_float(mfu.get("mfu_percent"), 100 * as_float(mfu.get("mfu")))


# --- numbers ---


def finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def evaluations(run: Run, name: str, since_attempt: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and losses of the evaluations; name is train_loss or val_loss."""
    steps = [s for s in dicts(run.record, "eval_steps") if as_float(s.get("attempt"), 1) >= since_attempt]
    x, y = (np.array([as_float(step.get(key)) for step in steps], float) for key in ("iter", name))
    exists = np.isfinite(x) & np.isfinite(y)
    return x[exists], y[exists]


def iterations_of(run: Run, section: str) -> np.ndarray:
    """Of the entries of a list of the record, such as "events"."""
    return finite(np.array([as_float(entry.get("iter")) for entry in dicts(run.record, section)]))


def spread(run: Run, name: str) -> tuple[float, float, float] | None:
    """Median, 10th and 90th percentile of a column after warm-up; None when nothing was measured by then."""
    values = finite(run.columns[name][run.timed])
    if not len(values):
        return None
    p10, p90 = np.percentile(values, [10, 90], method="nearest")  # as in training/records/percentiles.py
    return float(np.median(values)), float(p10), float(p90)


def tokenizers_differ(runs: list[Run]) -> bool:
    """Whether nats per token of these runs cannot be compared. By what all records that name the tokenizer of
    their data say of it."""
    sources = [source for run in runs for source in dicts(as_dict(run.startup.get("data")), "sources")[:1]]
    recorded = [found for source in sources if (found := as_dict(source.get("meta")).get("tokenizer"))]
    named = [as_dict(found) or {"name": found} for found in recorded]
    for key in ("sha256", "chars", "name"):
        if all(tokenizer.get(key) for tokenizer in named):
            return len({str(tokenizer[key]) for tokenizer in named}) > 1
    return False


def throttled(run: Run) -> str:
    """'power_limit 98 %': in which share of the samples of the timed rows the GPU had lowered its clock, and
    for what; an empty text if no row has samples."""
    rows = [row for row, timed in zip(run.record["training_iterations"], run.timed, strict=True) if timed]
    known = [row["throttle"] for row in rows if isinstance(row.get("throttle"), dict)]
    reasons = dict.fromkeys(reason for shares in known for reason in shares)
    means = [sum(as_float(shares.get(reason), 0) for shares in known) / len(known) for reason in reasons]
    texts = [
        f"{one_line(reason, 30)} {100 * mean:.0f} %" for reason, mean in zip(reasons, means, strict=True)
    ]
    return " and ".join(texts) or "nothing" * bool(known)


def recounted(run: Run, method: str) -> Run:
    """The run with its MFU by another FLOPs formula: tokens/s x training FLOPs per token / peak."""
    if run.mfu_methods in ((), (method,)):
        return run
    totals = as_dict(as_dict(run.startup.get("flops")).get("totals"))
    flops_per_token = as_float(totals.get(method))
    if math.isnan(flops_per_token):
        raise UserError(
            f"{run.path} counts MFU by {' and '.join(run.mfu_methods)} and cannot be recounted as {method}: "
            "it has no startup_info.flops.totals for it (an older log); leave this run out"
        )
    mfu = 100 * run.columns["tokens_per_sec"] * flops_per_token / run.columns["peak_flops"]
    causal = np.full_like(mfu, math.nan)  # the record has no causal total per method
    columns = {**run.columns, "mfu_percent": mfu, "mfu_causal_percent": causal}
    return replace(run, columns=columns, mfu_methods=(method,))
