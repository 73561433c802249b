"""The house: which file may import which. Imports point down one list, and no files import each other in a
circle, also not by imports inside functions or under TYPE_CHECKING."""

import ast
import graphlib
import subprocess
import textwrap

import pytest
from support.helpers import ROOT

# A file may import those of its own line and of the lines below it. A name that ends in /* stands for the
# files of a folder that have no line of their own.
ORDER = (
    "train.py",
    "sample.py",
    "bench/*",
    "training/*",
    "training/faults/*",
    "training/records/*",
    "training/cuda_graphs/*",
    "training/checkpoints/*",
    "training/optimization/*",
    "training/strategies/*",
    "training/batches/*",
    "training/hardware/*",
    "training/process/*",
    "training/configuration/*",
    "model_builder.py",
    "mfu_versions/*",
    "model.py",
    "ops/*",
    "ops/triton_kernels/*",
    "model_config.py",
    "data/*",
    "data/pipeline/*",
    "data/tokenizers/*",
    "data/folders.py",
    "data/huggingface.py",
    "plots/*",
    "common/*",
)


def product_files() -> list[str]:
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (path for path in done.stdout.split() if (ROOT / path).is_file())  # not those just deleted
    return [path for path in paths if not path.startswith(("tests/", "config/"))]


def line_of(path: str) -> int:
    """Its place in ORDER: by its own name, else by the nearest folder that has one. So each
    data/NAME/prepare.py is as high as the files of data/ itself."""
    folder, found = path, path
    while found not in ORDER:
        assert "/" in folder, f"{path} has no place in ORDER: which room does it belong to?"
        folder = folder.rpartition("/")[0]
        found = f"{folder}/*"
    return ORDER.index(found)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, modules: dict[str, str]) -> set[str]:
    """The files among `modules` ({module: path}) that a source imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are written from the root"
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else str(node.module) for name in found}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {modules[name] for name in names if name in modules}


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """{path: paths that it imports} of {path: source}."""
    modules = {module_of(path): path for path in sources}
    return {path: imports(source, modules) - {path} for path, source in sources.items()}


def arrows_up(arrows: dict[str, set[str]]) -> list[str]:
    return [
        f"{path} imports {other}, which stands above it"
        for path, others in sorted(arrows.items())
        for other in sorted(others)
        if line_of(other) < line_of(path)
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
    return graph({path: (ROOT / path).read_text(encoding="utf-8") for path in product_files()})


def test_imports_point_down(arrows):
    assert arrows_up(arrows) == []


def test_no_files_import_each_other_in_a_circle(arrows):
    assert circle(arrows) == []


def test_every_package_says_what_its_job_is():
    packages = {path for path in product_files() if path.endswith("/__init__.py")}
    assert {f"{folder}/__init__.py" for folder in ("training", "ops", "bench", "data")} <= packages
    for path in packages:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert len(ast.get_docstring(tree) or "") > 40, f"{path} has no docstring"
        assert len(tree.body) == 1, f"{path} does more than that"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("training/process/console.py", "from training.records.rows import Logger"),
        ("ops/linear.py", "def late():\n    import training.evaluation"),
        ("model.py", "from training import evaluation"),
        ("data/tokenizers/files.py", "from data.pipeline.units import Unit"),
        (
            "training/batches/loader.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from training.strategies.fsdp import Fsdp",
        ),
        ("training/records/rows.py", "import importlib\nimportlib.import_module('training.faults.watchdog')"),
    ],
)
def test_an_arrow_that_points_up_is_found_wherever_it_stands(path, source):
    others = {
        "training/records/rows.py": "",
        "training/evaluation.py": "",
        "data/pipeline/units.py": "",
        "training/strategies/fsdp.py": "",
        "training/faults/watchdog.py": "",
    }
    (found,) = arrows_up(graph({**others, path: textwrap.dedent(source)}))
    assert found.startswith(f"{path} imports ")


def test_a_circle_through_a_function_is_found():
    sources = {"ops/a.py": "import ops.b", "ops/b.py": "def late():\n    from ops.a import f", "ops/c.py": ""}
    assert set(circle(graph(sources))) == {"ops/a.py", "ops/b.py"}


def test_a_file_without_a_place_is_an_error():
    with pytest.raises(AssertionError, match="helpers/things.py has no place in ORDER"):
        arrows_up(graph({"helpers/things.py": "import train", "train.py": ""}))
