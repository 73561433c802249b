"""Run records for the plots: the JSON that train.py writes, and the older field logs of the same shape.

record_of_today() brings an older log into today's shape, so that nothing else knows of them. Rows are read
once into columns, with NaN for whatever a log lacks. A record may come from anybody: what is not of the type
that a reader needs counts as missing, and each text becomes one line that a terminal can show.

Trap: not every time_ms is that of a plain step. Warm-up includes compilation, and a run that was stopped and
resumed may have changed its hardware. Medians use only the rows in `Run.timed`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common import units
from common.arguments import matching_files
from common.errors import UserError
from common.run_records import is_old_seal, load_record
from common.text import one_line
from common.time_to_loss import Progress

METHODS = {
    "v1": "nanogpt_legacy_v1",
    "v2": "combined_formula_v2",
    "v3": "component_summation_v2025",
}
PLACES = {  # {column: where a row has it}
    **{name: (name,) for name in ("iter", "loss", "lr", "time_ms", "tokens_per_sec")},
    **{name: (name,) for name in ("sm_clock_mhz", "power_w", "temperature_c")},
    **{name: ("mfu", name) for name in ("mfu_percent", "mfu_causal_percent", "tokens_per_iter")},
    "peak_flops": ("mfu", "hardware_peak_flops"),
    "memory_gb": ("memory", "max_allocated_gb"),
    "grad_norm": ("gradients", "global_norm"),
}
LARGEST = 1e30  # FLOP/s of the largest machines are 1e19; far larger ones overflow on the way to the plot
OLD_WARMUP_ITERS = 5  # in older logs, which do not mark warm-up: compilation and autotuning end by then


@dataclass(frozen=True, eq=False)
class Run:
    path: Path
    record: dict  # as record_of_today() returns it
    columns: dict[str, np.ndarray]  # one value per logged iteration
    warmup: np.ndarray  # bool: timing includes compilation or warm-up
    timed: np.ndarray  # bool: plain steps of the last attempt
    mfu_methods: tuple[str, ...]  # FLOPs formulas behind the MFU column; empty without MFU, normally one

    @property
    def rows(self) -> list[dict]:
        return self.record["training_iterations"]

    @property
    def startup(self) -> dict:
        return as_dict(self.record.get("startup_info"))

    @property
    def config(self) -> dict:
        return as_dict(self.record.get("config"))

    @property
    def hardware(self) -> dict:
        """The mfu fields of the last measured row; what was found at start-up replaces them."""
        last: dict = next((row["mfu"] for row in reversed(self.rows) if row["mfu"]), {})
        found = as_dict(self.startup.get("hardware"))
        return {**last, **{key: value for key, value in found.items() if value is not None}}

    # --- texts ---

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
    def precision(self) -> str:
        precision = self.hardware.get("precision") or self.config.get("dtype") or "precision not recorded"
        low = look_up(self.startup, "low_precision", "recipe")
        return one_line(", ".join(str(name) for name in (precision, low) if name))

    @property
    def peak(self) -> str:
        """'989.4 TFLOPS per GPU'; 'measured' if it was timed on the machine, where the next start may find
        half as much if it is a CPU, as in '229.7 GFLOPS, measured'."""
        peaks = finite(self.columns["peak_flops"])
        if not len(peaks) or not peaks[-1] or not self.num_gpus:
            return ""
        flops = float(peaks[-1]) / self.num_gpus
        kind = ", 2:4 sparse" * bool(self.hardware.get("sparse_mode"))
        kind += ", measured" * bool(look_up(self.hardware, "peak", "measured"))
        if self.config.get("device") == "cpu":
            return f"{units.flops(flops)}LOPS{kind}"
        return f"{flops / 1e12:,.6g} TFLOPS per GPU{kind}"

    @property
    def why_no_mfu(self) -> str:
        reasons = [row.get("mfu_reason") for row in self.rows if row.get("mfu_reason")]
        return one_line(str(reasons[-1])) if reasons else "the log holds no measured MFU and gives no reason"

    # --- numbers ---

    @property
    def num_gpus(self) -> int | None:
        return int(as_float(self.hardware.get("num_gpus"), 0)) or None

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
        method = next(iter(self.mfu_methods), look_up(self.startup, "flops", "calculation_method"))
        return as_float(look_up(self.startup, "flops", "totals", str(method)))

    @property
    def best_val_loss(self) -> float | None:
        """Since the validation losses are of what they are of now (training/evaluation.py, `measure`)."""
        events = dicts(self.record, "events")
        changes = [as_float(e.get("attempt"), 1) for e in events if e.get("kind") == "other_measure"]
        losses = evaluations(self, "val_loss", since_attempt=max(changes, default=0))[1]
        seen = [*losses, as_float(look_up(self.record, "summary", "best_val_loss"))]
        return min((loss for loss in seen if loss < 1e9), default=None)  # older logs: nothing was evaluated


# --- values from anybody ---


def as_float(value: Any, default: float = math.nan) -> float:
    """The value as a float; `default` if it is no number, or one that no quantity of a run can have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else default  # NaN is below nothing


def as_dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def dicts(record: dict, key: str) -> list[dict]:
    rows = record.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def look_up(value: Any, *names: str) -> Any:
    """What is under these names, each within the one before; None if nothing is."""
    for name in names:
        value = as_dict(value).get(name)
    return value


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
    record = record_of_today(record)
    rows = record["training_iterations"]
    columns = {
        name: np.array([as_float(look_up(row, *place)) for row in rows], float)
        for name, place in PLACES.items()
    }
    warmup = np.array([bool(row.get("warmup")) for row in rows], bool)
    attempts = np.array([as_float(row.get("attempt"), 1) for row in rows])
    timed = ~warmup & (attempts >= as_float(record.get("attempt"), 1))
    methods = {
        one_line(str(row["mfu"].get("calculation_method") or "method not stated"))
        for row in rows
        if row["mfu"]
    }
    return Run(path, record, columns, warmup, timed, tuple(sorted(methods)))


def record_of_today(record: dict) -> dict:
    """An older log in the shape that train.py writes today; today's record stays what it is, but for `mfu`,
    which is {} in a row where it was not measured.

    Older logs hold an MFU of -100.0 until the first measurement, or have it only as a share; they have
    tokens/s within `mfu` or in training_progress alone, peaks in TFLOPS, and memory without its maximum. They
    do not mark warm-up, and the time of a row includes its evaluation: such a row then has no time."""
    rows = record["training_iterations"]
    progress = {as_float(row.get("iter")): row for row in dicts(record, "training_progress")}
    evaluated = {as_float(step.get("iter")) for step in dicts(record, "eval_steps")}
    is_old = not any("warmup" in row for row in rows)
    end_of_warmup = (as_float(rows[0].get("iter"), 0) if rows else 0) + OLD_WARMUP_ITERS
    found = []
    for index, row in enumerate(rows):
        iteration = as_float(row.get("iter"), index)
        mfu, memory = as_dict(row.get("mfu")), as_dict(row.get("memory"))
        percent = as_float(mfu.get("mfu_percent"), 100 * as_float(mfu.get("mfu")))
        peak = as_float(mfu.get("hardware_peak_flops"), 1e12 * as_float(mfu.get("hardware_peak_tflops")))
        speeds = (source.get("tokens_per_sec") for source in (row, mfu, progress.get(iteration, {})))
        gib = as_float(memory.get("max_allocated_gb"), as_float(memory.get("allocated_gb")))
        row = {
            **row,
            "iter": iteration,
            "mfu": {**mfu, "mfu_percent": percent, "hardware_peak_flops": peak} if percent >= 0 else {},
            "tokens_per_sec": next((speed for speed in speeds if speed is not None), None),
            "memory": {**memory, "max_allocated_gb": gib},
        }
        if is_old:
            row["warmup"] = iteration < end_of_warmup
        if is_old and iteration in evaluated:
            row |= {"time_ms": None, "tokens_per_sec": None, "mfu": {}}
        found.append(row)
    return {**record, "training_iterations": found}


# --- numbers ---


def finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def evaluations(run: Run, name: str, since_attempt: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and losses of the evaluations; name is train_loss or val_loss."""
    steps = [s for s in dicts(run.record, "eval_steps") if as_float(s.get("attempt"), 1) >= since_attempt]
    x, y = (np.array([as_float(step.get(key)) for step in steps], float) for key in ("iter", name))
    exists = np.isfinite(x) & np.isfinite(y)
    return x[exists], y[exists]


def iterations_of(entries: list[dict], name: str = "iter") -> np.ndarray:
    """Of the entries of a list of the record, such as "events"."""
    return finite(np.array([as_float(entry.get(name)) for entry in entries]))


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
    recorded = [found for source in sources if (found := look_up(source, "meta", "tokenizer"))]
    named = [as_dict(found) or {"name": found} for found in recorded]
    known = (key for key in ("sha256", "chars", "name") if all(tokenizer.get(key) for tokenizer in named))
    key = next(known, "")
    return len({str(tokenizer.get(key)) for tokenizer in named}) > 1


def throttled(run: Run) -> str:
    """'power_limit 98 %': in which share of the samples of the timed rows the GPU had lowered its clock, and
    for what; an empty text if no row has samples."""
    known = dicts({"shares": [run.rows[i].get("throttle") for i in np.flatnonzero(run.timed)]}, "shares")
    reasons = dict.fromkeys(reason for shares in known for reason in shares)
    means = {r: sum(as_float(shares.get(r), 0) for shares in known) / len(known) for r in reasons}
    texts = [f"{one_line(reason, 30)} {100 * mean:.0f} %" for reason, mean in means.items()]
    return " and ".join(texts) or "nothing" * bool(known)


def recounted(run: Run, method: str) -> Run:
    """The run with its MFU by another FLOPs formula: tokens/s x training FLOPs per token / peak."""
    if run.mfu_methods in ((), (method,)):
        return run
    flops_per_token = as_float(look_up(run.startup, "flops", "totals", method))
    if math.isnan(flops_per_token):
        raise UserError(
            f"{run.path} counts MFU by {' and '.join(run.mfu_methods)} and cannot be recounted as {method}: "
            "it has no startup_info.flops.totals for it (an older log); leave this run out"
        )
    mfu = 100 * run.columns["tokens_per_sec"] * flops_per_token / run.columns["peak_flops"]
    causal = np.full_like(mfu, math.nan)  # the record has no causal total per method
    columns = {**run.columns, "mfu_percent": mfu, "mfu_causal_percent": causal}
    return replace(run, columns=columns, mfu_methods=(method,))
