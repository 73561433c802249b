"""A second look: every replay_check_interval iterations, the first micro-step runs twice with the same inputs
and random numbers, and must have the same results bit for bit. A GPU that computes wrongly now and then gives
numbers that look right: nothing else shows on which rank.

What is compared are checksums of the loss and of the gradients, which stay on the device. The working copies
of weights (in the compute dtype, quantized) are compared with fresh ones: both passes would use the same
wrong bit. A difference becomes a bit of the update guard's verdict, so that the update is made on no rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ops.linear import Linear
from training.configuration.keys import TrainConfig
from training.process.world import sum_over_ranks
from training.strategies.strategy import Strategy

BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}  # bytes of an element -> the integer of its size


class SecondLook:
    """Runs a micro-step twice and remembers what differed, until the run waits for the device anyway."""

    def __init__(self, strategy: Strategy, config: TrainConfig):
        self.strategy, self.draws = strategy, config.dropout > 0
        self.sizes: dict[str, int] = {}  # what is compared -> its elements
        # Of the first look that differed, else of the last one: (look, checksum or sum, tensor). Written in
        # place, because a captured iteration writes to the same memory each time.
        self.kept: torch.Tensor | None = None
        self.has_differed = torch.zeros((), dtype=torch.bool, device=strategy.world.device)
        self.differs = self.has_differed  # in this iteration, on this rank

    def __call__(self, micro_step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The loss of micro_step(), which makes the forward and the backward. Does not wait."""
        strategy, device = self.strategy, self.strategy.world.device
        copies = _copies(strategy)
        first = [checksums(copies)] if copies else []
        strategy.publish()
        second = [checksums(copies)] if copies else []
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=self.draws):
            first.append(checksums(self._results(micro_step())))
        strategy.clear_gradients()
        loss = micro_step()
        results = self._results(loss)
        second.append(checksums(results))
        self.sizes = {name: tensor.numel() for name, tensor in [*copies.items(), *results.items()]}
        self._keep(torch.stack([torch.cat(first, 1), torch.cat(second, 1)]))
        return loss

    def _results(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        sums = self.strategy.gradient_sums()
        return {"the loss": loss, **{f"gradient of {name}": gradient for name, gradient in sums.items()}}

    def _keep(self, found: torch.Tensor) -> None:
        self.kept = torch.zeros_like(found) if self.kept is None else self.kept
        self.kept.copy_(torch.where(self.has_differed, self.kept, found))
        self.differs = (found[0, 0] != found[1, 0]).any()
        self.has_differed.logical_or_(self.differs)

    def ranks_that_differ(self) -> torch.Tensor:
        """Their number, fp32 (), after a look. All ranks; does not wait."""
        return sum_over_ranks(self.differs.float(), self.strategy.world)

    def differences(self) -> dict[str, str]:
        """{tensor: how it differs} on this rank. Sync point."""
        if self.kept is None:
            return {}
        checksums, sums = self.kept[:, 0].tolist(), self.kept[:, 1].view(torch.float64).tolist()
        found = {}
        for (name, size), *pair, once, again in zip(self.sizes.items(), *checksums, *sums, strict=True):
            if pair[0] != pair[1]:
                found[name] = f"sum {once:.9g}, then {again:.9g}{_one_flip(pair[1] - pair[0], size)}"
        return found


def _copies(strategy: Strategy) -> dict[str, torch.Tensor]:
    """What this rank computes with and publish() makes from the optimizer's weights."""
    copies = {f"{name} (working weights)": copy for name, copy in strategy.working_copies().items()}
    for path, module in strategy.module.named_modules():
        if isinstance(module, Linear):
            copies |= {f"{path}.weight (quantized {form})": t for form, t in module.copies().items()}
    return copies


def checksums(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 (2, n): checksums; and the bits of sums in float64, which say how large a difference is."""
    if next(iter(tensors.values())).is_cuda:
        from ops.triton_kernels.checksum import triton_checksums

        checksums, sums = triton_checksums(list(tensors.values()))
    else:
        checksums, sums = map(torch.stack, zip(*map(checksum_and_sum, tensors.values()), strict=True))
    return torch.stack([checksums, sums.double().view(torch.int64)])


def checksum_and_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the bit patterns, that of element i times 2i + 1, modulo 2^64, int64 (); and the sum of the
    numbers, of codes of one byte that of the codes, fp32 (). Sums of integers are exact in any order. The
    factor is odd, so any single element that changes, and any two that change places, change the checksum."""
    bits = tensor.view(BITS[tensor.element_size()]).reshape(-1)
    numbers = bits if tensor.element_size() == 1 else tensor
    return (bits * (2 * torch.arange(len(bits)) + 1)).sum(), numbers.sum(dtype=torch.float32)


def _one_flip(change: int, size: int) -> str:
    """Of a checksum's change that a single flipped bit makes: 2^bit (2 element + 1), added or taken away."""
    change = abs((change + 2**63) % 2**64 - 2**63)
    bit = (change & -change).bit_length() - 1
    element = change >> bit + 1
    return f", as if bit {bit} of element {element:,} had flipped" if bit < 32 and element < size else ""
