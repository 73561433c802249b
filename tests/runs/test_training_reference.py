"""A run of train.py makes the same updates as the same model in plain fp32 PyTorch with torch.optim.AdamW and
clip_grad_norm_: the same losses, gradient statistics, weights and moments, iteration after iteration.

The reference below shares nothing with the code that it judges but the first weights and the batches. Dropout
is compared value by value: both draw their masks from one generator, in the order of the architecture.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.helpers import TINY, checkpoint_tensors, last_run, make_dataset, write_config

import train
from training.batches.loader import Loader
from training.optimization.update_guard import UpdateGuard

ITERATIONS = 8
# warm-up over 2 iterations to 1e-2, then a cosine to 1e-3 at iteration 6
RATES = [1e-2 / 3, 2e-2 / 3, 1e-2, 8.681980515e-3, 5.5e-3, 2.318019485e-3, 1e-3, 1e-3]
KEYS = {
    **TINY,
    "max_iters": ITERATIONS,
    "eval_interval": 0,
    "gradient_log_interval": 1,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 2,
    "lr_decay_iters": 6,
    "weight_decay": 0.5,
    "attention_backend": "manual",
}
GPT2 = {"arch_preset": "gpt2", "num_key_value_heads": 4, "bias": True}
HEADS, HEAD_WIDTH = TINY["n_head"], TINY["n_embd"] // TINY["n_head"]


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x):
    """x (B, H, T, D): rotary positions with theta 1e6, half-split."""
    T, D = x.shape[-2:]
    angles = torch.outer(torch.arange(T).float(), 1e6 ** -(torch.arange(0, D, 2).float() / D))
    one, two = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def attention(w, block, x, heads_of_keys, dropout):
    B, T, C = x.shape
    weight, bias = w[f"{block}.attn.qkv.weight"], w.get(f"{block}.attn.qkv.bias")
    q, k, v = F.linear(x, weight, bias).split([C, *[heads_of_keys * HEAD_WIDTH] * 2], dim=-1)
    q, k, v = (part.view(B, T, -1, HEAD_WIDTH).transpose(1, 2) for part in (q, k, v))  # (B, H or K, T, D)
    if f"{block}.attn.q_norm.weight" in w:
        q = rotate(rms_norm(q, w[f"{block}.attn.q_norm.weight"]))
        k = rotate(rms_norm(k, w[f"{block}.attn.k_norm.weight"]))
    k, v = (part.repeat_interleave(HEADS // heads_of_keys, dim=1) for part in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD_WIDTH)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    weights = F.dropout(scores.softmax(-1), dropout)
    y = (weights @ v).transpose(1, 2).reshape(B, T, C)
    return F.linear(y, w[f"{block}.attn.out.weight"], w.get(f"{block}.attn.out.bias"))


def feed_forward(w, block, x):
    x = F.linear(x, w[f"{block}.ffn.up.weight"], w.get(f"{block}.ffn.up.bias"))
    if f"{block}.ffn.up.bias" in w:
        x = F.gelu(x, approximate="tanh")
    else:
        gate, up = x[..., 0::2], x[..., 1::2]
        x = F.silu(gate) * up
    return F.linear(x, w[f"{block}.ffn.down.weight"], w.get(f"{block}.ffn.down.bias"))


def normalize(w, name, x):
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    return rms_norm(x, weight) if bias is None else F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def reference_loss(w, keys, ids, targets):
    """GPT-2 with biases, or Qwen3, from weights `w` by name."""
    dropout, kv_heads = keys.get("dropout", 0.0), keys["num_key_value_heads"]
    x = F.embedding(ids, w["embed.weight"])
    if "positions.weight" in w:
        x = x + w["positions.weight"][: ids.shape[1]]
    x = F.dropout(x, dropout)
    for block in (f"blocks.{i}" for i in range(keys["n_layer"])):
        normed = normalize(w, f"{block}.attn_norm", x)
        x = x + F.dropout(attention(w, block, normed, kv_heads, dropout), dropout)
        normed = normalize(w, f"{block}.ffn_norm", x)
        x = x + F.dropout(feed_forward(w, block, normed), dropout)
    logits = F.linear(normalize(w, "head.norm", x), w.get("head.lm_head.weight", w["embed.weight"]))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference_run(first_weights, batches, keys):
    """(rows of loss, norm, mean and deviation of the gradients; weights; AdamW's state by name)."""
    w = {name: tensor.clone().requires_grad_() for name, tensor in first_weights.items()}
    groups = [
        {"params": [p for p in w.values() if p.ndim == 2], "weight_decay": keys["weight_decay"]},
        {"params": [p for p in w.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    rows = []
    for rate, (x, y) in zip(RATES, batches, strict=True):
        losses = [reference_loss(w, keys, ids, targets) for ids, targets in zip(x, y, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in w.values()])
        deviation = gradients.std(correction=0).item()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), keys["grad_clip"] or math.inf)
        rows.append((loss.item(), norm.item(), gradients.mean().item(), deviation))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return rows, w, {name: optimizer.state[p] for name, p in w.items()}


@pytest.fixture
def both(run, tmp_path, monkeypatch):
    """(train.py's rows, its checkpoint's tensors, the reference's rows, weights, state) for these keys."""

    def train_and_compute(**changed):
        keys = {**KEYS, "grad_clip": 1.0, **changed}
        seen = {"weights": {}, "batches": [], "generator": None}
        build, next_batch = train.build, Loader.next

        def build_and_note(*args):
            built = build(*args)
            seen["weights"] = {name: p.detach().clone() for name, p in built[0].named_parameters()}
            return built

        def next_and_note(loader):
            if seen["generator"] is None:
                seen["generator"] = torch.get_rng_state()
            x, y = next_batch(loader)
            seen["batches"].append((x.clone(), y.clone()))
            return x, y

        monkeypatch.setattr(train, "build", build_and_note)
        monkeypatch.setattr(Loader, "next", next_and_note)
        data = make_dataset(tmp_path / "data")
        path = write_config(tmp_path / "c.py", **keys, dataset=data, out_dir=tmp_path / "out")
        assert run(path) == 0
        rows = last_run(tmp_path / "out")["training_iterations"]
        tensors = checkpoint_tensors(tmp_path / "out" / "checkpoints" / f"step-{ITERATIONS:08d}")
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(seen["generator"])
            expected = reference_run(seen["weights"], seen["batches"], keys)
        return rows, tensors, *expected

    return train_and_compute


def compared(name, tensor):
    """What of a tensor has a gradient. A bias that all keys share changes no softmax: its gradient is only
    rounding, which Adam makes large."""
    return torch.cat([tensor[: TINY["n_embd"]], tensor[-TINY["n_embd"] :]]) if "qkv.bias" in name else tensor


def agree(rows, tensors, expected_rows, weights, state, relative=2e-5, absolute=2e-6):
    assert [row["lr"] for row in rows] == pytest.approx(RATES, rel=1e-9)
    for row, expected in zip(rows, expected_rows, strict=True):
        gradients = row["gradients"]
        found = (row["loss"], gradients["global_norm"], gradients["grad_mean"], gradients["grad_std"])
        assert found == pytest.approx(expected, rel=relative, abs=absolute / 10), row["iter"]
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in weights}
    for name, weight in weights.items():
        found = {f"model.{name}": weight.detach()}
        found |= {f"optimizer.{name}.{moment}": state[name][moment] for moment in ("exp_avg", "exp_avg_sq")}
        for what, reference in found.items():
            ours, reference = compared(name, tensors[what]), compared(name, reference)
            error, size = (ours - reference).norm().item(), reference.norm().item()
            assert error <= 5 * relative * size, f"{what}: {error / size:.1e}"
        assert tensors[f"optimizer.{name}.step"].item() == ITERATIONS


@pytest.mark.parametrize("clip", [0.0, 0.01, 1000.0])
@pytest.mark.parametrize("style", [{"loss_chunks": 4, "attention_backend": "sdpa"}, GPT2], ids=str)
def test_a_run_is_torch_s_adamw_and_clip_grad_norm(both, style, clip):
    found = both(grad_clip=clip, **style)
    agree(*found)
    norms = [norm for _, norm, *_ in found[2]]
    assert min(norms) > 0.02 and max(norms) < 100  # so the small clip always acts, and the large one never


def test_gradient_accumulation_is_the_mean_over_the_micro_steps(both):
    rows, *others = found = both(gradient_accumulation_steps=4, grad_clip=0.5)
    agree(*found)
    assert rows[-1]["tokens_per_sec"] == pytest.approx(4 * 4 * 32 * 1000 / rows[-1]["time_ms"])


@pytest.mark.parametrize("keys", [{}, {"activation_checkpointing": "full"}, GPT2], ids=str)
def test_dropout_is_where_the_architecture_has_it(both, keys):
    """After the embedding, on attention's weights, and after both layers of each block: with the same masks
    in the same order, a dropout that is missing, doubled or elsewhere gives other losses."""
    agree(*both(dropout=0.25, **keys))


def test_float16_takes_its_loss_scale_out_of_all_that_is_reported_and_updated(both, monkeypatch):
    """The scale is 65536, so a place that forgets it is wrong by this factor, and one that clips before it is
    taken out clips by this factor too much."""
    judged, judge = [], UpdateGuard.judge
    monkeypatch.setattr(
        UpdateGuard, "judge", lambda guard, *values: (judged.append(values), judge(guard, *values))[1]
    )
    rows, tensors, expected_rows, weights, state = both(dtype="float16", grad_clip=0.01)
    assert [norm.item() for _, norm, *_ in judged] == [row["gradients"]["global_norm"] for row in rows]
    for row, expected in zip(rows, expected_rows, strict=True):
        gradients = row["gradients"]
        loss, norm, mean, deviation = expected
        assert row["loss"] == pytest.approx(loss, rel=5e-3), row["iter"]
        assert gradients["global_norm"] == pytest.approx(norm, rel=0.05), row["iter"]
        assert gradients["grad_mean"] == pytest.approx(mean, abs=0.05 * deviation), row["iter"]
        assert gradients["grad_std"] == pytest.approx(deviation, rel=0.05), row["iter"]
        assert not row.get("skipped_updates")
    for name, moments in state.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            ours, reference = tensors[f"optimizer.{name}.{moment}"], moments[moment]
            assert (ours - reference).norm() <= 0.2 * reference.norm(), (name, moment)
        change = (tensors[f"model.{name}"] - weights[name].detach()).norm() / weights[name].detach().norm()
        assert change < 0.1, (name, change)
