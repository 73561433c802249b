"""The commands of the published guides, in published_commands.txt, work as they stand: each training command
as a dry run with its number of processes; the rest on a tiny run on a CPU, in the order of a user."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.evaluation import figures
from support.helpers import ROOT, TINY, edit_json, last_run, make_dataset, run_in_one_launch, write_config

import sample
from common.run_records import run_records
from plots import compare_runs, plot_single_run, report
from tools import export_hf, seal, track
from training.configuration.files_and_flags import load_config
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import choose
from training.records.attempts import find_history
from training.records.rows import Logger

TEXT = (ROOT / "tests/runs/published_commands.txt").read_text()
LINES = [line.split("   #")[0].rstrip() for line in TEXT.splitlines() if line and not line.startswith("#")]
TRAINING = [line for line in LINES if " train.py " in line]
SNIPPETS = [line for line in LINES if line.startswith("python -c ")]
AROUND = [line for line in LINES if line not in TRAINING and line not in SNIPPETS]
OUT = "out-llama-1.36b"  # where the snippets look
B200 = "config/full_qwen3_1.8b_b200_optimal.py"


def processes_and_arguments(line: str) -> tuple[int, list[str]]:
    """What a training command starts, and the arguments of train.py."""
    words = shlex.split(line.replace("$BS", "8"))
    launcher, arguments = words[: words.index("train.py")], words[words.index("train.py") + 1 :]
    counts = [int(word.partition("=")[2]) for word in launcher if word.startswith("--nproc_per_node=")]
    return (counts or [1])[0], arguments


def printed(snippet: str) -> list[str]:
    """The lines that a one-line script prints, here in this process: by a print() of its own, since the run's
    thread of checkpoints may print, too."""
    lines: list[str] = []
    own = {"print": lambda *values: lines.append(" ".join(map(str, values)))}
    exec(compile(shlex.split(snippet)[2], "-c", "exec"), own)
    return lines


@pytest.mark.parametrize("line", TRAINING)
def test_training_command_passes_as_a_dry_run(line, run, monkeypatch, capfd):
    processes, arguments = processes_and_arguments(line)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    if "--init_from=resume" in arguments:  # the report of an evaluation is that of a run
        assert load_config(arguments, processes).eval_only
    assert run(*arguments, "--dry_run=True") == 0
    assert "THEORETICAL PERFORMANCE" in capfd.readouterr().out


def test_b200_config_without_flags_is_phase_1_of_the_guide_and_fits(monkeypatch):
    monkeypatch.chdir(ROOT)
    config, found = choose(load_config([B200], 8), 8, card_memory(CARDS["B200"]))
    assert config.samples_per_iter(8) * config.block_size == 64 * 4 * 8 * 2048 == 4_194_304
    assert config.use_dataloader and config.dataloader_num_workers == 16
    assert config.activation_checkpointing == "none" and config.loss_chunks == 1
    assert found.fits and found.needed_gib < 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run with the flags that the guides give to LLaMA on two processes."""
    folder = tmp_path_factory.mktemp("published")
    dataset = make_dataset(folder / "tokens")
    tokenizer = {"kind": "char", "name": "char", "chars": "\n" + "".join(map(chr, range(48, 111)))}
    edit_json(dataset / "meta.json", tokenizer=tokenizer, eot_id=None)
    keys = {**TINY, "max_iters": 6, "block_size": 16, "eval_interval": 3}
    config = write_config(folder / "run.py", **keys, dataset=dataset, out_dir=folder / OUT)
    flags = ["--batch_size=6", "--gradient_accumulation_steps=32", "--use_zero1=True"]
    run_in_one_launch(folder, [[config, *flags]], processes=2)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch) -> Path:
    """A copy of that run, as the folder in which one works."""
    shutil.copytree(trained / OUT, tmp_path / OUT)
    shutil.copy(trained / "run.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in (folder / OUT).glob(pattern))


def test_evaluation_alone_refuses_no_schedule_no_seed_and_no_other_data(folder, run, capfd):
    other = make_dataset(folder / "other", seed=1)
    flags = ["--init_from=resume", "--eval_only=True", f"--dataset={other}", "--seed=7", "--warmup_iters=200"]
    flags += ["--learning_rate=1e-5", "--lr_decay_iters=100", "--weight_decay=0", "--packing=stream"]
    assert run("run.py", f"--out_dir={OUT}", *flags) == 0, capfd.readouterr()
    assert len(names(folder, "eval_*.json")) == 1


def lines_of(log: str, text: str) -> list[str]:
    return [line for line in log.splitlines() if text in line]


def test_zero1_and_cuda_graphs_on_one_cpu_run_without_and_have_a_line_each(folder, run, capfd):
    assert run("run.py", "--out_dir=alone", "--use_zero1=True", "--use_cuda_graphs=True") == 0
    log = capfd.readouterr().out
    (parallelism,) = lines_of(log, "Parallelism")
    assert "single, use_zero1=True has no other process to share with" in parallelism
    (graph,) = lines_of(log, "CUDA Graph")
    assert "not used, the eager step runs: device='cpu' has no CUDA Graphs" in graph
    assert last_run(folder / "alone")["startup_info"]["hardware"]["parallelism"] == "single"


PEAK = "--peak_tflops=1"  # a CPU has no MFU without it
PROGRESS, LAST_ROW = SNIPPETS


@pytest.mark.parametrize("flags", [[], [PEAK, "--log_save_interval=1"]], ids=["no peak", "peak"])
def test_snippets_read_the_record_at_every_row_of_a_run(flags, folder, run, monkeypatch):
    for path in (folder / OUT).glob("run_*"):
        path.unlink()
    seen, write = [], Logger.write

    def write_and_read(logger, reading, *arguments):
        write(logger, reading, *arguments)
        seen.append((len(printed(PROGRESS)), printed(LAST_ROW)))

    monkeypatch.setattr(Logger, "write", write_and_read)
    assert run("run.py", f"--out_dir={OUT}", *flags) == 0
    assert len(seen) == 6 and all(len(last) == 1 for _, last in seen)
    assert seen[0][0] == 0 and seen[0][1][0].split()[0] == "0"  # at once; the first iteration has no MFU
    assert len(printed(PROGRESS)) == (5 if flags else 0)
    assert printed(LAST_ROW)[0].split()[0] == "5"
    progress = last_run(folder / OUT)["training_progress"]
    assert all(value is not None for row in progress for value in row.values())
    assert {row["memory_kind"] for row in progress} <= {"resident memory of the process"}
    assert all(0.05 < row["memory_allocated_gb"] < 64 for row in progress)


def test_a_run_says_how_to_watch_it_and_its_page_too(folder, run, capfd):
    assert run("run.py", "--out_dir=watched") == 0
    (log,) = (folder / "watched").glob("*.log")
    before, hint, _ = capfd.readouterr().out.partition(f"tail -F watched/{log.name}")
    assert hint and "STARTING TRAINING" in before and "📍" not in before
    page = " ".join((ROOT / "docs/run-record.md").read_text().split())
    assert "tail -F out-qwen3-1.8b-b200/run_*.log" in page
    assert "`tail -f out-*/run_*.json` shows nothing" in page


def test_train_evaluate_resume_plot_and_read_in_this_order(folder, run, capfd):
    """As the guides say: torchrun with two processes made the run (see `trained`)."""
    there = names(folder, "run_*"), names(folder, "checkpoints/*")
    assert run("run.py", f"--out_dir={OUT}", "--init_from=resume", "--eval_only=True") == 0
    assert (names(folder, "run_*"), names(folder, "checkpoints/*")) == there
    (path,) = (folder / OUT).glob("eval_*.json")
    content = json.loads(path.read_text())
    assert content["run_name"] == path.stem and content["training_iterations"] == []
    assert [step["iter"] for step in content["eval_steps"]] == [6] and path.with_suffix(".log").exists()
    trained = last_run(folder / OUT)["eval_steps"][-1]["val_loss"]
    assert content["eval_steps"][0]["val_loss"] == pytest.approx(trained, abs=0.1)  # of other windows
    same = ["--batch_size=6", "--gradient_accumulation_steps=64", "--use_zero1=True"]  # as many samples
    assert run("run.py", f"--out_dir={OUT}", "--init_from=resume", "--max_iters=8", PEAK, *same) == 0
    assert run("run.py", f"--out_dir={OUT}", "--init_from=resume", "--eval_only=True") == 0
    capfd.readouterr()
    records = names(folder, "run_*.json")
    assert len(records) == 2 and len(names(folder, "eval_*.json")) >= 1
    assert plot_single_run.main([f"{OUT}/run_*.json"]) == 0
    assert compare_runs.main([f"{OUT}/{record}" for record in records]) == 0
    assert [line.split()[0] for line in printed(PROGRESS)] == ["7"]
    assert printed(LAST_ROW)[0].split()[0] == "7"
    grep = next(line for line in AROUND if line.startswith("grep "))
    found = subprocess.run(grep, shell=True, capture_output=True, text=True).stdout
    assert all(text in found for text in ("CUDA Graph", "DataLoader", "Attention backend"))


@pytest.mark.parametrize("line", [line for line in AROUND if line.startswith(("cp ", "cd ", "ls "))])
def test_what_a_command_around_a_run_names_is_there(line):
    for word in shlex.split(line)[1:]:
        if "/" in word:
            assert list(ROOT.glob(word.rstrip("/"))), word


def documents_snippets() -> list[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    lines = [line for line in text.splitlines() if line.startswith("python -c ") and "run_*.json" in line]
    return [line.replace("out-qwen3-1.8b-b200", OUT) for line in lines]


TOOLS = {
    "seal": lambda record: seal.main([record]),
    "evaluate": lambda record: figures(OUT, f"--dataset={Path.cwd()}/tokens", output=Path(OUT)),
    "track": lambda record: track.main([record, "--trackers=tensorboard"]),
    "plot": lambda record: plot_single_run.main([record]),
    "compare": lambda record: compare_runs.main([record, record]),
    "report": lambda record: report.main([record]),
    "export": lambda record: export_hf.main([OUT, f"{OUT}/exported"]),
    "sample": lambda record: sample.main(
        [f"--out_dir={OUT}", "--device=cpu", f"--dataset={Path.cwd()}/tokens"]
    ),
}


def test_one_liners_take_a_folder_without_a_record_and_a_record_without_rows(folder):
    """A run that has just begun. Those of two pages of docs/."""
    (path,), lines = (folder / OUT).glob("run_*.json"), documents_snippets()
    record = json.loads(path.read_text())
    path.unlink()
    assert len(lines) >= 3 and not any(map(printed, lines))
    path.write_text(
        json.dumps(record | {"training_iterations": [], "training_progress": [], "summary": None})
    )
    assert [line for each in map(printed, lines) for line in each] == ["None"]


@pytest.mark.parametrize("tool", TOOLS)
def test_one_liners_still_take_the_runs_record_after_every_tool(tool, trained, folder):
    if tool == "track":
        pytest.importorskip("tensorboard", reason="needs tensorboard")
    shutil.copytree(trained / "tokens", folder / "tokens")
    give_a_peak(record := folder / OUT / names(folder, "run_*.json")[0])
    snippets = SNIPPETS + documents_snippets()
    before = [printed(line) for line in snippets]
    assert len(snippets) >= 5 and all(before)
    there = set((folder / OUT).rglob("*"))
    TOOLS[tool](f"{OUT}/{record.name}")
    written = set((folder / OUT).rglob("*")) - there
    assert bool(written) == (tool != "sample")
    assert names(folder, "run_*.json") == [record.name] and not list(folder.glob("run_*.json"))
    assert [printed(line) for line in snippets] == before
    assert find_history(folder / OUT, record.stem, None)["run_name"] == record.stem


def give_a_peak(path: Path) -> None:
    """The record as on a GPU: the one-liners print rows that have an MFU."""
    content = json.loads(path.read_text())
    for row in content["training_iterations"]:
        progress = {"iter": row["iter"], "loss": row["loss"], "mfu": 0.5, "tokens_per_sec": 1.0}
        content["training_progress"].append(progress | {"memory_allocated_gb": 1.0, "dt_ms": row["time_ms"]})
    path.write_text(json.dumps(content))


def test_a_seal_of_the_earlier_name_is_no_record_and_is_still_verified(folder, capsys):
    (record,) = (folder / OUT).glob("run_*.json")
    assert seal.main([str(record)]) == 0
    (new,) = (folder / OUT).glob("seal_*.json")
    old = new.rename(record.with_name(f"{record.stem}.seal.json"))
    assert seal.main(["--verify", str(old)]) == 0
    assert run_records(folder / OUT) == [record]
    assert find_history(folder / OUT, None, {"id": "other", "restarts": 1}) is None
    assert find_history(folder / OUT, record.stem, None)["run_name"] == record.stem
    assert "cannot be read" not in capsys.readouterr().err
    assert plot_single_run.main([f"{OUT}/run_*.json"]) == 0
    assert plot_single_run.main([str(old)]) == 0
    assert [line.rsplit("/")[-1] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        f"{record.stem}.png",
        f"{old.stem}.png",
    ]
