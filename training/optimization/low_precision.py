"""Puts the recipe that low_precision names to work: chooses its layers, checks that they can be computed so,
and says what computes them. ops/recipe.py says what a recipe is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from common.errors import UserError
from model import Transformer
from ops.linear import Linear
from ops.recipe import EMULATED, NATIVE, Place, Recipe
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.configuration.seeds import LOW_PRECISION, stream_seed
from training.hardware.capability import Capability, capability, dotted
from training.process.world import ALONE, World, gather_objects

FASTER = "fp8_tensorwise"  # than bf16, where it is native

Layers = dict[str, Linear]


def recipe_class(config: TrainConfig) -> type[Recipe]:
    """Raises UserError."""
    found: type[Recipe] = find("low_precision", config.low_precision)
    return found


def use_recipe(model: Transformer, config: TrainConfig, world: World = ALONE) -> Recipe:
    """Gives the Linear layers that low_precision is for their recipe; refresh_weights fills what it keeps of
    weights. Embeddings and norms never have any. Raises UserError for a width or a number of tokens that the
    recipe cannot have, and RunError for a GPU on which a kernel stores wrong numbers. All ranks."""
    kind, (layers, head) = recipe_class(config), low_precision_layers(model, config)
    device, tokens = next(model.parameters()).device, config.micro_batch * config.block_size
    chunks = config.logit_parts if head else 1
    _check_tokens(config, kind.multiple, tokens, chunks)
    for path, layer in (layers | head).items():
        assert not layer.weight.is_meta, f"{path}: init_weights comes first"
        _check_widths(config, kind.multiple, path, layer)

    def first_reason(found: Iterable[str | None]) -> str | None:
        reasons = gather_objects(next(filter(None, found), None), world)
        return next((f"rank {rank}: {one}" for rank, one in enumerate(reasons) if one), None)

    seed = stream_seed(config.seed, LOW_PRECISION, world.rank) >> 1
    place = Place(device, capability(device), seed, tokens, tokens // chunks, first_reason)
    recipe = kind(config, layers, head, place)
    for path, layer in recipe.linears.items():
        model.set_submodule(path, layer)
    if recipe.linears and device.type == "cuda":  # what comparisons took, up to 2 GB, is not the run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return recipe


def low_precision_layers(model: Transformer, config: TrainConfig) -> tuple[Layers, Layers]:
    """The Linear layers that compute in low precision, by their path in the model: of blocks, of the head."""
    if config.low_precision == "none":
        return {}, {}
    blocks = range(config.low_precision_skip_first, len(model.blocks) - config.low_precision_skip_last)
    layers = {path: one for i in blocks for path, one in _linears(model.blocks[i], f"blocks.{i}").items()}
    return layers, _linears(model.head, "head") if config.low_precision_scope == "layers_and_head" else {}


def _linears(module: nn.Module, path: str) -> Layers:
    return {name: one for name, one in module.named_modules(prefix=path) if isinstance(one, Linear)}


def _check_widths(config: TrainConfig, multiple: int, path: str, layer: Linear) -> None:
    if any(width % multiple for width in layer.weight.shape):
        raise UserError(
            f"low_precision={config.low_precision!r} needs matrices whose sides are multiples of "
            f"{multiple}, but {path} is {tuple(layer.weight.shape)}; change n_embd, "
            "head_dim, d_ff or vocab_size, or set low_precision='none'"
        )


def _check_tokens(config: TrainConfig, multiple: int, tokens: int, chunks: int) -> None:
    """Weight gradients sum over the tokens of a micro-batch, the head's over those of a part of it."""
    if tokens % (chunks * multiple):
        divided = f", in {chunks} loss_chunks" if chunks > 1 else ""
        raise UserError(
            f"low_precision={config.low_precision!r} needs a multiple of {multiple} tokens, "
            f"but batch_size * block_size is {tokens:,}{divided}; choose another block_size or batch_size"
        )


# --- on a device, before a run ---


def require_low_precision(config: TrainConfig, here: Capability) -> None:
    """Raises UserError if the recipe cannot run here."""
    kind = recipe_class(config)
    if kind.support(here) is None:
        raise UserError(
            f"low_precision={config.low_precision!r} needs {kind.needs}, but {here.name} has "
            f"{dotted(here.compute)}; set --low_precision=none"
        )


def emulation_warnings(config: TrainConfig, here: Capability, support: str | None = None) -> list[str]:
    """What somebody should know who chose a recipe for its speed. support: what a run found, after its
    check."""
    kind = recipe_class(config)
    if (support or kind.support(here)) != EMULATED:
        return []
    name = FASTER if find("low_precision", FASTER).support(here) == NATIVE else "none"
    return [
        f"low_precision={config.low_precision!r} is emulated on {here.name}: slower than bf16 (it needs "
        f"{kind.native_needs}); for speed take {name!r}"
    ]


# --- what a run says ---


def low_precision_line(config: TrainConfig, executed: str | None = None) -> str:
    """'fp8_tensorwise matmuls in layers but the last 4 blocks (native fp8)'. A dry run, which looks at no
    device, does not know what is executed."""
    text = f"{config.low_precision} matmuls in {config.low_precision_scope}"
    counts = {"first": config.low_precision_skip_first, "last": config.low_precision_skip_last}
    if skipped := " and ".join(f"{name} {count} blocks" for name, count in counts.items() if count):
        text += f" but the {skipped}"
    return text + (f" ({executed})" if executed else "")


def describe_recipe(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    """For the start-up report and the record: the recipe, what computes it, in how many layers."""
    if not recipe.linears:
        return {}
    support = recipe.support(recipe.place.here)
    found = {
        "recipe": config.low_precision,
        "scope": config.low_precision_scope,
        "executed": recipe.executed,
        "native": recipe.native,
        "support": support if recipe.native else EMULATED,
        "layers": len(recipe.linears),
    }
    return {"low_precision": found, **recipe.describe()}
