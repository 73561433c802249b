"""The documents are checked against the code: every command parses as its program would parse it, every file,
setting and message that they name exists, and every table of numbers is what the code computes."""

import argparse
import ast
import importlib.machinery
import re
import runpy
import shlex
import subprocess
import sys
import types
import warnings

import pytest
from support.helpers import ROOT
from test_architecture import ORDER, product_files
from torch.distributed.run import get_args_parser

import model_builder
from mfu_versions import model_builder_v1 as v1
from mfu_versions import model_builder_v2 as v2
from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ALIASES, KEYS
from training.records.memory_estimate import estimate_memory

DOCS = ("README.md", "TRAINING_GUIDE.md", "SYSTEM_OVERVIEW.md", "CONTRIBUTING.md", "mfu_versions/README.md")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCS}
SCRIPTS = ("*.py", "mfu_versions/*.py", "plots/*.py", "data/*/prepare.py")
OTHER_PROGRAMS = {"git", "source", "cd", "grep", "nvidia-smi", "export", "ls", "tail", "head", "mv", "hf"} | {
    "pre-commit"
}
PLACEHOLDERS = {"config/FILE.py", "prepare.py", "merges.txt"}  # of several files, or of a user's
PLACEHOLDERS |= {"config/full_NAME.py", "config/smoke_NAME.py", "data/NAME/prepare.py"}  # of a contributor's
S = 2048


# --- commands: where they are ---


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def document_lines(text: str) -> list[str]:
    """The commands of a document, one a line, continuations joined; and `make ...` in its sentences."""
    blocks = [content for language, content in fences(text) if language in ("sh", "bash")]
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
    return [line for line in lines if line and not line.startswith("#")] + re.findall(r"`(make \w+)`", text)


def docstring_lines(source: str) -> list[str]:
    """The commands of a script's docstring: indented lines that begin with a program."""
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    return re.findall(r"^ {4,}((?:python|torchrun|cp|make|pip) .*)$", docstring, re.M)


def header(source: str) -> str:
    """The comment that a config file opens with."""
    return re.match(r"(?:#.*\n)*", source)[0]


def header_lines(source: str) -> list[str]:
    """The commands of a config's header: indented lines, and scripts that a sentence says to run."""
    whole = re.findall(r"^# {3,}((?:python|torchrun|cp|make|pip) .*)$", header(source), re.M)
    return whole + re.findall(r"python \S+\.py", header(source))


def all_commands() -> list:
    lines = [(name, line) for name, text in TEXTS.items() for line in document_lines(text)]
    for pattern in SCRIPTS:
        for path in sorted(ROOT.glob(pattern)):
            lines += [(path.name, line) for line in docstring_lines(path.read_text(encoding="utf-8"))]
    for path in sorted(ROOT.glob("config/*.py")):
        lines += [(path.name, line) for line in header_lines(path.read_text(encoding="utf-8"))]
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


# --- commands: what each program would say ---


class Parsed(Exception):
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
            if not program.endswith(".py"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # another test may have imported the module
                    runpy.run_module(program, run_name="__main__")
            monkeypatch.syspath_prepend(str((ROOT / program).parent))
            runpy.run_path(str(ROOT / program), run_name="__main__")

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
        assert launch.training_script == "train.py"
        nodes = int(launch.nnodes.split(":")[-1])  # 1:1 where it is not given
        load_config(launch.training_script_args, nodes * int(launch.nproc_per_node))
    elif program in ("python", "python3"):
        check_python(arguments, int(environment.get("WORLD_SIZE", 1)), script)
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
    pins = "".join(file.read_text() for file in ROOT.glob("requirements*.txt"))
    extras = re.findall(r"^(\w+) = \{ file = ", (ROOT / "pyproject.toml").read_text(), re.M)
    for package in given.packages:
        if package.startswith("."):
            asked = re.fullmatch(r"\.\[([\w,]+)\]", package)
            assert asked and set(asked[1].split(",")) <= set(extras) - {"dependencies"}, package
        elif "==" in package:
            assert re.search(rf"^{re.escape(package)}(\s|$)", pins, re.M), package


def check_python(arguments: list[str], world_size: int, script):
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    elif arguments[0] == "-m":
        if arguments[1].startswith("data."):
            script(arguments[1], arguments[2:])
            if "--" in arguments:
                script(f"data/{arguments[2]}/prepare.py", arguments[arguments.index("--") + 1 :])
        else:
            assert arguments[1] in ("venv", "pytest")
            assert all((ROOT / word).is_file() for word in arguments[2:] if word.endswith(".py"))
    elif arguments[0] == "train.py":
        load_config(arguments[1:], world_size)
    else:
        assert (ROOT / arguments[0]).is_file(), arguments[0]
        script(arguments[0], arguments[1:])


@pytest.mark.parametrize("line", all_commands())
def test_command_is_accepted_by_its_program(line, script, monkeypatch):
    monkeypatch.chdir(ROOT)
    wandb = types.ModuleType("wandb")  # the documents say how to install it
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    check_line(line, script)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py config/quickstart.py --max_iter=100",
        "python train.py config/absent.py",
        "python train.py config/quickstart.py --use_fsdp=True",  # one process
        "torchrun --standalone --nproc=8 train.py config/quickstart.py --batch_size=many",
        "python sample.py --out=out-quickstart --tokens=3",
        "python plots/compare_runs.py run.json --method v4",
        "python data/text/prepare.py --input x.txt",
        "python data/absent/prepare.py",
        "cd data/slimpajama_6b_qwen3 && python prepare.py --worker_count=3",
        "python -m data.inspect",
        "python -m data.cluster slimpajama_6b_qwen3 --executor local --tasks 2 -- --worker_count=3",
        "make trian",
        "cp mfu_versions/model_builder_v4.py model_builder.py",
        "pip install -r requirements-absent.txt",
        "pip install '.[absent]'",
        "pip install torch==1.0.0 --index-url https://download.pytorch.org/whl/cpu",
        "python -m pytest tests/test_absent.py",
        "curl something | python",
    ],
)
def test_wrong_command_would_be_found(line, script, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((Exception, SystemExit)):
        check_line(line, script)


@pytest.mark.parametrize("name", DOCS)
def test_every_fenced_block_says_whether_it_holds_commands(name):
    assert {language for language, _ in fences(TEXTS[name])} <= {"sh", "text"}
    assert TEXTS[name].count("```") == 2 * len(fences(TEXTS[name]))


# --- names ---


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_is_named_exists(name):
    named = set(re.findall(r"(?<![\w./*-])\.?\w[\w./-]*\.(?:py|md|toml|txt)\b", TEXTS[name])) - PLACEHOLDERS
    assert named
    folders = (ROOT, (ROOT / name).parent)
    assert sorted(file for file in named if not any((folder / file).is_file() for folder in folders)) == []


def test_readme_lists_the_files_at_the_top_as_git_does():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    tracked = {path.split("/")[0] for path in done.stdout.splitlines()}
    cells = [row[0] for row in table(TEXTS["README.md"], "file")]
    listed = [entry.strip("/") for cell in cells for entry in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert tracked - set(listed) == set(), "tracked, and not in the README's table of files"
    assert [entry for entry in listed if not (ROOT / entry).exists()] == []


def test_module_map_is_complete():
    cells = [row[0] for row in table(TEXTS["SYSTEM_OVERVIEW.md"], "module")]
    listed = [entry for cell in cells for entry in cell.split(", ")]
    elsewhere = r"bench/.*|mfu_versions/.*|data/\w+/prepare\.py|(.*/)?__init__\.py"  # described in sentences
    wanted = [path for path in product_files() if not re.fullmatch(elsewhere, path)]
    assert sorted(listed) == sorted(wanted)


def test_module_map_is_in_the_order_of_imports():
    cells = [row[0] for row in table(TEXTS["SYSTEM_OVERVIEW.md"], "module")]
    lines = dict.fromkeys(cell if "/" not in cell else f"{cell.rpartition('/')[0]}/*" for cell in cells)
    assert [line for line in lines if line in ORDER] == [line for line in ORDER if line in lines]


def test_every_key_is_explained():
    assert [name for name, key in KEYS.items() if not key.help] == []


def test_key_tables_name_only_real_keys():
    rows = table(TEXTS["TRAINING_GUIDE.md"], "group")
    named = [key for row in rows for key in re.findall(r"`(\w+)`", row[1])]
    assert named and [key for key in named if key not in KEYS and key not in ALIASES] == []
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", [*DOCS, *(f"config/{path.name}" for path in ROOT.glob("config/*.py"))])
def test_every_flag_in_a_sentence_is_a_key(name):
    text = TEXTS.get(name) or header((ROOT / name).read_text())
    launcher = {word.strip("-") for action in get_args_parser()._actions for word in action.option_strings}
    known = {*KEYS, *ALIASES, *launcher, "key"}
    prose = text if name not in DOCS else re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert [key for key in re.findall(r"--(\w+)=", prose) if key not in known] == []


@pytest.mark.parametrize("name", DOCS)
def test_no_document_names_a_path_of_one_machine(name):
    assert re.findall(r"(?<![\w.-])/(?:work|root|tmp|home|mnt)\b", TEXTS[name]) == []


def test_every_message_in_the_troubleshooting_table_is_one_that_the_code_has():
    places = ("train.py", "sample.py", "model_config.py", "training/", "data/", "plots/")
    source = "".join((ROOT / path).read_text() for path in product_files() if path.startswith(places))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent literals are one message
    cells = [row[0] for row in table(TEXTS["TRAINING_GUIDE.md"], "message or symptom")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 20
    assert [message for message in messages if message not in source] == []


# --- numbers ---


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


def full(name: str, *flags: str):
    return load_config([str(ROOT / "config" / name), *flags])


def totals(formula, model) -> int:
    return formula.count_flops(model, S)["flops_per_token"]


def test_readme_describes_the_full_models():
    rows = table(TEXTS["README.md"], "config")
    assert sorted(row[0] for row in rows) == sorted(f"config/{p.name}" for p in ROOT.glob("config/full_*.py"))
    for path, shape, vocabulary, parameters, flops in rows:
        model = full(path.split("/")[1]).model_config()
        sizes = f"{model.n_layer}-{model.n_head}-{model.n_embd}-{model.d_ff}, {model.n_kv_head}"
        total = model_builder.build_model(model).count_parameters()["total"]
        tied = " tied" if model.weight_tying else ""
        expected = [sizes, f"{model.vocab_size:,}{tied}", f"{total:,}", f"{totals(v3, model):,}"]
        assert [shape, vocabulary, parameters, flops] == expected


def test_the_three_phases_on_b200_need_the_memory_that_was_measured():
    flags = ["--loss_chunks=8", "--activation_checkpointing=full"]
    for _, batch, tokens, _, estimated, measured, _, _ in table(TEXTS["TRAINING_GUIDE.md"], "phase"):
        batch_size, accumulation = batch.split(" x ")
        flags_of_phase = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
        config = full("full_qwen3_1.8b_b200_optimal.py", *flags_of_phase, *flags)
        assert tokens == f"{config.samples_per_iter(8) * config.block_size:,}"
        model = config.model_config()
        parameters = model_builder.build_model(model).count_parameters()["total"]
        estimate = sum(estimate_memory(model, parameters, config, 8).values())
        assert estimated == f"{estimate:.1f}"
        assert estimate == pytest.approx(float(measured), rel=0.01)


def test_guide_has_the_batches_and_the_memory_of_the_full_configs():
    rows = table(TEXTS["TRAINING_GUIDE.md"], "config")
    assert sorted(row[0] for row in rows) == sorted(f"config/{p.name}" for p in ROOT.glob("config/full_*.py"))
    for path, batch, tokens, tokens_8, memory, published, iterations in rows:
        config = full(path.split("/")[1])
        model = config.model_config()
        per_iter = config.samples_per_iter(1) * config.block_size
        parameters = model_builder.build_model(model).count_parameters()["total"]
        assert batch == f"{config.batch_size} x {config.gradient_accumulation_steps}"
        assert [tokens, tokens_8] == [f"{per_iter:,}", f"{8 * per_iter:,}"]
        assert memory == f"{sum(estimate_memory(model, parameters, config, 1).values()):.1f}"
        if published:
            needed = round(float(published.split()[0]) * 1e9)
            assert iterations == f"{-(-needed // (8 * per_iter)):,}"


GOLDEN = {  # row of mfu_versions/README.md -> config
    "GPT-2 1.36B": "full_gpt2_1.36b.py",
    "LLaMA 2 1.36B": "full_llama_1.36b.py",
    "LLaMA 3 1.5B": "full_llama3_1.5b_optimal.py",
    "LLaMA 3 2.2B": "full_llama3_2.2b_chinchilla.py",
    "Qwen3 1.8B": "full_qwen3_1.8b_optimal.py",
}


def test_golden_table_is_what_the_code_computes():
    rows = table(TEXTS["mfu_versions/README.md"], "model")
    assert [row[0] for row in rows] == list(GOLDEN)
    for name, *cells in rows:
        model = full(GOLDEN[name]).model_config()
        old, new = totals(v1, model), totals(v3, model)
        exact = v3.count_flops(model, S)
        ratio_of_v2 = v2.count_flops(model, S)["attention_to_ffn_ratio"]
        ratios = (old / new, exact["attention_to_ffn_ratio"], ratio_of_v2)
        assert totals(v2, model) == new
        assert cells[:3] == [f"{old:,}", f"{new:,}", f"{exact['flops_per_token_causal']:,}"]
        assert cells[3:] == [f"{ratio:.4f}" for ratio in ratios]


def worked(model) -> dict[str, str]:
    """Label of a row in the worked tables -> its figure, per token, from what the three formulas return."""
    one, two, three = (formula.count_flops(model, S) for formula in (v1, v2, v3))
    L = model.n_layer
    layer = {name: count // L for name, count in three["components"].items() if name != "logits"}
    attention, ffn = three["attention_flops_per_layer"], three["ffn_flops_per_layer"]
    scores = layer["attention_scores"] + layer["attention_context"]
    counts = {
        **{f"`{name}`": count for name, count in layer.items()},
        "attention": attention,
        "feed-forward": ffn,
        "layer": attention + ffn,
        "layers, L x layer": L * (attention + ffn),
        "`logits`, 2HV": three["logit_flops"],
        "forward": sum(three["components"].values()),
        "scores and context, 4SH": scores,
        "projections, 2H²(2 + 2/G)": two["attention_flops_per_layer"] - scores,
    }
    per_token = {label: count // S for label, count in counts.items()}
    per_token |= {
        "training, x 3": three["flops_per_token"],
        "causal half of the scores off, 3 L 2SH": three["flops_per_token"] - three["flops_per_token_causal"],
        "training, causal": three["flops_per_token_causal"],
        "N": one["components"]["parameters"] // (2 * S),
        "6N": 3 * one["components"]["parameters"] // S,
        "12 L H S (H = n_head head_dim)": 3 * one["components"]["attention_scores"] // S,
        "training": one["flops_per_token"],
    }
    ratio = {"attention / feed-forward": f"{attention / ffn:.4f}"}
    return {label: f"{count:,}" for label, count in per_token.items()} | ratio


def test_worked_tables_are_what_the_code_computes():
    text = TEXTS["mfu_versions/README.md"]
    rows = table(text, "component") + table(text, "")
    expected = [worked(full(GOLDEN[name]).model_config()) for name in ("Qwen3 1.8B", "LLaMA 2 1.36B")]
    assert {row[0] for row in rows} == set(expected[0])
    for row in rows:
        assert row[-2:] == [figures[row[0]] for figures in expected], row[0]
