"""AdamW in one kernel against torch's, in every dtype that the keys allow; and in whole runs."""

import itertools

import pytest
import torch
from support.graphed_runs import ON_GPU, build, train
from support.helpers import make_dataset
from support.updates import update
from torch.nn.utils import get_total_norm

from training.configuration.keys import TrainConfig
from training.optimization.adamw import AdamW
from training.strategies.strategy import Shard, norms

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STORED = (FP32, BF16)
BETAS, DECAYS, SCALE, STEPS = (0.9, 0.95), (0.1, 0.0), 3.7, 20
MATRICES, VECTORS = ((300, 1030), (64, 16), (0, 7)), ((2048,), (5,), (1,))
ROUNDING = 2.0**-8 * 1.001  # of a bf16 number, to nearest; truncation is twice as far off


class Case:
    """Weights, working copies and an optimizer, with gradients of several magnitudes."""

    def __init__(self, device: str, stored=FP32, moments=FP32, copies=None):
        """copies: their dtype, if there are any."""
        self.device, self.generator = device, torch.Generator().manual_seed(0)
        shapes = (*MATRICES, *VECTORS)
        self.weights = [torch.nn.Parameter((0.02 * self.random(shape)).to(stored)) for shape in shapes]
        self.copies = {w: copies and w.detach().to(copies, copy=True) for w in self.weights}
        named = enumerate(self.copies.items())
        self.shards = [Shard(f"w{i}", weight, weight, working_copy=copy) for i, (weight, copy) in named]
        stored, moments = (str(dtype).removeprefix("torch.") for dtype in (stored, moments))
        keys = {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAYS[0]}
        self.optimizer = AdamW(self.shards, TrainConfig(param_dtype=stored, adam_dtype=moments, **keys))
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def random(self, shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def prepare(self, i: int, found_inf: float = 0.0) -> float:
        """Writes the gradients of update i. Returns its rate."""
        for weight in self.weights:
            weight.grad.copy_(SCALE * 10.0 ** (i % 3 - 3) * self.random(weight.shape))
            if found_inf:
                weight.grad.fill_(float("nan"))
        return 1e-2 / (1 + i)

    def tensors(self) -> list[torch.Tensor]:
        """All that an update changes."""
        states = [t for shard in self.shards for t in self.optimizer.kept(shard).values()]
        return [*self.weights, *states, *(copy for copy in self.copies.values() if copy is not None)]

    def kept(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors()]

    def triples(self) -> list[tuple[torch.Tensor, ...]]:
        states = [self.optimizer.kept(shard) for shard in self.shards]
        return [
            (w.detach(), s["exp_avg"], s["exp_avg_sq"]) for w, s in zip(self.weights, states, strict=True)
        ]

    def torch_updates(self, rate: float) -> list[tuple[torch.Tensor, ...]]:
        """Weights and moments after torch's own update of this state, in fp32 and not fused."""
        results = []
        for i, (weight, triple) in enumerate(zip(self.weights, self.triples(), strict=True)):
            wide, mean, square = (tensor.to(FP32, copy=True) for tensor in triple)
            wide = torch.nn.Parameter(wide)
            wide.grad = weight.grad.float() / SCALE
            decay = DECAYS[i >= len(MATRICES)]
            theirs = torch.optim.AdamW([wide], rate, BETAS, weight_decay=decay, fused=False, foreach=False)
            step = self.optimizer.kept(self.shards[i])["step"].cpu().clone()
            theirs.state[wide] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
            theirs.step()
            results.append((wide.detach(), mean, square))
        return results


def assert_rounded(ours: torch.Tensor, exact: torch.Tensor) -> None:
    if ours.dtype == FP32:
        assert (ours - exact).norm() <= 1e-6 * exact.norm()
    else:
        # a sum of terms that cancel is off by a rounding error of the terms
        allowed = ROUNDING * exact.abs() + 1e-6 * exact.abs().amax() if exact.numel() else exact
        assert ((ours.float() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("stored", "moments", "copies"), [*itertools.product(STORED, STORED, (None, FP32, BF16, FP16))]
)
def test_every_update_is_torch_s_rounded_to_what_is_stored(stored, moments, copies):
    """With weight decay, a gradient that is divided, a rate that changes, and updates that are skipped."""
    case = Case("cuda", stored, moments, copies)
    for i in range(STEPS):
        if i in (0, 7):
            before = case.kept()
            update(case.optimizer, case.prepare(i, found_inf=1.0), SCALE, found_inf=1.0)
            assert all(torch.equal(now, was) for now, was in zip(case.tensors(), before, strict=True))
        rate = case.prepare(i)
        expected = case.torch_updates(rate)
        before_weights = [weight.detach().clone() for weight in case.weights]
        gradients = [weight.grad.clone() for weight in case.weights]
        update(case.optimizer, rate, SCALE)
        for ours, exact in zip(case.triples(), expected, strict=True):
            for tensor, wanted in zip(ours, exact, strict=True):
                assert_rounded(tensor, wanted)
        for weight, copy in case.copies.items():
            assert copy is None or torch.equal(copy, weight.detach().to(copy.dtype))
        for weight, gradient in zip(case.weights, gradients, strict=True):
            assert torch.equal(weight.grad, gradient)  # nothing is written back
        if stored == FP32:
            for weight, was, (wanted, *_) in zip(case.weights, before_weights, expected, strict=True):
                allowed = 1e-5 * (wanted - was).norm() + 2.5e-7 * was.norm()  # of the change; two last bits
                assert (weight.detach() - wanted).norm() <= allowed
    assert all(case.optimizer.kept(shard)["step"] == STEPS for shard in case.shards)


@pytest.mark.parametrize(("stored", "moments"), [(FP32, BF16), (BF16, FP32), (BF16, BF16)])
def test_the_kernel_rounds_with_the_bits_of_the_plain_form(stored, moments):
    """Its own update of the same numbers, kept in fp32, is what is rounded."""
    from support import rounded_updates as updates

    scalars, key = updates.scalars("cuda"), updates.KEY.cuda()
    key_of_step = key.clone()
    key_of_step[1] = updates.STEP
    for start, n in [*updates.SHARDS, (24, 5000), (29, 5000)]:
        tensors = updates.shard(n, stored, moments, BF16 if stored == FP32 else None, "cuda")
        wide = [tensor.to(FP32, copy=True) for tensor in tensors[:4]]
        updates.update((*wide, None), scalars, None)
        expected = updates.rounded((wide[0], *wide[2:]), tensors, key_of_step, start)
        updates.update(tensors, scalars, (key, start))
        updates.assert_stored(tensors, expected, f"{n} elements from {start}")


def test_the_8_bit_kernel_has_the_bits_of_the_plain_form_on_a_cpu():
    """Also those of the random bits; products and sums are not fused."""
    from support import rounded_updates as updates

    updates.assert_the_8_bit_kernel_equals_its_plain_form("cuda")


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16", "adam_dtype": "bfloat16"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16", "weight_rounding": "stochastic"},
        {"dtype": "bfloat16", "adam_dtype": "8bit"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16", "gradient_dtype": "bfloat16"},
    ],
    ids=lambda keys: "-".join(keys.values()),
)
def test_a_run_learns_and_publish_copies_nothing(tmp_path, monkeypatch, keys):
    """With clipping. That each update is torch's, is above."""
    dataset = make_dataset(tmp_path / "tokens", train_tokens=50_000)
    parts = build(dataset, **{**ON_GPU, **keys})
    assert parts.step.optimizer.writes_copies
    strategy = parts.state.strategy
    monkeypatch.setattr(strategy, "_copy_back", None)
    losses = [row[0] for row in train(parts, iterations=range(12), sums=())]
    for shard in strategy.shards:
        copy = shard.working_copy
        assert copy is None or torch.equal(copy, shard.local.detach().to(copy.dtype)), shard.name
    assert losses[-1] < losses[0] - 0.1


def test_the_norm_of_whole_buckets_is_as_exact_as_that_of_single_gradients():
    """1e8 elements of several magnitudes, and an offset, whose rounding errors would add up."""
    flat = torch.randn(2**27 + 4, device="cuda") * 1e-3 + 1e-4
    flat[: 2**20] *= 100
    gradients = flat[:-4]
    exact = torch.stack([part.double().square().sum() for part in gradients.split(2**24)]).sum().sqrt()
    whole = torch.linalg.vector_norm(norms([gradients, gradients[: 2**20]], foreach=False))
    exact_both = (exact.square() + gradients[: 2**20].double().square().sum()).sqrt()
    assert whole.item() == pytest.approx(exact_both.item(), rel=1e-6)
    single = get_total_norm(list(gradients.split(2**22)))
    (alone,) = norms([gradients], foreach=False)
    assert abs(alone - exact) <= max(2 * abs(single - exact), 1e-6 * exact)
