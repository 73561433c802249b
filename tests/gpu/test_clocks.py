"""Clock and power of a real GPU in the record of a run."""

import pytest
from support.graphed_runs import ON_GPU
from support.helpers import TINY, last_run, make_dataset, run_train, write_config

from training.hardware.nvml import THROTTLE_REASONS

pytestmark = pytest.mark.gpu

SIZES = {"n_layer": 4, "n_embd": 2048, "n_head": 16, "d_ff": 6144, "block_size": 1024}


def test_rows_of_a_real_run_have_plausible_figures(tmp_path):
    dataset = make_dataset(tmp_path / "tokens", train_tokens=500_000)
    keys = {**TINY, **ON_GPU, **SIZES, "dataset": dataset, "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **keys)
    flags = ["--max_iters=151", "--log_interval=25", "--batch_size=8", "--always_save_checkpoint=False"]
    done = run_train(config, *flags)
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
