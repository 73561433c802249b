"""Clocks and power in the record of whole runs with GPUs that are made here; test_record.py has a CPU's."""

import sys
import time

import pytest
from support.fake_nvml import UUIDS, FakeNvml
from support.helpers import TINY, last_run, make_dataset, write_config

import train
from training.hardware.gpu_monitor import GpuMonitor
from training.records import beginning

FIGURES = ("sm_clock_mhz", "power_w", "temperature_c", "throttle")
STEP_S = 0.02  # longer than many samples


@pytest.fixture
def config(tmp_path):
    dataset = make_dataset(tmp_path / "tokens")
    keys = {**TINY, "max_iters": 8, "dataset": dataset, "out_dir": tmp_path / "out"}
    return write_config(tmp_path / "run.py", **keys)


@pytest.fixture
def nvml(monkeypatch):
    """A run on the CPU that samples these GPUs, at 1 kHz, while each of its iterations takes STEP_S."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(beginning, "watch_gpus", lambda world: GpuMonitor(list(UUIDS), interval_s=0.001))
    step = train.EagerStep.__call__

    def slow_step(*arguments, **options):
        time.sleep(STEP_S)
        return step(*arguments, **options)

    monkeypatch.setattr(train.EagerStep, "__call__", slow_step)
    return fake


def test_rows_and_summary_have_clock_and_power(run, config, tmp_path, nvml, capsys):
    assert run(config, "--peak_tflops=1") == 0
    record, log = last_run(tmp_path / "out"), capsys.readouterr().out
    for row in record["training_iterations"]:
        assert [row[name] for name in FIGURES] == [1500, 700.5, 61, {"power_limit": 1.0}], row
        assert row["gpu_samples"] > 0 and row["gpu_reason"] is None
    summary = record["summary"]
    assert summary["sm_clock_mhz"] == {"median": 1500, "p10": 1500, "p90": 1500}
    assert summary["power_w"]["median"] == 700.5 and summary["throttle"] == {"power_limit": 1.0}
    assert record["startup_info"]["machine"]["gpus_sampled"] == 2
    (line,) = (line for line in log.splitlines() if line.startswith("GPU: "))
    assert f"MFU {summary['mfu_percent']['median']:.2f} %, 1,500 MHz, 700 W, 61 °C" in line
