"""tools.plan: a budget buys the model of least loss. tests/docs/test_numbers.py has the published plans."""

import json
import re
import runpy
import shlex
import sys

import pytest
from support.documents import TEXTS, fences
from support.helpers import ROOT

from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from tools import plan as plan_command
from tools.plan import FAMILIES, HOFFMANN, Law, model_for, models_of, optimal, parameters, plan
from training.configuration.files_and_flags import load_config
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import choose

JOIN = "--rdzv_id=plan --rdzv_backend=c10d --rdzv_endpoint=node0:29500"
SMALL = ("qwen3", 4096, 128)  # a family with the vocabulary of quickstart: quick to build
SMALL_FLAGS = ["--arch=qwen3", "--vocab_size=4096", "--block_size=128"]


# --- shapes ---


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_rule_of_a_family_gives_its_shipped_shape(arch):
    name, _, d_ff, _ = FAMILIES[arch]
    given = load_config([str(ROOT / "config" / name)]).model_config()
    assert model_for(arch, parameters(given)) == given
    for model in models_of(arch):
        exact = d_ff * model.n_embd
        assert model.d_ff % 128 == 0 and exact <= model.d_ff < exact + 128


@pytest.mark.parametrize("size", [2e6, 11e6, 90e6])
def test_a_shape_has_about_the_wanted_size_and_the_counted_parameters(size):
    model = model_for(SMALL[0], size, *SMALL[1:])
    assert parameters(model) == pytest.approx(size, rel=0.08)
    assert parameters(model) == v3.build_model(model).count_parameters()["total"]


# --- what is best ---


def test_every_other_shape_at_these_flops_has_a_higher_loss():
    models = models_of(*SMALL)
    best = optimal(HOFFMANN, models, 1e18)
    losses = {model: plan(HOFFMANN, model, flops=1e18).loss for model in models}
    assert min(losses, key=losses.get) == best.model not in (models[0], models[-1])
    assert best.loss == losses[best.model] == HOFFMANN.loss(parameters(best.model), best.tokens)
    assert best.tokens * best.flops_per_token == pytest.approx(1e18)


def test_1_36e21_flops_of_v3_buy_the_shipped_qwen3_as_the_compute_optimal_one():
    best = optimal(HOFFMANN, models_of("qwen3"), 1.36e21)
    assert (parameters(best.model), f"{best.tokens / 1e9:.1f}") == (1_830_395_904, "131.7")


# --- the command ---


def printed(capsys, *flags):
    plan_command.main(list(flags))
    return capsys.readouterr().out


def test_the_command_prints_the_plan_of_a_config(capsys):
    config = ROOT / "config" / "full_llama3_1.5b_optimal.py"
    text = printed(capsys, f"--config={config}", "--tokens=101.909e9", "--gpus=8xH200", "--mfu=0.6157")
    asked, best = (line.split() for line in text.splitlines() if line.startswith("llama3"))
    assert asked[0] == "llama3" and {"1,544,628,224", "8,597,274,624", "101,909,000,000", "2.335"} <= {*asked}
    assert best[:2] == ["llama3,", "compute-optimal"]
    assert "8.7614e+20 training FLOPs by v3" in text
    # 8.7614e20 / (8 x 989.4e12 x 0.6157) seconds
    assert "time: 49.94 hours, 399.5 GPU-hours" in text
    assert "fitted to MassiveText" in text and "extrapolated" not in text and "To train" not in text
    text = printed(capsys, f"--config={ROOT / 'config' / 'qwen2.5_1.5b.py'}", "--flops=1e20")
    assert "1e+20 training FLOPs" in text and "compute-optimal" not in text, "it has no family"


def test_hours_of_a_machine_are_the_flops_of_its_gpus_at_this_mfu(capsys):
    text = printed(capsys, "--gpus=8xH200", "--hours=72", "--mfu=0.61", *SMALL_FLAGS)
    assert f"budget: {72 * 3600 * 8 * 989.4e12 * 0.61:.5g} training FLOPs" in text
    assert "time: 72 hours, 576 GPU-hours" in text and "cost:" not in text
    text = printed(capsys, "--gpus=8xH200", "--hours=72", "--mfu=0.61", "--price=2.5", *SMALL_FLAGS)
    assert "cost: 1,440.00 at 2.50 for a GPU-hour\n" in text


@pytest.mark.parametrize(
    ("gpus", "launcher"),
    [
        (1, "python"),
        (3, "torchrun --standalone --nproc_per_node=3"),
        (8, "torchrun --standalone --nproc_per_node=8"),
        (16, f"torchrun --nnodes=2 {JOIN} --nproc_per_node=8"),
    ],
)
def test_the_printed_command_trains_on_the_gpus_of_the_plan(capsys, gpus, launcher, monkeypatch):
    text = printed(capsys, f"--gpus={gpus}xH200", "--hours=2", "--mfu=0.5", *SMALL_FLAGS)
    command = text.splitlines()[-1]
    assert command.startswith(f"{launcher} train.py config/full_qwen3_1.8b_optimal.py ")
    monkeypatch.chdir(ROOT)
    config = load_config([*shlex.split(command.partition(" train.py ")[2]), "--dry_run=True"], gpus)
    assert choose(config, gpus, card_memory(CARDS["H200"]))[1].fits


def test_a_plan_beyond_the_law_says_so(capsys):
    text = printed(capsys, f"--config={ROOT / 'config' / 'quickstart.py'}", "--tokens=614400")
    assert "above that of a random guess, 8.318" in text
    assert "extrapolated: 3.2e+06 parameters; fitted to 7e+07 to 1.6e+10" in text
    assert "extrapolated: 6.14e+05 tokens" in text
    text = printed(capsys, "--flops=1e29", *SMALL_FLAGS)
    assert "extrapolated: 7.74e+10 parameters" in text and "tokens; fitted to 5e+09 to 5e+11" in text


def test_the_printed_command_trains_what_was_planned(run, capsys, tmp_path, monkeypatch):
    text = printed(capsys, *SMALL_FLAGS, "--size=1e7", "--tokens=20e9")
    assert "--tokens_per_iter=32768 " in text  # 256 sequences at most
    text = printed(capsys, *SMALL_FLAGS, "--size=1e7", "--tokens=2e7")
    program, script, *flags = shlex.split(text.splitlines()[-1])
    assert (program, script) == ("python", "train.py")
    monkeypatch.chdir(ROOT)
    flags += ["--dataset=quickstart", f"--out_dir={tmp_path / 'out'}"]
    config = load_config(flags)
    assert config.model_config() == model_for(SMALL[0], 1e7, *SMALL[1:])
    assert config.max_iters * config.tokens_per_iter == pytest.approx(2e7, rel=0.01)
    assert config.tokens_per_iter == 64 * 128
    assert config.lr_decay_iters == config.max_iters >= 2000
    assert config.warmup_iters < config.max_iters / 5
    assert run(*flags, "--dry_run=True", "--gpu=H200") == 0
    assert re.search("Fits: +yes", capsys.readouterr().out)


def test_own_constants_make_the_prediction(capsys):
    text = printed(capsys, "--law=1,300,500,0.3,0.32", *SMALL_FLAGS, "--size=1e7", "--tokens=2e8")
    size = parameters(model_for(SMALL[0], 1e7, *SMALL[1:]))
    loss = 1 + 300 / size**0.3 + 500 / 2e8**0.32
    assert f"  {loss:.3f}\n" in text and "MassiveText" not in text and "extrapolated" not in text
    constants = "1.8172,482.01,2085.43,0.3478,0.3658"
    both = [printed(capsys, f"--law={law}", "--flops=1e20", *SMALL_FLAGS) for law in ("besiroglu", constants)]
    assert both[0] == both[1] and "Besiroglu et al. 2024" in both[0] and "MassiveText" in both[0]


def test_the_script_on_the_page_finds_the_law_behind_nine_runs(capsys, tmp_path, monkeypatch):
    law = Law(1.2, 300.0, 500.0, 0.305, 0.327)
    (script,) = [code for language, code in fences(TEXTS["docs/plan.md"]) if language == "python"]
    (tmp_path / "fit.py").write_text(script)
    paths = []
    for n in (10**8, 4 * 10**8, 16 * 10**8):
        for iteration in (10_000, 40_000, 200_000):
            last = {"iter": iteration, "val_loss": law.loss(n, 500_000.0 * iteration)}
            startup = {"model": {"total_params": n}, "tokens_per_iter": 500_000}
            paths.append(tmp_path / f"run_{len(paths)}.json")
            paths[-1].write_text(json.dumps({"startup_info": startup, "eval_steps": [{"iter": 1}, last]}))
    monkeypatch.setattr(sys, "argv", ["fit.py", *map(str, paths)])
    runpy.run_path(str(tmp_path / "fit.py"))
    found = plan_command.own_law(capsys.readouterr().out.strip().removeprefix("--law="))
    assert found.alpha == pytest.approx(0.305, abs=0.011) and found.beta == pytest.approx(0.327, abs=0.011)
    assert found.loss(1e9, 2e10) == pytest.approx(law.loss(1e9, 2e10), abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "one of the arguments --flops --hours --tokens is required"),
        (["--flops=nan"], "nan is not between"),
        (["--flops=1e40"], "1e\\+40 is not between"),
        (["--gpus=0xH200", "--hours=1", "--mfu=0.5"], "write it as 8xH200"),
        (["--gpus=8xH900", "--hours=1", "--mfu=0.5"], "'H900' is not one of B200"),
        (["--gpus=2xT4", "--hours=1", "--mfu=0.5"], "no bf16 peak is known for the Tesla T4"),
        (["--gpus=8xH200", "--hours=1", "--mfu=61"], "61 is not between 0.001 and 1"),
        (["--gpus=8xH200", "--hours=1"], "state both --gpus and --mfu"),
        (["--hours=1"], "state both --gpus and --mfu"),
        (["--flops=1e20", "--price=2"], "state both --gpus and --mfu"),
        (["--flops=1e21", "--hours=1"], "not allowed with argument --flops"),
        (["--tokens=1e9"], "of which model"),
        (["--size=1e9", "--tokens=1e9"], "needs one family"),
        (["--config=config/quickstart.py", "--vocab_size=9", "--flops=1e18"], "leave out --arch"),
        (["--config=config/cpt_qwen3_1.7b_4096.py", "--flops=1e18"], "begins with trained weights"),
        (["--law=1,2,3,0.3,9", "--flops=1e18"], "is not E,A,B,alpha,beta"),
        ([*SMALL_FLAGS, "--size=1e3", "--tokens=1e9"], "smaller --vocab_size"),
        ([*SMALL_FLAGS, "--size=1e15", "--tokens=1e9"], "family has"),
    ],
)
def test_flags_beyond_sense_are_one_clear_message(capsys, monkeypatch, flags, says):
    monkeypatch.chdir(ROOT)
    with pytest.raises((UserError, SystemExit)) as raised:
        plan_command.main(flags)
    assert re.search(says, str(raised.value) + capsys.readouterr().err)
