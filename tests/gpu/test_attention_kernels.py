"""Attention kernels of a GPU: which one is chosen, and what it computes."""

import pytest
import torch
from support.attention_cases import assert_agrees, choose, forward_and_gradients, inputs, shape

from model import Block, rotary_angles
from model_config import model_config
from training.hardware import attention_kernels as attention
from training.hardware.capability import CUDNN, capability

pytestmark = pytest.mark.gpu


GPU = torch.device("cuda")


def needs_cudnn_attention():
    if capability(GPU).sdpa[0] != CUDNN:
        pytest.skip("cuDNN attention is not the first choice of this GPU")


def gpu_shape(kv, head_dim, T):
    return shape(kv, head_dim, T, n_head=8, n_embd=8 * head_dim)


@pytest.mark.parametrize("T", [256, 2048])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("kv", [None, 4])
def test_cudnn_is_chosen_and_agrees_with_manual_attention(kv, head_dim, T):
    needs_cudnn_attention()
    config = gpu_shape(kv, head_dim, T)
    choice = choose("sdpa", config, torch.bfloat16, GPU)
    assert (choice.used, choice.kernel, choice.reason) == ("sdpa", "cuDNN", "")
    assert_agrees(choice.attend, config, torch.bfloat16, 2e-2, GPU, batch=1)


@pytest.mark.parametrize("kv", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_torchs_own_choice_agrees_with_manual_attention(kv, dtype, tolerance):
    config = gpu_shape(kv, 64, 256)
    assert_agrees(attention._sdpa_default, config, dtype, tolerance, GPU)


@pytest.mark.parametrize("kv", [None, 4])
def test_a_profile_of_the_compiled_kernel_shows_cudnn(kv):
    needs_cudnn_attention()
    config = gpu_shape(kv, 128, 2048)
    attend = torch.compile(choose("sdpa", config, torch.bfloat16, GPU).attend, fullgraph=True)
    qkv, above = inputs(config, torch.bfloat16, GPU, batch=1)
    forward_and_gradients(attend, qkv, above)  # compiles
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        forward_and_gradients(attend, qkv, above)
        torch.cuda.synchronize()
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    cudnn = [name for name in on_gpu if "cudnn" in name.lower()]
    assert any("fprop" in name or "fwd" in name for name in cudnn), on_gpu
    assert any("bprop" in name or "bwd" in name for name in cudnn), on_gpu


@pytest.mark.parametrize("preset", ["gpt2", "llama", "qwen3"])
def test_a_compiled_block_computes_what_the_eager_block_computes(preset):
    config = model_config(
        preset,
        n_layer=1,
        n_head=8,
        n_embd=1024,
        d_ff=1024,
        vocab_size=97,
        block_size=256,
        n_kv_head=None if preset == "gpt2" else 4,
    )
    attend = choose("sdpa", config, torch.bfloat16, GPU).attend
    block = Block(config, attend).to(GPU)
    generator = torch.Generator(GPU).manual_seed(0)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_((p.ndim == 1) + 0.03 * torch.randn(p.shape, device=GPU, generator=generator))
    rotary = rotary_angles(256, config.head_dim, config.rope_theta, GPU) if preset != "gpt2" else None
    x, above = torch.randn(2, 2, 256, 1024, device=GPU, generator=generator).to(torch.bfloat16)
    x.requires_grad_()

    def results(module):
        total, (value, _) = module(x, (torch.zeros_like(x), None), rotary)
        y = total + value
        return y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], above)

    eager, compiled = results(block), results(torch.compile(block, fullgraph=True, dynamic=False))
    for got, expected in zip(compiled, eager, strict=True):
        assert got.dtype == expected.dtype
        assert (got.float() - expected.float()).norm() / expected.float().norm() < 2e-2
