"""Clock and power of a real GPU in the record of a run, and what it costs to sample them."""

import statistics
import time

import pytest
import torch
from support.graphed_runs import ON_GPU, build, rate
from support.helpers import TINY, last_run, make_dataset, run_train, write_config

from training.hardware.gpu_monitor import INTERVAL_S, GpuMonitor, watch_gpus
from training.hardware.nvml import THROTTLE_REASONS
from training.process.world import World

pytestmark = pytest.mark.gpu

BLOCK_S = 1.0
PAIRS = 10  # of blocks with and without sampling
FAST_S = 0.002  # between two samples while the cost is measured: at the usual 0.2 s it is below the noise
SIZES = {
    "launches": {},  # tiny and eager: the GPU waits for Python, which shares its lock with the thread
    "matmuls": {"n_layer": 4, "n_embd": 2048, "n_head": 16, "d_ff": 6144, "block_size": 1024},
}


def test_rows_of_a_real_run_have_plausible_figures(tmp_path):
    dataset = make_dataset(tmp_path / "tokens", train_tokens=500_000)
    keys = {**TINY, **ON_GPU, **SIZES["matmuls"], "dataset": dataset, "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **keys)
    flags = ["--max_iters=151", "--log_interval=25", "--batch_size=8", "--always_save_checkpoint=False"]
    done = run_train(config, *flags, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    record = last_run(tmp_path / "out")
    machine = record["startup_info"]["machine"]
    (gpu,) = machine["gpus"]
    assert machine["host"] and machine["gpus_sampled"] == 1 and machine["gpu_reason"] is None
    rows = [row for row in record["training_iterations"] if row["gpu_samples"]]
    assert len(rows) >= 4
    for row in rows:
        assert row["gpu_reason"] is None
        assert 100 < row["sm_clock_mhz"] <= gpu["max_sm_clock_mhz"]
        assert 20 < row["power_w"] < 1.2 * gpu["power_limit_w"]
        assert 10 < row["temperature_c"] < 110
        assert set(row["throttle"]) <= set(THROTTLE_REASONS.values())
    assert f"{record['summary']['sm_clock_mhz']['median']:,.0f} MHz" in done.stdout
    assert record["summary"]["gpu_monitor"]["cpu_percent"] < 5


@pytest.mark.parametrize("size", SIZES)
def test_sampling_costs_less_than_a_thousandth(tmp_path, size):
    """The same step in alternating blocks, with and without a thread that samples 100 times as often as a
    run does. What one sample costs follows from the difference."""
    keys = {**ON_GPU, **SIZES[size], "dtype": "bfloat16"}
    parts = build(make_dataset(tmp_path / "tokens", train_tokens=500_000), **keys)
    x, y = parts.loader.next()

    def seconds(iterations: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(iterations):
            parts.step(x, y, rate(i))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(20)
    iterations = max(1, round(BLOCK_S / (seconds(20) / 20)))
    world = World(0, 0, 1, torch.device("cuda", 0), local_size=torch.cuda.device_count())
    usual = watch_gpus(world)
    uuids = usual.uuids
    usual.close()
    seconds(iterations)
    costs, samples = [], 0
    for pair in range(PAIRS):
        taken = {}
        for sampling in (True, False) if pair % 2 else (False, True):
            monitor = GpuMonitor(uuids if sampling else [], FAST_S)
            monitor.facts()  # connecting to the driver is over
            before = len(monitor.samples)
            taken[sampling] = seconds(iterations)
            if sampling:
                count = len(monitor.samples) - before
            monitor.close()
        assert count > 20, monitor.reason
        samples += count
        costs.append((taken[True] - taken[False]) / count)
    share, error = (100 * each / INTERVAL_S for each in (statistics.median(costs), standard_error(costs)))
    print(
        f"\n{size}, {len(uuids)} GPUs, {1000 * taken[False] / iterations:.2f} ms per iteration: "
        f"a sample every {INTERVAL_S} s costs {share:.4f} % +- {error:.4f} % of the speed ({samples} samples)"
    )
    assert share < 0.1 + 2 * error and error < 0.1


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5
