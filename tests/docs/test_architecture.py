"""The house: which file may import which. Imports point down one list, and no files import each other in a
circle, also not by imports inside functions or under TYPE_CHECKING."""

import ast
import graphlib
import re

import pytest
from support.helpers import ROOT
from support.imports import ORDER, graph, module_of, product_files, reached, read_sources, room_of

import recipes
from training.configuration.choices import CHOICES


def arrows_up(arrows: dict[str, set[str]]) -> list[str]:
    return [
        f"{path} imports {other}, which stands above it"
        for path, others in sorted(arrows.items())
        for other in sorted(others)
        if ORDER.index(room_of(other)) < ORDER.index(room_of(path))
    ]


@pytest.fixture(scope="module")
def arrows():
    return graph(read_sources())


def test_imports_point_down_and_in_no_circle(arrows):
    assert arrows_up(arrows) == []
    graphlib.TopologicalSorter(arrows).prepare()  # a CycleError has the files of a circle


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
    assert {f"{folder}/__init__.py" for folder in ("training", "ops", "bench", "data", "recipes")} <= packages
    for path in packages:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert len(ast.get_docstring(tree) or "") > 40, f"{path} has no docstring"
        more = ["NAMES"] if path == "recipes/__init__.py" else []  # what choices.py finds there
        assert [ast.unparse(node).split()[0] for node in tree.body[1:]] == more, f"{path} does more than that"


NOT_THE_CORES = re.compile(r"mxfp8|nvfp4|fp8_delayed|block_?scaled", re.IGNORECASE)


def test_recipes_use_operations_and_the_model_and_nobody_imports_them(arrows):
    allowed = {"recipes", "ops", "common", "model.py"}
    for path, others in arrows.items():
        rooms = {one.partition("/")[0] for one in others}
        assert rooms <= allowed if path.startswith("recipes/") else "recipes" not in rooms, path


def test_the_recipes_of_a_setting_are_modules_that_the_finder_names_and_no_others():
    sources = read_sources()
    for key, (attribute, _, core) in CHOICES.items():
        named = {*core.values(), *(f"recipes.{name}" for name in recipes.NAMES.get(key, ()))}
        offers = re.compile(rf"^{attribute} = \w+$", re.MULTILINE)
        offering = {module_of(path) for path, source in sources.items() if offers.search(source)}
        assert offering == named, key


def of_core(arrows) -> set[str]:
    """What a run imports, but for what a setting names in recipes/."""
    paths = {module_of(path): path for path in arrows}
    by_name = [paths[module] for one in CHOICES.values() for module in one.core.values()]
    return reached(arrows, "train.py", *by_name)


def names_in(source: str) -> set[str]:
    """Every name and every text of a source, without comments, docstrings and the help of keys."""
    tree, found, told = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "key":
            told |= {argument for argument in node.args[1:2]}
    for node in ast.walk(tree):
        if node not in told:
            found |= {value for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return found


def test_the_core_names_no_recipe_that_it_does_not_have(arrows):
    sources, core = read_sources(), of_core(arrows)
    assert {"ops/float8_recipe.py", "training/memory/sizes.py"} <= core
    assert [path for path in core if path.startswith("recipes/")] in ([], ["recipes/__init__.py"])
    naming = {path: [*filter(NOT_THE_CORES.search, names_in(sources[path]))] for path in core}
    assert {path: names for path, names in naming.items() if names and "recipes/" not in path} == {}


def test_few_files_outside_of_recipes_mention_one_at_all():
    """By the name of its setting or file, also in comments and docstrings, as an example."""
    others = {path: text for path, text in read_sources().items() if not path.startswith("recipes/")}
    mentioning = {path for path, text in others.items() if re.search(NOT_THE_CORES.pattern, text)}
    assert len(mentioning - {"training/configuration/keys.py"}) <= 4, sorted(mentioning)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        *(("x.nvfp4_amaxes", True), ("if recipe == 'fp8_delayed': pass", True), ("f'{x} in nvfp4'", True)),
        ("low_precision: str = key('mxfp8', 'a recipe')", True),
        ("amax_history: int = key(1024, 'what fp8_delayed keeps', minimum=1)", False),
        ('"""As \'mxfp8\' does."""\nx = 1  # nvfp4', False),
    ],
)
def test_a_name_is_found_wherever_code_has_it(source, found):
    assert any(map(NOT_THE_CORES.search, names_in(source))) == found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/linear.py", "def late():\n    import training.evaluation"),
        ("model.py", "import typing\nif typing.TYPE_CHECKING:\n    from training import evaluation"),
        ("ops/linear.py", "importlib.import_module('training.evaluation')"),
    ],
)
def test_an_arrow_that_points_up_is_found_wherever_it_stands(path, source):
    other = "training/evaluation.py"
    assert arrows_up(graph({other: "", path: source})) == [f"{path} imports {other}, which stands above it"]
    with pytest.raises(AssertionError, match="helpers/things.py has no place in ORDER"):
        arrows_up(graph({"helpers/things.py": "import train", "train.py": ""}))


def test_the_model_reads_like_the_paper():
    """In which precision an operation runs, what is recomputed and which backend computes it comes from
    outside: ops/activation.py, ops/recipe.py, ops/recompute.py, ops/ffn_backend.py, training/."""
    text = (ROOT / "model.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 275
    words = r"precision|quanti[sz]|fp8|float8|amax|recomput|checkpoint|backend|quack"
    assert re.findall(words, text, re.IGNORECASE) == []
