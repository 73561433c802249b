"""generation/ on a GPU: the recorded step and the Triton forms against the CPU."""

import pytest
import torch

from generation.cache import cached_attention
from generation.choice import Choice
from generation.decoding import generate
from model_builder import build_model
from model_config import model_config

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 3, 3, 41, 7, 22], [8], [60, 1, 13]]
SIZES = dict(n_layer=2, n_head=4, n_embd=128, d_ff=256, vocab_size=64, block_size=64)
SEEDS = [7, 8, 9]


def built(device, preset="qwen3", **keys):
    config = model_config(preset, **SIZES, **keys)
    model = build_model(config, cached_attention).init_weights("cpu", seed=1).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


@pytest.mark.parametrize("keys", [dict(n_kv_head=2), dict(preset="gpt2", bias=True)], ids=["qwen3", "gpt2"])
def test_greedy_tokens_in_fp32_are_those_of_the_cpu(keys):
    expected = generate(built("cpu", **keys), PROMPTS, 40)
    model = built("cuda", **keys)
    assert generate(model, PROMPTS, 40) == expected
    assert [generate(model, [prompt], 40)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("choice", [Choice(1.0), Choice(0.8, top_k=20), Choice(1.0, top_p=0.9)])
def test_the_recorded_step_draws_what_the_step_itself_draws(choice, monkeypatch):
    model = built("cuda", n_kv_head=2)
    recorded = generate(model, PROMPTS, 40, choice, seeds=SEEDS)
    assert generate(model, PROMPTS, 40, choice, seeds=SEEDS) == recorded
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda step, _: step)
    assert generate(model, PROMPTS, 40, choice, seeds=SEEDS) == recorded
    assert generate(model, PROMPTS, 40, choice, seeds=[10, 11, 12]) != recorded
