"""The house: which file may import which. Imports point down one list, and no files import each other in a
circle, also not by imports inside functions or under TYPE_CHECKING."""

import ast
import graphlib
import re

import pytest
from support.helpers import ROOT
from support.imports import ORDER, graph, product_files, read_sources, room_of


def arrows_up(arrows: dict[str, set[str]]) -> list[str]:
    return [
        f"{path} imports {other}, which stands above it"
        for path, others in sorted(arrows.items())
        for other in sorted(others)
        if ORDER.index(room_of(other)) < ORDER.index(room_of(path))
    ]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The files of one circle; none if there is none."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def arrows():
    return graph(read_sources())


def test_imports_point_down(arrows):
    assert arrows_up(arrows) == []


def test_no_files_import_each_other_in_a_circle(arrows):
    assert circle(arrows) == []


def test_what_a_run_says_and_what_fits_meet_only_as_values(arrows):
    rooms = {"training/records/*", "training/memory/*"}
    crossing = [
        f"{path} imports {other}"
        for path, others in arrows.items()
        for other in others
        if {room_of(path), room_of(other)} == rooms
    ]
    assert crossing == []


def test_every_package_says_what_its_job_is():
    packages = {path for path in product_files() if path.endswith("/__init__.py")}
    assert {f"{folder}/__init__.py" for folder in ("training", "ops", "bench", "data")} <= packages
    for path in packages:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert len(ast.get_docstring(tree) or "") > 40, f"{path} has no docstring"
        assert len(tree.body) == 1, f"{path} does more than that"


@pytest.mark.parametrize(
    ("path", "source", "other"),
    [
        ("ops/linear.py", "def late():\n    import training.evaluation", "training/evaluation.py"),
        ("model.py", "from training import evaluation", "training/evaluation.py"),
        (
            "training/batches/loader.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from training.strategies.fsdp import Fsdp",
            "training/strategies/fsdp.py",
        ),
        ("training/records/rows.py", "importlib.import_module('training.faults.x')", "training/faults/x.py"),
    ],
)
def test_an_arrow_that_points_up_is_found_wherever_it_stands(path, source, other):
    assert arrows_up(graph({other: "", path: source})) == [f"{path} imports {other}, which stands above it"]


def test_a_circle_through_a_function_is_found():
    sources = {"ops/a.py": "import ops.b", "ops/b.py": "def late():\n    from ops.a import f", "ops/c.py": ""}
    assert set(circle(graph(sources))) == {"ops/a.py", "ops/b.py"}


def test_a_file_without_a_place_is_an_error():
    with pytest.raises(AssertionError, match="helpers/things.py has no place in ORDER"):
        arrows_up(graph({"helpers/things.py": "import train", "train.py": ""}))


def test_the_model_reads_like_the_paper():
    """In which precision an operation runs, what is recomputed and which backend computes it comes from
    outside:
    ops/activation.py, convert() of ops/quantized_linear.py, ops/recompute.py, training/."""
    text = (ROOT / "model.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 275
    words = r"precision|quanti[sz]|fp8|float8|amax|recomput|checkpoint|backend|quack"
    assert re.findall(words, text, re.IGNORECASE) == []
