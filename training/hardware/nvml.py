"""Asks NVML, the library of NVIDIA's driver, for the clock, power and temperature of GPUs, why their clock is
lowered, and for their limits. How they are connected: nvidia-smi topo -m.

Each answer may be missing: an old driver, a container or a part of a GPU (MIG) may lack it. Then it is None.
A call may also hang with the driver, so only the thread of training/hardware/gpu_monitor.py makes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# NVML's bits, nvmlClocksEventReason... An idle GPU (1), a clock that the user or the display has set (2 and
# 256) are no throttling.
THROTTLE_REASONS = {
    4: "power_limit",
    8: "hardware_slowdown",
    16: "sync_boost",
    32: "temperature",
    64: "hardware_temperature",
    128: "hardware_power_brake",
    512: "board_limit",
    1024: "reliability",
}


class Unavailable(Exception):
    """NVML cannot be used at all; the message says why."""


class GpuReading(NamedTuple):
    """One GPU at one moment."""

    sm_clock_mhz: float | None
    power_w: float | None  # since Ampere the driver's mean over the last second
    temperature_c: float | None
    throttle: tuple[str, ...] | None  # of THROTTLE_REASONS; empty if the clock is not lowered


FIELDS = GpuReading._fields[:3]  # those that are numbers


class Nvml:
    """The GPUs with these UUIDs, as torch writes them. Raises Unavailable."""

    def __init__(self, uuids: list[str]):
        try:
            import pynvml
        except ImportError:
            raise Unavailable(
                "the nvidia-ml-py library is missing (pip install -r requirements.txt)"
            ) from None
        self.nvml: Any = pynvml
        self.last_error = ""
        try:
            pynvml.nvmlInit()
            self.gpus = [self._find(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            raise Unavailable(f"NVML, the library of NVIDIA's driver, does not answer: {error}") from None

    def _find(self, uuid: str) -> Any:
        try:
            return self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self.nvml.NVMLError:
            return self.nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _ask(self, function: str, *arguments: Any) -> Any:
        """None if the driver, the library or the GPU does not have it."""
        try:
            return getattr(self.nvml, function)(*arguments)
        except (self.nvml.NVMLError, AttributeError) as error:
            self.last_error = str(error)
            return None

    # --- a sample ---

    def read(self) -> list[GpuReading]:
        return [self._read(gpu) for gpu in self.gpus]

    def _read(self, gpu: Any) -> GpuReading:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", gpu)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        return GpuReading(
            self._ask("nvmlDeviceGetClockInfo", gpu, self.nvml.NVML_CLOCK_SM),
            None if milliwatts is None else milliwatts / 1000,
            self._ask("nvmlDeviceGetTemperature", gpu, self.nvml.NVML_TEMPERATURE_GPU),
            None
            if reasons is None
            else tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
        )

    # --- what does not change ---

    def describe(self) -> dict[str, Any]:
        """The limits of each GPU."""
        return {"gpus": [self._describe(gpu) for gpu in self.gpus]}

    def _describe(self, gpu: Any) -> dict[str, Any]:
        milliwatts = self._ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
        return {
            "uuid": self._ask("nvmlDeviceGetUUID", gpu),  # as nvidia-smi shows it: GPU-5f3e...
            "power_limit_w": None if milliwatts is None else milliwatts / 1000,
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", gpu, self.nvml.NVML_CLOCK_SM),
        }
