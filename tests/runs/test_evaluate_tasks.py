"""lm-eval on local task files: our model gets the scores of lm-eval's own backend with the same weights.

Needs requirements-evaluate.txt; nothing needs the network.
"""

import json

import pytest
import torch
from support.evaluation import TEXTS, figures, make_tasks, make_token_files, make_weights, write_texts
from support.helpers import TINY, launch, run_train, write_config

from common.errors import UserError
from tools import export_hf
from tools.evaluate import __main__ as evaluate
from tools.evaluate.heldout import windows
from training.process.world import World

REASON = "needs lm-eval: pip install -r requirements-evaluate.txt"
lm_eval = pytest.importorskip("lm_eval", reason=REASON)
ALONE = World(0, 0, 1, torch.device("cpu"))
NAMES = ("tiny_choice", "tiny_text", "tiny_answer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    make_weights(folder / "weights")
    make_weights(folder / "begins", name="llama2", begins=True)
    make_tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Of all tasks, by our model."""
    argv = [f"--hf={folder / 'weights'}", f"--tasks={','.join(NAMES)}", f"--include_path={folder / 'tasks'}"]
    return figures(*argv, output=folder / "found")


def theirs(folder, name, **keys):
    from lm_eval.models.huggingface import HFLM

    # batch_size=1: in lm-eval 0.4.13, larger batches mix up windows of equal tokens
    return HFLM(pretrained=str(folder / name), dtype="float32", device="cpu", batch_size=1, **keys)


def ours(folder, name):
    from tools.evaluate.benchmarks import open_model

    return open_model(str(folder / name), torch.float32, 3, ALONE)


def numbers(metrics: dict) -> dict:
    """Without the errors that lm-eval does not estimate."""
    return {name: value for name, value in metrics.items() if "," in name and value not in ("N/A", None)}


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.parametrize("name", ["weights", "begins"])
def test_every_answer_equals_that_of_lm_evals_own_backend(folder, name):
    pairs = [("What is it?", " one"), ("What is it? ", "two or three"), ("", "A b"), (TEXTS[1], " B")]
    asked = requests("loglikelihood", *pairs)
    for mine, other in zip(
        ours(folder, name).loglikelihood(asked), theirs(folder, name).loglikelihood(asked), strict=True
    ):
        assert mine[0] == pytest.approx(other[0], rel=1e-5) and mine[1] == other[1]


def test_texts_of_any_length_equal_those_of_lm_evals_own_backend(folder):
    asked = requests("loglikelihood_rolling", *[(text,) for text in TEXTS])
    mine = ours(folder, "weights").loglikelihood_rolling(asked)
    assert mine == pytest.approx(theirs(folder, "weights").loglikelihood_rolling(asked), rel=1e-5)


@pytest.mark.parametrize("name", ["weights", "begins"])
def test_generated_text_equals_that_of_lm_evals_own_backend(folder, name):
    keys = {"until": ["q", "Z"], "max_gen_toks": 20, "do_sample": False}
    asked = requests("generate_until", *[(text, keys) for text in ("What is it?", TEXTS[1], "A")])
    assert ours(folder, name).generate_until(asked) == theirs(folder, name).generate_until(asked)


@pytest.mark.parametrize("stride", [8, 4, 1])
def test_windows_are_those_of_lm_eval(stride):
    for length in (1, 8, 9, 16, 31):
        ids = list(range(1, length + 1))
        expected = lm_eval.utils.get_rolling_token_windows(ids, 0, 8, 8 - stride + 1)
        expected = [lm_eval.utils.make_disjoint_window(pair) for pair in expected]
        found = [(window.tolist(), count) for window, count in windows(ids, 0, 8, stride)]
        assert found == [([*context, *answer], len(answer)) for context, answer in expected]


def test_a_batch_gives_the_scores_of_one_also_where_windows_have_equal_tokens(folder):
    asked = requests("loglikelihood_rolling", ("A" * 150,), ("A" * 70,), ("A" * 9 + "B",))
    mine = ours(folder, "weights").loglikelihood_rolling(asked)
    assert mine == pytest.approx(theirs(folder, "weights").loglikelihood_rolling(asked), rel=1e-5)


def test_the_checkpoint_of_a_run_has_the_scores_of_its_export(folder, tmp_path):
    data, out = make_token_files(tmp_path / "data", folder / "weights", TEXTS), tmp_path / "out"
    keys = {**TINY, "dataset": str(data), "out_dir": str(out), "max_iters": 2}
    done = run_train(write_config(tmp_path / "run.py", **keys))
    assert done.returncode == 0, done.stderr
    export_hf.main([str(out), str(tmp_path / "exported")])
    argv = [f"--tasks={','.join(NAMES)}", f"--include_path={folder / 'tasks'}"]
    of_run = figures(out, *argv, output=out)["tasks"]
    assert of_run == figures(f"--hf={tmp_path / 'exported'}", *argv, output=tmp_path)["tasks"]
    assert len(of_run) == 3 and not list(out.glob("export*"))


def test_metrics_equal_those_of_lm_evals_own_backend(folder, found):
    from lm_eval.evaluator import simple_evaluate

    from tools.evaluate.benchmarks import load_tasks

    manager, _ = load_tasks(list(NAMES), str(folder / "tasks"))
    expected = simple_evaluate(
        theirs(folder, "weights"), tasks=list(NAMES), task_manager=manager, log_samples=False
    )
    for name in NAMES:
        assert numbers(found["tasks"][name]["metrics"]) == pytest.approx(
            numbers(expected["results"][name]), rel=1e-5
        )


def test_bits_per_byte_of_a_task_equal_those_of_the_same_text(folder, found):
    text = write_texts(folder / "texts.jsonl", TEXTS)
    alone = figures(f"--hf={folder / 'weights'}", f"--text={text}", output=folder / "alone")["texts"][0]
    of_task = found["tasks"]["tiny_text"]["metrics"]["bits_per_byte,none"]
    assert of_task == pytest.approx(alone["bits_per_byte"], rel=1e-6)


def test_the_record_says_what_ran(folder, found):
    task = found["tasks"]["tiny_choice"]
    assert (task["version"], task["n_shot"], task["examples"]["effective"]) == (1.5, 0, 5)
    assert found["versions"]["lm_eval"] == lm_eval.__version__
    path = folder / "tasks/tiny_choice.yaml"
    argv = [f"--hf={folder / 'weights'}", f"--tasks={path}", "--num_fewshot=2", "--limit=3"]
    task = figures(*argv, output=folder / "few")["tasks"]["tiny_choice"]
    assert (task["n_shot"], task["examples"]["effective"]) == (2, 3)


def test_two_processes_find_what_one_finds(folder, found, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    argv = [f"--hf={folder / 'weights'}", f"--tasks={','.join(NAMES)}", f"--include_path={folder / 'tasks'}"]
    launch([[*torchrun, "-m", "tools.evaluate", *argv, "--device=cpu", f"--output={tmp_path}"]])
    (path,) = tmp_path.glob("evaluate_*.json")
    two = json.loads(path.read_text())["tasks"]
    for name in NAMES:
        one = found["tasks"][name]
        assert numbers(two[name]["metrics"]) == pytest.approx(numbers(one["metrics"]), rel=1e-6)
        assert two[name]["examples"] == found["tasks"][name]["examples"]


def test_contexts_that_do_not_fit_are_counted(folder, tmp_path, capsys):
    long = {"question": "Where? " * 20, "choices": [" one", " two", " three", " A"], "answer": 0}
    tasks = make_tasks(tmp_path / "tasks")
    (tasks / "questions.jsonl").write_text(json.dumps(long) + "\n")
    argv = [f"--hf={folder / 'weights'}", f"--tasks={tasks / 'tiny_choice.yaml'}"]
    assert figures(*argv, output=tmp_path)["truncated_contexts"] == 4
    assert "4 contexts did not fit into block_size=64" in capsys.readouterr().out


# --- mistakes ---


def without_data(folder):
    (folder / "tasks/questions.jsonl").unlink()
    return []


def no_yaml(folder):
    (folder / "tasks/tiny_choice.yaml").write_text("task: [")
    return []


def long_answer(folder):
    row = {"question": "A", "choices": [" b" * 40, " c", " d", " e"], "answer": 0}
    (folder / "tasks/questions.jsonl").write_text(json.dumps(row) + "\n")
    return []


def long_generation(folder):
    path = folder / "tasks/tiny_answer.yaml"
    path.write_text(path.read_text().replace('"max_gen_toks": 12', '"max_gen_toks": 64'))
    return [f"--tasks={path}"]


MISTAKES = {
    "absent.yaml: lm-eval cannot load it": lambda folder: [f"--tasks={folder}/absent.yaml"],
    "lm-eval cannot load it.*FileNotFoundError": without_data,
    "lm-eval cannot load it": no_yaml,
    "an answer is longer than the model's context of 64": long_answer,
    "requested max tokens to generate .64. must be less": long_generation,
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line(message, folder, tmp_path):
    make_tasks(tmp_path / "tasks")
    argv = [f"--hf={folder / 'weights'}", f"--tasks={tmp_path / 'tasks/tiny_choice.yaml'}", "--device=cpu"]
    argv += MISTAKES[message](tmp_path)  # the last --tasks counts
    with pytest.raises(UserError, match=message) as raised:
        evaluate.main([*argv, f"--output={tmp_path / 'out'}"])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_near_names_of_an_unknown_task_are_named(folder, tmp_path):
    argv = [f"--hf={folder / 'weights'}", "--tasks=tiny_choise", f"--include_path={folder / 'tasks'}"]
    with pytest.raises(UserError, match="has no task 'tiny_choise'; near it: tiny_choice"):
        evaluate.main([*argv, f"--output={tmp_path}"])


def test_a_tokenizer_without_end_of_text_is_refused(trained, folder):
    argv = [str(trained), f"--tasks={folder / 'tasks/tiny_text.yaml'}", "--device=cpu"]
    with pytest.raises(UserError, match="--tasks needs a tokenizer with an end-of-text token"):
        evaluate.main(argv)
