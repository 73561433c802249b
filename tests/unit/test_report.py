"""The lines of the start-up report name what will run."""

import pytest
from support.helpers import TINY, write_config

import model_builder
from training.configuration.files_and_flags import load_config
from training.hardware.peaks import Peak
from training.memory.gpus import DeviceMemory
from training.memory.micro_batch import choose
from training.records.report import report_lines
from training.records.startup_info import Setup, startup_info

NO_PEAK = Peak(None, "none", "no peak")


@pytest.fixture
def lines(tmp_path):
    """lines(*flags): 'name' -> text of the report of a tiny run, and 'warnings', which follow it."""

    def lines(*flags: str, processes: int = 1, attention: dict | None = None, peak=NO_PEAK) -> dict[str, str]:
        path = write_config(tmp_path / "run.py", **{**TINY, "dtype": "bfloat16", "compile": True})
        config = load_config([str(path), *flags], processes)
        config, micro_batch = choose(config, processes, DeviceMemory(16.0, "a GPU"))
        flops = model_builder.count_flops(config.model_config(), config.block_size)
        audit = {"exact": True, "counted_flops_per_sequence": 1}
        flops |= {"calculation_method": "", "totals": {}, "audit": audit}
        machine = dict.fromkeys(("python", "torch", "numpy", "cuda", "cudnn", "nccl", "driver"))
        machine["gpu_name"] = "NVIDIA H200"
        attention = {"line": "", **(attention or {})}
        setup = Setup(flops, peak, attention, micro_batch.describe(config, processes))
        info = startup_info(config, processes, setup, machine)
        rows = [line.split(":", 1) for line in report_lines(config, info) if ":" in line]
        found = {name.strip(): text.strip() for name, text in rows}
        return {**found, "warnings": "\n".join(info["warnings"])}

    return lines


SHARDED = [
    "--use_fsdp=True",
    "--fsdp_sharding=hybrid",
    "--reshard_after_forward=True",
    "--reduce_dtype=bfloat16",
]
STOCHASTIC = ["--param_dtype=bfloat16", "--weight_rounding=stochastic"]
FP8 = ["--low_precision=fp8_tensorwise", "--low_precision_scope=layers_and_head"]
ROUNDED, FP8_LAYERS = "stochastic rounding to bfloat16", "fp8_tensorwise matmuls in layers_and_head"
IN_BF16 = "gradients travel in bfloat16, gradients summed by FSDP"
NAMED = [
    (["--device=cuda"], "Optimizer", "AdamW (one pass, Triton), betas 0.9 0.95"),
    (["--device=cpu"], "Optimizer", "AdamW (fused), betas 0.9 0.95"),
    (["--device=cpu", "--adam_dtype=bfloat16"], "Optimizer", "AdamW (on float32 copies), betas 0.9 0.95"),
    ([], "Precision", "bfloat16 compute, float32 weights and optimizer state"),
    (["--adam_dtype=bfloat16"], "Precision", "bfloat16 compute, float32 weights, bfloat16 optimizer state"),
    (STOCHASTIC, "Precision", "bfloat16 compute, bfloat16 weights, float32 optimizer state, " + ROUNDED),
    (FP8, "Precision", "bfloat16 compute, float32 weights and optimizer state; " + FP8_LAYERS),
    ([], "torch.compile", "True"),
    (["--compile=False"], "torch.compile", "False"),
    (["--activation_checkpointing=full"], "torch.compile", "True, activation checkpointing full"),
    ([], "Parallelism", "single"),
    (SHARDED, "Parallelism", "fsdp, hybrid sharding, reshard after forward, " + IN_BF16),
]


@pytest.mark.parametrize(("flags", "name", "text"), NAMED)
def test_the_report_names_what_runs(lines, flags, name, text):
    assert lines(*flags, processes=2 if flags == SHARDED else 1)[name] == text


def test_attention_that_runs_otherwise_than_asked_is_a_warning(lines):
    """A dense mask in place of flex attention was 28 % slower, and one line of the report said so."""
    choice = {"asked": "sdpa", "used": "sdpa", "kernel": "dense mask"}
    failed = {**choice, "reason": "sdpa [flex attention] failed: it broke"}
    expected = "attention_backend='sdpa' runs as sdpa [dense mask]: sdpa [flex attention] failed: it broke"
    assert expected in lines(attention=failed)["warnings"]
    assert "attention" not in lines(attention={**choice, "reason": None})["warnings"]


def test_the_report_names_the_gpus(lines):
    assert lines(processes=3)["Device"] == "3 x NVIDIA H200"
