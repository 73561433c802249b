"""How weights and gradients travel between two GPUs. Run there with: python -m pytest -m gpu"""

import pytest
import torch
from support.helpers import SMALL_RUN, checkpoint_tensors, last_run, make_dataset, run_train, write_config

from tools.profile.trace import read_events
from training.records.profiler import ITERATIONS, TIMES, trace_path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ZERO1, FSDP = "--use_zero1=True", "--use_fsdp=True"
OVERLAPPED, FUSED = "--overlap_param_gather=True", "--gradient_accumulation_fusion=True"
FP8 = ["--low_precision=fp8_tensorwise"]
# a block's forward takes longer than the all-gather of the next block's weights
LARGE = ["--n_layer=8", "--n_embd=2048", "--d_ff=6144", "--n_head=16", "--num_key_value_heads=16"]
LARGE += ["--batch_size=16", "--block_size=1024"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("communication")
    make_dataset(folder / "tokens", train_tokens=200_000)
    write_config(folder / "run.py", **SMALL_RUN, dataset=str(folder / "tokens"))
    return folder


def train(folder, out: str, *flags: str, processes: int = 2) -> dict:
    done = run_train(folder / "run.py", f"--out_dir={folder / out}", *flags, processes=processes, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return last_run(folder / out)


def losses(record: dict) -> list[float]:
    return [row["loss"] for row in record["training_iterations"]]


@pytest.mark.parametrize("name", ["zero1", "zero1-fp8", "fsdp-fp8"])
def test_weights_that_arrive_during_the_forward_are_the_same_bit_for_bit(folder, name):
    """With two micro-steps, evaluations, and replicas that are compared after each iteration."""
    low = FP8 if name.endswith("fp8") else []
    flags = [ZERO1 if name.startswith("zero1") else FSDP, "--drift_check_interval=1", *low]
    plain = train(folder, f"plain-{name}", *flags)
    ours = train(folder, f"overlapped-{name}", *flags, OVERLAPPED)
    assert losses(ours) == losses(plain)
    assert [step["val_loss"] for step in ours["eval_steps"]] == [
        step["val_loss"] for step in plain["eval_steps"]
    ]
    for step in (10, 20):
        found, expected = (
            checkpoint_tensors(folder / f"{out}-{name}" / "checkpoints" / f"step-{step:08d}")
            for out in ("overlapped", "plain")
        )
        assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def gathers_with_matmuls_among_them(out_dir) -> list[bool]:
    """Of each series of all-gathers that follows an update: whether a matmul began before its last one ended.
    Durations say less, since a gather's kernel also waits for the other GPU."""
    kernels = [e for e in read_events(trace_path(out_dir, TIMES, 0)) if e.get("cat") == "kernel"]
    found, begin, end, began = [], None, 0.0, []  # of the present series
    for event in sorted(kernels, key=lambda event: event["ts"]):
        name = event["name"].lower()
        if "allgather" in name:
            begin, end = begin or event["ts"], event["ts"] + event["dur"]
        elif "nccl" in name and begin is not None:  # gradients: the iteration's backward
            found.append(any(begin < moment < end for moment in began))
            begin, began = None, []
        elif begin is not None and ("gemm" in name or "nvjet" in name):
            began.append(event["ts"])
    return found


def test_no_iteration_waits_for_all_weights_after_its_update(folder):
    flags = [ZERO1, *LARGE, "--profile=time", f"--max_iters={ITERATIONS}", "--eval_interval=0"]
    # a row waits for the GPU, and then the gathers are over before the next forward is launched
    flags += ["--always_save_checkpoint=False", "--log_interval=100"]
    train(folder, "profile-plain", *flags)
    train(folder, "profile-overlapped", *flags, OVERLAPPED)
    plain = gathers_with_matmuls_among_them(folder / "profile-plain")
    ours = gathers_with_matmuls_among_them(folder / "profile-overlapped")
    assert len(ours) == len(plain) > 1
    assert not any(plain) and all(ours)


@pytest.mark.parametrize("more", [[], FP8, ["--reduce_dtype=bfloat16"], ["--weight_tying=True"]])
def test_fsdp_whose_matmuls_sum_gradients_trains_as_one_gpu(folder, more):
    """Also compiled, where the sums are arguments of the backward. The first norm is of equal weights."""
    name = "-".join(more).strip("-").replace("=", "-") or "bf16"
    one = train(folder, f"one-{name}", *more, "--gradient_accumulation_steps=4", processes=1)
    two = train(folder, f"fused-{name}", *more, FSDP, FUSED)
    assert two["startup_info"]["gradient_sums"]["used"] == "in the matmul"
    norms = [record["training_iterations"][0]["gradients"]["global_norm"] for record in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)
    assert losses(two)[:3] == pytest.approx(losses(one)[:3], rel=2e-3)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)


@pytest.mark.parametrize("strategy", [[], [ZERO1, OVERLAPPED], [FSDP, FUSED]], ids=["ddp", "zero1", "fsdp"])
def test_settings_of_nccl_change_no_loss(folder, strategy):
    """With two ranks a sum has one order, however many multiprocessors compute it."""
    name = strategy[0].strip("-").split("=")[0] if strategy else "ddp"
    plain = train(folder, f"nccl-{name}-plain", *strategy)
    limited = ["--nccl_max_ctas=4", f"--nccl_high_priority_stream={FSDP not in strategy}"]  # not the default
    assert losses(train(folder, f"nccl-{name}", *strategy, *limited)) == losses(plain)
    left = train(folder, f"nccl-{name}-carveout", *strategy, *limited, "--sm_carveout=4")
    assert losses(left) == pytest.approx(losses(plain), rel=1e-2)  # other algorithms round differently
