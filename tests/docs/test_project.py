"""The habits of a public project: what an installation needs, once; license, citation, versions, CI."""

import os
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools.config.pyprojecttoml import read_configuration
from support.documents import DOCS, TEXTS
from support.helpers import ROOT
from support.imports import product_files

from training.configuration.rules import TRACKERS
from training.process.torch_build import OLDER_CUDA

# extra -> the file that a user of pip's -r installs instead
EXTRAS = {
    extra: f"requirements/{extra}.txt"
    for extra in ("data", "gpu", "quack", "trackers", "peers", "evaluate", "dev")
}
IN_NO_EXTRA = {"liger-kernel"}  # a peer, of bench.throughput alone


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def installed_by(name: str) -> set[str]:
    """Every requirement of a requirements file, and of those that it names by -r."""
    found = set()
    for line in read(name).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if line.startswith("-r "):
            found |= installed_by(str(Path(name).parent / line.removeprefix("-r ").strip()))
        elif line:
            found.add(str(Requirement(line)))
    return found


@pytest.fixture(scope="module")
def configuration():
    """pyproject.toml as setuptools reads it."""
    return read_configuration(ROOT / "pyproject.toml", expand=False)


# --- installation ---


def test_an_installation_needs_what_the_requirements_files_say_and_brings_no_module(configuration):
    tool, base = configuration["tool"]["setuptools"], installed_by("requirements.txt")
    named = {"": tool["dynamic"]["dependencies"], **tool["dynamic"]["optional-dependencies"]}
    assert not [
        name for entry in named.values() for name in entry["file"] if re.search("^-r", read(name), re.M)
    ]
    assert {extra: set.union(*map(installed_by, entry["file"])) for extra, entry in named.items()} == {
        "": base,
        **{extra: installed_by(file) - base for extra, file in EXTRAS.items()},
    }
    assert base <= installed_by("requirements/dev.txt")
    assert tool["packages"] == tool["py-modules"] == [], "else setuptools looks for some by itself"


def test_a_package_is_required_in_one_file():
    lines = "".join(map(read, ["requirements.txt", *EXTRAS.values(), "requirements/test.txt"]))
    names = [canonicalize_name(name) for name in re.findall(r"^(?!-r)([\w-]+)", lines, re.M)]
    assert "torch" in names and sorted(names) == sorted(set(names))
    (rule,) = re.findall(r"^\$\(VENV\)/\.installed-dev: (.*)$", read("Makefile"), re.M)
    files = re.findall(r"^-r (\S+)", read("requirements/dev.txt"), re.M)
    named = {f"requirements/{file}" for file in files if "/" not in file}
    assert {"requirements/dev.txt", *named} <= set(rule.split()), "make installs again"


def hints() -> list[tuple[str, str]]:
    """(file, what follows `pip install`) of every message in the product code, adjacent literals joined."""
    found = []
    for path in product_files():
        source = re.sub(r'"\s*\n\s*f?"', "", read(path))
        found += [
            (path, hint)
            for hint in re.findall(r"pip install ((?:-r )?[\w/-]+(?:\.txt)?)(?![\w-]|==)", source)
        ]
    return found


def test_messages_say_how_to_install_what_an_extra_has():
    found, everything = set(hints()), set.union(*map(installed_by, ("requirements.txt", *EXTRAS.values())))
    for path, hint in found:
        if hint.startswith("-r "):
            assert hint.removeprefix("-r ") in {"requirements.txt", *EXTRAS.values()}, path
        elif hint not in IN_NO_EXTRA:
            (requirement,) = (one for one in map(Requirement, everything) if one.name == hint)
            assert "==" not in str(requirement), f"{path}: a pinned package is installed from its file"
    for file, packages in (("data", ["huggingface_hub"]), ("trackers", TRACKERS)):
        assert f"-r requirements/{file}.txt" in {hint for _, hint in found}
        named = {Requirement(line).name for line in installed_by(f"requirements/{file}.txt")}
        assert set(packages) <= named


# --- versions that stand in several places ---


def pin(package: str) -> str:
    """The version that a requirements file pins."""
    lines = installed_by("requirements/dev.txt")
    (version,) = (line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))
    return version


def test_documents_ci_and_pre_commit_name_the_torch_and_the_ruff_that_are_pinned():
    ((oldest, newest),) = set(re.findall(r"torch (2\.\d+) to (2\.\d+)", TEXTS["README.md"]))
    assert newest == pin("torch").rpartition(".")[0]
    assert f"torch {oldest}.0" in read("LOG.md")
    assert f"{pin('torch')} is pinned" in TEXTS["README.md"]
    texts = [*(TEXTS[name] for name in DOCS), read(".github/workflows/ci.yml"), read("pyproject.toml")]
    text = "\n".join(texts).replace(OLDER_CUDA, "")
    named = re.findall(r"[\d.]+(?=\+cpu| for Linux)|(?<=torch==)[\d.]+", text)
    assert set(named) == {pin("torch")}
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["rev"] == f"v{pin('ruff')}"
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]


def test_every_file_names_one_version_one_license_and_the_oldest_python(configuration):
    project, citation = configuration["project"], yaml.safe_load(read("CITATION.cff"))
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert isinstance(citation["message"], str) and isinstance(citation["title"], str)
    assert citation["authors"] == [{"name": "nanoMFU authors"}]
    known = "cff-version message type title abstract version license authors keywords"
    assert set(citation) <= set(known.split())  # the format refuses any other key
    (newest, *_) = re.findall(r"^## \[([\d.]+)\]", read("CHANGELOG.md"), re.M)
    assert project["name"] == "nanomfu"
    assert project["version"] == str(citation["version"]) == newest
    assert project["license"] == citation["license"] == "MIT"
    assert project["license-files"] == ["LICENSE"]
    assert read("LICENSE").startswith("MIT License\n\nCopyright (c) 2026 the nanoMFU authors\n")
    assert project["requires-python"] == ">=3.10" and "Python 3.10 or newer" in read("README.md")
    assert "sys.version_info < (3, 10)" in read("Makefile")
    assert configuration["tool"]["ruff"]["target-version"] == "py310"


# --- files of public hosts ---


def test_ci_runs_what_the_project_runs_with_the_oldest_python_and_torch_for_a_cpu():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    (job,) = workflow["jobs"].values()
    steps = {step["run"]: step.get("if") for step in job["steps"] if "run" in step}
    assert steps == {".ci/run": None, "make test-all": "github.event_name == 'schedule'"}
    assert workflow[True]["schedule"]  # YAML 1.1 reads the key "on" so
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.12"]  # as texts: the number 3.10 is 3.1
    assert job["env"]["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"
    assert workflow["permissions"] == {"contents": "read"}
