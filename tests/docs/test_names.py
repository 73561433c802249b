"""Every file, setting, flag, message and variable that the documents name exists."""

import ast
import re
import subprocess

import pytest
from support.documents import DOCS, EVERYTHING, TEXTS, prose, table
from support.helpers import ROOT
from support.imports import product_files
from torch.distributed.run import get_args_parser

from docs.reference import VARIABLES
from training.configuration.keys import KEYS
from training.configuration.other_names import ALIASES

# Of several files, of a user's, or of a contributor's.
PLACEHOLDERS = {"config/FILE.py", "prepare.py", "merges.txt", "config/full_NAME.py", "config/smoke_NAME.py"}
PLACEHOLDERS |= {"config/NAME.py", "config/tuned_NAME.py", "data/NAME/prepare.py", "run.py"}
PLACEHOLDERS |= {"ops/X.py", "triton_kernels/X.py"}


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_is_named_exists(name):
    named = set(re.findall(r"(?<![\w./*-])\.?\w[\w./-]*\.(?:py|md|toml|txt)\b", TEXTS[name])) - PLACEHOLDERS
    folders = (ROOT, (ROOT / name).parent)
    assert sorted(file for file in named if not any((folder / file).is_file() for folder in folders)) == []


def test_readme_lists_the_files_at_the_top_as_git_does():
    tracked = {path.split("/")[0] for path in tracked_files()}
    cells = [row[0] for row in table(TEXTS["README.md"], "file")]
    listed = [entry.strip("/") for cell in cells for entry in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert tracked - set(listed) == set(), "tracked, and not in the README's table of files"
    assert [entry for entry in listed if not (ROOT / entry).exists()] == []


@pytest.mark.parametrize("name", [*DOCS, *(f"config/{path.name}" for path in ROOT.glob("config/*.py"))])
def test_every_flag_in_a_sentence_is_a_key(name):
    text = TEXTS.get(name) or re.match(r"(?:#.*\n)*", (ROOT / name).read_text())[0]
    text = re.sub(r"^# {3,}python -m .*$", "", text, flags=re.M)  # test_commands.py checks whole commands
    launcher = {word.strip("-") for action in get_args_parser()._actions for word in action.option_strings}
    known = {*KEYS, *ALIASES, *launcher, "key"}
    assert [key for key in re.findall(r"--(\w+)=", prose(text)) if key not in known] == []


@pytest.mark.parametrize("name", DOCS)
def test_no_document_names_a_path_of_one_machine(name):
    assert re.findall(r"(?<![\w.-])/(?:work|root|tmp|home|mnt)\b", TEXTS[name]) == []


def test_every_message_in_the_troubleshooting_table_is_one_that_the_code_has():
    places = ("train.py", "sample.py", "model_config.py", "training/", "data/", "plots/")
    source = "".join((ROOT / path).read_text() for path in product_files() if path.startswith(places))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent literals are one message
    cells = [row[0] for row in table(EVERYTHING, "message or symptom")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 20
    assert [message for message in messages if message not in source] == []


def test_no_file_cites_a_document_that_is_not_here():
    """Also in comments. Names that tests make up, such as table.md, have no capitals."""
    missing = []
    for path in (path for path in tracked_files() if path.endswith((".py", ".md", ".sh", ".toml", ".yml"))):
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        cited = set(re.findall(r"(?<![\w./-])(?:docs/[\w-]+|(?:\w+/)*[A-Z][A-Z_]+)\.md\b", text))
        missing += [f"{path}: {name}" for name in sorted(cited) if not (ROOT / name).is_file()]
    assert missing == []


def environment_variables(source: str) -> set[str]:
    """Names of the environment that a source reads or sets, as far as they are written out in it."""
    if "os.environ" not in source:
        return set()
    names = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    names |= {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword)}
    return {name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Z]{2,}(?:_[A-Z]+)*", name)}


def test_reference_has_every_environment_variable_that_is_read_or_set():
    used = set().union(*(environment_variables((ROOT / path).read_text()) for path in product_files()))
    used |= set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / "scripts/slurm_train.sh").read_text()))
    used |= set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.M))
    used -= {name for name in used if name.startswith("SLURM_")}
    assert used == set(VARIABLES)
