"""Reads the fields of a config.json, which anybody may have written."""

from __future__ import annotations

from typing import Any

import rope_scaling
from common.errors import UserError
from common.text import shown

LARGEST = 2**53  # whole numbers of JSON beyond this are not exact


class ConfigFields:
    """Every method raises UserError. `where`: the file's name in messages."""

    def __init__(self, fields: dict[str, Any], where: str):
        self.fields, self.where = fields, where

    def refused(self, what: str, why: str) -> UserError:
        return UserError(f"{self.where} has {what}, which nanoMFU cannot read: {why}")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < LARGEST:
            got = "is missing" if value is None else f"is {shown(value)}"
            raise UserError(f"{self.where}: {name} {got}; it must be a whole number above 0")
        return value

    def number(self, name: str, default: float, stated: object = None) -> float:
        """`stated`: found elsewhere than at the top."""
        value = self.fields.get(name) if stated is None else stated
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < LARGEST:  # type: ignore[operator]  # a number
            raise UserError(f"{self.where}: {name} is {shown(value)}; it must be a number above 0")
        return float(value)  # type: ignore[arg-type]  # a number

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise UserError(f"{self.where}: {name} is {shown(value)}; it must be true or false")
        return value

    def require(self, name: str, *allowed: object) -> None:
        value = self.fields.get(name, allowed[0])
        if value not in allowed or type(value) not in map(type, allowed):
            raise self.refused(f"{name}={shown(value)}", f"it must be {' or '.join(map(repr, allowed))}")

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(rope_theta, rope_scaling), from either spelling."""
        given: dict[str, Any] = {}
        for spelling in ("rope_parameters", "rope_scaling"):
            parameters = self.fields.get(spelling) or {}
            if not isinstance(parameters, dict):
                raise UserError(f"{self.where}: {spelling} is {shown(parameters)}; it must be an object")
            stated = {"rope_type": parameters.get("type"), **parameters}
            for name, value in stated.items():
                if value is not None and given.setdefault(name, value) != value:
                    both = f"{shown(given[name])} in rope_parameters and {shown(value)} in rope_scaling"
                    raise self.refused(f"{name}={both}", "they must be equal")
        theta = self.number("rope_theta", 10_000.0, given.pop("rope_theta", None))
        given.pop("type", None)
        kind = given.pop("rope_type", "default")
        if given.pop("partial_rotary_factor", self.fields.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise self.refused("partial_rotary_factor", "all of a head is rotated here")
        if nested := [name for name, value in given.items() if isinstance(value, dict)]:
            raise self.refused(f"rope_parameters of {shown(nested[0])}", "all layers have the same here")
        if kind == "default":
            return theta, None
        if given.get("truncate") is True:  # the bounds of YaRN's ramp are whole pairs, as without it
            del given["truncate"]
        if kind in ("yarn", "llama3"):  # transformers' default
            given.setdefault("original_max_position_embeddings", self.fields.get("max_position_embeddings"))
        try:
            return theta, rope_scaling.parse({"rope_type": kind, **given}).to_dict()
        except ValueError as error:
            raise self.refused(f"rope_type={shown(kind)}", str(error)) from None
