"""Runs that begin with Hugging Face weights learn what transformers learns, under every strategy."""

import hashlib
import json

import pytest
import torch
from support.helpers import last_run, run_in_one_launch
from support.hf_models import MODELS, hf_run, make, save, tensors

from tools import export_hf
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.optimization.schedule import learning_rate
from training.pretrained.settings import load_run_config
from training.process.world import World

ALONE = World(0, 0, 1, torch.device("cpu"))
STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}


def losses(out_dir) -> list[float]:
    return [row["loss"] for row in last_run(out_dir)["training_iterations"]]


def losses_of_transformers(model, config) -> list[float]:
    """Of its model, trained by torch.optim.AdamW with the same batches and rates."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2))
    loader = Loader(make_windows(open_sources(config, scan=True), config)["train"], config, ALONE)
    found = []
    for iteration in range(config.max_iters):
        x, y = loader.next()
        loss = model(input_ids=x[0], labels=y[0], shift_labels=y[0]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, config)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    loader.close()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_three_updates_change_the_loss_as_in_transformers(name, run, tmp_path):
    folder = save(name, tmp_path / "model", shards="20KB")
    config = hf_run(tmp_path, max_iters=4, learning_rate=1e-3)
    flags = [f"--init_weights=hf:{folder}", f"--out_dir={tmp_path / 'out'}", "--weight_decay=0.1"]
    assert run(config, *flags) == 0
    expected = losses_of_transformers(make(name).train(), load_run_config([str(config), *flags]))
    assert losses(tmp_path / "out") == pytest.approx(expected, abs=1e-4)
    assert expected[0] - expected[3] > 0.01  # the updates count


def test_every_strategy_reads_and_writes_the_same_bits(tmp_path):
    folders = {name: save(name, tmp_path / name, shards="20KB") for name in ("gpt2", "qwen3 untied")}
    still = {"max_iters": 1, "learning_rate": 0.0, "min_lr": 0.0}
    config = hf_run(tmp_path, **still)
    runs = {(name, s): tmp_path / f"out-{name}-{s}" for name in folders for s in STRATEGIES}
    commands = [
        [config, f"--init_weights=hf:{folders[name]}", f"--out_dir={out}", *STRATEGIES[strategy]]
        for (name, strategy), out in runs.items()
    ]
    run_in_one_launch(tmp_path, commands, processes=2)
    for (name, strategy), out in runs.items():
        (checkpoint,) = (out / "checkpoints").glob("step-*")
        assert len(list(checkpoint.glob("tensors-*"))) == 2  # each rank wrote its part
        assert last_run(out)["startup_info"]["hardware"]["parallelism"] == strategy
        exported = tmp_path / f"exported-{name}-{strategy}"
        export_hf.main([str(out), str(exported)])
        stored, back = tensors(folders[name]), tensors(exported)
        assert stored.keys() == back.keys()
        assert [n for n in stored if not torch.equal(stored[n], back[n])] == []


def test_the_record_and_the_checkpoint_say_which_weights_they_were(run, tmp_path):
    folder = save("qwen3", tmp_path / "model", shards="20KB")
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    assert run(config, f"--init_weights=hf:{folder}") == 0
    said = last_run(tmp_path / "out")["startup_info"]["pretrained"]
    assert (said["source"], said["commit"]) == (f"hf:{folder}", None)
    files = {path.name for path in folder.iterdir()} - {"generation_config.json"}
    assert said["files"].keys() == files
    for name, facts in said["files"].items():
        content = (folder / name).read_bytes()
        assert facts == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "state.json").read_text())["pretrained"]
    assert saved == {**said, "config": json.loads((folder / "config.json").read_text())}


def test_a_resume_takes_the_architecture_from_the_checkpoint(run, tmp_path, capsys):
    folder = save("qwen3", tmp_path / "model")
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=2)
    weights = f"--init_weights=hf:{folder}"
    assert run(config, weights) == 0
    other = save("llama2", tmp_path / "other")
    assert run(config, f"--init_weights=hf:{other}", "--init_from=resume", "--max_iters=3") == 0
    assert last_run(tmp_path / "out")["startup_info"]["model"]["architecture"]["arch"] == "qwen3"
    capsys.readouterr()
    assert run(config, weights, "--init_from=resume", "--n_layer=3", "--max_iters=4") == 2
    assert "n_layer: checkpoint 2, configuration 3" in capsys.readouterr().err


def test_the_same_command_goes_on_without_the_weights_and_with_no_setting_changed(run, tmp_path, capsys):
    for name in ("gpt2", "llama3.2"):
        folder = save(name, tmp_path / name)
        command = [hf_run(tmp_path, max_iters=3), f"--init_weights=hf:{folder}", "--init_from=auto"]
        command += [f"--out_dir={tmp_path / f'out-{name}'}", "--dropout=0.1"]
        assert run(*command, "--max_iters=2") == 0
        folder.rename(tmp_path / f"gone-{name}")
        assert run(*command) == 0
        assert "is not read: the weights are the checkpoint's" in capsys.readouterr().out
        record = last_run(tmp_path / f"out-{name}")
        assert [row["iter"] for row in record["training_iterations"]] == [0, 1, 2]
        info = record["startup_info"]
        assert info["changed_since_checkpoint"] == {"max_iters": [2, 3]}
        assert info["pretrained"]["source"] == f"hf:{folder}"


def test_an_evaluation_alone_measures_the_weights_as_they_are(run, tmp_path):
    folder = save("qwen3", tmp_path / "model")
    config = hf_run(tmp_path, out_dir=tmp_path / "out", eval_iters=2)
    assert run(config, f"--init_weights=hf:{folder}", "--eval_only=True") == 0
    (record,) = (tmp_path / "out").glob("eval_*.json")
    (step,) = json.loads(record.read_text())["eval_steps"]
    assert step["val_loss"] > 4  # random weights: about ln 64, and above
    assert not (tmp_path / "out/checkpoints").exists()
