"""Kernels that walk over rows start programs for the GPU at hand; all compile for every GPU of the table, and
give the bits of their plain forms in an interpreter."""

import os
import sys
import types

import pytest
import torch
from support import warm_python
from support.helpers import HANG_S
from support.updates import empty_moment

from ops.quantization.adamw import Scalars
from ops.triton_kernels import launch
from ops.triton_kernels.launch import walking_programs
from training.hardware.capability import TABLE

# multiprocessors: what CUDA reports for these GPUs
GPUS = {"A100": 108, "RTX 4090": 128, "H200": 132, "B200": 148}
SHARED_MEMORY = 48 * 1024  # bytes of a program that every GPU gives without being asked for more
BF16, CUDA = torch.bfloat16, torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(count): torch reports a GPU with so many multiprocessors."""

    def gpu(count):
        properties = types.SimpleNamespace(multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return gpu


def test_every_multiprocessor_gets_the_same_number_of_programs_and_a_cpu_is_not_asked(gpu, monkeypatch):
    for count in GPUS.values():
        gpu(count)
        assert walking_programs(CUDA, 4) == 4 * count
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert walking_programs(torch.device("cpu"), 4) > 4  # and still adds several sums


# --- with Triton, which compiles for a GPU that is not there ---


@pytest.fixture
def compiled(monkeypatch):
    """compiled(compute): a dict that kernels, which do not run, enter: {name: (what Triton made, grid)}."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compiled(compute):
        target, kernels = GPUTarget("cuda", 10 * compute[0] + compute[1], 32), {}

        def compile_only(function, *args, grid, warmup, **options):
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            kernels[function.__name__] = kernel, grid

        fake = types.SimpleNamespace(
            get_current_device=lambda: f"a fake {compute}",
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
        monkeypatch.setattr(type(driver), "active", fake)
        monkeypatch.setattr(JITFunction, "run", compile_only)
        return kernels

    return compiled


def start_backwards(tokens: int, heads: int = 16) -> None:
    from ops.triton_kernels.heads import triton_heads_backward
    from ops.triton_kernels.norm import triton_add_norm_backward

    x, weight = torch.zeros(tokens, 2048, dtype=BF16), torch.ones(2048)
    triton_add_norm_backward(x, x, x, weight, torch.zeros(2, tokens), False, False, True)
    dq, dk = (torch.zeros(1, tokens, n, 128, dtype=BF16) for n in (heads, heads // 2))
    qkv, angles = torch.zeros(1, tokens, heads * 256, dtype=BF16), torch.zeros(tokens, 64)
    triton_heads_backward(dq, dk, dk, qkv, weight[:128], weight[:128], angles, angles, 1e-6)


@pytest.mark.parametrize("name", GPUS)
def test_a_backward_starts_programs_for_this_gpus_multiprocessors(gpu, compiled, monkeypatch, name):
    kernels = compiled((9, 0))
    gpu(GPUS[name])
    count = launch.multiprocessors  # the tensors are on the CPU
    monkeypatch.setattr(launch, "multiprocessors", lambda _: count(CUDA))
    start_backwards(tokens=2048)
    grids = {kernel: grid for kernel, (_, grid) in kernels.items() if kernel != "_sum_parts"}
    # 16 query, 8 key and 8 value heads are 4 blocks of heads
    assert grids == {"_add_norm_backward": (4 * GPUS[name],), "_heads_backward": (4, 6 * GPUS[name] // 4)}


def test_no_more_programs_start_than_there_are_rows(compiled):
    kernels = compiled((9, 0))
    start_backwards(tokens=3)
    assert kernels["_add_norm_backward"][1] == (3,)
    assert kernels["_heads_backward"][1] == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, torch.zeros(4, dtype=torch.int64)])
def test_the_code_of_nvfp4s_kernels_fits_an_instruction_cache(compiled, key):
    """7,253 instructions of straight code, 93 KB, took eight times as long as a GPU needs to execute them."""
    kernels = compiled((9, 0))
    from recipes.kernels.nvfp4 import triton_nvfp4, triton_nvfp4_amaxes

    x = torch.zeros(16, 2048, dtype=BF16)
    triton_nvfp4(x, torch.ones(2), key)
    triton_nvfp4_amaxes(x)
    for name, (kernel, _) in kernels.items():
        assert kernel.asm["ptx"].count(";") < 2500, name  # 1,584 with triton 3.6


@pytest.mark.slow
@pytest.mark.parametrize("compute", TABLE)
def test_every_kernel_compiles_for_every_gpu_of_the_table_within_its_shared_memory(compiled, compute):
    kernels = compiled(compute)
    from ops.triton_kernels import adamw, adamw_8bit, cross_entropy, embedding, float8, heads, norm, swiglu
    from ops.triton_kernels.checksum import triton_checksums
    from recipes.block_scaled import block_forms
    from recipes.kernels import block_scaled, delayed_float8, delayed_swiglu, mxfp8, nvfp4

    x, weight, ids = torch.zeros(16, 2048, dtype=BF16), torch.ones(2048), torch.zeros(16, dtype=torch.int64)
    norm.triton_add_norm(x, x, weight, None, 1e-6, False)
    norm.triton_norm(x, weight, None, 1e-6, False)
    angles = torch.zeros(16, 64)
    qkv, heads_weight = x[None].repeat(1, 1, 2), weight[:128]
    heads.triton_heads(qkv, None, heads_weight, heads_weight, angles, angles, 16, 8, 1e-6)
    heads.triton_heads(qkv, qkv[0, 0], None, None, angles, angles, 16, 8, 1e-6)
    dq, dk = qkv[:, :, :2048].view(1, 16, 16, 128), qkv[:, :, :1024].reshape(1, 16, 8, 128)
    heads.triton_heads_backward(dq, dk, dk, None, None, None, angles, angles, 1e-6, True)
    start_backwards(tokens=16)
    swiglu.triton_swiglu(x, 2048)
    swiglu.triton_swiglu_backward(x, x[:, :1024].contiguous(), 2048)
    swiglu.triton_swiglu_backward_and_product(x, x[:, :1024].contiguous(), 2048)
    cross_entropy.triton_cross_entropy(x, ids, True)
    embedding.triton_add_embedding_gradient(ids, x, torch.zeros(4, 2048))
    one = torch.ones(())
    adamw.triton_adamw(*(weight.clone() for _ in range(4)), x[0], Scalars(*[one] * 6), (0.9, 0.95), 1e-8, 0.1)
    moments, key = (empty_moment(x), empty_moment(x)), torch.zeros(4, dtype=torch.int64)
    about = Scalars(*[one] * 6), (0.9, 0.95), 1e-8, 0.1, (key, 0)
    adamw_8bit.triton_adamw_8bit(x.clone(), x, *moments, None, *about)
    mxfp8.triton_mxfp8(x.repeat(2, 1))
    nvfp4.triton_nvfp4(x, torch.ones(2), torch.zeros(4, dtype=torch.int64))
    nvfp4.triton_nvfp4_square(x, torch.ones(()))
    nvfp4.triton_nvfp4_amaxes(x)
    for amaxes, bits in ((None, None), (torch.ones(1), None), (torch.ones(2), key)):
        square = x.repeat(2, 1)
        block_scaled.triton_block_forms(square, amaxes, bits, block_forms(square, amaxes))
    triton_checksums([x, weight, ids.byte()])
    expected = 17
    if TABLE[compute].fp8:  # others have no instruction for it
        float8.triton_quantize(x, weight[0], torch.float8_e4m3fn)
        float8.triton_amax(x, torch.zeros(2), 16384)
        swiglu.triton_swiglu_backward_float8(x, x[:, :1024].contiguous(), weight[0], torch.float8_e5m2)
        cross_entropy.triton_cross_entropy_float8(x, ids, weight[0], torch.float8_e5m2)
        delayed = one, one.clone(), torch.float8_e5m2
        delayed_float8.triton_delayed_quantize(x, *delayed, None)
        delayed_float8.triton_delayed_quantize(x, *delayed, weight)
        delayed_swiglu.triton_delayed_swiglu_backward(x, x[:, :1024].contiguous(), *delayed, 2048)
        expected += 9
    assert len(kernels) == expected
    for name, (kernel, _) in kernels.items():
        assert kernel.metadata.shared <= SHARED_MEMORY, name


INTERPRETED = ("emulated_operands", "block_scaled_forms", "checksum_cases", "fp8_delayed_casts")
INTERPRETED += ("recomputed_inputs", "rounded_updates")


@pytest.mark.slow
@pytest.mark.parametrize("module", INTERPRETED)
def test_kernels_give_the_bits_of_their_plain_forms_in_tritons_interpreter(module):
    """It counts when triton is imported, so in a process of its own."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", f"support.{module}"]
    done = warm_python.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
