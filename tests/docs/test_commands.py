"""Every command in a document, a script's docstring or a config's header: its program would accept it."""

import argparse
import ast
import importlib
import importlib.machinery
import re
import runpy
import shlex
import sys
import types
import warnings

import pytest
from support.documents import TEXTS, fences, prose
from support.helpers import ROOT
from torch.distributed.run import get_args_parser

from bench.plan import RESERVED, check_overrides
from training.configuration.files_and_flags import load_config
from training.configuration.rules import TRACKERS
from training.dry_run import dry_run
from training.process.torch_build import OLDER_CUDA

SCRIPTS = (
    *("*.py", "mfu_versions/*.py", "plots/*.py", "bench/*.py", "tools/*.py", "tools/*/*.py"),
    "data/*/prepare.py",
)
OURS = {"python", "python3", "torchrun", "make", "pip", "cp", "sbatch"}
OTHER_PROGRAMS = {"git", "source", "cd", "grep", "nvidia-smi", "tail", "pre-commit", "torchfrtrace", "hf"}
COMMAND = rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(sorted(OURS | OTHER_PROGRAMS))}) "
IN_A_SENTENCE = (
    r"`((?:make|pip install|sbatch|python -m (?:pytest|docs|data|tools)|python train.py config)[ ./][^`]*)`"
)


def block_lines(language: str, content: str) -> list[str]:
    """The commands of a fenced block, continuations joined. A block of `sh` holds nothing else; in any other,
    a line that begins with a program is one."""
    joined = re.sub(r"\\\n\s*", "", content).splitlines()
    lines = [line.strip() for line in joined if line.strip() and not line.strip().startswith("#")]
    return [line for line in lines if language == "sh" or re.match(COMMAND, line)]


def document_lines(text: str) -> list[str]:
    """The commands of a document, those in its sentences included."""
    lines = [line for language, content in fences(text) for line in block_lines(language, content)]
    return lines + [" ".join(line.split()) for line in re.findall(IN_A_SENTENCE, prose(text))]


def docstring_lines(source: str) -> list[str]:
    """The commands of a script's docstring: indented lines that begin with a program."""
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    joined = re.sub(r"\\\n\s*", "", docstring)
    return re.findall(rf"^ {{4,}}({COMMAND}.*)$", joined, re.M)


def header_lines(source: str) -> list[str]:
    """The commands of a config's header: indented lines, and scripts that a sentence says to run."""
    header = re.match(r"(?:#.*\n)*", source)[0]
    whole = re.findall(r"^# {3,}((?:python|torchrun|cp|make|pip) .*)$", header, re.M)
    return whole + re.findall(r"python \S+\.py", header)


def all_commands() -> list:
    lines = [(name, line) for name, text in TEXTS.items() for line in document_lines(text)]
    image = re.findall(r"^(?:RUN|CMD) (?!apt-get )(.+)$", (ROOT / "Dockerfile").read_text(), re.M)
    lines += [("Dockerfile", line) for line in image]
    for pattern in (*SCRIPTS, "config/*.py"):
        found_in = header_lines if pattern == "config/*.py" else docstring_lines
        for path in sorted(ROOT.glob(pattern)):
            lines += [(path.name, line) for line in found_in(path.read_text(encoding="utf-8"))]
    return [pytest.param(line, id=f"{name}: {line}") for name, line in lines]


def split(line: str) -> list[tuple[dict[str, str], list[str]]]:
    """(environment, words) of each command that a line pipes or chains together."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    commands = [({}, [])]
    for word in lexer:
        assert word not in ("<", ">", ">>", "&"), f"{word} is not looked into by this test: {line}"
        environment, words = commands[-1]
        if word in ("|", "||", "&&", ";"):
            commands.append(({}, []))
        elif not words and re.fullmatch(r"[A-Z_]+=.*", word):
            environment.update([word.split("=", 1)])
        else:
            words.append(word)
    return commands


class Parsed(BaseException):
    """The script's arguments were accepted; it need not go on."""


@pytest.fixture
def script(monkeypatch):
    """script(program, arguments): runs a program up to its argparse; SystemExit if that refuses. A program is
    the path of a script, or the module that follows `python -m`."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, *arguments):
        parse_args(parser, *arguments)
        raise Parsed

    def script(program, arguments):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            if program.endswith(".py"):
                monkeypatch.syspath_prepend(str((ROOT / program).parent))
                runpy.run_path(str(ROOT / program), run_name="__main__")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another test may have imported the module
                runpy.run_module(program, run_name="__main__")

    return script


def check_line(line: str, script):
    """Every command of a line; `cd FOLDER` holds for those after it."""
    folder = ""
    for environment, words in split(line):
        if words[0] == "cd" and (ROOT / words[1]).is_dir():
            folder = f"{words[1]}/"
        elif folder and words[0] == "python":
            check(environment, ["python", folder + words[1], *words[2:]], script)
        else:
            check(environment, words, script)


def check(environment: dict, words: list[str], script):
    program, arguments = words[0], words[1:]
    if program == "torchrun":
        launch = get_args_parser().parse_args(arguments)
        if launch.module:
            return check_module(launch.training_script, launch.training_script_args, script)
        assert launch.training_script == "train.py"
        nodes = int(launch.nnodes.split(":")[-1])  # 1:1 where it is not given
        load_config(launch.training_script_args, nodes * int(launch.nproc_per_node))
    elif program in ("python", "python3"):
        check_python(arguments, int(environment.get("WORLD_SIZE", 1)), script)
    elif program == "sbatch" and arguments[-1].startswith("--wrap="):
        wrapped = arguments[-1].removeprefix("--wrap=").replace("$SLURM_ARRAY_TASK_ID", "0")
        check(environment, wrapped.split(), script)
    elif program == "sbatch":
        while arguments[0].startswith("--"):
            arguments = arguments[1:]
        assert (ROOT / arguments[0]).is_file()
        load_config(arguments[1:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert arguments and set(arguments) <= set(targets)
    elif program == "cp":
        *sources, target = arguments
        assert sources and all((ROOT / source).is_file() for source in sources)
        assert (ROOT / target).parent.is_dir()
    elif program == "pip":
        check_pip(arguments)
    else:
        assert program in OTHER_PROGRAMS, f"{program} is in no list of this test"


def check_pip(arguments: list[str]):
    """Requirements files and extras exist; a version is that of a requirements file."""
    assert arguments[0] == "install"
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-r", action="append", default=[])
    parser.add_argument("--index-url")
    parser.add_argument("--no-build-isolation", action="store_true")
    parser.add_argument("packages", nargs="*")
    given = parser.parse_args(arguments[1:])
    assert all((ROOT / file).is_file() for file in given.r)
    pins = "".join(
        file.read_text() for file in [ROOT / "requirements.txt", *(ROOT / "requirements").glob("*.txt")]
    )
    pins += "\n".join(OLDER_CUDA.split())  # for an older driver
    extras = re.findall(r"^(\w+) = \{ file = ", (ROOT / "pyproject.toml").read_text(), re.M)
    for package in given.packages:
        if package.startswith("."):
            asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", package)
            assert asked and set((asked[1] or "dev").split(",")) <= set(extras) - {"dependencies"}, package
        elif "==" in package:
            assert re.search(rf"^{re.escape(package)}(\s|$)", pins, re.M), package


def check_python(arguments: list[str], world_size: int, script):
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    elif arguments[0] == "-m":
        check_module(arguments[1], arguments[2:], script)
    elif arguments[0] == "train.py":
        load_config(arguments[1:], world_size)
    else:
        assert (ROOT / arguments[0]).is_file(), arguments[0]
        script(arguments[0], arguments[1:])


def check_module(module: str, arguments: list[str], script):
    """Some leave flags of train.py over."""
    if module == "pytest":
        return check_pytest(arguments)
    if (module, arguments) in (("venv", [".venv"]), ("docs.generate", [])):
        return None
    assert module.startswith(("data.", "tools.", "bench."))
    if module == "bench.roofline":
        return load_config(arguments)
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    program = importlib.import_module(f"{module}.__main__" if is_package else module)
    parsed = module != "tools.plan" and hasattr(program, "parse") and program.parse(arguments)
    if not isinstance(parsed, tuple):  # argparse's own answer
        return script(module, arguments)
    options, flags = parsed
    if module == "bench.peer":
        return load_config(flags)
    check_overrides(flags, getattr(program, "RESERVED", getattr(program, "OTHERS", RESERVED)))
    if getattr(options, "config", None):
        processes = getattr(options, "nproc", getattr(options, "processes", 1))
        load_config([str(options.config), *flags], processes)


def check_pytest(arguments: list[str]):
    """Markers are registered, options are pytest's own, files and folders exist."""
    markers = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-m", choices=markers)
    parser.add_argument("-n", type=int)
    parser.add_argument("-k")
    parser.add_argument("--collect-only", action="store_true")
    parser.add_argument("paths", nargs="*")
    assert all((ROOT / path.partition("::")[0]).exists() for path in parser.parse_args(arguments).paths)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
def test_the_commands_of_the_readme_for_several_gpus_fit_each_that_they_may_meet(gpu):
    text = TEXTS["README.md"].replace("\\\n", " ")
    commands = re.findall(r"^torchrun .*nproc_per_node=(\d+) train\.py (.*)$", text, re.M)
    assert commands
    for processes, arguments in commands:
        config = load_config([*shlex.split(arguments), "--dry_run=True", f"--gpu={gpu}"], int(processes))
        assert any(re.match(r"Fits: +yes", line) for line in dry_run(config, int(processes))), gpu


@pytest.mark.parametrize("line", all_commands())
def test_command_is_accepted_by_its_program(line, script, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in TRACKERS:  # the documents say how to install them
        package = types.ModuleType(name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    check_line(line, script)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py config/quickstart.py --max_iter=100",
        "python train.py config/quickstart.py --use_fsdp=True",  # one process
        "torchrun --standalone --nproc=8 train.py config/quickstart.py --batch_size=many",
        "python plots/compare_runs.py run.json --method v4",
        "python data/absent/prepare.py",
        "cd data/slimpajama_6b_qwen3 && python prepare.py --worker_count=3",
        "python -m data.inspect",
        "make trian",
        "cp mfu_versions/model_builder_v4.py model_builder.py",
        "pip install -r requirements/absent.txt",
        "pip install '.[absent]'",
        "pip install torch==1.0.0 --index-url https://download.pytorch.org/whl/cpu",
        "python -m pytest tests/unit/test_absent.py",
        "python -m pytest -m item_12",
        "python -m bench.throughput --suite absent",
        "curl something | python",
    ],
)
def test_wrong_command_would_be_found(line, script, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((Exception, SystemExit)):
        check_line(line, script)


FOUND = ("python -m pytest absent.py", "A=1 python absent.py")
BLOCKS = {  # what stands in a document -> the commands that are found there
    f"```sh\n{FOUND[0]}\n```\n": FOUND[:1],
    f"```\n{FOUND[0]}\n```\n": FOUND[:1],
    "- a list\n\n  ```sh\n  A=1 python \\\n      absent.py\n  ```\n": FOUND[1:],
    f"Type `{FOUND[0]}` first.\n": FOUND[:1],
    "```text\npythonic\n```\n\n```json\n{}\n```\n\n```mermaid\na --> b\n```\nmake a run, then cp it.\n": (),
}


@pytest.mark.parametrize("text", BLOCKS)
def test_a_command_is_found_in_a_block_and_in_a_sentence_and_nothing_else_is_one(text):
    assert document_lines(f"# Title\n\n{text}\nThe end.\n") == list(BLOCKS[text])


@pytest.mark.parametrize("name", TEXTS)
def test_no_command_stands_in_a_block_of_another_kind(name):
    """By indentation, by tildes, in a quotation, of another shell or behind a prompt it would be missed."""
    assert re.findall(rf"^(?: {{4,}}{COMMAND}.*|~~~.*|> *```.*)$", prose(TEXTS[name]), re.M) == []
    languages = {language for language, _ in fences(TEXTS[name])}
    assert languages <= {"", "sh", "text", "python", "py", "mermaid", "diff"}
    assert re.findall(r"^ *\$ .*$", TEXTS[name], re.M) == []
