"""How long a run takes, and what it costs, is said before it begins: from an MFU with its source."""

import json
import re
from dataclasses import replace

import pytest
from support.helpers import ROOT, TINY

from docs import your_gpu
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.dry_run import dry_run
from training.hardware.peaks import find_gpu
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import choose
from training.records.expected_time import ASSUMED, MEASURED, expected_rows, expected_speed
from training.records.utilization import count_flops

QWEN3, H100 = str(ROOT / "config/full_qwen3_1.8b_optimal.py"), "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def audited_once(monkeypatch, counted_flops):
    """The audit of a large model's FLOPs takes seconds."""
    monkeypatch.setattr("training.dry_run.count_flops", counted_flops)


def said(world_size: int = 1, *flags: str) -> dict[str, str]:
    """{name: text} of the lines of a dry run."""
    lines = dry_run(load_config([QWEN3, "--dry_run=True", *flags], world_size), world_size)
    return dict(re.split(r": +", line.strip(), maxsplit=1) for line in lines if re.search(r": +\S", line))


@pytest.mark.parametrize(("gpu", "kind"), MEASURED)
def test_each_measured_mfu_is_the_median_of_its_seal(gpu, kind):
    percent, name = MEASURED[gpu, kind]
    record = json.loads((ROOT / "seals" / f"{name}.seal.json").read_text())["record"]
    assert percent == round(record["summary"]["mfu_percent"]["median"], 1)
    hardware, config = record["startup_info"]["hardware"], record["config"]
    found = find_gpu(hardware["gpu_name"])
    assert (found.name if found else "CPU") == gpu and hardware["num_gpus"] == 1
    head = ", the head too" * (config["low_precision_scope"] == "layers_and_head")
    assert config["low_precision"] + head == kind
    assert config["activation_checkpointing"] == "none"
    assert record["startup_info"]["flops"]["calculation_method"] == "component_summation_v2025"


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_dry_run_says_how_long_and_for_how_much(gpus):
    iterations = 1000 * gpus
    found = said(gpus, "--gpu=H100", "--price=2.5", f"--max_iters={iterations}")
    tokens_per_sec = gpus * 0.588 * 989.4e12 / 10_322_706_432
    hours = iterations * load_config([QWEN3]).tokens_per_iter / tokens_per_sec / 3600
    time = rf"([\d.]+) h for {iterations:,} iterations at ([\d,]+) tokens/s, evaluations not counted"
    told, rate = re.fullmatch(time, found["Expected time"]).groups()
    assert float(told) == pytest.approx(hours, abs=0.06)
    assert float(rate.replace(",", "")) == pytest.approx(tokens_per_sec, rel=1e-4)
    measured = "58.8 % by v3 (measured: seals/qwen3_1.8b_h100.seal.json"
    assert found["from an MFU of"].startswith(measured)
    price = r"([\d.]+): ([\d.]+) GPU-hours at 2.50 each"
    cost, gpu_hours = map(float, re.fullmatch(price, found["Expected cost"]).groups())
    assert gpu_hours == pytest.approx(gpus * hours, abs=0.006)
    assert cost == pytest.approx(2.5 * gpus * hours, abs=0.03)


def test_what_is_not_measured_is_called_an_assumption():
    assert said(1, "--gpu=B200")["from an MFU of"] == f"{ASSUMED:.1f} % by v3 (assumed: not measured)"
    assert "on one GPU and not on 8" in said(8, "--gpu=H100")["from an MFU of"]
    small = said(1, "--gpu=H100", "--n_layer=2", "--n_embd=512", "--d_ff=1024", "--vocab_size=50304")
    assert "assumed" in small["from an MFU of"], "a small model reaches less than a large one"
    for flags in ((), ("--gpu=H100", "--use_sparse_specs=True", "--price=2")):
        found = said(1, *flags)
        assert found["Expected time"] == "not known without a dense peak; state one: --peak_tflops"
        assert "Expected cost" not in found


def test_a_guess_never_stands_beside_a_measurement_of_the_same_gpu():
    """fp8 on an H100 gains what it gains on an H200; what is measured nowhere has no time there."""
    for scope, kind in (("layers", "fp8_tensorwise"), ("layers_and_head", "fp8_tensorwise, the head too")):
        fp8 = ("--low_precision=fp8_tensorwise", f"--low_precision_scope={scope}")
        gain = MEASURED["H200 SXM", kind][0] / 62.2
        told = said(8, "--gpu=H100", *fp8)["from an MFU of"]
        assert told.startswith(
            f"{58.8 * gain:.1f} % by v3 (measured: bf16, seals/qwen3_1.8b_h100.seal.json; "
        )
        assert told.endswith(f"times {gain:.2f}, measured on the H200 SXM, on one GPU and not on 8)")
    for unknown in ("--low_precision=fp8_delayed", "--low_precision=nvfp4", "--dtype=float16"):
        found = said(1, "--gpu=H100", unknown, "--price=2.5")
        assert found["Expected time"] == "not known: this precision was not measured here, as another was"
        assert "from an MFU of" not in found and "Expected cost" not in found
    assert "assumed" in said(1, "--gpu=B200", "--low_precision=fp8_delayed")["from an MFU of"]


def test_recomputation_takes_its_share_of_the_time():
    config = load_config([QWEN3])
    flops, full = count_flops(config), replace(config, activation_checkpointing="full")
    plain, recomputed = (expected_speed(c, flops, 10**9, H100, 989.4, 1) for c in (config, full))
    share = plain.tokens_per_sec / recomputed.tokens_per_sec
    assert 1.25 < share < 1.34, "a forward is a third of a training step; the head is not made again"


def test_a_resume_counts_the_iterations_that_are_left():
    config = TrainConfig(**{**TINY, "max_iters": 100, "peak_tflops": 0.1})
    info = {
        "hardware": {"peak": {"tflops_per_gpu": 0.1, "sparse": False}, "num_gpus": 1, "gpu_name": "a CPU"}
    }
    info |= {"flops": count_flops(config), "tokens_per_iter": 128, "model": {"total_params": 1}}
    info["micro_batch"] = {"needed_gib": 2.0, "available_gib": 1.0}
    said = expected_rows(config, info, 40)[0][1]
    assert "60 iterations at" in said and said.endswith("by the estimate it does not fit")
    assert expected_rows(config, info, 100) == []


@pytest.mark.parametrize("count", [1, 8])
def test_every_row_of_the_page_fits_its_gpus(count):
    for name in your_gpu.GPUS:
        model, config, changed = next(your_gpu._fitting(name, count))
        flags = [f"--{key}={value}" for key, value in changed.items()]
        flags += [f"--{key}={getattr(config, key)}" for key in ("batch_size", "gradient_accumulation_steps")]
        asked = load_config([str(ROOT / "config" / f"{model}.py"), *flags], count)
        numbers, found = choose(asked, count, card_memory(CARDS[name]))
        assert found.fits and numbers.micro_batch == config.micro_batch, (name, count)
