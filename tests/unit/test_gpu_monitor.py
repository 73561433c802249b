"""Clocks and power of the GPUs in the log rows, from an NVML that is made here: two GPUs joined by NVLink;
the second has no power meter."""

import itertools
import sys
import threading
import time
import types

import pytest
import torch
from support.fake_nvml import UUIDS, FakeError, FakeNvml

from tools.track.figures import figures_of
from training.hardware import gpu_monitor
from training.hardware.gpu_monitor import GpuMonitor, Sample, watch_gpus
from training.hardware.nvml import THROTTLE_REASONS, GpuReading, Nvml, numa_node
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
    wait_until(lambda: monitor.count >= samples or not monitor.thread.is_alive())
    monitor.close()
    return monitor


def everything(monitor: GpuMonitor) -> dict:
    """A row of the monitor's whole time."""
    return monitor.take([(monitor.began, time.perf_counter())])


def filled(*samples: tuple[float, float | None], gpus: int = 1, throttle=()) -> GpuMonitor:
    """A monitor without a thread, with (time, clock) as its samples."""
    monitor = GpuMonitor([])
    monitor.reason = None
    for moment, clock in samples:
        reading = GpuReading(clock, 100.0, 50.0, throttle)
        monitor.samples.append(Sample(moment, moment + 0.01, [reading] * gpus))
    return monitor


# --- which samples belong to a row ---


def test_a_row_has_the_medians_of_the_samples_since_the_last_row():
    monitor = filled((1.0, 1000), (2.0, 1100), (3.0, 1300), (4.0, 1500), (5.0, 1600))
    first, second = monitor.take([(0.0, 3.5)]), monitor.take([(3.5, 5.5)])
    assert (first["sm_clock_mhz"], first["gpu_samples"], first["gpu_reason"]) == (1100, 3, None)
    assert (second["sm_clock_mhz"], second["gpu_samples"]) == (1550, 2)
    assert (first["power_w"], first["temperature_c"]) == (100, 50)


def test_samples_of_an_evaluation_or_a_checkpoint_are_in_no_row():
    monitor = filled(*((float(t), 1000 + t) for t in range(10)))
    row = monitor.take([(0.5, 2.5), (6.5, 8.5)])  # paused from 2.5 to 6.5
    assert row["gpu_samples"] == 4 and row["sm_clock_mhz"] == (1001 + 1002 + 1007 + 1008) / 4
    assert [sample.began for sample in monitor.samples] == [9.0]  # the next row's


def test_a_sample_that_is_not_over_before_the_pause_is_in_no_row():
    monitor = filled((1.0, 1000), (1.995, 2000))
    assert monitor.take([(0.0, 2.0)])["sm_clock_mhz"] == 1000


def test_a_row_shorter_than_a_sample_says_so():
    row = filled((1.0, 1000)).take([(1.1, 1.15)])
    reason = row.pop("gpu_reason")
    assert row == NO_SAMPLE
    assert reason == "these 0.05 s lie between two samples, which are 0.2 s apart"


def test_a_long_row_without_a_sample_is_the_drivers_fault():
    assert filled().take([(0.0, 7.0)])["gpu_reason"] == "NVML gave no sample in these 7 s"


def test_a_row_of_days_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(gpu_monitor, "MAX_SAMPLES", 5)
    monitor = filled(*((float(t), 1000.0) for t in range(20)))
    assert [sample.began for sample in monitor.samples] == [15, 16, 17, 18, 19]


# --- what is sampled ---


def test_a_row_covers_all_gpus(nvml):
    monitor = watched()
    row = everything(monitor)
    assert (row["sm_clock_mhz"], row["temperature_c"]) == (1500, 61)  # between 60 and 62
    assert row["power_w"] == 700.5  # of the GPU that has it
    assert row["gpu_samples"] == monitor.count > 0 and row["gpu_reason"] is None


def test_what_a_gpu_does_not_have_is_null_and_named(nvml):
    row = everything(watched(UUIDS[1:]))
    assert (row["power_w"], row["temperature_c"]) == (None, 62)
    assert row["gpu_reason"] == "NVML does not give power_w on this machine"


def test_throttling_is_the_share_of_samples_by_reason(nvml):
    monitor = GpuMonitor([])
    fractions = [(), ("power_limit",), ("power_limit", "temperature"), ("power_limit",)]
    for names in fractions:
        monitor.samples.append(Sample(1.0, 1.0, [GpuReading(1.0, 1.0, 1.0, names)]))
    assert monitor.take([(0.0, 2.0)])["throttle"] == {"power_limit": 0.75, "temperature": 0.25}


@pytest.mark.parametrize("bits", [0, 1, 2, 256, 1 | 2 | 256])
def test_an_idle_gpu_and_a_clock_that_was_set_are_no_throttling(nvml, bits):
    nvml.reasons = bits
    assert everything(watched())["throttle"] == {}


@pytest.mark.parametrize("bit, name", THROTTLE_REASONS.items())
def test_each_reason_has_its_name(nvml, bit, name):
    nvml.reasons = bit
    assert Nvml([UUIDS[0]]).read()[0].throttle == (name,)


def test_a_driver_before_535_has_another_name_for_the_reasons(nvml, monkeypatch):
    def missing(gpu):
        raise FakeError("Function Not Found")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", missing)
    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: 32)
    assert everything(watched())["throttle"] == {"temperature": 1.0}


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
    assert on_cpu.cost() == {"samples": 0, "cpu_percent": None}


def test_a_torch_that_does_not_name_its_gpus_is_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: types.SimpleNamespace())
    monitor = watch_gpus(World(0, 0, 1, torch.device("cuda", 0)))
    assert "torch does not name the GPUs" in everything(monitor)["gpu_reason"]


# --- an NVML that does not work ---


def test_a_gpu_that_nvml_does_not_know_is_the_reason(nvml):
    reason = everything(watched(["cc"]))["gpu_reason"]
    assert reason == "NVML, the library of NVIDIA's driver, does not answer: Not Found: MIG-cc"


def test_a_driver_that_is_not_loaded_is_the_reason(nvml, monkeypatch):
    def fails():
        raise FakeError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fails)
    row = everything(watched())
    reason = row.pop("gpu_reason")
    assert row == NO_SAMPLE
    assert reason == "NVML, the library of NVIDIA's driver, does not answer: Driver Not Loaded"


def test_a_missing_library_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "the nvidia-ml-py library is missing" in everything(watched())["gpu_reason"]


def test_a_gpu_that_fell_off_the_bus_is_the_reason_in_later_rows_alone(nvml, monkeypatch):
    def lost(*arguments):
        raise FakeError("GPU is lost")

    monitor = GpuMonitor(list(UUIDS), interval_s=0.001)
    wait_until(lambda: monitor.count)
    before = everything(monitor)
    for name in ("ClockInfo", "PowerUsage", "Temperature", "CurrentClocksEventReasons"):
        monkeypatch.setattr(nvml, f"nvmlDeviceGet{name}", lost)
    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lost)
    wait_until(lambda: monitor.reason)
    everything(monitor)  # the samples from before
    after = everything(monitor)
    monitor.close()
    assert before["sm_clock_mhz"] == 1500 and before["gpu_reason"] is None
    assert after == {**NO_SAMPLE, "gpu_reason": "NVML no longer answers: GPU is lost"}


def test_an_error_that_nobody_expects_is_the_reason_and_ends_nothing(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *arguments: 1 / 0)
    monitor = watched()
    assert not monitor.thread.is_alive()
    assert everything(monitor)["gpu_reason"].startswith("sampling the GPUs failed: ZeroDivisionError")
    assert monitor.facts()["links"] == {"NVLink": "all pairs"}  # found before


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
    reason = row.pop("gpu_reason")
    assert row == NO_SAMPLE and reason.startswith("NVML ")
    if call == "nvmlInit":
        assert machine["gpus"] is None and machine["gpu_reason"] == reason == "NVML has not answered yet"


def test_the_cost_is_the_threads_own_cpu_time(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *arguments: sum(range(200_000)))
    monitor = watched(samples=3)
    busy = monitor.cost()
    assert busy["samples"] == monitor.count
    assert 0 < busy["cpu_percent"] < 100


# --- the machine ---


def test_the_machine_is_described_with_limits_and_links(nvml, tmp_path):
    machine = machine_info(watched())
    gpu = {"power_limit_w": 700, "max_sm_clock_mhz": 1980, "pcie_generation": 5, "pcie_lanes": 16}
    gpu |= {"nvlinks": 17, "numa_node": None}
    assert [each | {"numa_node": None} for each in machine["gpus"]] == [
        {"uuid": f"GPU-{uuid}", **gpu} for uuid in UUIDS
    ]
    assert machine["links"] == {"NVLink": "all pairs"}
    assert machine["host"] and machine["gpus_sampled"] == 2 and machine["gpu_reason"] is None
    info = {"machine": machine, "hardware": {"num_gpus": 16}, "software": {"driver": "580.1", "cuda": "13.0"}}
    lines = dict(machine_lines(info))
    assert lines["Host"].endswith("driver 580.1")
    assert lines["  limits of a GPU"] == "700 W, 1,980 MHz, PCIe 5, 16 lanes, 17 NVLinks"
    assert lines["  links"] == "NVLink: all pairs"
    assert lines["  clocks and power"] == "of 2 of 16 GPUs, in every log row"


def test_gpus_without_nvlink_are_connected_by_pcie(nvml):
    nvml.p2p = 5
    assert machine_info(watched())["links"] == {"PCIe and the link between NUMA nodes": "all pairs"}
    assert machine_info(watched(UUIDS[:1]))["links"] == {}


def test_pairs_of_gpus_are_told_apart(nvml, monkeypatch):
    reader = Nvml(list(UUIDS))
    reader.gpus = [0, 1, 2, 3]
    monkeypatch.setattr(nvml, "nvmlDeviceGetP2PStatus", lambda one, other, kind: int(one // 2 != other // 2))
    links = reader.describe()["links"]
    assert links == {"NVLink": "0-1, 2-3", "PCIe and the link between NUMA nodes": "0-2, 0-3, 1-2, 1-3"}


@pytest.mark.parametrize(
    "bus_id, node", [("00000000:1B:00.0", 1), (b"00000000:2B:00.0", None), ("../../../x", None), ("", None)]
)
def test_the_numa_node_is_linuxs(tmp_path, bus_id, node):
    for name, number in (("0000:1b:00.0", "1\n"), ("0000:2b:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(number)
    assert numa_node(bus_id, tmp_path) == node


def test_without_nvml_the_report_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    info = {
        "machine": machine_info(watched()),
        "hardware": {"num_gpus": 1},
        "software": {"driver": "580.1", "cuda": "13.0"},
    }
    text = dict(machine_lines(info))["  clocks and power"]
    assert text.startswith("not sampled: the nvidia-ml-py library is missing")


def test_a_cpu_has_only_a_host_and_a_dry_run_nothing():
    info = {
        "machine": machine_info(GpuMonitor([])),
        "hardware": {},
        "software": {"driver": None, "cuda": None},
    }
    assert [name for name, _ in machine_lines(info)] == ["Host"]
    assert info["machine"]["gpu_reason"] == "the run uses no GPU"
    del info["machine"]
    assert machine_lines(info) == []


# --- several rows ---


def rows() -> list[dict]:
    """Rows of 1, 2 and 1 samples, and one between two samples."""
    monitor = filled(*((t, 1000 + 100 * t) for t in range(4)), throttle=("power_limit",))
    monitor.samples.append(Sample(4.0, 4.01, [GpuReading(2000, 300.0, 60.0, ())]))
    ends = [(-0.5, 0.5), (0.5, 0.6), (0.6, 3.5), (3.5, 5.0)]
    return [monitor.take([each]) for each in ends]


def test_the_summary_leaves_rows_without_a_sample_out():
    found = summarize_gpus(rows())
    assert found["sm_clock_mhz"] == {"median": 1200, "p10": 1000, "p90": 2000}
    assert found["throttle"] == {"power_limit": pytest.approx(0.8)}  # of 5 samples, not of rows
    assert found["gpu_reason"] is None


def test_a_summary_without_a_sample_says_why():
    found = summarize_gpus(list(itertools.repeat(GpuMonitor([]).take([(0.0, 1.0)]), 3)))
    assert found == {**{name: None for name in NO_SAMPLE if name != "gpu_samples"}} | {
        "gpu_reason": "the run uses no GPU"
    }


def test_the_end_of_the_log_has_clock_and_power_beside_the_mfu():
    found = summarize_gpus(rows()) | {"mfu_percent": {"median": 41.2}}
    assert speed_line(found) == (
        "MFU 41.20 %, 1,200 MHz, 100 W, 50 °C (medians after warm-up); "
        "clock lowered by power limit in 80 % of the samples"
    )
    assert speed_line(found | {"mfu_percent": None}).startswith("1,200 MHz")
    assert speed_line({}) is speed_line(summarize_gpus([])) is None


def test_trackers_get_the_numbers():
    assert figures_of("training_iterations", rows()[0]) == {
        **{"gpu/sm_clock_mhz": 1000, "gpu/power_w": 100, "gpu/temperature_c": 50},
        "gpu/throttle/power_limit": 1.0,
    }
