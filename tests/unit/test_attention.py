"""Every attention kernel computes what model.manual_attention computes, and one line tells the choice."""

import dataclasses
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import CPU, assert_agrees, choose, inputs, shape
from torch.nn.attention.flex_attention import create_block_mask

from model import manual_attention
from training.hardware import attention_kernels as attention
from training.hardware.attention_kernels import block_mask, choose_attention
from training.hardware.capability import CUDNN, TORCH, lookup

KV_HEADS = {"MHA": None, "GQA": 2}  # of 4 query heads


# --- the reference itself ---


@pytest.mark.parametrize("heads", KV_HEADS)
def test_manual_attention_is_the_formula_one_position_at_a_time(heads):
    config = shape(KV_HEADS[heads], T=7)
    (q, k, v), _ = inputs(config)
    y = manual_attention(q, k, v)
    group = config.n_head // config.n_kv_head
    for b in range(2):
        for t in range(7):
            for h in range(config.n_head):
                past_k, past_v = (x[b, : t + 1, h // group] for x in (k, v))  # (t + 1, D)
                weights = (past_k @ q[b, t, h] / config.head_dim**0.5).softmax(dim=0)
                torch.testing.assert_close(y[b, t, h], weights @ past_v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", ["sdpa", "manual"])
def test_each_backend_agrees_with_manual_attention(backend, dtype, tolerance, heads):
    config = shape(KV_HEADS[heads])
    choice = choose(backend, config, dtype)
    assert (choice.asked, choice.used, choice.reason) == (backend, backend, "")
    assert_agrees(choice.attend, config, dtype, tolerance)


@pytest.mark.parametrize("backend", ["sdpa", "manual"])
def test_dropout_drops_and_only_when_asked(backend):
    """The first position sees itself alone, with weight 1: its value is dropped, or divided by 1 - p."""
    config = shape(dropout=0.75)
    attend = choose(backend, config).attend
    (q, k, v), _ = inputs(config, batch=16)
    v = torch.ones_like(v)
    torch.manual_seed(0)
    assert torch.allclose(attend(q, k, v, 0.0), torch.ones(()))
    first = attend(q, k, v, 0.75)[:, 0]
    assert torch.all((first == 0) | ((first - 4).abs() < 1e-5))
    kept = (first[..., 0] != 0).float().mean().item()
    assert 0.1 < kept < 0.4, kept  # a quarter is expected; each head of each sample draws once


# --- falling back ---


@pytest.mark.parametrize(
    ("asked", "dtype", "reasons"),
    [("flash_attn_3", torch.bfloat16, 2), ("flash_attn_2", torch.bfloat16, 1), ("sdpa", torch.float32, 0)],
)
def test_on_a_cpu_sdpa_runs_and_the_line_says_why(asked, dtype, reasons):
    config = shape(2)
    choice = choose(asked, config, dtype)
    facts = choice.to_dict()
    assert (facts["asked"], facts["used"], facts["reason"] is None) == (asked, "sdpa", asked == "sdpa")
    begin = f"sdpa [{choice.kernel}], asked for {asked}"
    assert facts["line"].startswith(f"{begin} (") if reasons else facts["line"] == begin
    assert facts["line"].count("needs a CUDA GPU, this is cpu") == reasons and "\n" not in facts["line"]
    assert_agrees(choice.attend, config, dtype, 2e-2)


def test_fp32_has_no_flash_attention():
    with pytest.raises(attention.Unavailable, match="bfloat16 or float16.*float32"):
        attention._need_cuda_and_half("flash-attn 2", torch.float32, torch.device("cuda"))
    attention._need_cuda_and_half("flash-attn 2", torch.bfloat16, torch.device("cuda"))


@pytest.fixture
def looks_like(monkeypatch):
    """looks_like(9, 0, flash_attn=function): this machine looks like such a GPU to the backends, and
    has a package whose flash_attn_func is that, or none. Gives the calls that it will have had."""

    def looks_like(*compute, **packages):
        calls = []

        def recorded(function):
            return lambda *args, **kwargs: (calls.append((args, kwargs)), function(*args, **kwargs))[1]

        monkeypatch.setattr(attention, "_need_cuda_and_half", lambda *_: None)
        monkeypatch.setattr(attention, "capability", lambda _: lookup(compute, "a GPU"))
        for name in ("flash_attn", "flash_attn_interface"):  # None: import raises ImportError
            function = packages.get(name)
            package = function and types.SimpleNamespace(flash_attn_func=recorded(function))
            monkeypatch.setitem(sys.modules, name, package)
        return calls

    return looks_like


def flash_attn_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    return manual_attention(q, k, v)


def flash_attn_3(q, k, v, softmax_scale=None, causal=False):
    return manual_attention(q, k, v)


def flash_attn_3_before_2025(q, k, v, softmax_scale=None, causal=False):
    return flash_attn_3(q, k, v, causal=causal), "log-sum-exp"


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize(
    ("backend", "module", "function"),
    [
        ("flash_attn_2", "flash_attn", flash_attn_2),
        ("flash_attn_3", "flash_attn_interface", flash_attn_3),
        ("flash_attn_3", "flash_attn_interface", flash_attn_3_before_2025),
    ],
)
def test_flash_attention_is_called_by_its_convention(looks_like, backend, module, function, heads):
    calls, config = looks_like(9, 0, **{module: function}), shape(KV_HEADS[heads])
    choice = choose(backend, config)
    assert (choice.used, choice.reason) == (backend, "")
    calls.clear()
    assert_agrees(choice.attend, config, torch.float32, 1e-5)
    ((args, kwargs),) = calls
    kv_shape = (2, 32, config.n_kv_head, 16)  # grouped heads are not expanded
    assert [tuple(t.shape) for t in args] == [(2, 32, 4, 16), kv_shape, kv_shape]  # (B, T, heads, D)
    assert kwargs["causal"] is True


def test_flash_attention_2_is_told_the_dropout(looks_like):
    calls, config = looks_like(9, 0, flash_attn=flash_attn_2), shape(dropout=0.25)
    attend = choose("flash_attn_2", config).attend
    for p in (0.25, 0.0):
        attend(*inputs(config)[0], p)
    assert [kwargs["dropout_p"] for _, kwargs in calls[-2:]] == [0.25, 0.0]


HOPPER_ONLY = "flash_attn_3: its kernels are for Hopper GPUs (compute capability 9.0)"


@pytest.mark.parametrize(
    ("compute", "config", "asked", "used", "reason"),
    [
        ((9, 0), shape(dropout=0.1), "flash_attn_3", "flash_attn_2", "flash_attn_3: it has no dropout"),
        ((8, 0), shape(), "flash_attn_3", "flash_attn_2", HOPPER_ONLY),
        ((8, 9), shape(), "flash_attn_3", "flash_attn_2", HOPPER_ONLY),
        ((7, 5), shape(), "flash_attn_2", "sdpa",
         "flash_attn_2: its kernels are for GPUs of compute capability 8.0 or above"),
        *(((9, 0), shape(head_dim=256), f"flash_attn_{n}", f"flash_attn_{n}", "") for n in (2, 3)),
        *(((9, 0), shape(head_dim=264), f"flash_attn_{n}", "sdpa",
           f"flash-attn {n} has heads of at most 256, head_dim is 264") for n in (2, 3)),
    ],
)  # fmt: skip
def test_a_package_whose_kernels_do_not_fit_falls_back(looks_like, compute, config, asked, used, reason):
    looks_like(*compute, flash_attn=flash_attn_2, flash_attn_interface=flash_attn_3)
    choice = choose(asked, config)
    assert choice.used == used and reason in choice.reason and bool(choice.reason) == bool(reason)


@pytest.mark.parametrize(
    ("compute", "cudnn"),
    [((7, 5), 0), ((8, 0), 0), ((8, 9), 0), ((9, 0), 1), ((10, 0), 1), ((10, 3), 1), ((12, 0), 0)],
)
def test_sdpa_tries_cudnn_first_on_hopper_and_datacenter_blackwell_only(looks_like, compute, cudnn):
    looks_like(*compute)

    def attends(dtype=torch.bfloat16, **overrides):
        return [attend for _, attend in attention._sdpa(shape(**overrides), dtype, CPU)]

    assert attends() == [attention._sdpa_cudnn] * cudnn + [attention._sdpa_default]
    for unfit in (attends(torch.float32), attends(head_dim=256), attends(dropout=0.1)):
        assert unfit == [attention._sdpa_default]


def test_sdpa_keeps_the_order_of_the_capability(monkeypatch):
    reverse = dataclasses.replace(lookup((9, 0), "a GPU"), sdpa=(TORCH, CUDNN))
    monkeypatch.setattr(attention, "capability", lambda _: reverse)
    candidates = attention._sdpa(shape(), torch.bfloat16, CPU)
    assert [attend for _, attend in candidates] == [attention._sdpa_default, attention._sdpa_cudnn]


def test_where_cudnn_fails_the_probe_torchs_own_choice_runs(looks_like):
    looks_like(9, 0)
    choice = choose("sdpa", shape(), torch.bfloat16)  # this machine is a CPU, whatever it looks like
    assert (choice.used, choice.attend.__wrapped__) == ("sdpa", attention._sdpa_default)
    assert choice.reason.startswith("sdpa [cuDNN] failed: ")


def test_packages_that_are_not_installed_are_named_and_sdpa_runs_or_else_manual(looks_like, monkeypatch):
    looks_like(9, 0)
    choice = choose("flash_attn_3", shape())
    assert choice.used == "sdpa"
    assert "flash_attn_3: flash_attn_interface is not installed" in choice.reason
    assert "flash_attn_2: flash_attn is not installed" in choice.reason
    monkeypatch.setattr(F, "scaled_dot_product_attention", no_kernel)
    choice = choose("flash_attn_3", shape(2))
    assert (choice.used, choice.attend.__wrapped__) == ("manual", manual_attention)
    assert all(name in choice.reason for name in ("flash_attn_3", "flash_attn_2", "sdpa"))
    assert re.match(r"manual \[.*asked for flash_attn_3", choice.to_dict()["line"])
    with pytest.raises(RuntimeError, match="sdpa .*no kernel image.*manual .*no kernel image"):
        choose_attention("sdpa", shape(), torch.float32, CPU, no_kernel)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError"])
def test_a_broken_package_is_not_called_a_missing_one(looks_like, monkeypatch, tmp_path, error):
    """flash-attn built for another torch fails at import; 'not installed' would mislead, a crash more so."""
    looks_like(9, 0)
    for module in ("flash_attn", "flash_attn_interface"):
        (tmp_path / f"{module}.py").write_text(f"raise {error}('undefined symbol of {module}')")
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    choice = choose("flash_attn_3", shape())
    assert choice.used == "sdpa" and "is not installed" not in choice.reason
    for module in ("flash_attn", "flash_attn_interface"):
        assert f"undefined symbol of {module}" in choice.reason


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *_):
        return q.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("head_dim 256 has no backward")


def no_kernel(*_, **__):
    raise RuntimeError("no kernel image is available\nCUDA kernel errors might be reported elsewhere")


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (no_kernel, "no kernel image is available"),
        (lambda q, k, v, **_: NoBackward.apply(q, k, v), "head_dim 256 has no backward"),
        (lambda q, k, v, **_: (q + k + v) * float("nan"), "gradients are not finite"),
    ],
)
def test_a_backend_that_fails_the_probe_falls_through_with_its_reason(looks_like, attend, reason):
    looks_like(9, 0, flash_attn=attend)
    choice = choose("flash_attn_2", shape())
    assert (choice.used, choice.reason) == ("sdpa", f"flash_attn_2 [flash-attn 2] failed: {reason}")
    assert "\n" not in choice.to_dict()["line"]


@pytest.mark.parametrize("asked", ["sdpa", "manual"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("head_dim", [6, 40])
def test_every_kernel_here_takes_a_head_width_that_is_no_share_of_the_model_s(asked, documents, head_dim):
    config = dataclasses.replace(shape(2, n_embd=64), head_dim=head_dim)
    choice = choose_attention(asked, config, torch.float32, CPU, manual_attention, documents)
    assert choice.used == asked and choice.reason == ""


@pytest.mark.parametrize("T", [60, 128, 200, 512, 1000])
@pytest.mark.parametrize("begins", [0, 0.001, 0.01, 0.3])  # the chance that a document does at a token
def test_the_mask_of_flex_attention_is_the_one_that_torch_finds_by_looking_at_all_tokens(T, begins):
    starts = torch.rand(3, T, generator=torch.Generator().manual_seed(T)) < begins
    numbers = starts.cumsum(-1, dtype=torch.int32)

    def visible(b, h, query, key):
        return (query >= key) & (numbers[b, query] == numbers[b, key])

    found, expected = block_mask(numbers), create_block_mask(visible, 3, None, T, T, device="cpu")
    for one, other in zip(found.as_tuple(), expected.as_tuple(), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else callable(one) or one == other
