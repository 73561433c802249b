"""The table and the picture of the precision matrix: figures of each row, beside the published ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.plan import Entry
from bench.precision_rows import BASELINE, HEAD, PUBLISHED, ROWS, UNTIED, Row, corrected
from common.errors import UserError
from common.text import aligned
from plots.figure import legend, literal, new_figure
from plots.figure import save as save_figure
from training.configuration.keys import TrainConfig

COLUMNS = (
    "row",
    "weights",
    "matmuls",
    "executed as",
    "tokens/s",
    "MFU %",
    "causal %",
    "of fp8 %",
    "peak GiB",
    "reserved",
    "held-out loss",
    "from row 1 %",
    "study's MFU %",
    "corrected %",
    "its causal %",
    "study's loss",
    "note",
)
SEE_BELOW = {"failures": "failed", "fallbacks": "ran otherwise"}  # of a row: what lines below the table say
TEXT_COLUMNS = ("weights", "matmuls", "executed as", "note")
LEGEND = (
    "weights: what the optimizer updates, rounded to nearest unless it says stochastic; MFU: v3, logits\n"
    "in every row, of the bf16 peak, also for fp8 and emulated rows: with the full matrix of scores;\n"
    "causal: its causal half, inside documents where they are masked; of fp8: of the fp8 peak, native fp8\n"
    "alone; peak GiB, reserved: most memory allocated and reserved; loss, from row 1: mean and standard\n"
    "deviation over seeds, relative to row 1 of the same seed. Four columns are the study's, from one\n"
    "B200: MFU and loss as printed (two formulas; training in a fourth epoch), and its tokens/s counted\n"
    "as here, full and causal, without documents. docs/low_precision.md says more."
)
STUDY_LINE = (
    "the study: learning_rate=2e-05, warmup_iters=100, wsd with a cosine tail over the last 20 % of 2,776\n"
    "  iterations of 131,072 tokens (four epochs), beta1=0.9, beta2=0.999, weight_decay=0.01 on all\n"
    "  weights, gradients and Adam moments in the dtype of the weights; here moments are float32 unless a\n"
    "  flag says otherwise: bfloat16 ones, rounded to nearest, hardly change at beta2=0.999"
)
SCHEDULE = ("learning_rate", "min_lr", "warmup_iters", "lr_schedule", "beta1", "beta2", "weight_decay")


@dataclass
class Run:
    """A run of a row: of its speed, or of its loss with one seed."""

    phase: str
    row: str
    seed: int | None
    entry: Entry
    warmup: int  # iterations that no figure includes
    settings: str  # what the runs of this phase have in common


def settings_line(phase: str, config_file: str, config: TrainConfig, held_out: str) -> str:
    """What the runs of a phase have in common, for the head of the table."""
    batch, steps = config.micro_batch, config.micro_steps
    tokens = batch * steps * config.block_size
    model = (
        f"{config.n_layer} blocks of width {config.n_embd}, vocabulary {config.model_config().vocab_size:,}"
    )
    parts = [
        f"{phase}: {config_file}, {model}",
        f"{config.max_iters:,} iterations of {batch} x {steps} x {config.block_size} = {tokens:,} tokens",
        f"dataset {config.dataset}, packing={config.packing}, doc_masking={config.doc_masking}",
        f"{config.device}, dtype={config.dtype}, compile={config.compile}",
    ]
    if phase == "loss":
        parts += [f"init_weights={config.init_weights}"] if config.init_weights else ["from scratch"]
        parts += [", ".join(f"{name}={getattr(config, name)}" for name in SCHEDULE)]
        parts += [f"adam_dtype={config.adam_dtype}", f"held-out loss on {held_out}, after the last iteration"]
    return "; ".join(parts)


# --- figures ---


def row_figures(runs: list[Run]) -> list[dict]:
    """Everything about each row, in the order of the table; what was not measured is None or empty."""
    losses = {name: losses_of(name, runs) for name in ROWS}
    return [figures(row, runs, losses) for row in ROWS.values()]


def losses_of(name: str, runs: list[Run]) -> dict[str, float]:
    """{seed: held-out loss after the last iteration}"""
    found = {}
    for run in runs:
        if run.phase == "loss" and run.row == name and run.entry.result:
            found[str(run.seed)] = run.entry.facts["evaluations"][-1]["val_loss"]
    return found


def figures(row: Row, runs: list[Run], all_losses: dict[str, dict[str, float]]) -> dict:
    losses = all_losses[row.name]
    own = [run for run in runs if run.row == row.name and run.entry.runs]
    speed = next((run.entry for run in own if run.phase == "speed" and run.entry.result), None)
    measured = (speed and speed.result) or {}
    facts = next((run.entry.facts for run in own if run.entry.result), {})
    low = facts.get("low_precision") or {}
    native = low.get("native", True)
    changes = [] if row.name == BASELINE else percent_above(losses, all_losses[BASELINE])
    untied = percent_above(losses, all_losses[UNTIED])
    weight_tying = facts.get("config", {}).get("weight_tying", row.weight_tying)
    failures = phases_of((run.phase, run.entry.runs[-1]["reason"]) for run in own)
    fallbacks = phases_of((run.phase, text) for run in own for text in run.entry.facts.get("fallbacks", []))
    if row.name in PUBLISHED:
        published = {**PUBLISHED[row.name]._asdict(), "corrected": corrected(row)}
    else:
        published = {}
    return {
        "row": row.name,
        "param_dtype": row.param_dtype,
        "low_precision": row.low_precision,
        "scope": row.scope,
        "weight_tying": weight_tying,
        "options": row.options,
        "note": row.note,
        "same_as": row.same_as,
        "executed": low.get("executed") or ("bf16" if facts and row.low_precision == "none" else None),
        "native": native if facts and row.low_precision != "none" else None,
        **{name: measured.get(name) for name in ("tokens_per_sec", "mfu_percent", "mfu_causal_percent")},
        "mfu_fp8_percent": measured.get("mfu_fp8_percent") if native else None,
        **{name: measured.get(name) for name in ("max_allocated_gb", "max_reserved_gb")},
        "losses": losses,
        "loss": mean(list(losses.values())),
        "loss_spread": deviation(list(losses.values())),
        "from_row_1_percent": mean(changes),
        "from_row_1_spread": deviation(changes),
        "from_untied_percent": None if weight_tying or row.name == UNTIED else mean(untied),
        "published": published,
        "failures": failures,
        "fallbacks": fallbacks,
    }


def phases_of(pairs: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """{text: the phases that have it}, from pairs of a phase and a text or None."""
    found: dict[str, list[str]] = {}
    for phase, text in dict.fromkeys(pairs):
        if text:
            found.setdefault(text, []).append(phase)
    return found


def percent_above(losses: dict[str, float], others: dict[str, float]) -> list[float]:
    """Of each seed that both have."""
    return [100 * (losses[seed] / others[seed] - 1) for seed in losses if seed in others]


def mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


# --- the table ---


def document_lines(content: dict, runs: list[Run]) -> list[str]:
    """The saved document: date, machine, settings, versions, the table, failures, what the columns mean."""
    facts = [run.entry.facts for run in runs if run.entry.facts]
    hardware, software = (facts[0][name] if facts else {} for name in ("hardware", "software"))
    machine = hardware.get("gpu_name") or ("CPU" if facts else "nothing measured yet")
    commits = sorted({(f["git"]["commit"] or "unknown")[:12] for f in facts})
    versions = [f"{name} {v}" for name, v in software.items() if v and name != "gpu_name"]
    lines = [f"## {content['date'][:10]}, {machine}, precision matrix", "", f"    {content['command']}", ""]
    lines += [f"- {text}" for text in [*content["settings"], STUDY_LINE]]
    if facts:
        lines.append(f"- {', '.join(versions)}; commit {', '.join(commits)}")
        peak = hardware["peak"]
        if peak["tflops_per_gpu"]:
            lines.append(f"- bf16 peak {peak['tflops_per_gpu']:.4g} TFLOPS, {peak['source']}")
    rows = row_figures(runs)
    table = aligned(COLUMNS, [cells(row) for row in rows], TEXT_COLUMNS, "github")
    below = [
        f"row {row['row']}: {' and '.join(phases)} {what}: {text}"
        for kind, what in SEE_BELOW.items()
        for row in rows
        for text, phases in row[kind].items()
    ]
    return [*lines, "", *table, "", *below, *[""] * bool(below), LEGEND]


def cells(found: dict) -> list[str]:
    """The cells of one row; what was not measured leaves its cell empty."""

    def number(value: dict | float | None, form: str, spread: float | None = None) -> str:
        value = value["median"] if isinstance(value, dict) else value
        text = "" if value is None else format(value, form)
        return f"{text} ± {spread:{form.lstrip('+')}}" if text and spread is not None else text

    published = found["published"]
    again = published.get("corrected") or {}
    stochastic = " stochastic" * (found["options"].get("weight_rounding") == "stochastic")
    return [
        found["row"],
        found["param_dtype"].replace("float", "fp").replace("bfp", "bf") + stochastic,
        found["low_precision"] + " and head" * (found["scope"] == HEAD),
        found["executed"] or "",
        number(found["tokens_per_sec"], ",.0f"),
        number(found["mfu_percent"], ".1f"),
        number(found["mfu_causal_percent"], ".1f"),
        number(found["mfu_fp8_percent"], ".1f"),
        number(found["max_allocated_gb"], ".1f"),
        number(found["max_reserved_gb"], ".1f"),
        number(found["loss"], ".4f", found["loss_spread"]),
        number(found["from_row_1_percent"], "+.2f", found["from_row_1_spread"]),
        number(published.get("mfu_percent"), ".2f"),
        number(again.get("full"), ".1f"),
        number(again.get("causal"), ".1f"),
        number(published.get("loss"), ".4f"),
        note(found).replace("|", "/").replace("\n", " "),
    ]


def note(found: dict) -> str:
    if found["same_as"]:
        return f"as row {found['same_as']}: {found['note']}"
    notes = [found["note"]]
    for kind, what in SEE_BELOW.items():
        phases = sorted({phase for those in found[kind].values() for phase in those}, reverse=True)
        notes.append(f"{' and '.join(phases)} {what}: see below" if phases else "")
    if not found["failures"] and not found["losses"] and found["tokens_per_sec"] is None:
        notes.append("not run")
    elif found["weight_tying"] != ROWS[found["row"]].weight_tying:
        notes.append("tied, as its weights are")
    elif not found["weight_tying"]:
        notes.append("untied")
        if (change := found["from_untied_percent"]) is not None:
            notes.append(f"{change:+.2f} % from row {UNTIED}")
    return "; ".join(filter(None, notes))


# --- the picture ---


MARKERS = {"float32": "o", "bfloat16": "s", "stochastic": "^"}


def draw(rows: list[dict], path: Path) -> None:
    """Held-out loss against tokens/s, a labelled point for each row that has both."""
    points = [row for row in rows if row["tokens_per_sec"] and row["loss"] is not None]
    if not points:
        return
    try:
        figure = new_figure(10, 6.5)
        axis = figure.add_subplot()
        for number, recipe in enumerate(dict.fromkeys(row["low_precision"] for row in points)):
            axis.plot([], [], "o", color=f"C{number}", label=recipe)
            for row in (row for row in points if row["low_precision"] == recipe):
                x, y = row["tokens_per_sec"]["median"], row["loss"]
                marker = MARKERS[row["options"].get("weight_rounding", row["param_dtype"])]
                axis.errorbar(x, y, yerr=row["loss_spread"], fmt=marker, color=f"C{number}", markersize=6)
                # on different sides, as rows that differ in rounding or in the head are close together
                left, below = marker == MARKERS["stochastic"], row["scope"] == HEAD
                offset = (-6 if left else 6, -12 if below else 4)
                label = axis.annotate(literal(row["row"]), (x, y), offset, textcoords="offset points")
                label.set_horizontalalignment("right" if left else "left")
        kinds = "circle: fp32 weights; square: bf16, to nearest; triangle: bf16, stochastic"
        axis.set_xlabel(f"tokens/s ({kinds})")
        axis.set_ylabel("held-out loss")
        axis.grid(alpha=0.3)
        legend(axis)
        save_figure(figure, path)
    except UserError as error:
        print(f"no picture: {error}", flush=True)
