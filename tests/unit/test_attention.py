"""Every attention kernel computes what model.manual_attention computes, and one line tells the choice."""

import dataclasses
import functools
import re
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import fake_flash_attn_4
from support.attention_cases import CPU, assert_agrees, choose, forward_and_gradients, inputs, shape
from support.helpers import last_run
from support.masked_documents import make_documents_run
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy

import train
from model import manual_attention
from model_builder import build_model
from ops import recompute
from ops.documents import START, Edges, dense_mask, plain_ids
from ops.flash_attn_4 import flash_attn_4
from training.configuration.keys import TrainConfig
from training.hardware import attention_kernels as attention
from training.hardware.attention_kernels import CHAIN, block_mask, choose_attention
from training.hardware.capability import CUDNN, TORCH, lookup
from training.optimization.compile import compile_and_checkpoint

KV_HEADS = {"MHA": None, "GQA": 2}  # of 4 query heads


# --- against manual attention, which is that of Hugging Face's models (test_model.py) ---


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


@pytest.fixture
def gpu(looks_like, monkeypatch):
    """gpu(9, 0): this machine looks like such a GPU, with flash-attn 4 alone installed, or a stand-in of some
    of its functions; gpu(9, 0, None): with none."""

    def gpu(major, minor, forward=fake_flash_attn_4.flash_attn_func, **internals):
        looks_like(major, minor)
        if forward:
            fake_flash_attn_4.install(monkeypatch, forward, **internals)

    return gpu


# --- flash-attn 4: its operator, when it is chosen and why not; a stand-in computes ---


@pytest.mark.parametrize("kv", [None, 2])
def test_it_computes_attention_and_its_gradients_also_of_strided_values(gpu, kv):
    gpu(10, 0)
    choice = choose("flash_attn_4", shape(kv))
    assert (choice.used, choice.kernel, choice.reason) == ("flash_attn_4", "flash-attn 4", "")
    assert_agrees(choice.attend, shape(kv), torch.float32, 1e-5)


def test_compiled_code_is_one_graph_with_the_same_results(gpu):
    gpu(10, 0)
    attend, (qkv, above) = choose("flash_attn_4", shape(2)).attend, inputs(shape(2))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    made = [forward_and_gradients(function, qkv, above) for function in (attend, compiled)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*made, strict=True))
    torch.library.opcheck(flash_attn_4, tuple(qkv))  # shapes and strides are those that it announces


@pytest.mark.parametrize("level", ["memory_bound", "attention"])
def test_a_block_that_is_recomputed_has_the_same_gradients(gpu, level):
    gpu(10, 0)
    config, made = shape(2, n_layer=2), []
    for recomputed in (False, True):
        model = build_model(config, choose("flash_attn_4", config).attend).init_weights("cpu", seed=0).train()
        for block in model.blocks if recomputed else ():
            recompute.recompute(block, level)
        ids = torch.arange(64).view(2, 32) % 97
        model(ids, ids.roll(1, 1)).backward()
        made.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*made, strict=True))


def test_a_checkpoint_that_keeps_products_keeps_its_result():
    for name in ("flash_attn_4_forward", "flash_attn_4_backward"):
        operation = getattr(torch.ops.nanomfu, name).default
        assert recompute._policy(None, operation) == CheckpointPolicy.MUST_SAVE


def test_a_run_whose_bits_are_to_repeat_gets_the_deterministic_backward(gpu):
    asked = []

    @functools.wraps(fake_flash_attn_4._flash_attn_bwd)  # with its signature
    def noting(*tensors, deterministic, **options):
        asked.append(deterministic)
        fake_flash_attn_4._flash_attn_bwd(*tensors, deterministic=deterministic, **options)

    gpu(10, 0, _flash_attn_bwd=noting)
    for repeats in (False, True):
        asked.clear()
        arguments = "flash_attn_4", shape(2), torch.float32, CPU, manual_attention
        choice = choose_attention(*arguments, repeats=repeats)
        forward_and_gradients(choice.attend, *inputs(shape(2)))
        assert choice.used == "flash_attn_4" and set(asked) == {repeats}


def test_it_is_the_first_of_the_chain_and_no_default():
    assert CHAIN == ("flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "manual")


ELSEWHERE = (
    "flash_attn_4: its kernels are for Hopper and Blackwell GPUs (compute capability 9.0, 10.x and 12.x)"
)


@pytest.mark.parametrize("compute", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_it_runs_on_hopper_and_blackwell_alone_and_where_flash_attn_3_has_no_kernels_in_its_place(
    gpu, compute
):
    gpu(*compute)
    choice, hopper_or_newer = choose("flash_attn_4", shape()), compute >= (9, 0)
    assert choice.used == ("flash_attn_4" if hopper_or_newer else "sdpa")
    assert (ELSEWHERE in choice.reason) != hopper_or_newer
    choice = choose("flash_attn_3", shape())
    assert (choice.asked, choice.used == "flash_attn_4") == ("flash_attn_3", compute >= (10, 0))
    for_hopper = "flash_attn_3: its kernels are for Hopper GPUs (compute capability 9.0)"
    assert (choice.reason == for_hopper) == (compute >= (10, 0))


def test_a_missing_package_is_named_with_its_file_and_the_chain_goes_on(gpu):
    gpu(9, 0, None)
    choice = choose("flash_attn_4", shape())
    assert choice.used == "sdpa"
    reasons = choice.reason.split("; ")
    assert reasons[0] == "flash_attn_4: flash_attn.cute.interface is not installed (requirements/quack.txt)"
    assert [reason.partition(":")[0] for reason in reasons[1:3]] == ["flash_attn_3", "flash_attn_2"]


def test_flash_attn_4_alone_is_not_taken_for_a_broken_flash_attn_2(gpu, monkeypatch, tmp_path):
    gpu(9, 0, None)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("import a_package_that_is_missing")
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    choice = choose("flash_attn_4", shape())
    missing = "(requirements/quack.txt): No module named 'a_package_that_is_missing'"
    assert f"flash_attn.cute.interface cannot be imported {missing}" in choice.reason
    assert "flash_attn_2: flash_attn is not installed (requirements/gpu.txt)" in choice.reason


def refuses(q, k, v, causal=False, return_lse=False):
    assert q.shape[-1] <= 128, f"({q.shape[-1]}, {v.shape[-1]}) is not supported on SM100/SM110"
    return fake_flash_attn_4.flash_attn_func(q, k, v, causal=True, return_lse=True)


def before_4(q, k, v, softmax_scale=None, causal=False):
    raise AssertionError("not to be called")


def backward_with(scale):
    """That of the stand-in, but dq is so many times as large."""

    @functools.wraps(fake_flash_attn_4._flash_attn_bwd)  # with its signature
    def backward(*tensors, dq, **options):
        fake_flash_attn_4._flash_attn_bwd(*tensors, dq=dq, **options)
        dq.mul_(scale)

    return backward


def not_causal(q, k, v, causal=False, return_lse=False):
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)
    return y.transpose(1, 2).contiguous(), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def sees_all(q, k, v, cu_seqlens_q=None, max_seqlen_q=None, return_lse=False, **options):
    """Does not look where a sequence begins."""
    edges = torch.tensor([0, len(q)], dtype=torch.int32)
    options |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": len(q), "max_seqlen_k": len(q)}
    return fake_flash_attn_4.flash_attn_varlen_func(q, k, v, return_lse=True, **options)


@functools.wraps(fake_flash_attn_4._flash_attn_bwd)  # with its signature
def forgets_documents(*tensors, cu_seqlens_q=None, **options):
    edges = cu_seqlens_q if cu_seqlens_q is None else cu_seqlens_q[[0, -1]]
    fake_flash_attn_4._flash_attn_bwd(*tensors, **options | {"cu_seqlens_q": edges, "cu_seqlens_k": edges})


def keeps_apart(**needs):
    needs["documents"] = True
    return choose_attention("flash_attn_4", shape(2), torch.float32, CPU, manual_attention, **needs)


FORWARD, BACKWARD = fake_flash_attn_4.flash_attn_func, fake_flash_attn_4._flash_attn_bwd
USUAL = {"_flash_attn_bwd": BACKWARD}
RELEASE = "flash_attn_4: this release has no {}; install that of requirements/quack.txt"
FAILED = "flash_attn_4 [flash-attn 4] failed: "


@pytest.mark.parametrize(
    ("forward", "internals", "chosen", "reason"),
    [
        (refuses, {}, lambda: choose("flash_attn_4", shape(head_dim=128)), None),
        (refuses, {}, lambda: choose("flash_attn_4", shape(head_dim=192)),
         FAILED + "(192, 192) is not supported on SM100/SM110"),
        (FORWARD, {}, lambda: choose("flash_attn_4", shape(head_dim=264)),
         "flash_attn_4: flash-attn 4 has heads of at most 256, head_dim is 264"),
        (FORWARD, {}, lambda: choose("flash_attn_4", shape(dropout=0.1)), "flash_attn_4: it has no dropout"),
        # another release
        (before_4, {}, None, RELEASE.format("flash_attn_func(return_lse=...)")),
        (FORWARD, {"another": None}, None, RELEASE.format("_flash_attn_bwd(deterministic=...)")),
        (FORWARD, {"_flash_attn_bwd": before_4}, None, RELEASE.format("_flash_attn_bwd(deterministic=...)")),
        # wrong numbers
        (FORWARD, {"_flash_attn_bwd": backward_with(1.01)}, None, None),
        (FORWARD, {"_flash_attn_bwd": backward_with(1.1)}, None, FAILED + "its dq differs from that of man"),
        (not_causal, {}, None, FAILED + "its output differs from that of manual"),
        # documents
        (FORWARD, USUAL | {"flash_attn_varlen_func": sees_all}, keeps_apart,
         FAILED + "documents see each other"),
        (FORWARD, {"_flash_attn_bwd": forgets_documents}, keeps_apart,
         FAILED + "its dq differs from that of manual attention"),
        (FORWARD, USUAL | {"flash_attn_varlen_func": before_4}, keeps_apart,
         RELEASE.format("flash_attn_varlen_func(return_lse=...)")),
        (FORWARD, {}, lambda: keeps_apart(captured=True), "flash_attn_4: use_cuda_graphs=True: how many"),
    ],
)  # fmt: skip
def test_what_it_cannot_compute_is_found_at_the_start_and_falls_back_with_its_reason(
    gpu, forward, internals, chosen, reason
):
    gpu(10, 0, forward, **internals)
    choice = chosen() if chosen else choose("flash_attn_4", shape(2))
    assert choice.used == ("sdpa" if reason else "flash_attn_4")
    assert choice.reason.startswith(reason or "")


def test_the_check_has_more_than_one_tile_of_queries(gpu):
    lengths = []

    def noting(q, k, v, causal=False, return_lse=False):
        lengths.append(q.shape[1])
        return fake_flash_attn_4.flash_attn_func(q, k, v, causal=causal, return_lse=return_lse)

    gpu(10, 0, noting)
    assert choose("flash_attn_4", shape(T=1024)).used == "flash_attn_4" and set(lengths) == {512}


# --- documents ---


def marked(documents):
    """Ids (1, 1, 64) of so many documents."""
    return torch.where(torch.arange(64) < documents, START, 0)[None, None]


@pytest.mark.parametrize("room", [None, 5, 40])  # asked from the device; told by the host; far too many
def test_documents_of_a_micro_batch_do_not_see_each_other(gpu, room):
    gpu(10, 0)
    choice, (qkv, above) = keeps_apart(), inputs(shape(2))
    assert (choice.used, choice.kernel, choice.reason) == ("flash_attn_4", "flash-attn 4", "")
    starts = torch.zeros(2, 32, dtype=torch.int32)
    starts[0, [5, 6, 20]] = 1  # four documents in the first window, one in the second
    numbers = starts.cumsum(-1, dtype=torch.int32)
    if room:
        choice.mask.expect(marked(room))
    mask = choice.mask(numbers)
    assert mask.tolist() == [0, 5, 6, 20, 32] + [64] * (choice.mask.room - 4) and choice.mask.room >= 5
    torch.library.opcheck(flash_attn_4, (*qkv, mask))  # shapes and strides are those that it announces
    made = []
    for attend, given in ((choice.attend, mask), (manual_attention, dense_mask(numbers))):
        y = attend(*qkv, 0.0, given)
        made.append([y.detach(), *torch.autograd.grad(y, qkv, above)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_more_documents_than_the_host_has_told_of_end_the_run(gpu):
    gpu(10, 0)
    mask, numbers = keeps_apart().mask, torch.arange(32, dtype=torch.int32)[None]
    mask.expect(marked(3))
    with pytest.raises(RuntimeError, match="more documents than the host was told of"):
        mask(numbers)
    with torch.no_grad():  # an evaluation waits for the device instead
        assert mask(numbers)[:33].tolist() == list(range(33))


@pytest.mark.parametrize("level", ["none", "memory_bound"])
def test_a_compiled_block_takes_any_number_of_documents(gpu, monkeypatch, level):
    """In training and in evaluations between. Torch ends a run at the ninth form of a block."""
    gpu(10, 0)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    choice, models = keeps_apart(), []
    for compiled in (False, True):
        model = build_model(shape(2), choice.attend).init_weights("cpu", seed=0).train()
        model.documents = choice.documents()
        compile_and_checkpoint(model, TrainConfig(compile=compiled, activation_checkpointing=level))
        models.append(model)
    sizes = set()
    for documents in range(1, 31, 3):
        ids = marked(documents).view(2, 32)
        choice.mask.expect(ids[None])
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                losses = [model.train(trains)(ids, plain_ids(ids) + 1) for model in models]
            torch.testing.assert_close(*losses)
            if trains:
                made = [torch.autograd.grad(losses[i], list(models[i].parameters())) for i in (0, 1)]
                torch.testing.assert_close(*made)
        sizes.add(choice.mask.room)
    assert len(sizes) == 10


def test_a_run_with_document_masks_has_the_losses_of_manual_attention(gpu, monkeypatch, tmp_path):
    """Also its evaluations, in whose windows there are more documents than in any of training. The loader
    counts the documents of each iteration before it."""
    counted = []
    expect = Edges.expect
    monkeypatch.setattr(Edges, "expect", lambda edges, ids: [counted.append(ids.shape), expect(edges, ids)])
    folder = make_documents_run(tmp_path)
    many = np.fromfile(tmp_path / "data" / "val.bin", "<u2")
    many[::2] = 0
    many.tofile(tmp_path / "data" / "val.bin")
    losses = {}
    for asked in ("flash_attn_4", "manual"):
        gpu(10, 0)
        flags = [f"--attention_backend={asked}", f"--out_dir={tmp_path / asked}", "--doc_masking=True"]
        assert train.main([str(folder / "run.py"), *flags, "--dtype=float32", "--eval_interval=4"]) == 0
        record = last_run(tmp_path / asked)
        assert record["startup_info"]["attention"]["used"] == asked
        rows = record["training_iterations"]
        losses[asked] = [row["loss"] for row in rows], [row["val_loss"] for row in record["eval_steps"]]
    assert all(losses["manual"]) and len(counted) == 1 + len(losses["manual"][0])
    torch.testing.assert_close(losses["flash_attn_4"], losses["manual"], atol=0, rtol=1e-5)
