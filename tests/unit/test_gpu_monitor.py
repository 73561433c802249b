"""Clocks and power of the GPUs in the log rows, from an NVML that is made here: two GPUs;
the second has no power meter."""

import sys
import threading
import time
import types

import pytest
import torch
from support.fake_nvml import UUIDS, FakeError, FakeNvml

from tools.track import figures_of
from training.hardware import gpu_monitor
from training.hardware.gpu_monitor import GpuMonitor, Sample, watch_gpus
from training.hardware.nvml import THROTTLE_REASONS, GpuReading, Nvml
from training.process.world import World
from training.records.machine import machine_info, machine_lines, speed_line, summarize_gpus

NO_SAMPLE = {"sm_clock_mhz": None, "power_w": None, "temperature_c": None, "throttle": None, "gpu_samples": 0}


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def wait_until(condition):
    """For a thread; the tests' own time limit ends it."""
    while not condition():
        time.sleep(0.001)


def watched(uuids=UUIDS, samples: int = 1) -> GpuMonitor:
    """A monitor that has ended, after this many samples or when its thread has given up."""
    monitor = GpuMonitor(list(uuids), interval_s=0.001)
    wait_until(lambda: len(monitor.samples) >= samples or not monitor.thread.is_alive())
    monitor.close()
    return monitor


def everything(monitor: GpuMonitor) -> dict:
    """A row of the monitor's whole time."""
    return monitor.take([(0.0, time.perf_counter())])


def filled(*samples: tuple[float, float | None], throttle=()) -> GpuMonitor:
    """A monitor without a thread, with (time, clock) as its samples."""
    monitor = GpuMonitor([])
    monitor.reason = None
    for moment, clock in samples:
        reading = GpuReading(clock, 100.0, 50.0, throttle)
        monitor.samples.append(Sample(moment, moment + 0.01, [reading]))
    return monitor


# --- which samples belong to a row ---


def test_a_row_has_the_medians_of_the_samples_since_the_last_row():
    monitor = filled((1.0, 1000), (2.0, 1100), (3.0, 1300), (4.0, 1500), (5.0, 1600))
    first, second = monitor.take([(0.0, 3.5)]), monitor.take([(3.5, 5.5)])
    assert (first["sm_clock_mhz"], first["gpu_samples"], first["gpu_reason"]) == (1100, 3, None)
    assert (second["sm_clock_mhz"], second["gpu_samples"]) == (1550, 2)
    assert (first["power_w"], first["temperature_c"]) == (100, 50)


def test_samples_of_an_evaluation_or_a_checkpoint_are_in_no_row():
    monitor = filled(
        *((float(t), 1000 + t) for t in range(3)), (2.495, 1), *((t, 1000 + t) for t in range(3, 10))
    )
    row = monitor.take([(0.5, 2.5), (6.5, 8.5)])  # paused from 2.5 to 6.5, within a sample
    assert row["gpu_samples"] == 4 and row["sm_clock_mhz"] == (1001 + 1002 + 1007 + 1008) / 4
    assert [sample.began for sample in monitor.samples] == [9.0]  # the next row's


def test_a_row_shorter_than_a_sample_says_so():
    row = filled((1.0, 1000)).take([(1.1, 1.15)])
    assert row == {**NO_SAMPLE, "gpu_reason": "no sample in 0.05 s; there is one every 0.2 s"}


# --- what is sampled ---


def test_a_row_covers_all_gpus_and_names_what_none_of_them_has(nvml):
    monitor = watched()
    count, row = len(monitor.samples), everything(monitor)
    assert (row["sm_clock_mhz"], row["temperature_c"]) == (1500, 61)  # between 60 and 62
    assert row["power_w"] == 700.5  # of the GPU that has it
    assert row["gpu_samples"] == count > 0 and row["gpu_reason"] is None
    second = everything(watched(UUIDS[1:]))
    assert (second["power_w"], second["temperature_c"]) == (None, 62)
    assert second["gpu_reason"] == "NVML does not give power_w on this machine"


def test_throttling_is_the_share_of_samples_by_reason():
    monitor = GpuMonitor([])
    for names in ((), ("power_limit",), ("power_limit", "temperature"), ("power_limit",)):
        monitor.samples.append(Sample(1.0, 1.0, [GpuReading(1.0, 1.0, 1.0, names)]))
    assert monitor.take([(0.0, 2.0)])["throttle"] == {"power_limit": 0.75, "temperature": 0.25}


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        *((bits, ()) for bits in (0, 1, 2, 256, 1 | 2 | 256)),  # an idle GPU, and a clock that was set
        *((bit, (name,)) for bit, name in THROTTLE_REASONS.items()),
    ],
)
def test_each_reason_has_its_name(nvml, bits, names):
    nvml.reasons = bits
    assert Nvml([UUIDS[0]]).read()[0].throttle == names


def test_the_library_has_every_function_and_every_constant_that_is_used():
    import pynvml

    for name, value in vars(FakeNvml).items():
        assert name.startswith("_") or hasattr(pynvml, name), name
        if isinstance(value, int):
            assert getattr(pynvml, name) == value, name
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    bits = {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksThrottleReason")}
    single = {bit for bit in bits if bit and not bit & (bit - 1)}
    assert single - {1, 2, 256} == set(THROTTLE_REASONS)


# --- which GPUs ---


@pytest.mark.parametrize("visible, local_size", [((1, 0), 2), ((1,), 1), ((0, 1), 1)])
def test_the_gpus_are_those_that_torch_gives_the_run(nvml, monkeypatch, visible, local_size):
    """visible: the numbers in CUDA_VISIBLE_DEVICES, which torch counts from 0 and NVML ignores."""
    properties = [types.SimpleNamespace(uuid=UUIDS[number]) for number in visible]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties[number])
    monitor = watch_gpus(World(0, 0, 4, torch.device("cuda", 0), local_size))
    monitor.close()
    assert monitor.uuids == [UUIDS[number] for number in visible[:local_size]]


def test_a_cpu_and_the_other_ranks_start_no_thread():
    on_cpu = watch_gpus(World(0, 0, 1, torch.device("cpu")))
    second_rank = watch_gpus(World(1, 1, 2, torch.device("cuda", 1)))
    assert not on_cpu.thread.is_alive() and not second_rank.thread.is_alive()
    assert on_cpu.take([(0.0, 100.0)]) == {**NO_SAMPLE, "gpu_reason": "the run uses no GPU"}


# --- an NVML that does not work ---


def test_a_gpu_that_fell_off_the_bus_is_the_reason_in_later_rows_alone(nvml, monkeypatch):
    def lost(*arguments):
        raise FakeError("GPU is lost")

    monitor = GpuMonitor(list(UUIDS), interval_s=0.001)
    wait_until(lambda: monitor.samples)
    before = everything(monitor)
    for name in ("ClockInfo", "PowerUsage", "Temperature", "CurrentClocksEventReasons"):
        monkeypatch.setattr(nvml, f"nvmlDeviceGet{name}", lost)
    wait_until(lambda: monitor.reason)
    everything(monitor)  # the samples from before
    after = everything(monitor)
    monitor.close()
    assert before["sm_clock_mhz"] == 1500 and before["gpu_reason"] is None
    assert after == {**NO_SAMPLE, "gpu_reason": "NVML no longer answers: GPU is lost"}


def test_a_gpu_that_nvml_does_not_know_and_an_unexpected_error_are_the_reason(nvml, monkeypatch):
    reason = everything(watched(["cc"]))["gpu_reason"]
    assert reason == "NVML, the library of NVIDIA's driver, does not answer: Not Found: MIG-cc"
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *arguments: 1 / 0)
    monitor = watched()
    assert not monitor.thread.is_alive()
    assert everything(monitor)["gpu_reason"].startswith("sampling the GPUs failed: ZeroDivisionError")
    assert len(monitor.facts()["gpus"]) == 2  # found before


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetClockInfo"])
def test_a_driver_that_hangs_does_not_hang_a_row_or_the_end(nvml, monkeypatch, call):
    asked, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(nvml, call, lambda *arguments: asked.set() or answer.wait(100))
    monkeypatch.setattr(gpu_monitor, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(gpu_monitor, "FACTS_TIMEOUT_S", 0.01)
    monitor = GpuMonitor(list(UUIDS), interval_s=0.001)
    asked.wait(100)
    machine, row = machine_info(monitor), monitor.take([(0.0, 10.0)])
    monitor.close()
    still_waiting = monitor.thread.is_alive()
    answer.set()
    monitor.thread.join(100)
    assert still_waiting and monitor.thread.daemon
    reason = row["gpu_reason"]
    assert row == {**NO_SAMPLE, "gpu_reason": reason} and reason
    if call == "nvmlInit":
        assert machine["gpus"] is None and machine["gpu_reason"] == reason == "NVML has not answered yet"


# --- the machine ---


def report(machine: dict, num_gpus: int) -> dict[str, str]:
    software = {"driver": "580.1", "cuda": "13.0"}
    info = {"machine": machine, "hardware": {"num_gpus": num_gpus}, "software": software}
    return dict(machine_lines(info))


def test_the_machine_is_described_with_limits_and_without_nvml_the_report_says_why(nvml, monkeypatch):
    machine = machine_info(watched())
    gpu = {"power_limit_w": 700, "max_sm_clock_mhz": 1980}
    assert machine["gpus"] == [{"uuid": f"GPU-{uuid}", **gpu} for uuid in UUIDS]
    assert machine["host"] and machine["gpus_sampled"] == 2 and machine["gpu_reason"] is None
    lines = report(machine, 16)
    assert lines["Host"].endswith("driver 580.1") and lines["  power limit"] == "700 W"
    assert lines["  clocks and power"] == "of 2 of 16 GPUs, in every log row"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said = report(machine_info(watched()), 1)["  clocks and power"]
    assert said.startswith("not sampled: the nvidia-ml-py library is missing")


# --- several rows ---


def rows() -> list[dict]:
    """Rows of 1, 2 and 1 samples, and one between two samples."""
    monitor = filled(*((t, 1000 + 100 * t) for t in range(4)), throttle=("power_limit",))
    monitor.samples.append(Sample(4.0, 4.01, [GpuReading(2000, 300.0, 60.0, ())]))
    ends = [(-0.5, 0.5), (0.5, 0.6), (0.6, 3.5), (3.5, 5.0)]
    return [monitor.take([each]) for each in ends]


def test_summary_and_end_of_the_log_leave_rows_without_a_sample_out_and_trackers_get_the_numbers():
    found = summarize_gpus(rows())
    assert found["sm_clock_mhz"] == {"median": 1200, "p10": 1000, "p90": 2000}
    assert found["throttle"] == {"power_limit": pytest.approx(0.8)}  # of 5 samples, not of rows
    assert found["gpu_reason"] is None
    found |= {"mfu_percent": {"median": 41.2}}
    assert speed_line(found) == (
        "MFU 41.20 %, 1,200 MHz, 100 W, 50 °C (medians after warm-up); "
        "clock lowered by power limit in 80 % of the samples"
    )
    assert speed_line(found | {"mfu_percent": None}).startswith("1,200 MHz")
    assert speed_line({}) is speed_line(summarize_gpus([])) is None
    assert figures_of("training_iterations", rows()[0]) == {
        **{"gpu/sm_clock_mhz": 1000, "gpu/power_w": 100, "gpu/temperature_c": 50},
        "gpu/throttle/power_limit": 1.0,
    }
