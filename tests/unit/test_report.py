"""The start-up report: the memory estimate moves as the settings say, and its lines name what will run."""

import pytest
from support.helpers import ROOT, STATED, TINY, write_config

import model_builder
from training.configuration.files_and_flags import load_config
from training.hardware.peaks import Peak
from training.memory.estimate import estimate_memory
from training.memory.gpus import DeviceMemory
from training.memory.micro_batch import choose
from training.records.report import report_lines
from training.records.startup_info import Setup, startup_info

FULL = sorted(ROOT.glob("config/full_*.py"))
NO_PEAK = Peak(None, "none", "no peak")
QWEN = "full_qwen3_1.8b_optimal.py"


def estimate(*flags: str, processes: int = 1, config: str = QWEN) -> dict[str, float]:
    loaded = load_config([str(ROOT / "config" / config), *STATED, *flags], processes)
    return estimate_memory(loaded, processes)


def total(*flags: str, processes: int = 1, config: str = QWEN) -> float:
    return sum(estimate(*flags, processes=processes, config=config).values())


# --- memory ---


def test_sharding_saves_what_it_shards():
    plain = total(processes=8)
    zero1, fsdp, fsdp_2 = (
        total(*flags, processes=processes)
        for flags, processes in (
            (["--use_zero1=True"], 8),
            (["--use_fsdp=True", "--gradient_accumulation_steps=1"], 8),
            (["--use_fsdp=True", "--gradient_accumulation_steps=1"], 2),
        )
    )
    assert fsdp < zero1 < plain == total()
    assert fsdp < fsdp_2
    assert total("--use_zero1=True", processes=2) > zero1
    resharded = total("--use_fsdp=True", "--reshard_after_forward=True", processes=8)
    assert resharded < total("--use_fsdp=True", processes=8)


def test_hybrid_sharding_divides_by_the_processes_of_one_machine(monkeypatch):
    fsdp = "--use_fsdp=True"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    hybrid = estimate(fsdp, "--fsdp_sharding=hybrid", processes=16)
    assert hybrid == estimate(fsdp, processes=8)
    assert sum(hybrid.values()) > total(fsdp, processes=16)


def test_the_estimate_holds_what_is_known_by_counting():
    """Qwen3 1.8B on one GPU: 4 + 2 + 4 + 8 bytes for each of 1,830,395,904 parameters."""
    parts, gib = estimate(), 1_830_395_904 / 2**30
    assert parts["weights (float32)"] == pytest.approx(4 * gib)
    assert parts["working weights (bfloat16)"] == pytest.approx(2 * gib)
    assert parts["gradient sums (float32)"] == pytest.approx(4 * gib)
    assert parts["Adam moments (float32)"] == pytest.approx(8 * gib)
    assert parts["logits"] == pytest.approx(2 * 16 * 2048 * 151_936 / 2**30)
    halves = estimate("--param_dtype=bfloat16", "--adam_dtype=bfloat16")
    assert halves["weights (bfloat16)"] == pytest.approx(2 * gib)
    assert halves["Adam moments (bfloat16)"] == pytest.approx(4 * gib)
    assert not any(name.startswith("working") for name in halves)  # the optimizer's own are used


# --- text ---


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


def test_the_report_names_the_update_that_runs(lines):
    assert lines("--device=cuda")["Optimizer"] == "AdamW (one pass, Triton), betas 0.9 0.95"
    assert lines("--device=cpu")["Optimizer"] == "AdamW (fused), betas 0.9 0.95"


def test_attention_that_runs_otherwise_than_asked_is_a_warning(lines):
    """A dense mask in place of flex attention was 28 % slower, and one line of the report said so."""
    choice = {"asked": "sdpa", "used": "sdpa", "kernel": "dense mask"}
    failed = {**choice, "reason": "sdpa [flex attention] failed: it broke"}
    expected = "attention_backend='sdpa' runs as sdpa [dense mask]: sdpa [flex attention] failed: it broke"
    assert expected in lines(attention=failed)["warnings"]
    assert "attention" not in lines(attention={**choice, "reason": None})["warnings"]


def test_the_report_names_the_dtypes_that_are_stored(lines):
    assert lines()["Precision"] == "bfloat16 compute, float32 weights and optimizer state"
    mixed = lines("--adam_dtype=bfloat16")["Precision"]
    assert mixed == "bfloat16 compute, float32 weights, bfloat16 optimizer state"
    stochastic = lines("--param_dtype=bfloat16", "--weight_rounding=stochastic")["Precision"]
    assert stochastic == (
        "bfloat16 compute, bfloat16 weights, float32 optimizer state, stochastic rounding to bfloat16"
    )
    fp8 = lines("--low_precision=fp8_tensorwise", "--low_precision_scope=layers_and_head")["Precision"]
    assert fp8.endswith("optimizer state; fp8_tensorwise matmuls in layers_and_head")


def test_the_report_names_what_is_compiled_recomputed_and_sharded(lines):
    assert lines()["torch.compile"] == "True"
    assert lines("--compile=False")["torch.compile"] == "False"
    recomputed = lines("--activation_checkpointing=full")["torch.compile"]
    assert recomputed == "True, activation checkpointing full"
    assert lines()["Parallelism"] == "single"
    flags = ["--use_fsdp=True", "--fsdp_sharding=hybrid", "--reshard_after_forward=True"]
    sharded = lines(*flags, "--reduce_dtype=bfloat16", processes=2)["Parallelism"]
    assert sharded == (
        "fsdp, hybrid sharding, reshard after forward, gradients travel in bfloat16, gradients summed by FSDP"
    )


def test_the_report_names_the_gpus(lines):
    assert lines(processes=3)["Device"] == "3 x NVIDIA H200"
