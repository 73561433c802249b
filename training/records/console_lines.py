"""What a log row is on the console and in the log. Users look for these lines, so their form stays."""

from __future__ import annotations

from tqdm import tqdm

from common import units


def console_lines(
    row: dict, method: str, flops_per_token: int, progress: str = "", known_reason: bool = False
) -> list[str]:
    """progress: how far the run is, and the time left. known_reason: why there is no MFU was said before."""
    mfu, memory = row["mfu"], row["memory"]
    lines = [
        f"📍 Iter {row['iter']:6d} │ Loss: {row['loss']:.4f} │ "
        f"Time: {row['time_ms']:.0f}ms │ LR: {row['lr']:.2e}{f' │ {progress}' if progress else ''}"
    ]
    if mfu:
        lines.append(
            f"⚡ MFU: {mfu['mfu_percent']:.2f}% │ Achieved: {units.flops(mfu['flops_achieved'])} │ "
            f"Peak: {units.flops(mfu['hardware_peak_flops'])}"
            + (" (2:4 sparse)" if mfu["sparse_mode"] else "")
            + (f" │ Of the fp8 peak: {fp8:.2f}%" if (fp8 := mfu.get("mfu_fp8_percent")) else "")
            + (f" │ Of the fp4 peak: {fp4:.2f}%" if (fp4 := mfu.get("mfu_fp4_percent")) else "")
            + (
                f" │ Causal, by document: {mfu['mfu_causal_percent']:.2f}%"
                if "document_length_per_token" in mfu
                else ""
            )
            + (f" │ HFU: {hfu:.2f}%" if (hfu := mfu["hfu_percent"]) not in (None, mfu["mfu_percent"]) else "")
        )
    else:
        lines.append("⚡ MFU: n/a" + ("" if known_reason else f" ({row['mfu_reason']})"))
    per_token = units.flops(flops_per_token, decimals=2, prefixes="GMk")
    padding = f" ({row['padding_percent']:.2f}% padding)" if "padding_percent" in row else ""
    lines.append(f"   Tokens/s: {row['tokens_per_sec']:.0f}{padding} │ FLOPs/token: {per_token} ({method})")
    if memory:
        allocated, most, reserved = (
            units.memory(memory[name]) for name in ("allocated_gb", "max_allocated_gb", "reserved_gb")
        )
        lines.append(f"💾 Memory: {allocated} alloc │ {most} peak │ {reserved} reserved")
    if row.get("skipped_updates"):
        lines.append(f"   Updates skipped since the last row: {row['skipped_updates']}")
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
