"""sample.py as a user runs it: on the checkpoint of a tiny run."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support import warm_python
from support.helpers import ROOT

import sample
from common.errors import UserError


def text(capsys, out_dir, *flags) -> str:
    sample.main([f"--out_dir={out_dir}", "--prompt=AB", "--max_new_tokens=40", "--device=cpu", *flags])
    return capsys.readouterr().out


def test_a_seed_gives_one_text_and_another_seed_another(trained, capsys):
    first, again, other = (text(capsys, trained, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other
    assert "--- sample 1 ---\nAB" in first
    assert len(first.split("--- sample 1 ---\n")[1].rstrip("\n")) == 42


def test_temperature_0_and_top_k_1_both_take_the_most_likely_token(trained, capsys):
    assert text(capsys, trained, "--temperature=0") == text(capsys, trained, "--top_k=1", "--seed=5")


def test_the_best_checkpoint_can_be_chosen(trained, capsys):
    assert "step-00000004" in text(capsys, trained)
    best = (trained / "checkpoints" / "best").read_text().strip()
    assert best in text(capsys, trained, "--checkpoint=best")
    with pytest.raises(UserError, match="there are latest, best, step-"):
        text(capsys, trained, "--checkpoint=step-7")


@pytest.mark.parametrize("flag", ["--top_k=-1", "--temperature=nan", "--num_samples=0", "--device=tpu"])
def test_bad_options_are_named_without_a_traceback(trained, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        text(capsys, trained, flag)
    assert stop.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_no_checkpoint_is_one_line_and_status_1(tmp_path):
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}"]
    done = warm_python.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "holds no complete checkpoint" in done.stderr


# --- how a token is chosen ---


class FixedLogits(torch.nn.Module):
    """A model with the same logits everywhere, which notes the windows that it is given."""

    def __init__(self, logits, block_size=4):
        super().__init__()
        self.config, self.logits = SimpleNamespace(block_size=block_size), torch.tensor(logits)
        self.windows, self.with_gradients = [], []

    def forward(self, window):
        self.windows.append(window[0].tolist())
        self.with_gradients.append(torch.is_grad_enabled())
        wrong = self.logits.flip(0).expand(*window.shape, -1).clone()
        wrong[:, -1] = self.logits  # only the last position predicts the next token
        return wrong


def chosen(logits, temperature, top_k=0, count=2000) -> torch.Tensor:
    """The share of each id among `count` tokens."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    tokens = sample.generate(FixedLogits(logits), ids, count, temperature, top_k, generator)[0, 1:]
    return torch.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_are_divided_by_the_temperature(temperature):
    logits = [0.0, 1.0, 2.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    assert chosen(logits, temperature).tolist() == pytest.approx(expected.tolist(), abs=0.04)


def test_a_low_temperature_takes_the_most_likely_token_and_a_high_one_takes_all_alike():
    assert chosen([0.0, 2.0, 1.0], 0.02).tolist() == [0, 1, 0]
    assert chosen([0.0, 2.0, 1.0], 1000.0).tolist() == pytest.approx([1 / 3] * 3, abs=0.04)
    assert chosen([0.0, 2.0, 1.0], 0).tolist() == [0, 1, 0]


def test_top_k_leaves_the_k_most_likely_tokens():
    assert (chosen([0.0, 2.0, 1.0, -1.0], 5.0, top_k=2) > 0).tolist() == [False, True, True, False]
    assert (chosen([0.0, 2.0, 1.0, -1.0], 5.0, top_k=9) > 0).all()


def test_the_model_sees_the_newest_tokens_that_fit_into_its_context():
    model = FixedLogits([0.0, 9.0, 0.0], block_size=4)
    ids = sample.generate(model, torch.tensor([[2, 0, 2, 0, 0, 2]]), 3, 0, 0, None)
    assert ids.tolist() == [[2, 0, 2, 0, 0, 2, 1, 1, 1]]
    assert model.windows == [[2, 0, 0, 2], [0, 0, 2, 1], [0, 2, 1, 1]]
    assert model.with_gradients == [False] * 3


def test_text_is_made_in_eval_mode(trained, capsys, monkeypatch):
    modes = []

    def generate(model, ids, *_):
        modes.append([module.training for module in model.modules()])
        return ids

    monkeypatch.setattr(sample, "generate", generate)
    text(capsys, trained, "--num_samples=2")
    assert len(modes) == 2 and not any(sum(modes, []))


def test_a_damaged_checkpoint_gives_no_text(trained, capsys):
    folder = sorted((trained / "checkpoints").glob("step-*"))[-1]
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{folder} is damaged: {path.name}"):
        text(capsys, trained)
