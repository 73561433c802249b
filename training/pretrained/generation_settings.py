"""Where generated text ends, and generation_config.json of an export: as with the weights that the run began
with.
"""

from __future__ import annotations

from typing import Any

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def end_ids(began_with: dict[str, Any], eot_id: int | None) -> list[int]:
    """The ids at which text of a run ends: those at which transformers' generate ends with the weights that
    it began with, and the end-of-text id of its dataset."""
    found: list[int] = []
    for source in ("generation", "config"):
        named = began_with.get(source, {}).get("eos_token_id")
        found = found or [one for one in (named if isinstance(named, list) else [named]) if type(one) is int]
    return list(dict.fromkeys([*found, *([] if eot_id is None else [eot_id])]))


def exported_generation(
    began_with: dict[str, Any], config: dict[str, Any], eot_id: int | None
) -> dict[str, Any]:
    """The content for an exported folder with this config.json: every setting of the first weights, so that
    generate ends where sample.py ends with the checkpoint."""
    known = {name: config[name] for name in IDS if config[name] is not None}
    settings = began_with.get("generation") or {"_from_model_config": True}
    ends = end_ids(began_with, eot_id)
    return known | settings | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})
