"""Declares an operator: a function that torch.compile calls and does not look into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.library import define, impl, infer_schema, register_fake

__all__ = ["custom_op", "register_fake"]


def custom_op(name: str, mutates_args: Sequence[str]) -> Callable[[Callable], torch._ops.OpOverload]:
    """torch.library.custom_op for a function that never returns an argument and that autograd does not reach:
    an autograd.Function calls it. So a call has no Python of torch around it, which took a fifth of the
    host's time in fp8 (LOG.md, 2026-11-28). register_fake tells torch.compile what it returns."""

    def declare(function: Callable) -> torch._ops.OpOverload:
        define(name, infer_schema(function, mutates_args=mutates_args), tags=torch.Tag.pt2_compliant_tag)
        impl(name, "default", function)
        namespace, operator = name.split("::")
        return getattr(getattr(torch.ops, namespace), operator).default

    return declare
