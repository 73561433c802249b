"""What the tests of tools.tune share: a config, a machine, and a speed for each setting."""

from support.helpers import SMALL, write_config

from tools.tune.settings import Settings
from training.configuration.files_and_flags import load_config
from training.memory.gpus import DeviceMemory

SEQUENCES = 48  # of a GPU, in an iteration: 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 divide them
GAINS = {  # the speed of a value, as a multiple of the careful one's
    "activation_checkpointing": {"selective": 1.1, "attention": 1.12, "memory_bound": 1.15, "none": 1.2},
    "loss_chunks": {4: 1.005, 1: 1.02},
    "use_cuda_graphs": {True: 1.04},
    "use_zero1": {True: 1.05},
    "use_fsdp": {True: 0.97},
}


def make_config(folder):
    """48 sequences an iteration on each of two GPUs, or 96 on one; nothing is started with it."""
    keys = {**SMALL, "batch_size": "auto", "gradient_accumulation_steps": "auto", "dataset": "quickstart"}
    keys |= {"block_size": 2048, "tokens_per_iter": 2 * SEQUENCES * 2048}
    return load_config([str(write_config(folder / "small.py", **keys))], 2)


def make_settings(config, gib=139.8, processes=2, fixed=()):
    return Settings(config, processes, DeviceMemory(gib, "NVIDIA H200"), set(fixed))


def speed_of(setting):
    speed = 1e6 * min(setting["batch_size"], 16) ** 0.5
    for key, gains in GAINS.items():
        speed *= gains.get(setting[key], 1.0)
    return speed


def good(speed, noise=0.0):
    """A run as bench/runner.py leaves it."""
    rows = [speed * (1 + noise + wobble) for wobble in (-1e-4, 0.0, 0.0, 1e-4)]
    found = {"tokens_per_sec": rows, "mfu_percent": [50.0], "max_allocated_gb": 10.0}
    return {"reason": None, "measurement": found}
