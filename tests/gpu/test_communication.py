"""How weights and gradients travel between two GPUs. Run there with: python -m pytest -m gpu"""

import pytest
import torch
from support.gpu_runs import losses, train
from support.helpers import SMALL_RUN, make_dataset, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ZERO1, FSDP = "--use_zero1=True", "--use_fsdp=True"
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


@pytest.mark.parametrize("more", [[], FP8, ["--weight_tying=True"]])
def test_fsdp_whose_matmuls_sum_gradients_trains_as_one_gpu(folder, more):
    """Also compiled, where the sums are arguments of the backward. The first norm is of equal weights."""
    name = "-".join(more).strip("-").replace("=", "-") or "bf16"
    one = train(folder, f"one-{name}", *more, "--gradient_accumulation_steps=4")
    two = train(folder, f"fused-{name}", *more, FSDP, processes=2)
    assert two["startup_info"]["gradient_sums"]["used"] == "in the matmul"
    norms = [record["training_iterations"][0]["gradients"]["global_norm"] for record in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)
    assert losses(two)[:3] == pytest.approx(losses(one)[:3], rel=2e-3)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
