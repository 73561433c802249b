"""matmul_algorithms='measured' on a GPU: every algorithm gives torch's result, and a resume is bit-exact."""

import subprocess
import sys

import pytest
import torch
from support.helpers import (
    ROOT,
    SMALL_RUN,
    checkpoint_tensors,
    last_run,
    make_dataset,
    run_train,
    write_config,
)
from support.tensors import E4M3, E5M2, error

from ops.matmul import Matmul, candidates, chosen, chosen_matmul, matmul_by_torch, multiply
from training.optimization import matmul_algorithms
from training.optimization.matmul_algorithms import ALGORITHMS, measure_one, random_operand

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MATMULS = {
    "bf16 forward": Matmul(4096, 1024, 1536, BF16, BF16, True, False),
    "bf16 dgrad": Matmul(4096, 1536, 1024, BF16, BF16, False, False),
    "fp8 forward": Matmul(4096, 1024, 1536, E4M3, E4M3, True, True),
    "fp8 dgrad": Matmul(4096, 1536, 1024, E5M2, E4M3, True, False),
    "three sizes": Matmul(192, 256, 384, BF16, BF16, False, False),
}
FP8 = ["--low_precision=fp8_tensorwise", "--low_precision_scope=layers_and_head"]
VARIANTS = {"bf16": [], "fp8": FP8, "graphs": ["--use_cuda_graphs=True"], "whole": ["--compile_scope=whole"]}
WORKER = ROOT / "tests/support/matmul_worker.py"


@pytest.fixture(autouse=True)
def no_plans():
    yield
    chosen.replace({})


def generator():
    return torch.Generator("cuda").manual_seed(0)


def operands(matmul):
    shape = (matmul.N, matmul.K) if matmul.transposed else (matmul.K, matmul.N)
    a, a_inverse = random_operand((matmul.M, matmul.K), matmul.a, generator())
    b, b_inverse = random_operand(shape, matmul.b, generator())
    return a, b, a_inverse, b_inverse


def plans_of(matmul):
    if matmul.is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 matmuls")
    return candidates(matmul, torch.cuda.current_device(), ALGORITHMS)


# --- algorithms ---


@pytest.mark.parametrize("name", MATMULS)
def test_every_algorithm_gives_torchs_result(name):
    matmul = MATMULS[name]
    plans = plans_of(matmul)
    a, b, *scales = operands(matmul)
    expected = matmul_by_torch(a, b, matmul.transposed, *scales, matmul.fast)
    assert len(plans) > 1
    for plan in plans:
        found = multiply(plan, a, b, matmul.N, *scales)
        assert found.shape == expected.shape and found.dtype == BF16
        assert error(found, expected) < matmul_algorithms.TOLERANCE


@pytest.mark.parametrize("name", MATMULS)
def test_the_operation_repeats_itself_bit_for_bit_also_in_a_capture(name):
    matmul = MATMULS[name]
    chosen.replace({matmul: plans_of(matmul)[-1]})
    a, b, *scales = operands(matmul)

    def run():
        return chosen_matmul(a, b, matmul.transposed, *scales, matmul.fast)

    eager = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


def test_an_algorithm_has_the_same_bytes_in_another_process():
    """Else no resume would find it."""
    code = (
        "import torch; from ops.matmul import Matmul, candidates; "
        "bf16 = torch.bfloat16; torch.ones(1, device='cuda'); "
        f"plans = candidates(Matmul(4096, 1024, 1536, bf16, bf16, True, False), 0, {ALGORITHMS}); "
        "print([bytes(plan.algorithm.configuration).hex() for plan in plans])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    here = [bytes(plan.algorithm.configuration).hex() for plan in plans_of(MATMULS["bf16 forward"])]
    assert printed == {f"{here}\n"}


def test_a_measurement_times_all_and_leaves_the_random_numbers_of_a_run():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    found = measure_one(MATMULS["bf16 forward"], torch.Generator(torch.device("cuda", 0)).manual_seed(0))
    assert 0 < found.chosen_ms <= found.usual_ms < 10
    assert (found.algorithm is None) == (found.sure_ms == 0)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matmuls")
    make_dataset(folder / "tokens", train_tokens=200_000)
    write_config(folder / "run.py", **SMALL_RUN, dataset=str(folder / "tokens"))
    return folder


def measured(folder, out, *flags):
    """A run by other algorithms than the first, in a process of its own."""
    if "--low_precision=fp8_tensorwise" in flags and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 matmuls")
    command = [sys.executable, WORKER, folder / "run.py", f"--out_dir={folder / out}"]
    command += ["--matmul_algorithms=measured", *flags]
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return last_run(folder / out)


def losses(record):
    return [row["loss"] for row in record["training_iterations"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_resumes_bit_for_bit_without_measuring_again(folder, name):
    flags = VARIANTS[name]
    whole = measured(folder, f"{name}-whole", *flags)
    about = whole["startup_info"]["matmul_algorithms"]
    assert about["used"] == "measured" and about["measured_because"] == "there is no earlier choice"
    assert any(row["algorithm"] for row in about["timings"]), about
    if name == "graphs":
        assert whole["startup_info"]["cuda_graphs"]["used"] == "CUDA Graph", whole["startup_info"][
            "cuda_graphs"
        ]
    measured(folder, f"{name}-parts", "--max_iters=10", "--lr_decay_iters=100", *flags)
    parts = measured(folder, f"{name}-parts", "--init_from=resume", *flags)
    assert "as in the checkpoint" in parts["startup_info"]["matmul_algorithms"]["line"]
    last = "checkpoints/step-00000020"
    one, other = (checkpoint_tensors(folder / f"{name}-{out}" / last) for out in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if not key.startswith("rng."))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_the_loss_is_that_of_cublas_algorithms(folder, name):
    other = losses(measured(folder, f"{name}-other", *VARIANTS[name]))
    done = run_train(folder / "run.py", f"--out_dir={folder / name}-cublas", *VARIANTS[name], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    usual = losses(last_run(folder / f"{name}-cublas"))
    assert len(usual) == len(other) == 20
    assert other == pytest.approx(usual, rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [[], ["--use_fsdp=True"]], ids=["ddp", "fsdp"])
def test_all_ranks_take_what_rank_0_has_measured(folder, flags):
    out = folder / f"two-{len(flags)}"
    done = run_train(
        *(folder / "run.py", f"--out_dir={out}", "--matmul_algorithms=measured", *flags),
        processes=2,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_run(out)["startup_info"]["matmul_algorithms"]["used"] == "measured"
