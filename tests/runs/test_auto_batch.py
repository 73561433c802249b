"""A run with batch_size='auto' on machines of different memory: the same training, evaluations and resume."""

import json

import pytest
from support.helpers import TINY, last_run, make_dataset, write_config

from training.configuration.files_and_flags import load_config
from training.memory import micro_batch
from training.memory.gpus import DeviceMemory
from training.memory.micro_batch import choose

AUTO = {"batch_size": "auto", "gradient_accumulation_steps": "auto", "tokens_per_iter": 8 * 32}
KEYS = {**TINY, **AUTO, "eval_interval": 2, "eval_batch_size": 4, "gradient_log_interval": 0}
EVALUATION = ("--init_from=resume", "--eval_only=True")


@pytest.fixture
def machine(monkeypatch, run, tmp_path):
    """machine(batch_size, *flags): a run, on a machine whose memory holds just this micro-batch."""
    make_dataset(tmp_path / "tokens")
    config = write_config(tmp_path / "run.py", **KEYS, dataset=tmp_path / "tokens", out_dir=tmp_path / "out")

    def machine(batch_size: int, *flags: object) -> int:
        stated = load_config([str(config), f"--batch_size={batch_size}"])
        _, found = choose(stated, 1, DeviceMemory(0.0, "nothing"))
        memory = DeviceMemory(found.needed_gib, f"a GPU for {batch_size} sequences")
        monkeypatch.setattr(micro_batch, "device_memory", lambda device, local_size: memory)
        return run(config, *flags)

    return machine


def figures(record: dict, section: str, *names: str) -> list[float]:
    return [row[name] for row in record[section] for name in names]


def test_the_training_and_the_evaluations_are_those_of_any_other_machine(machine, tmp_path, capfd):
    records = {}
    for batch_size in (8, 2, 1):
        assert machine(batch_size, f"--out_dir={tmp_path / str(batch_size)}") == 0
        record = records[batch_size] = last_run(tmp_path / str(batch_size))
        config, info = record["config"], record["startup_info"]
        assert (config["batch_size"], config["gradient_accumulation_steps"]) == (batch_size, 8 // batch_size)
        assert config["tokens_per_iter"] == info["tokens_per_iter"] == 256
        assert info["micro_batch"]["stated"] == {**AUTO, "loss_chunks": "auto"}
        assert info["micro_batch"]["device"] == f"a GPU for {batch_size} sequences"
        assert f"{batch_size} x 32 tokens (auto: fits by the estimate)" in capfd.readouterr().out
    compared = ("training_iterations", "iter", "loss"), ("eval_steps", "val_loss", "train_loss")
    for section, *names in compared:
        first, *others = (figures(record, section, *names) for record in records.values())
        assert len(first) >= 4
        for other in others:
            assert other == pytest.approx(first, rel=1e-5)


def test_a_resume_on_a_machine_of_another_memory_needs_nothing_to_be_allowed(machine, tmp_path, capfd):
    assert machine(8, "--max_iters=4", f"--out_dir={tmp_path / 'whole'}") == 0
    assert machine(8, "--max_iters=2") == 0
    assert machine(2, "--max_iters=4", "--init_from=resume") == 0
    assert "batch_size was 8 when it was saved, is 2 now" in capfd.readouterr().out
    resumed, whole = last_run(tmp_path / "out"), last_run(tmp_path / "whole")
    losses, expected = (figures(record, "training_iterations", "loss") for record in (resumed, whole))
    assert len(losses) == 4 and losses == pytest.approx(expected, rel=1e-5)
    state = json.loads((tmp_path / "out/checkpoints/step-00000004/state.json").read_text())
    assert state["samples_seen"] == 4 * 8 and state["config"]["batch_size"] == 2


def test_an_evaluation_alone_takes_another_micro_batch_and_gives_the_same_loss(machine, tmp_path, capfd):
    """Then numbers that are stated set tokens_per_iter aside, and the report says so."""
    assert machine(8, "--max_iters=2") == 0
    trained = last_run(tmp_path / "out")["eval_steps"][-1]["val_loss"]
    assert machine(1, *EVALUATION) == 0
    (path,) = (tmp_path / "out").glob("eval_*.json")
    content = json.loads(path.read_text())
    assert content["eval_steps"][0]["val_loss"] == pytest.approx(trained, rel=1e-5)
    assert content["config"]["batch_size"] < 4
    assert machine(8, "--batch_size=2", "--gradient_accumulation_steps=3", "--max_iters=1") == 0
    report = capfd.readouterr().out
    assert "192; tokens_per_iter=256 was set aside, because batch_size and gradient_accum" in report
    assert last_run(tmp_path / "out")["startup_info"]["micro_batch"]["set_aside"] is True
