"""torchtitan's own Trainer on our model. Run with torchtitan installed: python -m pytest -m gpu"""

import json
import subprocess
import sys

import pytest
import torch
from support.helpers import HANG_S, ROOT, make_dataset, write_config

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -r requirements/peers.txt")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ITERS = 5
RUN = {
    "arch_preset": "qwen3", "n_layer": 2, "n_head": 4, "num_key_value_heads": 2, "n_embd": 256, "d_ff": 512,
    "vocab_size": 512, "block_size": 128, "batch_size": 4, "gradient_accumulation_steps": 2,
    "dtype": "bfloat16", "max_iters": ITERS, "log_interval": 2, "eval_interval": 0, "peak_tflops": 989.0,
}  # fmt: skip
FP8 = "--low_precision=fp8_tensorwise"


def peer(config, *flags: str, processes: int = 1) -> dict:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, "-m", "bench.peer", "--peer=torchtitan", str(config), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "flags, processes",
    [
        ([], 1),
        (["--weight_tying=True"], 1),
        ([FP8], 1),
        (["--activation_checkpointing=full"], 1),
        ([], 2),
        (["--weight_tying=True"], 2),
        ([FP8], 2),
    ],
)
def test_torchtitan_trains_our_shape_and_every_row_has_its_figures(tmp_path, flags, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip("needs two GPUs")
    if FP8 in flags:
        pytest.importorskip("torchao")
    tokens = make_dataset(tmp_path / "tokens", vocab_size=512, train_tokens=50_000)
    config = write_config(tmp_path / "run.py", **RUN, dataset=str(tokens))
    found = peer(config, *flags, f"--out_dir={tmp_path / 'out'}", processes=processes)
    rows = found["training_iterations"]
    assert [row["iter"] for row in rows] == [0, 2, 4] and found["num_gpus"] == processes
    assert all(4.0 < row["loss"] < 12.0 for row in rows)  # random guesses: 6.24
    assert rows[-1]["mfu"]["mfu"] > 0 and rows[-1]["memory"]["max_allocated_gb"] > 0
    assert ("float8" in found["precision"]) == (FP8 in flags)
