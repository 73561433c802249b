"""From a prepared dataset to a model: the printed command works, and trains a model of fitting size."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.helpers import ROOT, last_run, make_dataset
from support.preparation import prepare_text, small_bpe

import model_builder
from common import processes
from data.pipeline.meta_file import read_meta
from data.pipeline.next_commands import CPU, GPU, Device, device_here, fitting, next_lines
from training.configuration.files_and_flags import load_config

LARGE = "config/full_gpt2_1.36b.py"


def words(command: str) -> list[str]:
    """The arguments of train.py in a command, which may begin with `cd FOLDER &&`."""
    _, _, rest = command.rpartition("&& ")
    python, script, *arguments = shlex.split(rest)
    assert script == "train.py"
    return arguments


def dataset(folder: Path, **keys) -> dict:
    return read_meta(make_dataset(folder, **keys)) | {"eot_id": None}


def meta_of(train_tokens: int, vocab_size: int = 50257, val_tokens: int = 10**6) -> dict:
    files = {"train.bin": {"tokens": train_tokens}, "val.bin": {"tokens": val_tokens}}
    return {"vocab_size": vocab_size, "files": files}


def training_command(meta: dict, folder: Path, config: str | None = None, device: Device = CPU) -> str:
    return next_lines(meta, folder, config, device)["next"]


@pytest.mark.parametrize("val_tokens", [4_000, 129, 128, 20])
def test_the_command_trains(run, tmp_path, monkeypatch, val_tokens):
    meta = dataset(tmp_path / "my text", vocab_size=300, val_tokens=val_tokens)
    arguments = words(training_command(meta, tmp_path / "my text"))
    assert "--out_dir=out-my text" in arguments
    script = [str(ROOT / arguments[0]), *arguments[1:]]
    monkeypatch.chdir(tmp_path)
    assert run(*script, "--max_iters=2", "--peak_tflops=1", "--eval_iters=1", "--n_embd=32", "--d_ff=64") == 0
    record = last_run(tmp_path / "out-my text")
    assert record["config"]["vocab_size"] == 300 and len(record["training_iterations"]) == 2
    assert [step["iter"] for step in record["eval_steps"]] == [0, 2]


def test_a_small_text_under_a_known_tokenizer_gets_a_small_model(tmp_path):
    arguments = words(training_command(meta_of(10**6), tmp_path, LARGE))
    assert arguments[:2] == ["config/quickstart.py", "--vocab_size=50257"]
    arguments = words(training_command(meta_of(10**9), tmp_path, LARGE))
    assert arguments == [LARGE, f"--dataset={tmp_path}", f"--out_dir=out-{tmp_path.name}"]


@pytest.mark.parametrize("device", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("tokens", [2_000, 10**6, 3 * 10**8, 3 * 10**9, 10**12])
def test_the_model_fits_the_text_and_its_config_is_complete(tmp_path, tokens, device):
    _, model_line = fitting(meta_of(tokens, 8001), device)
    config = load_config(words(training_command(meta_of(tokens, 8001), tmp_path, None, device)))
    model = config.model_config()
    size = next(size for size in device.sizes if size.n_layer == model.n_layer)
    counted = model_builder.build_model(model).count_parameters()["total"] if tokens < 10**9 else 0
    assert abs(size.parameters(model.vocab_size) - counted) < 0.01 * counted or not counted
    assert model_line.startswith(f"{size.parameters(model.vocab_size) / 1e6:,.1f} M parameters, for")
    assert model.vocab_size == (8001 if device is CPU else 8064)
    read = config.max_iters * size.tokens_per_iter
    if size != device.sizes[0]:  # the smallest may see a text several times
        assert size.parameters(8064) * 20 <= tokens and read <= 1.01 * tokens
    assert config.max_iters == 100 or read <= 4 * tokens
    assert device is GPU or config.max_iters <= 500 and config.device == "cpu"
    assert device is CPU or config.tokens_per_iter == size.tokens_per_iter


def test_the_smallest_size_of_a_device_is_that_of_its_config():
    for device in (CPU, GPU):
        config, size = load_config([device.config]), device.sizes[0]
        names = ("n_layer", "n_head", "num_key_value_heads", "n_embd", "d_ff", "learning_rate", "block_size")
        stated = size._asdict() | {"block_size": device.block_size}
        assert {name: getattr(config, name) for name in names} == {name: stated[name] for name in names}
        read = config.tokens_per_iter if device is GPU else config.batch_size * config.block_size
        assert read == size.tokens_per_iter


@pytest.mark.parametrize(
    "listing, device", [("GPU 0: a GPU (UUID: GPU-1)\n", GPU), ("No devices were found\n", CPU), (None, CPU)]
)
def test_a_gpu_is_found_by_nvidia_smi(monkeypatch, tmp_path, listing, device):
    if listing:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listing}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if listing else str(tmp_path))
    assert device_here() is device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_here() is CPU


def test_prepare_prints_the_command_of_the_python_that_runs(tmp_path):
    (tmp_path / "a.txt").write_text("A text of my own. " * 500)
    options = {
        "input": tmp_path / "a.txt",
        "tokenizer": small_bpe(tmp_path / "bpe"),
        "output": tmp_path / "made",
    }
    output = prepare_text(*(text for name, path in options.items() for text in (f"--{name}", path)))
    (command,) = re.findall(r"^next +(.*)$", output, re.M)
    config = load_config(words(command))
    assert (config.dataset, config.out_dir, config.device) == (str(tmp_path / "made"), "out-made", "cpu")


def test_the_command_goes_to_the_checkout_and_its_python_has_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert training_command(meta_of(1000), tmp_path).startswith(f"cd {shlex.quote(str(ROOT))} && ")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", "/opt/x/bin/python")
    for found, expected in (("/usr/bin/python", sys.executable), (sys.executable, "python")):
        monkeypatch.setattr(processes.shutil, "which", lambda name, found=found: found)
        assert training_command(meta_of(1000), tmp_path).startswith(f"{expected} train.py ")


@pytest.mark.parametrize("name", ["README.md", "TRAINING_GUIDE.md", "CONTRIBUTING.md"])
def test_a_document_activates_the_environment_before_its_first_python(name):
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    needs = [i for i, line in enumerate(lines) if re.match(r"(python|pip|torchrun) ", line)]
    assert any("source .venv/bin/activate" in line.split(" && ") for line in lines[: needs[0]])
