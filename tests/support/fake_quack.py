"""A Hopper GPU with QuACK, faked on a CPU: its functions compute our plain forms.

Run by tests/unit/test_fused_feed_forward.py under torchrun, it is support/runs_worker.py on such a machine:

    fake_quack.py COMMANDS.json
"""

import dataclasses
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch

import recipes.quack
from recipes import quack_matmuls as quack
from training import inputs
from training.hardware.capability import CPU

HERE = dataclasses.replace(CPU, compute=recipes.quack.HOPPER)
VERSIONS = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.7.1"}


def metadata_of(versions):
    """In place of importlib.metadata."""

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return SimpleNamespace(version=version, PackageNotFoundError=PackageNotFoundError)


def gemm_act(A, B, activation, tuned):
    assert activation in ACTIVATIONS and not tuned
    return quack.plain_forward(A, B.t(), activation)


def gemm_dact(A, B, PreAct, activation, dynamic_scheduler, tuned):
    assert activation in ACTIVATIONS and not tuned and not dynamic_scheduler
    return quack.plain_backward(A, B, PreAct, activation)


ACTIVATIONS = ("swiglu", "gelu_tanh_approx")  # of QuACK's that we use
INTERFACE = ModuleType("quack.gemm_interface")
INTERFACE.gemm_act, INTERFACE.gemm_dact = gemm_act, gemm_dact
MODULES = {"quack": ModuleType("quack"), INTERFACE.__name__: INTERFACE}
MACHINE = [
    (inputs, "capability", lambda device: HERE),
    (recipes.quack, "metadata", metadata_of(VERSIONS)),
    (torch.version, "cuda", "13.0"),
]


if __name__ == "__main__":
    from support import runs_worker

    sys.modules.update(MODULES)
    for owner, name, value in MACHINE:
        setattr(owner, name, value)
    runs_worker.main(sys.argv[1])
