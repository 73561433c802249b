"""The worst day of the commands: numbers, paths, texts and readers that nobody expects. One message and an
exit status, never a traceback."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from datetime import datetime

import pytest
from support import warm_python
from support.helpers import HANG_S, ROOT, TINY, last_run, make_dataset, write_config
from support.imports import product_files

import sample
import train
from bench import throughput
from bench.process import LINE_LENGTH, REASON_LENGTH, end_with_status, failure_reason
from bench.runner import last_json
from common.command import outcome, run_command
from common.errors import UserError
from common.text import MESSAGE_CHARACTERS, one_line, plain, shown
from data.pipeline import command as prepare
from training.configuration.files_and_flags import load_config
from training.configuration.key_line import INT_MAX
from training.configuration.keys import KEYS
from training.process import exit_status, redaction
from training.records.attempts import find_history

NUMBERS = ["9" * 400, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1e300", "-1e300", "1e400", "1e-320"]
NUMBERS += ["nan", "inf", "-inf", str(10**20), str(2**63), str(2**63 - 1), str(2**31), "-1", "0", "[" * 2000]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    return write_config(folder / "run.py", **TINY | {"dataset": make_dataset(folder / "tokens")})


def assert_one_message(text):
    assert "Traceback" not in text and text.count("error: ") == 1 and len(text) < 1000, text[:3000]


def tells(capfd) -> str:
    return capfd.readouterr().err


# --- A.8: numbers beyond sense ---


@pytest.mark.parametrize("name", KEYS)
def test_no_number_in_any_key_is_more_than_one_message(config, run, capfd, name):
    """Up to and including a dry run, which needs no device."""
    is_number = {int, float} & set(KEYS[name].types)
    for value in NUMBERS:
        flag = f"--{name}={value}"
        try:
            load_config([str(config), flag])
        except UserError as error:
            assert_one_message(f"error: {error}")
        else:
            if is_number:
                assert run(config, flag, "--dry_run=True") == 0, (flag[:100], tells(capfd)[-1000:])


GREATEST = INT_MAX
EXTREMES = [
    f"--max_iters={GREATEST}",
    f"--seed={GREATEST} --eval_iters={GREATEST} --eval_interval=2",
    "--learning_rate=1e18 --min_lr=1e18",
    "--weight_decay=1e18 --grad_clip=1e18",
    "--norm_eps=1e-320 --beta2=0.9999999999999999 --dropout=0.999999",
    "--rope_theta=1e-320",
    f"--skip_spikes=1e18 --max_skips={GREATEST}",
    "--loss_chunks=1048576 --timeout_minutes=525600 --start_timeout_minutes=525600",
    f"--peak_tflops=1e-320 --log_save_interval={GREATEST} --keep_last={GREATEST}",
    f"--checkpoint_interval=8760h --drift_check_interval={GREATEST}",
    f"--lr_schedule=wsd --wsd_decay_fraction=1e-320 --lr_decay_iters={GREATEST}",
    "--use_dataloader=True --dataloader_prefetch_factor=1024 --dataloader_num_workers=1",
]


@pytest.mark.parametrize("flags", EXTREMES)
def test_the_greatest_and_least_values_can_be_used(config, run, tmp_path, monkeypatch, capfd, flags):
    """A run ends in order, or as one whose loss is no number."""
    if "--max_iters" in flags:
        monkeypatch.setattr(train, "loop", lambda run: None)
    status = run(config, f"--out_dir={tmp_path}", *flags.split())
    error = tells(capfd)
    assert status == 0 or (status == 1 and "error: the " in error and "nan" in error), error
    assert "Traceback" not in error


def test_memory_that_is_not_there_is_one_message(config, run, tmp_path, monkeypatch, capfd):
    def no_memory(*arguments):
        raise MemoryError("Unable to allocate 8.00 TiB for an array")

    monkeypatch.setattr(train, "Loader", no_memory)
    assert run(config, f"--out_dir={tmp_path}") == 1
    error = tells(capfd)
    assert_one_message(error)
    assert "lower --batch_size" in error and "8.00 TiB" in error


def parse_preparation(argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *argv])
        return prepare.parse(prepare.make_parser("", ROOT, 0.1))


OPTIONS = {
    sample.parse: (["--out_dir=x"], "num_samples batch_size max_new_tokens temperature top_k top_p seed"),
    throughput.parse: (["--suite=quick"], "iters warmup repeats timeout"),
    parse_preparation: ([], "workers max_tokens shard_tokens max_bad"),
}


@pytest.mark.parametrize("parse", OPTIONS, ids=lambda parse: parse.__module__)
def test_no_number_in_an_option_is_more_than_one_message(parse, capfd):
    base, names = OPTIONS[parse]
    for name in names.split():
        for value in NUMBERS:
            status = run_command(lambda: parse([*base, f"--{name}={value}"]) and 0)  # noqa: B023 - called here
            error = tells(capfd)
            assert status in (0, 2) and "Traceback" not in error, (name, value[:50])
            last = error.strip().splitlines()[-1] if status else ""
            assert not status or (f"--{name}" in last and len(last) < 300), error[-1000:]


# --- A.8: paths with ~, a byte order mark ---


def test_a_tilde_is_the_home_folder_in_a_file_and_in_a_flag(tmp_path, monkeypatch):
    """unit/test_config.py has mixtures."""
    monkeypatch.setenv("HOME", "/home/x")
    config = str(write_config(tmp_path / "run.py", **TINY, dataset="~/tokens", out_dir="~/in file"))
    found = load_config([config])
    assert (found.dataset, found.out_dir) == ("/home/x/tokens", "/home/x/in file")
    for path, meant in {
        "~": "/home/x",
        "~nobody-of-this-name/x": "~nobody-of-this-name/x",
        "a~/b": "a~/b",
    }.items():
        assert load_config([config, f"--out_dir={path}"]).out_dir == meant


def test_an_empty_path_is_not_this_folder_and_a_prompt_must_be_text(capfd):
    for name in ("--out_dir", "--dataset"):
        assert run_command(lambda: sample.parse(["--out_dir=x", f"{name}="]) and 0) == 2  # noqa: B023 - called here
        assert f"{name}: it is empty; name a file or a folder" in tells(capfd)
    assert run_command(lambda: sample.main(["--out_dir=x", "--prompt=\udce9"])) == 2
    assert "a prompt has a control character, or is no UTF-8" in tells(capfd)


@pytest.mark.parametrize("name", ["out_dir", "dataset"])
def test_a_path_of_control_characters_or_no_text_is_refused_and_of_foreign_scripts_is_not(config, name):
    with pytest.raises(UserError, match="control character") as error:
        load_config([str(config), f"--{name}=a/\x1b[2J"])
    assert "\x1b" not in str(error.value)
    with pytest.raises(UserError, match="is no text that can name a folder"):
        load_config([str(config), f"--{name}=a/\ud800"])
    bytes_of_latin_1 = "a/\udce9"  # as Python reads a name that is not UTF-8
    for path in ("é/名\u3000前\u200c", bytes_of_latin_1):
        assert getattr(load_config([str(config), f"--{name}={path}"]), name) == path


def test_a_config_may_begin_with_a_byte_order_mark(config, tmp_path):
    path = tmp_path / "bom.py"
    path.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert load_config([str(path)]).batch_size == TINY["batch_size"]


# --- A.8: output ---


class Unwritable(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error


NO_CPU_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
NO_MEMORY_SAYS = "error: out of memory of the machine; see its limit with `ulimit -v`"
READER_GONE, DISK_FULL = BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")


def test_every_command_ends_in_the_same_way():
    mains = [path for path in product_files() if 'if __name__ == "__main__":' in (ROOT / path).read_text()]
    assert len(mains) > 15
    for path in mains:
        main = (ROOT / path).read_text()
        if "from data.pipeline.slimpajama import main" in main:
            main = (ROOT / "data/pipeline/slimpajama.py").read_text()
        assert re.search(r"\b(run_command|end_with_status|leave_now)\(", main), path


ENDS = {  # what a command raises -> (exit status, what is said)
    "done": (None, 0, ""),
    "user": (UserError("what and how"), 2, "error: what and how\n"),
    "hostile": (UserError("\x1b[2Jx" + "y" * 10**6), 2, "error: ?[2Jx"),
    "ctrl-c": (KeyboardInterrupt(), 130, "interrupted\n"),
    "argparse": (SystemExit(2), 2, ""),
    "words": (SystemExit("words"), 1, "words\n"),
    "pipe": (READER_GONE, 141, ""),
    "machine": (PermissionError(13, "Permission denied", "out/x"), 2, "error: out/x: Permission denied\n"),
    "memory": (MemoryError(), 2, f"{NO_MEMORY_SAYS} ()\n"),
    "our fault": (ZeroDivisionError(), None, None),
    "torch": (NO_CPU_MEMORY, 2, f"{NO_MEMORY_SAYS} ({NO_CPU_MEMORY})\n"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_one_status_and_one_message(end, capsys):
    error, status, told = ENDS[end]

    def main():
        if error:
            raise error

    if status is None:  # a fault of ours keeps its traceback
        with pytest.raises(type(error)):
            outcome(main)
        return
    assert run_command(main) == status
    said = capsys.readouterr().err
    assert said.startswith(told) if end == "hostile" else said == told
    assert len(said) <= MESSAGE_CHARACTERS + 1


@pytest.mark.parametrize("error, status", [(READER_GONE, 141), (DISK_FULL, 2)], ids=["pipe", "full"])
def test_output_that_cannot_be_written_is_no_traceback(error, status, config, run, capsys):
    with contextlib.redirect_stdout(Unwritable(error)):
        assert run_command(lambda: print("x")) == status
        if error is READER_GONE:
            assert run(config, "--dry_run=True") == 0, "it has seen enough"
    with contextlib.redirect_stdout(Unwritable(error)), contextlib.redirect_stderr(Unwritable(error)):
        assert run_command(lambda: print("x")) == status
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_command_prints_what_the_console_can_show(encoding):
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding=encoding)):
        assert run_command(lambda: print("é 名 \ud800 📍")) == 0
        shown = raw.getvalue().decode(encoding)
    assert shown == {"ascii": "? ? ? ?\n", "latin-1": "é ? ? ?\n", "utf-8": "é 名 ? 📍\n"}[encoding]


@pytest.fixture
def record():
    """A record of a few rows, as train.py writes it."""
    mfu = {"mfu": 0.4, "mfu_percent": 40.0, "hardware_peak_flops": 1e15, "num_gpus": 1, "tokens_per_sec": 1e5}
    mfu |= {"calculation_method": "component_summation_v2025", "gpu_name": "GPU"}
    row = {"time_ms": 9.0, "lr": 1e-3, "mfu": mfu, "tokens_per_sec": 1e5, "memory": {"max_allocated_gb": 1.0}}
    rows = [{"iter": i, "loss": 3.0 - i / 10, "attempt": 1, **row} for i in range(4)]
    model = {"architecture": "qwen3", "total_params": 10**9}
    made = {"run_name": "run_1", "status": "completed", "config": {"dtype": "bfloat16"}, "attempt": 1}
    made |= {"startup_info": {"model": model, "hardware": {}}, "attempts": [{"attempt": 1, "start_iter": 0}]}
    made |= {"training_iterations": rows, "training_progress": [], "summary": {"best_val_loss": 2.5}}
    return made | {"eval_steps": [{"iter": 2, "train_loss": 2.0, "val_loss": 2.5}]}


def closed_pipe(command):
    """(exit status, what is on stderr) of a command whose reader has ended: command | true."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        streams = {"stdout": stdout, "stderr": subprocess.PIPE}
        done = warm_python.run(command, cwd=ROOT, **streams, text=True, timeout=HANG_S)
    return done.returncode, done.stderr


def test_plots_and_data_commands_end_quietly_with_their_reader(record, config, tmp_path):
    path = tmp_path / "run_1.json"
    path.write_text(json.dumps(record))
    compare = [sys.executable, "plots/compare_runs.py", str(path)]
    assert closed_pipe(compare) == (141, "")
    assert closed_pipe([sys.executable, "-m", "data.inspect", str(config.parent / "tokens")])[0] in (2, 141)
    status, error = closed_pipe([sys.executable, "data/text/prepare.py", "--help"])
    assert status in (0, 141) and error == ""  # older versions of argparse do not ignore the closed pipe
    with open("/dev/full", "w") as full:
        done = warm_python.run(
            compare, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S
        )
    assert done.returncode == 2
    assert_one_message(done.stderr)
    closed = f"exec {shlex.join(compare)} >&- 2>&-"
    assert warm_python.run(closed, shell=True, cwd=ROOT, timeout=HANG_S).returncode == 0


# --- A.8: no compiler ---


def test_a_missing_compiler_is_one_message(capfd):
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    no_header = CppCompileError(["g++", "x.cpp"], "x.cpp:1: fatal error: Python.h: No such file or directory")
    for cause in (InvalidCxxCompiler(), no_header):
        assert exit_status.end_with(InductorError(cause, None)) == 2
        error = tells(capfd)
        assert "--compile=False" in error and "g++" in error and "Traceback" not in error
    assert exit_status.end_with(InductorError(ValueError("x"), None)) == 1


# --- A.6, A.8: records that anybody made ---

TEXTS = {
    "formula": r"$\frac{$",
    "escapes": "\x1b[2J\x1b]0;title\x07\nx\r\nz",
    "surrogate": "\ud800 📍 a$b$c \u202eabc\\",
    "long": "n" * 100_000,
    "other script": "名前",
    "no text": [{"a": 1}],
}


@pytest.fixture
def plots():
    """The main functions of both plots; a warning is an error."""
    pytest.importorskip("matplotlib")
    from plots import compare_runs, plot_single_run

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield plot_single_run.main, compare_runs.main


OFTEN = ("escapes", "formula", "surrogate")  # each takes seconds: it is drawn four times


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in TEXTS]
)
def test_texts_of_a_record_steer_neither_the_terminal_nor_matplotlib(name, record, plots, tmp_path, capsys):
    text, model = TEXTS[name], record["startup_info"]["model"]
    record |= {"run_name": text, "status": text}
    model["architecture"] = text
    record["startup_info"]["hardware"] |= {"gpu_name": text, "precision": text}
    for row in record["training_iterations"]:
        row["mfu"] = row["mfu"] | {"calculation_method": text}
    for row in record["training_iterations"][2:]:
        row |= {"mfu": None, "mfu_reason": text}
    path = tmp_path / "run_1.json"
    path.write_text(json.dumps(record))
    for main in plots:
        assert main([str(path)]) == 0
    printed = "".join(capsys.readouterr())
    assert all(c.isprintable() or c == "\n" for c in printed) and len(printed) < 3000


NO_RECORD = [b"", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"[]", b'{"a": 1}']
NO_RECORD += [b'{"training_iterations": [1]}', None]


@pytest.mark.parametrize("content", NO_RECORD, ids=lambda content: repr(content)[:20])
def test_a_file_that_is_no_record_is_one_message(content, plots, tmp_path, capsys):
    path = tmp_path / "run_1.json"
    if content is None:
        os.mkfifo(path)  # nobody writes to it
    else:
        path.write_bytes(content)
    for main in plots:
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert_one_message(error)
        assert str(path) in error and len(error.splitlines()) == 1


def test_the_log_of_a_run_cannot_steer_the_terminal(config, run, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(train, "closing_lines", lambda *arguments: ["\x1b]0;title\x07 of a checkpoint"])
    assert run(config, f"--out_dir={tmp_path}") == 0
    (log,) = tmp_path.glob("run_*.log")
    assert "?]0;title? of a checkpoint" in capfd.readouterr().out
    assert "\x1b" not in log.read_text()


def test_a_value_in_a_message_is_short_and_plain_text_stays_as_it_is():
    ends = {"x": "'x'", 10**5000: "an int of more than 4,300 digits", "y" * 500: "'" + "y" * 46 + " ... "}
    for value, text in ends.items():
        assert shown(value).startswith(text) and len(shown(value)) <= 100
    assert plain("│ 📍 é\n\t") == "│ 📍 é\n\t" and one_line(" a\n  b ") == "a b"


# --- bench ---


def test_what_a_benchmarked_process_says_is_told_within_limits(capsys):
    output = io.StringIO("x" * 10**6 + "\n" + "error: \x1b[2J" + "y" * 10**6)
    reason = failure_reason(1, output)
    assert reason.startswith("?[2Jyyy") and len(reason) <= REASON_LENGTH
    assert failure_reason(1, io.StringIO("z" * (LINE_LENGTH * 3))).startswith("zzz")

    def main(argv):
        raise RuntimeError("x" * 10**6)

    assert end_with_status(main, []) == 1
    error = capsys.readouterr().err
    assert len(error) <= MESSAGE_CHARACTERS + 1
    assert failure_reason(1, io.StringIO(error)).startswith("RuntimeError: xxx")


@pytest.mark.parametrize("line", [b"{" * 10_000, b'{"a": ' + b"1" * 5000 + b"}", b"{\xff}", b"no JSON"])
def test_what_a_benchmarked_process_printed_is_checked(line):
    with pytest.raises(ValueError):
        last_json(b"words\n" + line)


# --- C: the truth is stored, what is shown is redacted ---


@pytest.fixture
def secret(monkeypatch):
    """secret(NAME, value): an environment variable that is called like a secret."""

    def set_variable(name, value):
        monkeypatch.setenv(name, value)
        redaction._secrets.cache_clear()

    yield set_variable
    redaction._secrets.cache_clear()


def test_a_dataset_and_a_date_called_like_secrets_are_redacted_and_still_found(run, tmp_path, secret, capfd):
    """A resume finds the same data, and the attempts, whose names have the date."""
    folder, out = make_dataset(tmp_path / "corpus-2024-en"), tmp_path / "out"
    secret("CORPUS_TOKEN", "corpus-2024-en")
    secret("BUILD_KEY", f"{datetime.now():%Y%m%d}")
    config = write_config(tmp_path / "run.py", **TINY, dataset=folder, out_dir=out)
    assert run(config) == 0, tells(capfd)
    assert "corpus-2024-en" not in capfd.readouterr().out
    assert last_run(out)["config"]["dataset"] == f"{tmp_path}/***CORPUS_TOKEN***"
    (state,) = (out / "checkpoints").glob("step-*/state.json")
    assert json.loads(state.read_text())["config"]["dataset"] == str(folder)
    assert run(config, "--init_from=resume", "--max_iters=6") == 0, tells(capfd)
    record = last_run(out)
    assert record["startup_info"]["changed_since_checkpoint"].keys() == {"max_iters"}
    assert record["attempt"] == 2 and len(record["training_iterations"]) == 6
    assert all("***" not in attempt["run_name"] for attempt in record["attempts"])


def test_a_restart_is_found_though_its_launch_is_called_like_a_secret(config, run, tmp_path, secret):
    assert run(config, f"--out_dir={tmp_path}") == 0
    (path,) = tmp_path.glob("run_*.json")
    record = json.loads(path.read_text())
    record["startup_info"]["launch"] = {"id": "***JOB_TOKEN***", "restarts": 0}
    path.write_text(json.dumps(record))
    secret("JOB_TOKEN", "job-12345678")
    assert find_history(tmp_path, None, {"id": "job-12345678", "restarts": 1})["run_name"] == path.stem
