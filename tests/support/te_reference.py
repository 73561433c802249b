"""TransformerEngine's Python reference of NVFP4, without TransformerEngine's libraries for GPUs.

`import transformer_engine` loads them, so the file of the reference is run by its path. It gets the few names
that it imports from stand-ins; none of them takes part in the arithmetic."""

import enum
import importlib.util
import sys
import types
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "transformer_engine.pytorch.custom_recipes"


class Quantizer:
    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class QuantizedTensorStorage:
    pass


class GEMMType(enum.Enum):
    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def nvfp4_reference():
    """The module reference_nvfp4; skips the test if the wheel is not installed."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("pip install transformer-engine==2.20.2: the reference for NVFP4")
    return _load(Path(spec.origin).parent / "pytorch" / "custom_recipes")


@cache
def _load(folder):
    stand_ins = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        PACKAGE: {},
        "transformer_engine.pytorch.quantized_tensor": {
            "Quantizer": Quantizer,
            "QuantizedTensorStorage": QuantizedTensorStorage,
        },
        f"{PACKAGE}.gemm": {"GEMMType": GEMMType, "MMParams": object},
    }
    with pytest.MonkeyPatch.context() as patch:  # nothing else may take the stand-ins for TransformerEngine
        for name, contents in stand_ins.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            patch.setitem(sys.modules, name, module)
        package = sys.modules[PACKAGE]
        package.gemm = sys.modules[f"{PACKAGE}.gemm"]
        for name in ("reference_utils", "reference_nvfp4"):
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, spec.name, module)
            setattr(package, name, module)
            spec.loader.exec_module(module)
    return package.reference_nvfp4
