"""The worst day of data: token files that change under a run, damaged packings, advice that repairs."""

import os
import time

import pytest
from helpers import TINY, last_run, make_dataset, start_train, write_config

# --- token files that change under a run ---


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", ["stream", "truncate"])
def test_token_file_truncated_during_training_is_named(tmp_path, workers, packing):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    out = tmp_path / "out"
    keys = {**TINY, "dataset": folder, "out_dir": out, "max_iters": 10**6, "lr_decay_iters": 10**6}
    keys |= {"packing": packing, "use_dataloader": workers > 0, "dataloader_num_workers": max(workers, 1)}
    process = start_train(write_config(tmp_path / "run.py", **keys))
    try:
        wait_for_rows(out)
        os.truncate(folder / "train.bin", 1000)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, (process.returncode, stderr)
    assert f"{folder}/train.bin had 40,000 bytes when the run started and has 1,000 now" in stderr
    assert "Traceback" not in stderr and stderr.count("train.bin") == 1
    assert last_run(out)["status"] == "failed"


def wait_for_rows(out) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if list(out.glob("run_*.json")) and last_run(out)["training_iterations"]:
            return
        time.sleep(0.1)
    pytest.fail("no row in 60 s")
