"""Benchmarks by lm-eval on local task files: they have the figures of held-out text, which test_evaluate.py
compares with transformers.

Needs requirements/evaluate.txt; nothing needs the network.
"""

import pytest
from support.evaluation import TEXTS, figures, make_tasks, make_token_files, make_weights, write_texts
from support.helpers import TINY, run_train, write_config

from common.errors import UserError
from tools import evaluate

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -r requirements/evaluate.txt")
# windows of equal tokens, which lm-eval's cache of logits mixes up
REPEATED = [*TEXTS, "A" * 150, "A" * 70, "A" * 9 + "B"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights, others whose tokenizer begins every text with a token, tasks, and their texts."""
    folder = tmp_path_factory.mktemp("tasks")
    make_weights(folder / "weights")
    make_weights(folder / "begins", name="llama2", begins=True)
    write_texts(make_tasks(folder / "tasks") / "texts.jsonl", REPEATED)
    return folder


def test_a_checkpoint_has_the_bits_per_byte_of_a_text_also_as_a_task(folder, tmp_path):
    data, out = make_token_files(tmp_path / "data", folder / "begins", TEXTS), tmp_path / "out"
    keys = {**TINY, "dataset": str(data), "out_dir": str(out), "max_iters": 2}
    done = run_train(write_config(tmp_path / "run.py", **keys))
    assert done.returncode == 0, done.stderr
    tasks = ["--tasks=tiny_choice,tiny_text,tiny_answer", f"--include_path={folder / 'tasks'}"]
    found = figures(out, f"--text={folder / 'tasks/texts.jsonl'}", *tasks, "--batch_size=3", output=out)
    scores = found["lm_eval"]["results"]
    of_text = found["texts"][0]["bits_per_byte"]
    assert scores["tiny_text"]["bits_per_byte,none"] == pytest.approx(of_text, rel=1e-5)
    assert 0 <= scores["tiny_choice"]["acc,none"] <= 1 and scores["tiny_answer"]["exact_match,none"] == 0
    assert found["lm_eval"]["lm_eval_version"] == lm_eval.__version__
    assert found["lm_eval"]["versions"]["tiny_choice"] == 1.5
    assert not list(out.glob("lm_eval*"))  # the export


def test_weights_have_the_bits_per_byte_of_a_text_also_as_a_task(folder, tmp_path):
    tasks = ",".join(str(folder / f"tasks/{name}.yaml") for name in ("tiny_text", "tiny_choice"))
    argv = [f"--text={folder / 'tasks/texts.jsonl'}", f"--tasks={tasks}", "--num_fewshot=2", "--limit=4"]
    found = figures(f"--hf={folder / 'weights'}", *argv, output=tmp_path)
    of_text = found["texts"][0]["bits_per_byte"]
    of_task = found["lm_eval"]["results"]["tiny_text"]["bits_per_byte,none"]
    assert of_task == pytest.approx(of_text, rel=1e-5)
    assert found["lm_eval"]["n-shot"]["tiny_choice"] == 2
    assert found["lm_eval"]["n-samples"]["tiny_choice"]["effective"] == 4


def test_what_lm_eval_refuses_is_an_error_after_its_own_words(folder, tmp_path, capfd):
    argv = [f"--hf={folder / 'weights'}", "--tasks=absent", f"--include_path={folder / 'tasks'}"]
    with pytest.raises(UserError, match="^lm-eval ended with status .* python -m lm_eval run .*absent"):
        evaluate.main([*argv, "--device=cpu", f"--output={tmp_path}"])
    assert "absent" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_a_tokenizer_without_end_of_text_is_refused(trained, folder):
    argv = [str(trained), f"--tasks={folder / 'tasks/tiny_text.yaml'}", "--device=cpu"]
    with pytest.raises(UserError, match="--tasks needs a tokenizer with an end-of-text token"):
        evaluate.main(argv)
