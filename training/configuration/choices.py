"""Finds the class that a setting names: a recipe of low precision, an optimizer, a feed-forward backend.

    --low_precision=fp8_tensorwise    the core's own, in the table below
    --low_precision=NAME              recipes/NAME.py
    --low_precision=package.module    anybody's: a module that can be imported, whose RECIPE it is

A module is imported only when a setting asks for it. The tables have names alone, so that --help needs no
torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.errors import UserError
from common.text import one_line, shown

PACKAGE = Path(__file__).parents[2] / "recipes"


class Choice(NamedTuple):
    attribute: str  # what a module calls the class that it offers
    base: str  # of which that is a subclass
    core: dict[str, str]  # {name: module}


CHOICES = {
    "low_precision": Choice(
        "RECIPE", "ops.recipe.Recipe", {"none": "ops.recipe", "fp8_tensorwise": "ops.float8_recipe"}
    ),
    "ffn_backend": Choice("FFN_BACKEND", "ops.ffn_backend.FfnBackend", {"torch": "ops.ffn_backend"}),
    "optimizer": Choice(
        "OPTIMIZER",
        "training.optimization.optimizer.Optimizer",
        {"adamw": "training.optimization.adamw", "muon": "training.optimization.muon"},
    ),
}


def names_of(key: str) -> tuple[str, ...]:
    """What a setting may say, beside package.module."""
    return (*CHOICES[key].core, *_recipes().NAMES.get(key, ()))


def is_module(value: object) -> bool:
    """Whether this value is package.module, and so may be anybody's code."""
    words = value.split(".") if isinstance(value, str) else ()
    return len(words) > 1 and all(word.isidentifier() for word in words)


def find(key: str, name: str) -> Any:
    """The class that this value of the setting names. Raises UserError."""
    attribute, base, core = CHOICES[key]
    path = core.get(name) or (name if is_module(name) else f"{_recipes().__name__}.{name}")
    try:
        found = getattr(importlib.import_module(path), attribute, None)
    except ImportError as error:
        why = one_line(str(error), 200)
        raise UserError(f"{key}={shown(name)}: {path} cannot be imported ({why})") from error
    if not isinstance(found, type):
        raise UserError(f"{key}={shown(name)}: the module {path} has no class named {attribute}")
    module, _, kind = base.rpartition(".")
    wrong = ""
    if not issubclass(found, getattr(importlib.import_module(module), kind)):
        wrong = f"no subclass of {base}"
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        wrong = f"without {' and '.join(missing)}, which {base} leaves to it"
    if wrong:
        raise UserError(f"{key}={shown(name)}: {found.__name__} is {wrong}; CONTRIBUTING.md shows one")
    return found


def _recipes() -> ModuleType:
    """This checkout's package, even where the folder of the script that runs has a recipes.py of its own."""
    module = sys.modules.get("recipes")
    if module is None or Path(module.__file__ or "") != PACKAGE / "__init__.py":
        file, inside = PACKAGE / "__init__.py", [str(PACKAGE)]
        spec = importlib.util.spec_from_file_location("recipes", file, submodule_search_locations=inside)
        assert spec is not None and spec.loader is not None
        module = sys.modules["recipes"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
