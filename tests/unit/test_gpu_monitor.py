"""Clocks, power and temperature, from an NVML that is made here: two GPUs; the second has no power meter."""

import statistics
import sys
import threading

import pytest

from training.hardware import gpu_monitor
from training.hardware.gpu_monitor import GpuMonitor, gpu_ids

UUIDS = ("GPU-aaaa-1111", "GPU-bbbb-2222")


class FakeError(Exception):
    pass


class FakeNvml:
    """The functions of pynvml that are used. A GPU's handle is its number; each reading of a clock is 1 MHz
    above the one before."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self):
        self.readings = [0, 0]

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(UUIDS):
            raise FakeError("Invalid Argument")
        return index

    def nvmlDeviceGetUUID(self, gpu):
        return UUIDS[gpu]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        raise FakeError(f"Not Found: {uuid}")

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        assert kind == self.NVML_CLOCK_SM
        self.readings[gpu] += 1
        return 1000 + self.readings[gpu]

    def nvmlDeviceGetPowerUsage(self, gpu):
        if gpu == 1:
            raise FakeError("Not Supported")
        return 700_500  # mW

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60 + 2 * gpu


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def watched(ids: list[str], samples: int = 1) -> GpuMonitor:
    """A monitor that has ended, after this many samples or when its thread has given up."""
    with GpuMonitor(ids, interval_s=0.001) as monitor:
        while len(monitor.samples) < samples and monitor.thread.is_alive():
            monitor.ended.wait(0.001)
    return monitor


def test_the_figures_are_medians_of_the_second_half(nvml):
    monitor = watched(["0", "1"], samples=6)
    found, samples = monitor.summary(), len(monitor.samples)
    assert found["samples"] == samples >= 6 and found["gpus"] == 2
    assert found["samples_used"] == samples - samples // 2
    assert found["sm_clock_mhz"] == statistics.median(range(1001 + samples // 2, 1001 + samples))
    assert found["temperature_c"] == 61
    assert monitor.reason is None


def test_a_field_that_a_gpu_does_not_have_is_left_out(nvml):
    assert watched(["0", "1"]).summary()["power_w"] == 700.5  # of the GPU that has it
    alone = watched(["1"]).summary()
    assert (alone["power_w"], alone["temperature_c"], alone["gpus"]) == (None, 62, 1)


@pytest.mark.parametrize("name", ["1", UUIDS[1], "GPU-bb"])  # CUDA accepts the beginning of a UUID
def test_a_gpu_is_found_by_index_and_by_uuid(nvml, name):
    assert watched([name]).summary()["temperature_c"] == 62
    assert nvml.readings[0] == 0


@pytest.mark.parametrize("name", ["7", "GPU-cc", "MIG-1"])
def test_a_gpu_that_nvml_does_not_know_gives_no_figures_but_a_reason(nvml, name):
    monitor = watched([name])
    assert monitor.summary() is None
    assert "does not answer: " in monitor.reason


def test_a_driver_that_is_not_loaded_is_the_reason(nvml, monkeypatch):
    def fails():
        raise FakeError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fails)
    monitor = watched(["0"])
    assert monitor.summary() is None
    assert monitor.reason == "NVML, the library of NVIDIA's driver, does not answer: Driver Not Loaded"


def test_a_missing_library_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = watched(["0"])
    assert monitor.summary() is None
    assert "the nvidia-ml-py library is missing" in monitor.reason


def test_without_gpus_nothing_is_started():
    with GpuMonitor([]) as monitor:
        assert not monitor.thread.is_alive()
    assert (monitor.summary(), monitor.reason) == (None, "the run uses no GPU")


def test_a_gpu_that_fell_off_the_bus_adds_no_samples(nvml, monkeypatch):
    def lost(*arguments):
        raise FakeError("GPU is lost")

    with GpuMonitor(["0"], interval_s=0.001) as monitor:
        while len(monitor.samples) < 3:
            monitor.ended.wait(0.001)
        for name in ("ClockInfo", "PowerUsage", "Temperature"):
            monkeypatch.setattr(nvml, f"nvmlDeviceGet{name}", lost)
        monitor.ended.wait(0.05)
    assert monitor.samples[-1][0][2] == 60
    assert None not in monitor.summary().values()


def test_a_driver_that_hangs_does_not_hang_the_run(nvml, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: answer.wait(100))
    monkeypatch.setattr(gpu_monitor, "ANSWER_TIMEOUT_S", 0.01)
    with GpuMonitor(["0"]) as monitor:
        pass
    still_waiting = monitor.thread.is_alive()
    answer.set()
    monitor.thread.join(100)
    assert still_waiting and monitor.thread.daemon
    assert monitor.summary() is None and monitor.reason


@pytest.mark.parametrize(
    "count, visible, ids",
    [(2, None, ["0", "1"]), (1, "3,5", ["3"]), (2, "GPU-a, GPU-b", ["GPU-a", "GPU-b"]), (2, "", [])],
)
def test_the_gpus_are_those_that_the_run_sees(count, visible, ids):
    assert gpu_ids(count, visible) == ids


def test_the_library_has_every_function_that_is_used():
    import pynvml

    for name in vars(FakeNvml):
        assert name.startswith("_") or hasattr(pynvml, name), name
    for name in ("NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU"):
        assert getattr(pynvml, name) == getattr(FakeNvml, name)
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
