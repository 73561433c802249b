"""The documents of the project as tests read them: fences, tables, headings, links."""

import re
import textwrap
from pathlib import PurePosixPath

from support.helpers import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
DOCS = (
    "README.md",
    "TRAINING_GUIDE.md",
    "SYSTEM_OVERVIEW.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "mfu_versions/README.md",
    *PAGES,
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCS}
EVERYTHING = "\n".join(TEXTS.values())
FENCE = re.compile(r"^ *``` *([^\n`]*)\n(.*?)^ *``` *$", re.M | re.S)


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block, also in lists."""
    return [(language.strip(), textwrap.dedent(content)) for language, content in FENCE.findall(text)]


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def table(text: str, first_heading: str) -> list[list[str]]:
    """The cells of every row below `| first_heading |`; of all such tables in the text, one after another."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif inside and not set(line) <= set("|-"):
            rows.append(cells)
        elif cells[0] == first_heading:
            inside = True
    return rows


def headings(text: str, depth: str = "##+") -> list[str]:
    return re.findall(rf"^{depth} +(.+?) *$", prose(text), re.M)


def anchor(heading: str) -> str:
    """The fragment that GitHub gives to a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link in a heading counts by its text
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Every fragment of a document. A second heading of one name gets -1."""
    found: list[str] = []
    for heading in headings(text, "#+"):
        name = anchor(heading)
        same = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.append(f"{name}-{same}" if same else name)
    return set(found)


def links(text: str) -> list[str]:
    """The target of every link and image in the sentences of a document."""
    return re.findall(r"\]\(([^)\s]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", prose(text)))


def resolve(name: str, target: str) -> tuple[str, str]:
    """(path from the root, fragment) of a relative link in the document `name`."""
    path, _, fragment = target.partition("#")
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / path).parts if path else PurePosixPath(name).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts), fragment
