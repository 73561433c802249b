"""Chooses the attention kernel that runs on this device.

What was asked for falls back along flash_attn_4 -> flash_attn_3 -> flash_attn_2 -> sdpa -> manual, and one
line says what was asked, what runs, and why. With doc_masking, kernels that take a mask run instead. Where
flash_attn_3 was asked for and has no kernels, on Blackwell, flash_attn_4 comes next.

The choice is an argument of the model and calls its kernel by name, so it is part of the traced code. A
global switch (sdpa_kernel) is not part of inductor's cache key: a run could get the kernel of an earlier one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from common.errors import UserError
from model_config import ModelConfig
from ops import flash_attn_4
from ops.documents import Documents, Edges, dense_mask
from ops.ranges import ranged
from training.hardware.capability import CUDNN, FA3, FA4, TORCH, capability

CHAIN = (FA4, FA3, "flash_attn_2", "sdpa", "manual")
HALF = (torch.float16, torch.bfloat16)

FLASH_MAX_HEAD_DIM = 256  # of flash-attn; 4 has fewer widths on Blackwell, and says so itself in the probe
CUDNN_MAX_HEAD_DIM = 128
MASKED_BLOCK = 128  # tokens, of flex attention's mask
PROBE_TOKENS = 512  # more than one tile of every kernel: flash-attn 4 has another kernel for one
# of 1 + |output|: outputs are of about unit size, those of a document's first tokens up to 5, where one bit
# of bf16 is 0.03; a document too many changes them by 1
PROBE_TOLERANCE = 0.03


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel that runs, and how it came to be chosen."""

    asked: str
    used: str
    kernel: str  # the implementation inside the backend, such as 'cuDNN'
    reason: str  # why `used` differs from `asked`; empty when it does not
    attend: Callable
    mask: Callable | None = None  # documents' numbers (B, T) -> what attend takes as its mask

    def documents(self) -> Documents | None:
        """What keeps the documents of a window apart, where the kernel was chosen to."""
        return None if self.mask is None else Documents(self.mask)

    def to_dict(self) -> dict:
        """For the record; 'line' is the one line that the log shows after 'Attention backend:'."""
        because = f" ({self.reason})" if self.reason else ""
        line = f"{self.used} [{self.kernel}], asked for {self.asked}{because}"
        facts = {"asked": self.asked, "used": self.used, "kernel": self.kernel, "reason": self.reason or None}
        return {**facts, "line": line}


class Unavailable(Exception):
    """This backend cannot run here; the message says why."""


def choose_attention(
    asked: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    manual: Callable,
    documents: bool = False,
    repeats: bool = False,
    captured: bool = False,
) -> AttentionChoice:
    """The first backend of the chain, from `asked` on, that runs forward and backward on this device; with
    documents, also that keeps them apart, which is compared with `manual` on a few; with repeats, whose
    backward has the same bits each time; captured: in a CUDA graph. Raises UserError if only `manual`, which
    was not asked for, does.

    `manual`, model.manual_attention, ends the chain. attend takes q (B, T, H, D), k and v (B, T, K, D).
    """
    last = ("matmul, softmax, matmul", manual, *([dense_mask] if documents else []))
    backends = {**(DOCUMENT_BACKENDS if documents else BACKENDS), "manual": lambda *_: [last]}
    reasons = []
    for name in _order(asked, device):
        try:
            if captured and documents and name == FA4:
                raise Unavailable("use_cuda_graphs=True: how many documents it takes is fixed at the capture")
            candidates = backends[name](config, dtype, device)
        except Unavailable as error:
            reasons.append(f"{name}: {error}")
            continue
        for kernel, attend, *mask in candidates:
            if repeats and name.startswith("flash_attn"):  # else it adds queries' gradients in any order
                attend = functools.partial(attend, deterministic=True)
            failure = _probe(attend, config, dtype, device, manual, repeats, *mask)
            if failure is None and name == FA4:
                failure = _difference(
                    attend, manual, _probe_inputs(PROBE_TOKENS, config, dtype, device), *mask
                )
            if failure is None and repeats and name == "manual" != asked:
                break
            if failure is None:
                attend = ranged("attention")(attend)
                return AttentionChoice(asked, name, kernel, "; ".join(reasons), attend, *mask)
            reasons.append(f"{name} [{kernel}] failed: {failure}")
    if repeats:
        raise UserError(
            f"replay_check_interval needs attention whose bits repeat, but {'; '.join(reasons)}; set "
            "attention_backend='flash_attn_3' or 'flash_attn_2', where it is installed, or "
            "replay_check_interval=0"
        )
    raise RuntimeError(f"no attention backend runs here: {'; '.join(reasons)}")


def _order(asked: str, device: torch.device) -> tuple[str, ...]:
    names, here = CHAIN[CHAIN.index(asked) :], capability(device).flash_attn
    return (FA3, FA4, *names[1:]) if asked == FA3 and FA3 not in here and FA4 in here else names


def _probe_inputs(T: int, config: ModelConfig, dtype, device) -> list[torch.Tensor]:
    """q, k and v of a window with the model's heads; v is a part of qkv, as ops/heads.py hands it over."""
    T, heads = min(T, config.block_size), (config.n_head, config.n_kv_head, config.n_kv_head)
    # the same numbers at every start and on every rank, so that all make the same choice
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(1, T, sum(heads), config.head_dim, generator=generator, device=device).to(dtype)
    q, k, v = qkv.split(heads, dim=2)
    return [t.requires_grad_() for t in (q.contiguous(), k.contiguous(), v)]


def _difference(attend, manual, qkv: list[torch.Tensor], mask=None) -> str | None:
    """How the output or a gradient is not that of manual attention, as norm of the difference / norm."""
    numbers = _three_documents(qkv[0])
    results = attend(*qkv, 0.0, mask and mask(numbers)), manual(*qkv, 0.0, mask and dense_mask(numbers))
    found, expected = ([y.detach(), *torch.autograd.grad(y.sum(), qkv)] for y in results)
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((one.float() - other.float()).norm() / other.float().norm())
        if not error < PROBE_TOLERANCE:
            return f"its {name} differs from that of manual attention by {100 * error:.3g} %"
    return None


def _three_documents(q: torch.Tensor) -> torch.Tensor:
    """Their numbers (1, T)."""
    T = q.shape[1]
    return torch.arange(T, dtype=torch.int32, device=q.device)[None] * 3 // T


def _probe(attend, config: ModelConfig, dtype, device, manual, repeats=False, mask=None) -> str | None:
    """Runs one forward and backward; None, or what went wrong."""
    # only many tiles are added in a varying order
    q, k, v = _probe_inputs(config.block_size if repeats else PROBE_TOKENS, config, dtype, device)
    numbers = _three_documents(q)
    try:
        y = attend(q, k, v, config.dropout, *([mask(numbers)] if mask else []))
        gradients = torch.autograd.grad(y.sum(), (q, k, v), retain_graph=repeats)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)  # sync point, at start-up
        if finite and repeats:
            again = torch.autograd.grad(y.sum(), (q, k, v))
            if not all(map(torch.equal, gradients, again)):
                return "its backward has other bits each time"
        if mask and not config.dropout:
            expected = manual(q, k, v, 0.0, dense_mask(numbers)).detach().float()
            error = float(((y.detach().float() - expected).abs() / (1 + expected.abs())).max())
            if not error < PROBE_TOLERANCE:
                return f"documents see each other: it differs from manual attention by {100 * error:.3g} %"
    except Exception as error:  # a kernel may fail in any way; the reason is shown to the user, not hidden
        return _first_line(error)
    return None if finite else "gradients are not finite"


# --- backends: each returns [(kernel name, attend)], best first, or raises Unavailable ---


def _flash_attn_4(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """Hopper's and Blackwell's kernels, compiled at the start of a run. ops/flash_attn_4.py."""
    gpus = "Hopper and Blackwell GPUs (compute capability 9.0, 10.x and 12.x)"
    _need("flash-attn 4", FA4, gpus, config, dtype, device)
    if config.dropout > 0:
        raise Unavailable("it has no dropout")
    _import_function(flash_attn_4.PACKAGE, file := "requirements/quack.txt")
    if missing := flash_attn_4.missing_argument():
        raise Unavailable(f"this release has no {missing}; install that of {file}")

    def attend(q, k, v, dropout_p=0.0, mask=None, deterministic=False):
        return flash_attn_4.flash_attn_4(q, k, v, mask, deterministic)[0]

    return [("flash-attn 4", attend)]


def _flash_attn_3(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """Dao-AILab's Hopper kernels; the module is flash_attn_interface, not flash_attn. Shah et al. 2024."""
    hopper = "Hopper GPUs (compute capability 9.0)"
    _need("flash-attn 3", "flash_attn_3", hopper, config, dtype, device)
    if config.dropout > 0:
        raise Unavailable("it has no dropout")
    flash_attn_func = _import_function("flash_attn_interface")

    def attend(q, k, v, dropout_p=0.0, **options):
        y = flash_attn_func(q, k, v, causal=True, **options)
        return y[0] if isinstance(y, tuple) else y  # older releases return (out, log-sum-exp)

    return [("flash-attn 3", attend)]


def _flash_attn_2(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """The flash-attn package. Dao 2023."""
    ampere = "GPUs of compute capability 8.0 or above"
    _need("flash-attn 2", "flash_attn_2", ampere, config, dtype, device)
    flash_attn_func = _import_function("flash_attn")

    def attend(q, k, v, dropout_p=0.0, **options):
        return flash_attn_func(q, k, v, dropout_p=dropout_p, causal=True, **options)

    return [("flash-attn 2", attend)]


def _import_function(package: str, file: str = "requirements/gpu.txt") -> Callable:
    try:
        module = importlib.import_module(package)
        if getattr(module, "__file__", "") is None:  # flash-attn 4 alone: a folder without flash-attn 2
            raise ModuleNotFoundError(name=package)
        return module.flash_attn_func
    except Exception as error:  # built for another torch, it can fail in any way; the user is told which
        why = f"cannot be imported ({file}): {_first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}."):
            why = f"is not installed ({file})"
        raise Unavailable(f"{package} {why}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _need(name: str, backend: str, gpus: str, config: ModelConfig, dtype, device: torch.device) -> None:
    _need_cuda_and_half(name, dtype, device)
    if backend not in capability(device).flash_attn:
        raise Unavailable(f"its kernels are for {gpus}")
    if config.head_dim > FLASH_MAX_HEAD_DIM:
        raise Unavailable(f"{name} has heads of at most {FLASH_MAX_HEAD_DIM}, head_dim is {config.head_dim}")


def _need_cuda_and_half(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(f"{name} needs a CUDA GPU, this is {device.type}")
    if dtype not in HALF:
        raise Unavailable(f"{name} needs dtype bfloat16 or float16, this is {dtype}")


def _sdpa(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """torch's scaled_dot_product_attention: cuDNN by name where it is fastest, else torch's own choice."""
    kernels: dict[str, tuple] = {TORCH: (_default_sdpa_kernel(config, dtype, device), _sdpa_default)}
    D = config.head_dim
    if dtype in HALF and config.dropout == 0 and D % 8 == 0 and D <= CUDNN_MAX_HEAD_DIM:
        kernels[CUDNN] = (CUDNN, _sdpa_cudnn)
    return [kernels[name] for name in capability(device).sdpa if name in kernels]


def _sdpa_cudnn(q, k, v, dropout_p=0.0):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
    # out, log-sum-exp (kept for the backward), ...: the operator that SDPA itself calls for this backend
    y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, True)[0]
    return y.transpose(1, 2)


def _sdpa_default(q, k, v, dropout_p=0.0, mask=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
    sees = {"is_causal": True} if mask is None else {"attn_mask": mask}
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, enable_gqa=grouped, **sees)
    return y.transpose(1, 2)


def _default_sdpa_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the kernel that torch itself picks for these shapes, such as 'FLASH_ATTENTION'."""
    T, D = config.block_size, config.head_dim
    q, k = (
        torch.empty(1, heads, T, D, dtype=dtype, device=device, requires_grad=True)
        for heads in (config.n_head, config.n_kv_head)
    )
    grouped = config.n_head != config.n_kv_head
    return SDPBackend(torch._fused_sdp_choice(q, k, k, None, config.dropout, True, enable_gqa=grouped)).name


# --- backends that keep documents apart: each returns [(kernel name, attend, mask)] ---


def _flash_attn_4_documents(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """By its kernels for sequences of any length."""
    return [(*kernel, Edges()) for kernel in _flash_attn_4(config, dtype, device)]


def _no_documents(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    raise Unavailable("doc_masking is not wired to its variable-length kernels")


def _masked_sdpa(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list:
    """Flex attention skips what no query of a block may see; a dense mask only hides it."""
    kernels: list[tuple] = [("dense mask", _sdpa_default, dense_mask)]
    if device.type == "cuda" and config.dropout == 0:
        attend = functools.partial(_flex, torch.compile(flex_attention, dynamic=False))
        kernels.insert(0, ("flex attention", attend, block_mask))
    return kernels


def _flex(compiled, q, k, v, dropout_p, mask):
    """Dong et al. 2024. Fused only when compiled, so it is compiled also where the model is not.

    No kernel_options: ROWS_GUARANTEED_SAFE and BLOCKS_ARE_CONTIGUOUS are 5 % faster and wrong here. A token
    may see nothing of the first block it visits, and blocks seen in part lie on both sides of whole ones.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
    grouped = q.shape[1] != k.shape[1]
    return compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def block_mask(numbers: torch.Tensor) -> BlockMask:
    """Numbers (B, T) -> flex attention's mask: what a block of queries sees of one of keys, all, a part or
    nothing, and a rule for parts. Numbers only rise: those of a block's first and last token tell."""

    def visible(b, h, query, key):
        return (query >= key) & (numbers[b, query] == numbers[b, key])

    T, size = numbers.shape[1], MASKED_BLOCK
    first = numbers[:, ::size]  # (B, n), of n blocks
    # a block that the window's end cuts off sees no other as a whole: as if a document began in the rest
    last = torch.cat((numbers[:, size - 1 :: size], numbers[:, -1:] + 1), 1)[:, : first.shape[1]]
    seen = (last[:, None] >= first[:, :, None]).tril()  # (B, blocks of queries, of keys)
    whole = (first[:, None] >= last[:, :, None]).tril(-1)
    part = seen ^ whole
    kinds = torch.stack((part, whole, part.mT, whole.mT))[:, :, None]  # (4, B, 1, n, n)
    count = kinds.sum(-1, dtype=torch.int32)
    true_first = kinds.byte().argsort(dim=-1, descending=True, stable=True).int()
    keys, whole_keys, queries, whole_queries = zip(count, true_first, strict=True)
    blocks = (*keys, *whole_keys, *queries, *whole_queries)
    return BlockMask((T, T), *blocks, BLOCK_SIZE=(size, size), mask_mod=visible)


BACKENDS = {FA4: _flash_attn_4, FA3: _flash_attn_3, "flash_attn_2": _flash_attn_2, "sdpa": _sdpa}
DOCUMENT_BACKENDS = dict.fromkeys(BACKENDS, _no_documents)
DOCUMENT_BACKENDS |= {FA4: _flash_attn_4_documents, "sdpa": _masked_sdpa}
