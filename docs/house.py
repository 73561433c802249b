"""Reads rooms, modules and imports: for the map in docs/modules.md and the picture in SYSTEM_OVERVIEW.md."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A file may import those of its own line and of the lines below it. A name that ends in /* stands for the
# files of a folder that have no line of their own.
ORDER = (
    "docs/*",
    "train.py",
    "sample.py",
    "tools/*",
    "tools/evaluate/*",
    "tools/plan/*",
    "tools/profile/*",
    "tools/seal/*",
    "tools/tune/*",
    "bench/*",
    "generation/*",
    "training/*",
    "training/faults/*",
    "training/records/*",
    "training/trackers/*",
    "training/cuda_graphs/*",
    "training/pretrained/*",
    "training/checkpoints/*",
    "training/optimization/*",
    "training/strategies/*",
    "training/batches/*",
    "training/hardware/*",
    "training/process/*",
    "training/configuration/*",
    "model_builder.py",
    "mfu_versions/*",
    "model.py",
    "ops/*",
    "ops/triton_kernels/*",
    "ops/quantization/*",
    "model_config.py",
    "rope_scaling.py",
    "data/*",
    "data/pipeline/*",
    "data/tokenizers/*",
    "data/folders.py",
    "data/huggingface.py",
    "plots/*",
    "common/*",
)
# Not in the picture: what writes the documents, what every room may import, what ops/ alone imports, and
# files for a few rooms.
NOT_DRAWN = ("docs/*", "common/*", "ops/quantization/*", "data/folders.py", "data/huggingface.py")


# --- files and imports ---


def product_files() -> list[str]:
    """Every Python file that git knows, without tests and configurations."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (path for path in done.stdout.split() if (ROOT / path).is_file())  # not those just deleted
    return [path for path in paths if not path.startswith(("tests/", "config/"))]


def room_of(path: str) -> str:
    """Its line in ORDER: its own name, else the nearest folder that has one. So each data/NAME/prepare.py has
    the line of the files of data/ itself."""
    folder, found = path, path
    while found not in ORDER:
        assert "/" in folder, f"{path} has no place in ORDER: which room does it belong to?"
        folder = folder.rpartition("/")[0]
        found = f"{folder}/*"
    return found


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, modules: dict[str, str]) -> set[str]:
    """The files among `modules` ({module: path}) that a source imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are written from the root"
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else str(node.module) for name in found}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return {modules[name] for name in names if name in modules}


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """{path: paths that it imports} of {path: source}."""
    modules = {module_of(path): path for path in sources}
    return {path: imports(source, modules) - {path} for path, source in sources.items()}


def read_sources() -> dict[str, str]:
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in product_files()}


def first_sentence(source: str) -> str:
    """Of a module's docstring: what the module is for."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]


# --- the map ---


def module_map() -> str:
    """The tables of docs/modules.md: a room each, in the order of imports."""
    sources = read_sources()
    rooms = {room: [path for path in sources if room_of(path) == room] for room in ORDER}
    tables = {"Files at the root": [path for path in sum(rooms.values(), []) if "/" not in path]}
    for room, paths in rooms.items():
        folder = room.removesuffix("*")
        if room.endswith("/*"):
            tables[folder] = paths
        elif "/" in room:  # a file of a folder that other rooms of this folder import
            tables[f"{folder.rpartition('/')[0]}/"] += paths
    lines = [" ·\n".join(f"[{title}](#{anchor(title)})" for title in tables)]
    for title, paths in tables.items():
        lines += ["", f"## {title}", ""]
        if (package := f"{title}__init__.py") in paths:
            lines += [first_sentence(sources[package]), ""]
        lines += ["| module | what it is for |", "|---|---|"]
        lines += [f"| `{path}` | {first_sentence(sources[path])} |" for path in paths if path != package]
    return "\n".join(lines)


def anchor(title: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# --- the picture ---


def picture() -> str:
    """The rooms as a Mermaid flowchart, with one arrow for all imports from one room to another."""
    sources = read_sources()
    arrows: dict[str, set[str]] = {room: set() for room in ORDER if room not in NOT_DRAWN}
    for path, others in graph(sources).items():
        if (room := room_of(path)) in arrows:
            arrows[room] |= {room_of(other) for other in others} & arrows.keys() - {room}
    lines = ["```mermaid", "flowchart TD"]
    for room, targets in _without_shortcuts(arrows).items():
        below = " & ".join(_node(target) for target in ORDER if target in targets)
        label = f'{_node(room)}["{room.removesuffix("*")}<br>{_job(room, sources)}"]'
        lines.append(f"    {label} --> {below}" if below else f"    {label}")
    return "\n".join([*lines, "```"])


def _without_shortcuts(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leaves out each arrow where a longer way leads to the same room."""
    reachable: dict[str, set[str]] = {}
    for room in reversed(ORDER):
        if room in arrows:
            reachable[room] = arrows[room].union(*(reachable.get(other, set()) for other in arrows[room]))
    return {
        room: targets - set().union(*(reachable.get(other, set()) for other in targets))
        for room, targets in arrows.items()
    }


def _node(room: str) -> str:
    return re.sub(r"\W+", "_", room.removesuffix("/*").removesuffix(".py"))


def _job(room: str, sources: dict[str, str]) -> str:
    """The first clause of what the room's docstring says."""
    package = f"{room.removesuffix('*')}__init__.py" if room.endswith("/*") else room
    sentence = first_sentence(sources[package]) if package in sources else ""
    return re.split(r"[:;.] |[:.]$", sentence)[0]
