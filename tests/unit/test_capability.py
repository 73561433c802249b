"""What differs between GPUs is a row of one table, chosen by the capability that the device reports."""

import dataclasses
import re
import types

import pytest
import torch
from support.all_recipes import BLOCKS, ONE_SCALE, RECIPES
from support.helpers import ROOT, TINY, last_run, make_dataset, write_config

from common.errors import UserError
from ops.recipe import CHECKED, EMULATED, NATIVE
from training.configuration.keys import TrainConfig
from training.hardware.capability import CPU, CUDNN, TABLE, TORCH, capability, lookup
from training.optimization.low_precision import emulation_warnings, require_low_precision

# what each must have: cuDNN attention by name, backends with packages, bf16, fp8
EXPECTED = {
    (7, 5): (False, (), False, False),
    (8, 0): (False, ("flash_attn_2",), True, False),
    (8, 6): (False, ("flash_attn_2",), True, False),
    (8, 9): (False, ("flash_attn_2",), True, True),
    (9, 0): (True, ("flash_attn_4", "flash_attn_3", "flash_attn_2"), True, True),
    (10, 0): (True, ("flash_attn_4", "flash_attn_2"), True, True),
    (10, 3): (True, ("flash_attn_4", "flash_attn_2"), True, True),
    (12, 0): (False, ("flash_attn_4", "flash_attn_2"), True, True),
    (12, 1): (False, ("flash_attn_4", "flash_attn_2"), True, True),
}


@pytest.mark.parametrize("compute", EXPECTED)
def test_a_gpu_has_what_its_capability_has(monkeypatch, compute):
    properties = types.SimpleNamespace(name="NVIDIA Something", major=compute[0], minor=compute[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    here = capability("cuda")
    facts = (CUDNN in here.sdpa, here.flash_attn, here.bf16, here.fp8)
    assert facts == EXPECTED[compute]
    assert (here.compute, here.name) == (compute, "NVIDIA Something")
    blocks = CHECKED if compute[0] == 10 else EMULATED if here.bf16 else None
    for kind in ONE_SCALE.values():
        assert kind.support(here) == (NATIVE if here.fp8 else None)
    assert [kind.support(here) for kind in BLOCKS.values()] == [blocks, blocks]


def test_every_row_ends_with_the_kernel_that_always_runs_and_is_expected_above():
    assert set(TABLE) <= set(EXPECTED)
    assert all(row.sdpa[-1] == TORCH for row in TABLE.values())


def test_an_unknown_minor_number_is_taken_for_the_last_known_one_before_it_and_a_major_one_for_none():
    for unknown, known in (((8, 7), (8, 6)), ((9, 4), (9, 0)), ((10, 1), (10, 0)), ((10, 7), (10, 3))):
        assert lookup(unknown, "") == dataclasses.replace(lookup(known, ""), compute=unknown)
    for compute in ((11, 0), (13, 0), (20, 5)):  # what torch promises and no more
        here = lookup(compute, "")
        assert (here.sdpa, here.bf16, here.fp8) == ((TORCH,), True, True)


def test_a_cpu_is_never_asked_for_cuda_and_emulates_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert capability("cpu") == capability(torch.device("cpu")) == CPU
    assert (CPU.compute, CPU.sdpa, CPU.flash_attn, CPU.fp8) == (None, (TORCH,), (), False)
    assert [kind.support(CPU) for kind in RECIPES.values()] == [EMULATED] * 4


def test_a_recipe_on_a_gpu_that_cannot_run_it_is_an_error_that_says_what_to_set():
    with pytest.raises(UserError) as error:
        require_low_precision(TrainConfig(low_precision="mxfp8"), lookup((7, 0), "Tesla V100-SXM2-32GB"))
    assert str(error.value) == (
        "low_precision='mxfp8' needs bfloat16 (compute capability 8.0 or above), in which it is "
        "emulated, but Tesla V100-SXM2-32GB has 7.0; set --low_precision=none"
    )
    with pytest.raises(UserError, match="needs fp8 tensor cores .* but NVIDIA A100-SXM4-80GB has 8.0; set"):
        require_low_precision(
            TrainConfig(low_precision="fp8_delayed"), lookup((8, 0), "NVIDIA A100-SXM4-80GB")
        )


def test_nothing_else_asks_for_the_capability():
    patterns = ("*.py", "training/**/*.py", "ops/**/*.py", "recipes/**/*.py", "bench/*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    asks = re.compile(r"get_device_capability|\.(major|minor)\b")
    assert [path.name for path in files if asks.search(path.read_text())] == ["capability.py"]


@pytest.mark.parametrize("recipe", ["none", *RECIPES])
def test_a_recipe_that_is_only_emulated_warns_and_names_a_faster_one(recipe):
    config = TrainConfig(low_precision=recipe)
    for compute, name in (((8, 0), "A100"), ((9, 0), "H100"), ((12, 0), "RTX 5090"), ((10, 0), "B200")):
        here, blocks = lookup(compute, name), recipe in BLOCKS
        warnings = emulation_warnings(config, here)
        assert len(warnings) == (blocks and name != "B200")
        if blocks:  # on a B200, a run whose check has failed
            (warning,) = emulation_warnings(config, here, EMULATED)
            assert warnings in ([], [warning])
            faster = "none" if name == "A100" else "fp8_tensorwise"
            assert f"emulated on {name}: slower than bf16 (it needs compute capability 10.x" in warning
            assert f"take {faster!r}" in warning
    assert emulation_warnings(config, lookup((10, 0), "B200"), CHECKED) == []


EMULATES = "emulated: slower than bf16"


@pytest.mark.parametrize(
    ("flags", "row", "others"),
    [
        (["--gpu=B200"], "native after the check at the start\n", None),
        (["--gpu=RTX-5090"], EMULATES, "emulated on NVIDIA GeForce RTX 5090: slower than bf16"),
        (["--gpu=B200", "--low_precision=fp8_tensorwise"], "native\n", None),
        (["--gpu=A100", "--low_precision=fp8_tensorwise"], "refused\n", "cannot run fp8_tensorwise"),
        ([], "native after the check at the start on B200, B300, GB200\n", ""),
        (["--low_precision=fp8_delayed"], "native on B200, .*, H100, .*, L40S, ", ""),
        (["--device=cpu"], EMULATES, "emulated on the CPU"),
        (["--device=cpu", "--dry_run=False", "--max_iters=1"], EMULATES, "emulated on the CPU: slower"),
    ],
)
def test_a_dry_run_and_a_run_say_what_is_emulated(run, tmp_path, capfd, flags, row, others):
    keys = {**TINY, "dtype": "bfloat16", "n_embd": 64, "d_ff": 128, "low_precision": "mxfp8"}
    keys |= {"dataset": make_dataset(tmp_path / "t"), "out_dir": tmp_path / "o", "device": "cuda"}
    config = write_config(tmp_path / "run.py", **keys)
    assert run(config, "--dry_run=True", *flags) == 0
    said = capfd.readouterr().out
    assert re.search(f"{'  low precision:':<28} {row}", said)
    assert others in said if others is not None else "emulated" not in said
    if "--dry_run=False" in flags:
        info = last_run(tmp_path / "o")["startup_info"]
        assert info["low_precision"]["support"] == EMULATED
        assert any("emulated" in text for text in info["warnings"])
    else:
        assert run(config, "--dry_run=True", *flags, "--low_precision=none") == 0
        assert "low precision" not in capfd.readouterr().out
