"""tools.evaluate on GPUs finds what it finds on the CPU."""

import pytest
import torch
from support.evaluation import TEXTS, figures, make_weights, write_texts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    weights, text = make_weights(folder / "weights"), write_texts(folder / "texts.jsonl", TEXTS)
    return [f"--hf={weights}", f"--text={text}"]


@pytest.fixture(scope="module")
def on_cpu(argv, tmp_path_factory):
    return figures(*argv, output=tmp_path_factory.mktemp("cpu"))["texts"][0]


# bf16 has 8 bits: errors of 0.4 % of a logit, which mostly cancel out over 219 tokens
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-3), ("float16", 1e-3)])
def test_a_gpu_finds_the_nats_of_the_cpu(argv, on_cpu, tmp_path, dtype, tolerance):
    found = figures(*argv, f"--dtype={dtype}", output=tmp_path, device="cuda")
    assert found["texts"][0]["nats"] == pytest.approx(on_cpu["nats"], rel=tolerance)
    assert found["texts"][0]["tokens"] == on_cpu["tokens"]
    assert found["hardware"]["device"] == torch.cuda.get_device_name()
