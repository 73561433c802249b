"""config/cpt_qwen3_1.7b_4096.py is the published run of continued pretraining, as far as its header says."""

import pytest
import torch
from support.helpers import ROOT

from training.configuration import rules
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.optimization.schedule import end_after_epochs, fix_schedule, learning_rate

PATH = ROOT / "config" / "cpt_qwen3_1.7b_4096.py"
SEQUENCES = 22_206


@pytest.fixture
def config(monkeypatch) -> TrainConfig:
    monkeypatch.setattr(rules, "require_tracker", lambda name: None)  # wandb may not be installed
    return load_config([str(PATH)])


def test_it_states_no_key_of_the_model(config):
    model = {"arch_preset", "n_layer", "n_head", "n_embd", "num_key_value_heads", "d_ff", "vocab_size"}
    assert not model & set(PATH.read_text().split())
    assert config.init_weights == "hf:Qwen/Qwen3-1.7B-Base"


def test_four_epochs_are_the_2776_iterations_of_the_published_run(config):
    windows = (SEQUENCES * 4096 - 1) // 4096  # the last token of all has no target
    assert end_after_epochs(config, windows, 32).max_iters == 2776


def test_after_warm_up_the_rates_are_the_published_ones(config):
    from transformers import get_wsd_schedule

    config = fix_schedule(end_after_epochs(config, SEQUENCES - 1, 32), {})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-5)
    decay = int(0.2 * 2776)  # 555; ours decays over 555.2
    scheduler = get_wsd_schedule(optimizer, 100, decay, num_training_steps=2776)
    for i in range(2776):
        theirs = optimizer.param_groups[0]["lr"]
        if i >= 100:
            assert learning_rate(i, config) == pytest.approx(theirs, abs=2e-5 * 1e-3), i
        optimizer.step()
        scheduler.step()
    assert learning_rate(0, config) == 2e-5 / 101
