"""Checks the table of bench.throughput that was sealed with a run: its figures must follow from its own rows,
and one of its variants must be the sealed run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bench.results import RATES, combine
from common.errors import UserError
from common.text import one_line
from tools.seal.recount import ROUNDING, same_figure

MEASURED = ("variant", "peer")  # kinds of entries that have rows; a roofline has none


def bench_disagreements(bench: dict[str, Any] | None, record: dict[str, Any]) -> list[str]:
    """What in the table does not follow from its rows or from the record, a line each. Raises UserError if it
    is no such table."""
    if bench is None:
        return []
    try:
        return [*_figures(bench["entries"]), *_ratios(bench["entries"]), *_this_run(bench["entries"], record)]
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"the seal's bench cannot be read: {type(error).__name__}: {one_line(str(error), 200)}; it is "
            "damaged, or of another version"
        ) from None


def _figures(entries: list[dict]) -> Iterator[str]:
    """Medians and percentiles of each variant and peer, from the rows of its runs."""
    names = [entry["name"] for entry in entries]
    if len(set(names)) != len(names):
        yield "bench: two entries have the same name"
    for entry in entries:
        result = entry.get("result")
        if entry["kind"] not in MEASURED or not result:
            continue
        made = combine(entry["runs"])
        if made is None:
            yield f"bench, {entry['name']}: it has a result, and none of its runs has rows"
            continue
        for name in (*RATES, "mfu_percent", "mfu_causal_percent"):
            stated = result.get(name) or {}
            for part, value in (made[name] or {}).items():
                if not same_figure(stated.get(part), value):
                    yield (
                        f"bench, {entry['name']}: the {part} of {name} is {stated.get(part)!r}, and its rows "
                        f"make {value:.6g}"
                    )
        yield from _times(entry)


def _tokens(entry: dict[str, Any]) -> list[float]:
    """Of an iteration, by each row: tokens/s times its time."""
    return [
        rate * time / 1000
        for run in entry["runs"]
        if (measured := run["measurement"])
        for rate, time in zip(measured["tokens_per_sec"], measured["time_ms"], strict=True)
    ]


def _times(entry: dict[str, Any]) -> Iterator[str]:
    """The tokens of an iteration are the same in all rows of an entry."""
    tokens = _tokens(entry)
    if not all(math.isclose(one, tokens[0], rel_tol=ROUNDING) for one in tokens):
        yield f"bench, {entry['name']}: tokens/s of its rows do not follow from their times"


def _ratios(entries: list[dict]) -> Iterator[str]:
    """Each ratio to a peer, from the two medians; and the same tokens in an iteration on both sides."""
    compared = {entry["name"]: entry for entry in entries if entry.get("result")}
    for entry in entries:
        if entry["kind"] != "variant" or not entry.get("result"):
            continue
        rate = entry["result"]["tokens_per_sec_per_gpu"]["median"]
        for peer, stated in (entry["result"].get("times_peers") or {}).items():
            if peer not in compared:
                yield f"bench, {entry['name']}: it is compared with {peer}, which has no result"
                continue
            made = rate / compared[peer]["result"]["tokens_per_sec_per_gpu"]["median"]
            ours, theirs = _tokens(entry), _tokens(compared[peer])
            if ours and theirs and not math.isclose(ours[0], theirs[0], rel_tol=ROUNDING):
                yield (
                    f"bench, {peer}: {theirs[0]:.6g} tokens an iteration, and {entry['name']} has "
                    f"{ours[0]:.6g}"
                )
            if not same_figure(stated, made):
                yield f"bench, {entry['name']}: {stated!r} times {peer}, and their tokens/s make {made:.6g}"


def _this_run(entries: list[dict], record: dict[str, Any]) -> Iterator[str]:
    """One run of one variant must have the record's rows: bench may leave out more of the first ones."""
    rates = [row.get("tokens_per_sec") for row in record["training_iterations"]]
    measured = [
        run["measurement"]["tokens_per_sec"]
        for entry in entries
        if entry["kind"] == "variant"
        for run in entry["runs"]
        if run["measurement"]
    ]
    if not any(values and rates[-len(values) :] == values for values in measured):
        yield "bench: none of its variants has the rows of this record, so it measured other runs"
