"""Reads the imports of the product, and says which file may import which."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A file may import those of its own line and of the lines below it. A name that ends in /* stands for the
# files of a folder that have no line of their own.
ORDER = (
    "docs/*",
    "train.py",
    "sample.py",
    "tools/*",
    "tools/export_hf.py",
    "tools/profile/*",
    "tools/trials.py",
    "bench/*",
    "bench/peers/*",
    "generation/*",
    "training/*",
    "training/faults/*",
    "training/records/*",
    "training/memory/*",
    "training/cuda_graphs/*",
    "training/pretrained/*",
    "training/checkpoints/*",
    "training/optimization/*",
    "training/strategies/*",
    "training/batches/*",
    "training/hardware/*",
    "training/process/*",
    "training/configuration/*",
    "recipes/*",  # see also test_architecture.py: nobody imports them
    "recipes/kernels/*",
    "recipes/formats/*",
    "model_builder.py",
    "mfu_versions/*",
    "model.py",
    "ops/*",
    "ops/triton_kernels/*",
    "ops/quantization/*",
    "ops/custom_op.py",
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


def reached(arrows: dict[str, set[str]], *paths: str) -> set[str]:
    """These files, and what they import, wherever the import stands."""
    found, new = set(paths), list(paths)
    while new:
        new += arrows[new.pop()] - found
        found |= set(new)
    return found


def read_sources() -> dict[str, str]:
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in product_files()}


def first_sentence(source: str) -> str:
    """Of a module's docstring: what the module is for."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]
