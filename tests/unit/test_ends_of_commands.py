"""What a command says of errors that are about the machine, or about a file that somebody else has written:
one line, never a traceback."""

import json
import resource
import subprocess
import sys

import pytest
from support.helpers import ROOT, TINY, last_run, make_dataset, write_config

from common.command import USER_ERROR, run_command
from common.errors import UserError, os_error_text
from common.json_file import parse_object, read_json
from docs import generate
from plots import plot_single_run, report
from plots.figure import save
from tools import track


def test_a_small_file_is_read_in_little_memory(tmp_path):
    """A reader that allows 1 GiB must not ask for it."""
    path, limit = tmp_path / "small.json", 300 << 20
    path.write_text("{}")
    program = (
        f"import pathlib; from common.json_file import read_json; read_json(pathlib.Path({str(path)!r}))"
    )
    little = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, **little)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="more than 1"):
        read_json(path, 1)


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A record that is nested 900 deep: json reads it, and what walks through it does not."""
    path = tmp_path_factory.mktemp("nested") / "run_20260101_000000.json"
    content = {"run_name": path.stem, "config": {"seed": DEEP}, "startup_info": {"model": DEEP}}
    path.write_text(json.dumps({**content, "training_iterations": [{"iter": 0, "loss": 1.0, "mfu": DEEP}]}))
    return path


@pytest.mark.parametrize("main", [plot_single_run.main, report.main, track.main], ids=lambda f: f.__module__)
def test_a_record_that_is_nested_deep_is_read_or_refused_in_one_line(main, nested, capsys):
    arguments = [str(nested)] + ["--trackers=tensorboard"] * (main is track.main)
    status, message = run_command(main, arguments), capsys.readouterr().err
    assert status == 0 or (message.count("\n") == 1 and "nested" in message), message


def test_json_is_nested_64_levels_at_most_whatever_stands_beside():
    def nested(depth: int) -> bytes:
        inside = "[" * (depth - 2) + "]" * (depth - 2)
        return f'{{"x": [[], 1, {{}}, {inside}], "y": 1}}'.encode()

    assert parse_object(nested(64))["y"] == 1
    for depth in (65, 900, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 64 levels"):
            parse_object(nested(depth))


def test_a_dataset_whose_meta_is_nested_deep_is_named(run, tmp_path, capfd):
    tokens = make_dataset(tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    meta["tokenizer"]["deep"] = DEEP
    (tokens / "meta.json").write_text(json.dumps(meta))
    config = write_config(tmp_path / "run.py", **TINY, dataset=tokens, out_dir=tmp_path / "o")
    assert run(config) == USER_ERROR
    said = capfd.readouterr().err
    assert "meta.json" in said and "nested deeper than 64 levels" in said and "Traceback" not in said


def test_a_resume_leaves_out_a_history_that_is_nested_deep(run, tmp_path, capfd):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **keys)
    assert run(config, "--max_iters=2") == 0
    (path,) = (tmp_path / "out").glob("run_*.json")
    content = json.loads(path.read_text())
    content["config"]["seed"] = DEEP
    path.write_text(json.dumps(content))
    assert run(config, "--init_from=resume") == 0
    assert "the rows of earlier attempts are left out" in capfd.readouterr().out
    assert last_run(tmp_path / "out")["status"] == "completed"


def test_a_link_that_leads_nowhere_is_named_as_one(run, tmp_path, capfd):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    said = f"is a link to {tmp_path / 'gone'}, which is not there"
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "link"}
    assert run(write_config(tmp_path / "run.py", **keys)) == USER_ERROR
    assert said in capfd.readouterr().err
    with pytest.raises(OSError) as error:
        (tmp_path / "link").mkdir(exist_ok=True)
    assert os_error_text(error.value).endswith(said)
    with pytest.raises(UserError, match=f"link: {said}"):
        save(None, tmp_path / "link" / "figure.png")


def test_a_document_that_has_lost_its_marker_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "TRAINING_GUIDE.md").write_text("# no marker\n")
    monkeypatch.setattr(generate, "batches", lambda: "a table")
    assert run_command(generate.main) == USER_ERROR
    assert "TRAINING_GUIDE.md has the marker <!-- generated: batches --> 0 times" in capsys.readouterr().err
    assert (tmp_path / "TRAINING_GUIDE.md").read_text() == "# no marker\n"
