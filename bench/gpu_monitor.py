"""Clocks, power and temperature of the GPUs while something runs on them, sampled by nvidia-smi in a thread.

A GPU at its power limit lowers its clock, so two runs can be compared only if the clock is stated for both.
The trap: during the first half of a run, which is imports, compilation and warm-up, the clock is another one.
So only the samples of the second half count. There are none on a CPU or without nvidia-smi.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading

FIELDS = {"sm_clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
INTERVAL_S = 1.0
QUERY_TIMEOUT_S = 10  # nvidia-smi answers in 0.1 to 1 s; a hanging driver must not hang the benchmark


def gpu_ids(count: int, visible: str | None) -> list[str]:
    """nvidia-smi's names of the first `count` GPUs that a process sees. `visible` is the value of
    CUDA_VISIBLE_DEVICES, which nvidia-smi itself ignores."""
    if visible is None:
        return [str(i) for i in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]


class GpuMonitor:
    """A context around a run; call summary() after it. Without ids or nvidia-smi it does nothing."""

    def __init__(self, ids: list[str], interval_s: float = INTERVAL_S):
        self.command: list[str] = []  # empty: there is nothing to sample
        if ids and shutil.which("nvidia-smi"):
            query = f"--query-gpu={','.join(FIELDS.values())}"
            self.command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", ",".join(ids)]
        self.interval_s = interval_s
        self.samples: list[list[list[float | None]]] = []  # each holds the FIELDS of each GPU
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample_until_end, daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self.command:
            self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        if self.command:
            self.thread.join()

    def summary(self) -> dict | None:
        """Medians over GPUs and over the samples of the second half; None if there are no samples."""
        half = self.samples[len(self.samples) // 2 :]
        if not half:
            return None
        medians = {}
        for column, name in enumerate(FIELDS):
            values = [gpu[column] for sample in half for gpu in sample]
            known = [value for value in values if value is not None]
            medians[name] = statistics.median(known) if known else None
        return {**medians, "gpus": len(half[0]), "samples": len(self.samples), "samples_used": len(half)}

    def _sample_until_end(self) -> None:
        while not self.ended.wait(self.interval_s):
            if sample := _query(self.command):
                self.samples.append(sample)


def _query(command: list[str]) -> list[list[float | None]]:
    """The FIELDS of each GPU, None for those that a GPU does not have; [] if nvidia-smi did not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [
        [_number(cell) for cell in line.split(",")] for line in lines if line.count(",") == len(FIELDS) - 1
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None
