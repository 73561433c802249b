"""A run whose checkpoint has format 2 continues as if that had format 3: one process, and every strategy."""

import json
import os
import re
import sys

import pytest
from support import warm_python
from support.checkpoint_parts import as_format_2
from support.helpers import (
    ROOT,
    TINY,
    checkpoint_tensors,
    last_run,
    make_dataset,
    run_in_one_launch,
    write_config,
)

pytestmark = [pytest.mark.resume, pytest.mark.damage]

STRATEGIES = {
    "single": (1, []),
    "ddp": (2, []),
    "zero1": (2, ["--use_zero1=True"]),
    "fsdp": (2, ["--use_fsdp=True"]),
}
LLAMA = {"arch_preset": "llama", "num_key_value_heads": 4, "bias": True}  # gated, with biases
KEPT, LAST = "checkpoints/step-00000003", "checkpoints/step-00000006"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """whole-NAME: a run of 6 iterations. older-NAME: a resume from its iteration 3, saved in format 2."""
    folder = tmp_path_factory.mktemp("older")
    keys = {**TINY, **LLAMA, "max_iters": 6, "eval_interval": 3, "dropout": 0.1, "keep_last": None}
    config = write_config(folder / "run.py", **keys, dataset=make_dataset(folder / "data"))
    for processes in (1, 2):
        commands = {
            name: [config, *flags] for name, (count, flags) in STRATEGIES.items() if count == processes
        }
        whole = [[*command, f"--out_dir={folder / f'whole-{name}'}"] for name, command in commands.items()]
        run_in_one_launch(folder, whole, processes)
        for name in commands:
            as_format_2(folder / f"whole-{name}" / KEPT, folder / f"older-{name}" / KEPT)
        older = [[*command, f"--out_dir={folder / f'older-{name}'}"] for name, command in commands.items()]
        run_in_one_launch(folder, [[*command, "--init_from=resume"] for command in older], processes)
    return folder


def rows(out_dir):
    found = last_run(out_dir)["training_iterations"]
    return [(row["iter"], row["loss"], row["gradients"]) for row in found if row["iter"] >= 3]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_resumes_bit_equal_and_then_saves_the_new_format(folder, name):
    older, whole = folder / f"older-{name}", folder / f"whole-{name}"
    up = "model.blocks.1.ffn.up.bias"
    ours, theirs = checkpoint_tensors(older / KEPT), checkpoint_tensors(whole / KEPT)
    assert not ours[up].equal(theirs[up]), "the rows of format 2 are others"
    assert len(rows(older)) == 3 and rows(older) == rows(whole)
    ours, theirs = checkpoint_tensors(older / LAST), checkpoint_tensors(whole / LAST)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)
    formats = [json.loads((older / step / "state.json").read_text())["format"] for step in (KEPT, LAST)]
    assert formats == [2, 3]


@pytest.mark.reshard
@pytest.mark.parametrize("processes", [1, 2])
def test_every_strategy_loads_what_any_other_saved_in_format_2(folder, processes):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    saved = [f"{folder / f'older-{name}' / KEPT}={folder / f'whole-{name}' / KEPT}" for name in STRATEGIES]
    worker = [ROOT / "tests/support/load_worker.py", folder / "run.py", *saved]
    done = warm_python.run(
        [sys.executable, *(launcher if processes > 1 else []), *map(str, worker)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.search(r"loaded (\d+) pairs", done.stdout)[1]) == len(STRATEGIES) * {1: 3, 2: 4}[processes]
