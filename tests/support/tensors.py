"""Tensors of fixed random numbers, and how far two are apart."""

import torch
from support.all_recipes import use_recipe

from model_config import model_config
from ops import float8
from ops.linear import Linear

E4M3, E5M2 = float8.FORWARD, float8.GRADIENT
CONFIG = model_config("qwen3", n_layer=1, n_head=2, n_embd=32, vocab_size=64, block_size=64)


def random(*shape, device="cpu", dtype=torch.float32, std=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (std * torch.randn(*shape, generator=generator)).to(device, dtype)


def random_bf16(*shape, **keywords):
    return random(*shape, **{"dtype": torch.bfloat16, **keywords})


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def close(a, b, tolerance):
    error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)
    assert error < tolerance, error


def error(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def fp8_linear(weight):
    layer = Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return use_recipe(layer, "fp8_tensorwise")


def assert_requantized_as_each_alone(device):
    matrices = [
        random_bf16(*shape, std=std).to(device) for shape, std in (((64, 48), 0.1), ((300, 6144), 7.0))
    ]
    into = [float8.empty_like(matrix) for matrix in matrices]
    float8.requantize(matrices, into)
    for matrix, found in zip(matrices, into, strict=True):
        for a, b in zip(found, float8.quantize(matrix, E4M3), strict=True):
            assert torch.equal(a.float(), b.float())
