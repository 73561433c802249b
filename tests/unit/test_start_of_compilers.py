"""When Inductor's compiler processes are started."""

import pytest
from support.helpers import TINY
from torch._inductor.async_compile import AsyncCompile

from training.configuration.keys import TrainConfig
from training.optimization.compile import start_compilers


@pytest.mark.parametrize(
    "device, compiles, started", [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_they_start_ahead_where_a_gpu_needs_them(monkeypatch, device, compiles, started):
    starts = []
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: starts.append(1))
    start_compilers(TrainConfig(**{**TINY, "device": device, "compile": compiles}))
    assert len(starts) == started
