"""Inputs for attention kernels, and the comparison with manual attention in fp32."""

import torch

from model import manual_attention
from model_config import model_config
from training.hardware.attention_kernels import choose_attention

CPU = torch.device("cpu")


def shape(kv=None, head_dim=16, T=32, **overrides):
    sizes = dict(n_layer=1, n_head=4, n_embd=4 * head_dim, d_ff=96, vocab_size=97, block_size=T)
    return model_config("llama", **{**sizes, "n_kv_head": kv, **overrides})


def choose(asked, config, dtype=torch.float32, device=CPU):
    return choose_attention(asked, config, dtype, device, manual_attention)


def inputs(config, dtype=torch.float32, device=CPU, batch=2, seed=0):
    """q (B, T, H, D), k and v (B, T, K, D), all leaves, and the gradient that arrives from above. v has the
    strides of a part of qkv, as ops/heads.py hands it over."""
    generator = torch.Generator().manual_seed(seed)
    heads = (config.n_head, config.n_kv_head, config.n_kv_head)
    qkv, above = (
        torch.randn(batch, config.block_size, n, config.head_dim, generator=generator).to(device, dtype)
        for n in (sum(heads), config.n_head)
    )
    q, k, v = qkv.split(heads, dim=2)
    return [t.requires_grad_() for t in (q.contiguous(), k.contiguous(), v)], above


def forward_and_gradients(attend, qkv, above):
    y = attend(*qkv, 0.0)
    return y.detach(), *torch.autograd.grad(y, qkv, above)


def assert_agrees(attend, config, dtype, tolerance, device=CPU, batch=2):
    """Forward and gradients against manual attention in fp32, as norm of the difference / norm."""
    qkv, above = inputs(config, dtype, device, batch)
    ours = forward_and_gradients(attend, qkv, above)
    exact = forward_and_gradients(
        manual_attention, [t.detach().float().requires_grad_() for t in qkv], above.float()
    )
    for name, got, expected in zip(("y", "dq", "dk", "dv"), ours, exact, strict=True):
        assert got.dtype == dtype and got.shape == expected.shape, name
        error = ((got.float() - expected).norm() / expected.norm()).item()
        assert error <= tolerance, (name, error)
