"""What a log row is on the console and in the log. Users look for these lines, so their form stays."""

from __future__ import annotations

import textwrap

from tqdm import tqdm

from common import units

WIDTH = 80  # columns of a terminal


def console_lines(row: dict, progress: str = "", known_reason: bool = False) -> list[str]:
    """progress: how far the run is, and the time left. known_reason: why there is no MFU was said before."""
    shares = {"padding_percent": "padding", "target_percent": "targets"}  # of the positions
    share = "".join(f" ({row[name]:.2f}% {what})" for name, what in shares.items() if name in row)
    lines = [
        f"📍 Iter {row['iter']:6d} │ Loss: {row['loss']:.4f} │ Time: {row['time_ms']:.0f}ms │ "
        f"LR: {row['lr']:.2e}",
        *_mfu_lines(row, known_reason),
        f"   Tokens/s: {row['tokens_per_sec']:.0f}{share}{f' │ {progress}' if progress else ''}",
    ]
    if memory := row["memory"]:
        allocated, most, reserved = (
            units.memory(memory[name]) for name in ("allocated_gb", "max_allocated_gb", "reserved_gb")
        )
        lines.append(f"💾 Memory: {allocated} alloc │ {most} peak │ {reserved} reserved")
    if row.get("skipped_updates"):
        lines.append(f"   Updates skipped since the last row: {row['skipped_updates']}")
    return lines


def _mfu_lines(row: dict, known_reason: bool) -> list[str]:
    """The MFU and its parts, or why there is none, in as many lines as they need."""
    mfu = row["mfu"]
    if not mfu:
        text = "⚡ MFU: n/a" + ("" if known_reason else f" ({row['mfu_reason']})")
        return textwrap.wrap(text, WIDTH - 1, subsequent_indent="   ", break_on_hyphens=False)
    sparse = " (2:4 sparse)" if mfu["sparse_mode"] else ""
    parts = [f"Achieved: {units.flops(mfu['flops_achieved'])}"]
    parts.append(f"Peak: {units.flops(mfu['hardware_peak_flops'])}{sparse}")
    for form in ("fp8", "fp4"):
        if percent := mfu.get(f"mfu_{form}_percent"):
            parts.append(f"Of the {form} peak: {percent:.2f}%")
    if "document_length_per_token" in mfu:
        parts.append(f"Causal, by document: {mfu['mfu_causal_percent']:.2f}%")
    if (hfu := mfu["hfu_percent"]) not in (None, mfu["mfu_percent"]):
        parts.append(f"HFU: {hfu:.2f}%")
    lines = [f"⚡ MFU: {mfu['mfu_percent']:.2f}%"]
    for part in parts:
        fits = len(lines[-1]) + len(part) + 3 < WIDTH  # ⚡ takes two columns
        lines[-1:] = [f"{lines[-1]} │ {part}"] if fits else [lines[-1], f"   {part}"]
    return lines


class ProgressText:
    """How far a run is, for logs that show no progress bar."""

    def __init__(self, max_iters: int):
        self.max_iters = max_iters
        self.first: tuple[int, float] | None = None  # iterations done and time of this process's first row

    def text(self, done: int, now: float) -> str:
        """'12 %, 02:05 left' after so many iterations. The time counts evaluations and checkpoints, but
        not the first row, whose iteration includes compilation."""
        share = f"{100 * done / self.max_iters:.0f} %"
        if self.first is None:
            self.first = done, now
            return share
        since = done - self.first[0]
        left = (self.max_iters - done) * (now - self.first[1]) / since if since else 0.0
        return f"{share}, {tqdm.format_interval(round(left))} left" if done < self.max_iters else f"{share}"
