"""Computes a matmul by the algorithm that training has measured to be fastest, where it has measured any.

cuBLASLt knows several algorithms for a matmul (tile, cluster, order), and torch takes the first of its list.
training/optimization/matmul_algorithms.py measures the others, and puts a Plan for each matmul that has a
better one into `chosen`. As long as there is none, nothing here runs but torch's own functions, and
torch.compile sees nothing else.

    M tokens · K, N widths: a (M, K) b -> (M, N)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from ops import cublaslt


class Matmul(NamedTuple):
    """What an algorithm is chosen for: a (M, K) b -> (M, N) in bf16. b is stored as (N, K) if transposed,
    else as (K, N)."""

    M: int
    K: int
    N: int
    a: torch.dtype
    b: torch.dtype
    transposed: bool
    fast: bool  # accumulation of an fp8 matmul

    @property
    def label(self) -> str:
        """'32768x2048x4096 bfloat16 bfloat16 transposed', by which checkpoints know it."""
        words = [f"{self.M}x{self.K}x{self.N}", *(str(t).removeprefix("torch.") for t in (self.a, self.b))]
        return " ".join(words + ["transposed"] * self.transposed + ["fast"] * self.fast)

    @property
    def is_fp8(self) -> bool:
        return self.a.itemsize == 1


class Plan(NamedTuple):
    """How cuBLASLt computes a Matmul."""

    product: cublaslt.Product
    algorithm: cublaslt.Algorithm


class Chosen:
    """The plans of this process, made before its first iteration. Not an argument of the functions below: a
    custom operation takes only tensors and numbers, and compiled code may only ask whether there are any."""

    def __init__(self) -> None:
        self.plans: dict[Matmul, Plan] = {}
        self.plans_exist = False

    def replace(self, plans: dict[Matmul, Plan]) -> None:
        self.plans, self.plans_exist = plans, bool(plans)


chosen = Chosen()


def candidates(matmul: Matmul, device: int, count: int) -> list[Plan]:
    """At most `count`, cuBLASLt's own choice first. Raises cublaslt.Unavailable."""
    size, dtypes = (matmul.N, matmul.M, matmul.K), (matmul.b, matmul.a, torch.bfloat16)
    product = cublaslt.define(size, dtypes, matmul.fast, a_transposed=matmul.transposed)
    if matmul.is_fp8:
        cublaslt.set_any_scales(product, device)
    return [Plan(product, found) for found in cublaslt.find_algorithms(product, device, count)]


def multiply(
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    N: int,
    a_inverse: torch.Tensor | None,
    b_inverse: torch.Tensor | None,
) -> torch.Tensor:
    """a b by this plan. cuBLASLt's matrix A is b here, and its B is a (ops/cublaslt.py)."""
    result = a.new_empty(a.shape[0], N, dtype=torch.bfloat16)
    with plan.product.lock:
        if a_inverse is not None and b_inverse is not None:
            cublaslt.set_scales(plan.product, b_inverse, a_inverse)
        cublaslt.multiply(plan.product, plan.algorithm, b, a, result, beta=0.0)
    return result


# --- torch's own ---


def matmul_by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    transposed: bool,
    a_inverse: torch.Tensor | None,
    b_inverse: torch.Tensor | None,
    fast: bool,
) -> torch.Tensor:
    if a_inverse is not None and b_inverse is not None:
        return scaled_matmul(a, b, a_inverse, b_inverse, torch.bfloat16, fast)
    return F.linear(a, b) if transposed else a @ b


def scaled_matmul(
    a: torch.Tensor,
    b_transposed: torch.Tensor,
    a_inverse: torch.Tensor,
    b_inverse: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Of fp8 operands; on a CPU the same numbers are multiplied in fp32."""
    if a.is_cuda:
        return torch._scaled_mm(
            a, b_transposed.t(), a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.float() @ b_transposed.float().t()) * (a_inverse * b_inverse)).to(dtype)


# --- the operation ---


@custom_op("nanomfu::matmul", mutates_args=())
def chosen_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    transposed: bool,
    a_inverse: torch.Tensor | None,
    b_inverse: torch.Tensor | None,
    fast: bool,
) -> torch.Tensor:
    """a (M, K) b -> (M, N) in bf16, of operands in bf16, or in fp8 with their inverse scales: by its plan, or
    by torch if it has none."""
    (M, K), N = a.shape, b.shape[0 if transposed else 1]
    plan = chosen.plans.get(Matmul(M, K, N, a.dtype, b.dtype, transposed, fast))
    if plan is None or not _suited(a) or not _suited(b):
        return matmul_by_torch(a, b, transposed, a_inverse, b_inverse, fast)
    return multiply(plan, a, b, N, a_inverse, b_inverse)


@chosen_matmul.register_fake
def _(a, b, transposed, a_inverse, b_inverse, fast):
    return a.new_empty(a.shape[0], b.shape[0 if transposed else 1], dtype=torch.bfloat16)


@register_flop_formula(torch.ops.nanomfu.matmul)
def _(a_shape, b_shape, transposed, *args, **kwargs) -> int:
    return 2 * a_shape[0] * b_shape[0] * b_shape[1]


def _suited(operand: torch.Tensor) -> bool:
    """Whether it lies in memory as its plan was told."""
    return operand.is_contiguous() and operand.data_ptr() % cublaslt.ALIGNMENT == 0


# --- what a Linear needs ---


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (..., K), weight (N, K) -> x weight^T (..., N), without autograd."""
    if not (chosen.plans_exist and x.dtype == torch.bfloat16):
        return F.linear(x, weight)
    y = chosen_matmul(x.flatten(0, -2), weight, True, None, None, False)
    return y.unflatten(0, x.shape[:-1])


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dy (..., N), weight (N, K) -> dy weight (..., K), without autograd."""
    if not (chosen.plans_exist and dy.dtype == torch.bfloat16):
        return dy @ weight
    dx = chosen_matmul(dy.flatten(0, -2), weight, False, None, None, False)
    return dx.unflatten(0, dy.shape[:-1])


@custom_op("nanomfu::add_weight_gradient", mutates_args=("total",))
def add_weight_gradient(dy: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> None:
    """total (N, K) fp32 += dy (M, N)^T x (M, K), which a GPU's matmul does as it writes its result."""
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, dy.t(), x, total.dtype, out=total)
    else:
        total.addmm_(dy.t().to(total.dtype), x.to(total.dtype))


@add_weight_gradient.register_fake
def _(dy, x, total):
    return None


@register_flop_formula(torch.ops.nanomfu.add_weight_gradient)
def _(dy_shape, x_shape, total_shape, *args, **kwargs) -> int:
    return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]
