"""Attention kernels of a GPU: which one is chosen, and what it computes."""

import pytest
import torch
from support.attention_cases import assert_agrees, choose, forward_and_gradients, inputs, shape

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


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("kv", [None, 4])
def test_flash_attn_4_agrees_with_manual_attention_eager_compiled_and_captured(kv, head_dim):
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn 4: pip install -r requirements/quack.txt")
    if "flash_attn_4" not in capability(GPU).flash_attn:
        pytest.skip("flash-attn 4 has no kernels for this GPU")
    config = gpu_shape(kv, head_dim, 2048)
    choice = choose("flash_attn_4", config, torch.bfloat16, GPU)
    assert (choice.used, choice.reason) == ("flash_attn_4", "")
    assert_agrees(choice.attend, config, torch.bfloat16, 2e-2, GPU, batch=1)
    compiled = torch.compile(choice.attend, fullgraph=True)
    assert_agrees(compiled, config, torch.bfloat16, 2e-2, GPU, batch=1)
    (q, k, v), above = inputs(config, torch.bfloat16, GPU, batch=1)
    expected = forward_and_gradients(compiled, (q, k, v), above)  # also compiles its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_gradients(compiled, (q, k, v), above)
    graph.replay()
    assert torch.equal(captured[0], expected[0])
    for mine, other in zip(captured[1:], expected[1:], strict=True):  # sums of dq have any order
        torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)
