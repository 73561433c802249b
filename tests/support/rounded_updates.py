"""AdamW's kernel that rounds stochastically against its plain form, for a GPU or for Triton's interpreter.

python -m support.rounded_updates  # with TRITON_INTERPRET=1, which counts when triton is imported
"""

import itertools

import torch
from support import triton_interpreter
from support.tensors import random
from support.updates import empty_moment

from ops.quantization.adamw import plain_adamw
from ops.quantization.random_bits import bf16_stochastically, weight_key
from ops.triton_kernels import adamw

FP32, BF16 = torch.float32, torch.bfloat16
BETAS, EPS, DECAY, RATE, SCALE, STEP = (0.9, 0.999), 1e-8, 0.1, 3e-3, 3.7, 7
KEY = weight_key(2**40 + 7, 2**29 - 1)
SHARDS = [(0, 200), (8, 64), (3, 130), (8 * 2**32 - 72, 72), (5, 1), (16, 0)]  # start, elements


def scalars(device, found_inf=0.0, step=STEP):
    numbers = (RATE, SCALE, found_inf, step, 1 - BETAS[0] ** step, (1 - BETAS[1] ** step) ** 0.5)
    return adamw.Scalars(*(torch.full((), float(number), device=device) for number in numbers))


def shard(n, stored, moments, copies, device):
    """(weight, gradient, mean, square, copy) with weights of many sizes, infinite ones and no number."""
    weight = random(n) * 10.0 ** torch.linspace(-20, 20, n)
    for place, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0)):
        weight[place + 20 : place + 21] = value
    tensors = weight, random(n + 1)[1:], random(n + 2)[2:], random(n + 3)[3:].square()
    dtypes = stored, stored, moments, moments
    made = [tensor.to(device, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    return *made, None if copies is None else torch.zeros(n, dtype=copies, device=device)


def update(tensors, scalars, rounding):
    adamw.triton_adamw(*tensors, scalars, BETAS, EPS, DECAY, rounding)


def plain_update(tensors, scalars):
    """(weight, mean, square) in fp32, each operation as the kernel has it, with one rounding for each."""
    weight, gradient, mean, square = (tensor.float() for tensor in tensors[:4])
    beta1, rest1, beta2, rest2, eps, decay = torch.tensor(
        [BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1], EPS, DECAY], device=weight.device
    )
    gradient = gradient / scalars.grad_scale
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    weight = weight - scalars.rate * decay * weight
    step_size = scalars.rate / scalars.correction1
    root = square.double().sqrt().float()  # torch's own root of fp32 is not rounded to the nearest on a CPU
    return weight - step_size * mean / (root / scalars.root2 + eps), mean, square


def rounded(wide, tensors, key, start):
    """(weight, mean, square) as they are stored."""
    kept = (tensors[0], *tensors[2:4])
    return [
        bf16_stochastically(x, key, stream=stream, start=start) if old.dtype == BF16 else x
        for stream, (x, old) in enumerate(zip(wide, kept, strict=True))
    ]


def assert_stored(tensors, expected, name):
    for now, wanted in zip((tensors[0], *tensors[2:4]), expected, strict=True):
        assert torch.equal(now.isnan(), wanted.isnan()), name
        assert torch.equal(now.nan_to_num(), wanted.nan_to_num()), name
    copy = tensors[4]
    assert copy is None or torch.equal(copy.nan_to_num(), tensors[0].to(copy.dtype).nan_to_num()), name


def assert_the_kernel_equals_its_plain_form():
    """In every dtype that the keys allow, for shards that begin anywhere in the whole weight."""
    for (start, n), stored, moments in itertools.product(SHARDS, (FP32, BF16), (FP32, BF16)):
        name = f"{n} elements from {start}, {stored} weights, {moments} moments"
        tensors = shard(n, stored, moments, BF16 if stored == FP32 else None, "cpu")
        key = KEY.clone()
        key[1] = STEP
        expected = rounded(plain_update(tensors, scalars("cpu")), tensors, key, start)
        before = [None if tensor is None else tensor.clone() for tensor in tensors]
        update(tensors, scalars("cpu", found_inf=1.0), (KEY, start))
        for now, was in zip(tensors, before, strict=True):
            assert was is None or torch.equal(now.nan_to_num(), was.nan_to_num()), name
        update(tensors, scalars("cpu"), (KEY, start))
        assert_stored(tensors, expected, name)


# --- moments of 8 bits ---

ROWS = [(3, 512, 0), (5, 264, 264 * 3), (7, 40, 80), (2, 300, 0)]  # rows, columns, start of a shard


def eight_bit_updates(update, rows, columns, dtype, copies, rounding, device):
    """[weight, codes and scales of both moments, copy] after updates, of which one is refused."""
    weight = random(rows * columns).view(rows, columns).to(device, dtype)
    gradient = (1e-3 * random(rows * columns + 1)[1:]).view(rows, columns).to(device, dtype)
    gradient[:, 5] *= 1e4  # beside it, squares have code 0
    copy = None if copies is None else torch.zeros_like(weight, dtype=copies)
    moments = empty_moment(weight), empty_moment(weight)
    for step, found_inf in ((1, 0.0), (2, 0.0), (3, 1.0), (3, 0.0)):
        of_step = scalars(device, found_inf, step)
        update(weight, step * gradient, *moments, copy, of_step, BETAS, EPS, DECAY, rounding)
    return [weight, *moments[0], *moments[1], *([] if copy is None else [copy])]


def assert_the_8_bit_kernel_equals_its_plain_form(device="cpu"):
    """For shards that begin at any row; with rows that are blocks, that end in a part of one, or are one."""
    from ops.triton_kernels.adamw_8bit import triton_adamw_8bit

    for (rows, columns, start), dtype, stochastic in itertools.product(ROWS, (FP32, BF16), (False, True)):
        rounding = (KEY.to(device), start) if stochastic else None
        case = rows, columns, dtype, BF16 if dtype == FP32 else None, rounding
        ours = eight_bit_updates(triton_adamw_8bit, *case, device)
        theirs = eight_bit_updates(plain_adamw, *case, "cpu" if rounding is None else device)
        for now, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(now.cpu(), wanted.cpu()), case[:3]


if __name__ == "__main__":
    triton_interpreter.prepare()
    adamw.BLOCK = 64  # so that a shard is several programs
    assert_the_kernel_equals_its_plain_form()
    assert_the_8_bit_kernel_equals_its_plain_form()
    print("equal")
