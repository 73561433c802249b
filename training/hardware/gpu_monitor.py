"""Clocks, power and temperature of the GPUs while something runs on them, sampled through NVML in a thread.

A GPU at its power limit lowers its clock, so two runs can be compared only if the clock is stated for both.
The trap: during the first half of a run, which is imports, compilation and warm-up, the clock is another one.
So only the samples of the second half count. There are none on a CPU or where NVML does not answer.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from typing import Any

FIELDS: dict[str, Callable[[Any, Any], float]] = {  # name: (pynvml, GPU) -> value
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # NVML counts milliwatts
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
}
INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 10  # a sample takes milliseconds; a hanging driver must not hang the program


def gpu_ids(count: int, visible: str | None) -> list[str]:
    """Index or UUID of the first `count` GPUs that a process sees. `visible` is the value of
    CUDA_VISIBLE_DEVICES, which NVML itself ignores."""
    if visible is None:
        return [str(i) for i in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]


class GpuMonitor:
    """A context around a run; call summary() after it. Where there is none, `reason` says why."""

    def __init__(self, ids: list[str], interval_s: float = INTERVAL_S):
        self.ids, self.interval_s = ids, interval_s
        self.samples: list[list[list[float | None]]] = []  # each holds the FIELDS of each GPU
        self.reason: str | None = "the run ended before the first sample" if ids else "the run uses no GPU"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample_until_end, daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self.ids:
            self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        if self.ids:
            self.thread.join(ANSWER_TIMEOUT_S)

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
        try:
            import pynvml
        except ImportError:
            self.reason = "the nvidia-ml-py library is missing (pip install -r requirements.txt)"
            return
        try:
            pynvml.nvmlInit()
            gpus = [_find_gpu(pynvml, name) for name in self.ids]
        except pynvml.NVMLError as error:  # the driver's library is missing, too old, or knows no such GPU
            self.reason = f"NVML, the library of NVIDIA's driver, does not answer: {error}"
            return
        while not self.ended.wait(self.interval_s):
            sample = [[_read(pynvml, field, gpu) for field in FIELDS.values()] for gpu in gpus]
            if any(value is not None for values in sample for value in values):
                self.samples.append(sample)
                self.reason = None


def _find_gpu(nvml: Any, name: str) -> Any:
    """NVML's handle of a GPU by its index, or by its UUID, which CUDA_VISIBLE_DEVICES may shorten."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(gpu).startswith(name):
            return gpu
    return nvml.nvmlDeviceGetHandleByUUID(name)  # a part of a GPU (MIG), or an error that says what it is


def _read(nvml: Any, field: Callable[[Any, Any], float], gpu: Any) -> float | None:
    """None where a GPU does not have the field."""
    try:
        return float(field(nvml, gpu))
    except nvml.NVMLError:
        return None
