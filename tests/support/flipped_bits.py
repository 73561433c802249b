"""One flipped bit in one of the two passes of a second look, as a faulty GPU would make it."""

import torch

from training.optimization.second_look import BITS

ELEMENT, BIT = 5, 21  # of float32, the second of the fraction: the loss stays a number


def flip(tensor: torch.Tensor, element: int = ELEMENT, bit: int | None = None) -> None:
    """bit: counted from the lowest; None: BIT, or of bfloat16 the same one."""
    if bit is None:
        bit = BIT if tensor.element_size() == 4 else BIT - 16
    integers = tensor.data.view(BITS[tensor.element_size()]).view(-1)
    integers[element] ^= 1 << bit


def flip_activation(strategy, forward: int) -> None:
    """In what enters the last block, in this forward in training, counted from 0."""
    count = iter(range(10**6))

    def spoil(block, arguments):
        if not torch.is_grad_enabled() or next(count) != forward:
            return None
        x = arguments[0].clone()
        flip(x)
        return (x, *arguments[1:])

    strategy.module.blocks[-1].register_forward_pre_hook(spoil)


def flip_gradient_by(strategy, name: str, mask: torch.Tensor) -> None:
    """In every second pass, the bits that are set in the mask, an integer on the device: so a captured
    iteration can have a fault in one replay."""
    gradient_sums, passes = strategy.gradient_sums, iter(range(10**6))

    def spoil():
        found = gradient_sums()
        if next(passes) % 2:
            integers = found[name].data.view(mask.dtype).view(-1)
            integers[ELEMENT : ELEMENT + 1].bitwise_xor_(mask)
        return found

    strategy.gradient_sums = spoil


def flip_gradient(strategy, look: int, name: str) -> None:
    """In a gradient's sum, after this pass of a second look, counted from 0."""
    gradient_sums, count = strategy.gradient_sums, iter(range(10**6))

    def spoil():
        found = gradient_sums()
        if next(count) == look:
            flip(next(tensor for key, tensor in found.items() if key.startswith(name)))
        return found

    strategy.gradient_sums = spoil
