"""Every recipe of low precision by its name, as a run finds it, and its layers by themselves."""

import torch

from ops.linear import Linear, refresh_weights
from ops.recipe import Place
from recipes.block_recipe import BlockRecipe
from recipes.fp8_delayed import Delayed, DelayedLinear, Scaling
from training.configuration.choices import find, names_of
from training.configuration.keys import TrainConfig
from training.hardware.capability import capability

E5M2 = torch.float8_e5m2
RECIPES = {name: find("low_precision", name) for name in names_of("low_precision") if name != "none"}
BLOCKS = {name: kind for name, kind in RECIPES.items() if issubclass(kind, BlockRecipe)}
ONE_SCALE = {name: kind for name, kind in RECIPES.items() if name not in BLOCKS}  # for a whole matrix
EMULATED = {name: kind.emulated for name, kind in BLOCKS.items()}  # their layers
SCALED = {name: kind.scaled for name, kind in BLOCKS.items()}


def place_of(device="cpu", seed=1) -> Place:
    """One rank's, with as many tokens as every recipe can have."""
    device = torch.device(device)
    return Place(device, capability(device), seed, 128, 128, lambda found: next(filter(None, found), None))


def recipe_of(name: str, *layers: Linear, seed=1, **keys):
    """The recipe at work on these layers, without a model."""
    named, config = {str(i): layer for i, layer in enumerate(layers)}, TrainConfig(low_precision=name, **keys)
    return RECIPES[name](config, named, {}, place_of(seed=seed))


def use_recipe(layer: Linear, name: str, key=None, gradient_dtype=E5M2) -> Linear:
    """A layer with the same parameters in low precision, its weight quantized. Blocks of numbers are
    emulated, and `key` draws their random bits; a scale of the past has no history."""
    if name in BLOCKS:
        low = EMULATED[name](layer, key)
    elif RECIPES[name] is Delayed:
        scalings = [Scaling(*torch.zeros(2, device=layer.weight.device)) for _ in range(3)]
        low = DelayedLinear(layer, gradient_dtype, *scalings)
    else:
        low = recipe_of(name, layer).convert(layer, 0, False)
        low.gradient_dtype = gradient_dtype
    refresh_weights(low)
    return low


def use_recipe_in(module: torch.nn.Module, name: str) -> None:
    """Every Linear of the module gives its place to one in low precision."""
    for path, layer in list(module.named_modules()):
        if isinstance(layer, Linear):
            module.set_submodule(path, use_recipe(layer, name))
