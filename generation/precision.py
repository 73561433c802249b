"""The dtype in which a model computes when it only makes or scores text."""

from __future__ import annotations

from model import Transformer
from training.configuration.dtypes import DTYPES


def compute_in(model: Transformer, dtype: str) -> None:
    """Converts matrices once; vectors are converted where they are used, as in training."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(DTYPES[dtype])
    model.compute_dtype = DTYPES[dtype]
    model.eval()
