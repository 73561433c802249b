"""A torch that does not fit is named, with what to type."""

import warnings

import pytest
import torch
from support.documents import TEXTS, table
from support.helpers import TINY, make_dataset, write_config

from common.errors import UserError
from training.configuration.keys import TrainConfig
from training.process import torch_build
from training.process.exit_status import _describe
from training.process.torch_build import LEAST_DRIVER, OLDER_CUDA, SUPPORTED, version_warnings
from training.process.world import check_device

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture
def no_gpu(monkeypatch):
    """no_gpu(error, cuda, version): the error of a run with a torch that finds no GPU and says why."""

    def is_available() -> bool:
        warnings.warn("CUDA initialization: ...", stacklevel=1)
        return False

    def no_gpu(error: Exception, cuda: str | None = "13.0", version: str = "2.13.0+cu130") -> str:
        def init():
            raise error

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(UserError) as raised:
            check_device(TrainConfig())
        return str(raised.value)

    return no_gpu


def test_a_driver_that_is_too_old_gets_the_build_for_it(no_gpu):
    assert no_gpu(RuntimeError(TOO_OLD.format(12060))) == (
        "device='cuda' but the NVIDIA driver, for CUDA 12.6, is too old for torch 2.13.0+cu130; update it to "
        "580 or newer, or take a build for CUDA 12: pip install torch==2.11.0 "
        "--index-url https://download.pytorch.org/whl/cu128"
    )
    for found, cuda, version, least in ((11040, "13.0", "2.13.0+cu130", 580), (11080, "12.8", "2.11.0", 525)):
        said = no_gpu(RuntimeError(TOO_OLD.format(found)), cuda, version)
        assert said.endswith(f"is too old for torch {version}; update it to {least} or newer")
        assert f"for CUDA {found // 1000}.{found % 1000 // 10}, " in said


def test_other_reasons_for_no_gpu_have_the_usual_words(no_gpu):
    for error in (
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
        RuntimeError("No CUDA GPUs are available"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ):
        said = no_gpu(error, None, "2.13.0+cpu")
        assert said.startswith("device='cuda' but torch 2.13.0+cpu finds no CUDA GPU; use --device=cpu, ")


def test_a_supported_torch_is_not_mentioned_and_another_is_named_in_one_line():
    for version in (None, "2.11.0+cu128", "2.12.1", "2.13.0+cpu", "2.13.0a0+git12ab"):  # None: of these tests
        assert version_warnings(*[version] * (version is not None)) == []
    for version in ("2.10.2+cu128", "2.14.0.dev20260901", "1.13.1", "3.0.0"):
        (line,) = version_warnings(version)
        tried = "was not tried with this version of nanoMFU, which supports torch 2.11 to 2.13"
        assert line == f"torch {version} {tried}"


def test_a_run_on_another_torch_says_so_and_goes_on(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch_build, "SUPPORTED", ((1, 11), (1, 13)))
    folder = make_dataset(tmp_path / "t")
    config = write_config(tmp_path / "run.py", **TINY, dataset=folder, out_dir=tmp_path / "o")
    for flag in ("--dry_run=True", "--max_iters=1"):
        assert run(config, flag) == 0
        assert f"warning: torch {torch.__version__} was not tried" in capfd.readouterr().out
    assert "was not tried" in _describe(KeyError("a bug"))[1].splitlines()[-1]


def test_the_table_of_builds_has_the_drivers_and_the_command_of_the_error():
    guide = TEXTS["TRAINING_GUIDE.md"]
    rows = table(guide, "build")
    drivers = {name: driver for name, _, driver, _ in rows}
    for name, driver in drivers.items():
        if name.startswith("CUDA"):
            assert driver.startswith(str(LEAST_DRIVER[int(name.split()[1].split(".")[0])])), name
    assert OLDER_CUDA in guide
    first, last = ("{}.{}".format(*version) for version in SUPPORTED)
    assert f"torch {first} to {last}" in TEXTS["README.md"]
    versions = {name: versions for name, versions, *_ in rows}
    assert versions["CUDA 12.8"] == f"{first} alone"
    assert versions["CUDA 13.0"].startswith(f"{first} to {last}")
