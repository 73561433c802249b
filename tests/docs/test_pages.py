"""The documents as a whole: links, contents, sizes, generated parts, and what must agree with the code."""

import ast
import re

import pytest
from support.documents import (
    DOCS,
    EVERYTHING,
    TEXTS,
    anchor,
    anchors,
    fences,
    headings,
    links,
    resolve,
    table,
)
from support.helpers import ROOT
from support.imports import ORDER, first_sentence, read_sources

from docs.generate import pages

LONGEST = {"README.md": 130, "TRAINING_GUIDE.md": 300, "SYSTEM_OVERVIEW.md": 250, "CONTRIBUTING.md": 150}
LONGEST |= {"CHANGELOG.md": 100}  # lines
WITHOUT_CONTENTS_UP_TO = 100  # lines


# --- links, contents, sizes ---


def broken(name: str, text: str) -> list[str]:
    """The relative links of a document that lead nowhere."""
    found = []
    for target in links(text):
        if re.match(r"\w+:", target):
            continue  # of the web, which a test does not ask
        path, fragment = resolve(name, target)
        if not (ROOT / path).exists():
            found.append(target)
        elif fragment and path.endswith(".md"):
            here = text if path == name else (ROOT / path).read_text(encoding="utf-8")
            found += [target] if fragment not in anchors(here) else []
    return found


@pytest.mark.parametrize("name", DOCS)
def test_every_relative_link_and_its_anchor_resolve(name):
    assert broken(name, TEXTS[name]) == []


@pytest.mark.parametrize("name", DOCS)
def test_a_long_document_begins_with_its_contents(name):
    before = re.split(r"^## ", TEXTS[name], maxsplit=1, flags=re.M)[0]
    sections = [anchor(heading) for heading in headings(TEXTS[name], "##")]
    listed = [target[1:] for target in links(before) if target.startswith("#") and target[1:] in sections]
    assert listed == sections or len(TEXTS[name].splitlines()) <= WITHOUT_CONTENTS_UP_TO


@pytest.mark.parametrize("name", LONGEST)
def test_documents_are_short(name):
    assert len(TEXTS[name].splitlines()) <= LONGEST[name]


def test_readme_links_to_every_page():
    linked = {resolve("README.md", target)[0] for target in links(TEXTS["README.md"])}
    assert sorted({*DOCS, "LOG.md"} - {"README.md"} - linked) == []


def test_a_link_that_leads_nowhere_would_be_found():
    targets = ["absent.md", "plots/absent.md", "#absent", "README.md#absent", "docs/reference.md#keys-absent"]
    text = "# Title\n\n[a](README.md) [c](#title) [d](https://example.org/x.md) "
    assert broken("SYSTEM_OVERVIEW.md", text + " ".join(f"[b]({target})" for target in targets)) == targets
    assert broken("plots/x.md", "[a](../README.md) [b](figure.py) [c](README.md)") == ["README.md"]


# --- what is generated ---


@pytest.mark.parametrize("name", ["docs/reference.md", "docs/your_gpu.md", "TRAINING_GUIDE.md"])
def test_a_generated_page_is_what_the_code_says(name):
    """So the reference has every key, exit status and other name, and the guide every batch."""
    assert TEXTS[name] == pages()[name], "run: python -m docs.generate"


def test_the_tree_shows_every_folder_of_the_product():
    (tree,) = re.findall(r"```\n(train\.py .*?)```", TEXTS["SYSTEM_OVERVIEW.md"], re.S)
    shown, parent = set(), ""
    for indent, name in re.findall(r"^( *)(\S+)", tree, re.M):
        parent = parent if indent else name
        shown.add(parent + name if indent else name)
    packages = {room.removesuffix("*") for room in ORDER if room.endswith("/*") and room != "docs/*"}
    assert packages | {"config/"} == {name for name in shown if name.endswith("/")}
    assert {name for name in ORDER if "/" not in name} - {"rope_scaling.py"} <= shown


def test_every_module_says_in_its_first_sentence_what_it_is_for():
    sentences = {path: first_sentence(source) for path, source in read_sources().items()}
    assert [path for path, text in sentences.items() if not (25 < len(text) < 250 and text[-1] in ".:")] == []


# --- what must agree with the code ---


def calls(tree: ast.AST) -> list[str]:
    """object.method of every call, in the order of the source."""
    found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [func for func in found if isinstance(func, ast.Attribute)]
    named.sort(key=lambda func: (func.end_lineno, func.end_col_offset))
    return [".".join(ast.unparse(func).split(".")[-2:]) for func in named]


def test_the_picture_of_an_iteration_names_the_calls_of_the_loop_in_their_order():
    (loop,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "train.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "loop"
    )
    (body,) = (node for node in loop.body if isinstance(node, ast.For))
    not_drawn = ["logger.wants_gradients", "anomalies.wants_second_look"]
    not_drawn += ["anomalies.pending_verdicts", "anomalies.take_skipped"]
    made = [call for call in calls(body) if call not in not_drawn]
    (drawn,) = (text for language, text in fences(TEXTS["SYSTEM_OVERVIEW.md"]) if "watchdog.check" in text)
    named = re.findall(r"(\w+\.\w+)\(\)", drawn)
    assert sorted(named) == sorted(made)
    before_step = named.index("run.step")
    assert named[:before_step] == [call for call in made if call in named[:before_step]]
    assert named[before_step + 1 :] == [call for call in made if call in named[before_step + 1 :]]


def test_every_marker_and_folder_of_tests_is_explained_and_every_promise_has_tests():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] not in "_."}
    assert {row[0].strip("`/") for row in table(TEXTS["docs/testing.md"], "folder")} == folders
    (block,) = re.findall(r"^markers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    registered = re.findall(r'^    "(\w+): ', block, re.M)
    others = [row[0].strip("`") for row in table(TEXTS["docs/testing.md"], "marker")]
    promised = [row[0] for row in table(TEXTS["docs/checkpoints.md"], "marker") if row[0]]
    assert others == ["gpu", "slow", "chaos"]
    assert promised == [name for name in registered if name not in others]
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in promised if f"pytest.mark.{name}" not in sources] == []


def test_page_of_the_record_has_every_field():
    fields = set()
    paths = [f"training/records/{name}.py" for name in ("rows", "utilization", "run_record", "startup_info")]
    for path in (*paths, "common/run_records.py"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            keys = node.keys if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Assign):
                keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
            constants = (key.value for key in keys if isinstance(key, ast.Constant))
            fields |= {value for value in constants if isinstance(value, str)}
    assert {"mfu_percent", "superseded", "document_length_per_token", "commit"} <= fields
    words = set(re.findall(r"\w+", TEXTS["docs/run-record.md"]))
    assert sorted(fields - words) == []


def test_documents_name_the_parts_of_a_checkpoint_that_the_saver_has():
    saver = (ROOT / "training/checkpoints/saver.py").read_text()
    phases = re.findall(r"`(_\w+)`", " ".join(row[0] for row in table(EVERYTHING, "phase")))
    assert len(phases) == 7 and [phase for phase in phases if f"def {phase}(" not in saver] == []
