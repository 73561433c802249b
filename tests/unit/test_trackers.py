"""What an experiment tracker gets: every number of a row, nested ones too."""

import sys
import types

from training.configuration.keys import TrainConfig
from training.records.trackers import WandbTracker, numbers

ROW = {
    "iter": 10,
    "loss": 2.5,
    "warmup": False,
    "mfu": {"mfu_percent": 41.0, "architecture": "qwen3"},
    "mfu_reason": None,
    "memory": {"allocated_gb": 13.5},
    "gradients": {"global_norm": 0.5},
}


def test_a_row_is_flattened_with_its_gradients_and_memory(monkeypatch):
    logged = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: None
    fake.log = lambda values, step: logged.append((step, values))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WandbTracker(TrainConfig(), "run").add_row(ROW)
    assert logged == [
        (
            10,
            {
                "iter": 10,
                "loss": 2.5,
                "warmup": False,
                "mfu/mfu_percent": 41.0,
                "memory/allocated_gb": 13.5,
                "gradients/global_norm": 0.5,
            },
        )
    ]


def test_a_row_without_mfu_or_memory_has_none_of_their_numbers():
    assert numbers({**ROW, "mfu": None, "memory": None}).keys() == {
        "iter",
        "loss",
        "warmup",
        "gradients/global_norm",
    }
