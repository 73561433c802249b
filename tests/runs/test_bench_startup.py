"""bench.startup: the seconds of a cold and a warm start, from real runs."""

import json

import pytest
from support.helpers import TINY, write_config

from bench import startup
from common.errors import UserError


def test_cold_and_warm_start_have_their_seconds(tmp_path, capsys):
    config = str(write_config(tmp_path / "run.py", **{**TINY, "compile": False}))
    assert startup.main([config, "--dataset=random", f"--output={tmp_path / 'out'}"]) == 0
    results = json.loads((tmp_path / "out" / "table.json").read_text())["results"]
    assert [result["start"] for result in results] == ["cold", "warm"]
    for result in results:
        assert result["to_the_loop_s"] > 1.0  # importing torch alone takes longer
        assert result["first_iteration_s"] > 0 and result["third_iteration_s"] > 0
        assert result["inductor_s"] == 0.0 and result["own_kernels_compiled"] == 0  # nothing is compiled here
    assert "| cold " in (printed := capsys.readouterr().out) and "| warm " in printed


def test_the_table_has_the_median_of_the_repeats():
    """A result also has the account of each phase and kernel, of which there is no median."""
    numbers = {"first_iteration_s": 9.0, "third_iteration_s": 0.2, "inductor_s": 4.0, "own_kernels_s": 2.0}
    numbers |= {"own_kernels_compiled": 12, "own_kernels_read": 0, "kernels_s": {"norm": 0.5}}
    results = [
        {"start": "cold", "repeat": repeat, "to_the_loop_s": 5.0 + repeat, **numbers} for repeat in (1, 2, 3)
    ]
    (row,) = [line for line in startup.table(results) if line.startswith("| cold")]
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["7.00", "9.00"]


def test_start_that_fails_is_a_line_with_its_reason(tmp_path, capsys):
    config = str(write_config(tmp_path / "run.py", **TINY, dataset=str(tmp_path / "absent")))
    assert startup.main([config, f"--output={tmp_path / 'out'}"]) == 1
    assert str(tmp_path / "absent") in capsys.readouterr().out.split("warm, repeat 1: ")[1]


@pytest.mark.parametrize("arguments", [["absent.py"], ["config/quickstart.py", "--n_head=5"]])
def test_a_config_that_is_refused_starts_nothing(arguments, tmp_path):
    with pytest.raises(UserError, match="absent.py|n_head=5"):
        startup.main([*arguments, f"--output={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_setting_that_the_benchmark_makes_itself_is_refused(tmp_path):
    with pytest.raises(UserError, match="eval_interval"):
        startup.main([str(write_config(tmp_path / "run.py", **TINY)), "--eval_interval=5"])
