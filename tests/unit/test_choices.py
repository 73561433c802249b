"""A setting that names a class: the core's own, one of recipes/, anybody's module."""

import subprocess
import sys

import pytest
from support import no_recipe
from support.helpers import ROOT

from common.errors import UserError
from training.configuration.choices import CHOICES, find, names_of
from training.optimization.optimizer import Optimizer


def test_each_name_finds_the_class_of_its_module():
    found = {name: find("low_precision", name).__module__ for name in names_of("low_precision")}
    assert found == {
        "none": "ops.recipe",
        "fp8_tensorwise": "ops.float8_recipe",
        "fp8_delayed": "recipes.fp8_delayed",
        "mxfp8": "recipes.mxfp8",
        "nvfp4": "recipes.nvfp4",
    }
    assert [find("ffn_backend", name).__module__ for name in ("torch", "quack")] == [
        "ops.ffn_backend",
        "recipes.quack",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp4", "low_precision='mxfp4': recipes.mxfp4 cannot be imported"),
        ("of.nobody", "low_precision='of.nobody': of.nobody cannot be imported (No module named 'of')"),
        ("common.units", "the module common.units has no class named RECIPE"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_setting_and_module(name, words):
    with pytest.raises(UserError) as error:
        find("low_precision", name)
    assert words in str(error.value)


class Unfinished(Optimizer):
    def step(self, rate, divisor, found_inf):
        pass


@pytest.mark.parametrize("key", CHOICES)
def test_a_class_that_does_not_answer_what_is_asked_is_refused(monkeypatch, key):
    monkeypatch.setattr(no_recipe, CHOICES[key].attribute, Unfinished, raising=False)
    with pytest.raises(UserError) as error:
        find(key, "support.no_recipe")
    base = CHOICES[key].base
    missing = f"Unfinished is without keeps, which {base} leaves to it; CONTRIBUTING.md shows one"
    other = f"Unfinished is no subclass of {base}; CONTRIBUTING.md shows one"
    assert str(error.value) == f"{key}='support.no_recipe': {missing if key == 'optimizer' else other}"


@pytest.mark.parametrize("shadow", ["recipes.py", "recipes/__init__.py"])
def test_a_users_own_recipes_beside_the_script_does_not_shadow_the_package(tmp_path, shadow):
    """Nor does one that the user's configuration has imported."""
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("NAMES = None\nsoup = 'a user has it'\n")
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "if sys.argv[1:]: import recipes; assert recipes.soup\n"
        "from training.configuration.choices import find, names_of\n"
        "print(*names_of('low_precision'), find('low_precision', 'mxfp8').__module__)\n"
        "import recipes.nvfp4; print(recipes.nvfp4.__file__)\n"
    )
    for flags in ([], ["imported"]):
        command = [sys.executable, "script.py", *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        names = "none fp8_tensorwise fp8_delayed mxfp8 nvfp4 recipes.mxfp8"
        assert done.stdout == f"{names}\n{ROOT / 'recipes/nvfp4.py'}\n", done.stderr
