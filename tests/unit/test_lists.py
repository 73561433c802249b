"""Each list of names, entry by entry: which variables are secret, which tensors are compared, what a plan and
a summary hold. A new entry needs a line in a table here."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.preparation import small_bpe

from common.errors import UserError
from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.tokenizers.file_tokenizer import FileTokenizer
from training.faults import replica_check
from training.hardware.nvml import FIELDS
from training.process import redaction
from training.process.world import World
from training.records.percentiles import spread
from training.records.utilization import summarize
from training.strategies.strategy import Shard

CPU = torch.device("cpu")

# --- which names of variables mean a secret ---

SECRET = [
    *("KEY", "APIKEY", "API_KEY", "TOKEN", "SECRET", "PASS", "PASSWORD", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "AUTH"),
]
NO_SECRET = ["MONKEY", "TOKENIZERS_PARALLELISM", "COMPASS", "AUTHOR", "KEYBOARD", "SECRETARY", "PASSENGERS"]
VALUE = "v4lue-that-is-secret"


@pytest.fixture
def environment(monkeypatch):
    """environment(variables): what the process has, and nothing else."""

    def environment(variables: dict[str, str]) -> None:
        monkeypatch.setattr(redaction.os, "environ", variables)
        redaction._secrets.cache_clear()

    yield environment
    redaction._secrets.cache_clear()


@pytest.mark.parametrize("word", SECRET)
@pytest.mark.parametrize("form", ["{}", "MY_{}", "{}_2", "MY_{}_2", "my_{}"])
def test_the_value_of_a_variable_with_such_a_name_is_hidden(word, form, environment):
    name = form.format(word.lower() if form.islower() else word)
    environment({name: VALUE})
    assert redaction.redact(f"({VALUE})") == f"(***{name}***)"


def test_the_value_of_another_variable_is_shown(environment):
    environment(dict.fromkeys(NO_SECRET, VALUE))
    assert redaction.redact(VALUE) == VALUE


def test_a_secret_that_contains_another_is_hidden_whole(environment):
    short, long = {"A_KEY": VALUE}, {"B_KEY": f"{VALUE}-and-more"}
    for variables in ({**short, **long}, {**long, **short}):
        environment(variables)
        assert redaction.redact(f"{VALUE}-and-more {VALUE}") == "***B_KEY*** ***A_KEY***"


def test_short_values_words_and_paths_are_no_secrets(environment, tmp_path):
    values = {"A_KEY": "1234567", "B_KEY": "elevenchars", "C_KEY": str(tmp_path), "D_KEY": "12345678"}
    environment(values | {"E_KEY": "twelveletter"})
    assert sorted(name for name, _ in redaction._secrets()) == ["D_KEY", "E_KEY"]


# --- which tensors the replica check compares ---


def state_of_two_ranks(replicas: int, copies: bool, size: int = 2, parts: int = 1):
    """What replica_check needs of a run's state: a matrix and a vector, as one of several ranks has them."""
    shards, adam, working = [], {}, {}
    for name, shape in (("w", (3, 2)), ("b", (3,))):
        parameter = torch.nn.Parameter(torch.randn(shape))
        local = torch.nn.Parameter(torch.randn(shape))
        shards.append(Shard(name, parameter, local, replicas))
        adam[local] = {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape), "step": torch.ones(())}
        if copies:
            working[name] = parameter.data
    strategy = SimpleNamespace(shards=shards, parts=parts, working_copies=lambda: working)
    return SimpleNamespace(
        strategy=strategy,
        optimizer=SimpleNamespace(kept=lambda shard: adam[shard.local]),
        world=World(0, 0, size, CPU),
    )


MOMENTS = [f"{w}{kept}" for w in ("w", "b") for kept in ("", ".exp_avg", ".exp_avg_sq", ".step")]
WORKING = ["w (working weights)", "b (working weights)"]


@pytest.mark.parametrize(
    ("replicas", "copies", "names"),
    [(2, False, MOMENTS), (1, True, WORKING), (2, True, [*MOMENTS, *WORKING]), (1, False, [])],
    ids=["ddp", "zero1", "ddp in bf16", "fsdp"],
)
def test_weights_moments_and_working_weights_are_compared(replicas, copies, names, monkeypatch):
    state = state_of_two_ranks(replicas, copies)
    held = replica_check.replicated(state)
    assert sorted(held) == sorted(names)
    for place, name in enumerate(held):

        def other_rank_has_another(everyone, mine, place=place):
            everyone.copy_(mine.repeat(2))
            everyone[len(mine) + place] += 1

        monkeypatch.setattr(replica_check, "all_gather", other_rank_has_another)
        assert replica_check.differences(state) == ([0, 1], [name])
    monkeypatch.setattr(replica_check, "all_gather", lambda everyone, mine: everyone.copy_(mine.repeat(2)))
    assert replica_check.differences(state) == ([], [])


def test_only_ranks_that_hold_the_same_part_are_compared(monkeypatch):
    """8 ranks in 2 parts, as with hybrid sharding: even ranks hold one part and odd ranks the other."""
    state = state_of_two_ranks(4, copies=False, size=8, parts=2)

    def gather(everyone, mine):
        ranks = torch.stack([mine + rank % 2 for rank in range(8)])
        ranks[5] += 7
        everyone.copy_(ranks.flatten())

    monkeypatch.setattr(replica_check, "all_gather", gather)
    assert replica_check.differences(state) == ([5], MOMENTS)


# --- what a preparation's plan holds ---


def plan_of(tmp_path, **changed) -> dict:
    """Stops a preparation when it has written its plan, with one of its arguments changed; the plan."""
    text = tmp_path / f"in{changed.pop('input', '')}" / "a.txt"
    text.parent.mkdir(exist_ok=True)
    text.write_text("some text" * (1 + len(text.parent.name)))
    vocabulary = small_bpe(tmp_path / changed.pop("folder", "bpe"))
    end = changed.pop("tokenizer", "endoftext")
    vocabulary.write_text(vocabulary.read_text().replace("endoftext", end))
    settings = replace(Settings(256, None, val_fraction=0.1, shard_tokens=10**6, max_tokens=100), **changed)
    stopped = mock.patch("data.pipeline.preparation.run_parts", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        prepare([text], tmp_path / "out", FileTokenizer(vocabulary), settings, "test", Job())
    return json.loads((tmp_path / "out" / "plan.json").read_text())


PLAN = {
    **{"eot_id": 255, "bos_id": 1, "val_fraction": 0.2, "shard_tokens": 10**5},
    **{"input": 2, "tokenizer": "end", "max_tokens": 50},
}


@pytest.mark.parametrize("name", PLAN)
def test_a_preparation_that_changes_any_argument_is_refused_by_its_name(tmp_path, name):
    first = plan_of(tmp_path)
    assert first.keys() > PLAN.keys()
    assert plan_of(tmp_path, folder="elsewhere") == first, "a tokenizer is known by its content"
    with pytest.raises(UserError, match=f"was begun with another {name}; "):
        plan_of(tmp_path, **{name: PLAN[name]})
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == first


# --- percentiles ---


def test_percentiles_of_known_values():
    assert spread(range(101)) == {"median": 50, "p10": 10, "p90": 90}
    assert spread([5.0, 1.0]) == {"median": 3.0, "p10": 1.0, "p90": 5.0}
    assert spread([7.0]) == {"median": 7.0, "p10": 7.0, "p90": 7.0}


def test_each_figure_of_a_summary_is_of_its_own_column():
    names = ("time_ms", "tokens_per_sec", "tokens_per_sec_per_gpu", "mfu_percent", *FIELDS)
    rows = []
    for i in range(-5, 101):  # the first 5 are warm-up
        values = {name: 1000.0 * n + i for n, name in enumerate(names)}
        rows.append({**values, "mfu": {"mfu_percent": values["mfu_percent"]}, "warmup": i < 0})
    summary = summarize(rows)
    assert summary.pop("rows_after_warmup") == 101
    assert summary.pop("throttle") is summary.pop("gpu_reason") is None
    assert summary.keys() == set(names)
    for n, name in enumerate(names):
        assert summary[name] == {"median": 1000 * n + 50, "p10": 1000 * n + 10, "p90": 1000 * n + 90}, name


def test_every_kind_of_login_in_a_url_is_hidden():
    hidden = {
        "https://user:word@host/a": "https://***@host/a",
        "s3://token@host": "s3://***@host",
        "git+ssh://a:b@h and postgres://c:d@e": "git+ssh://***@h and postgres://***@e",
        "mail a@b.c": "mail a@b.c",
        "https://host/a@b": "https://host/a@b",
    }
    assert {text: redaction.without_logins(text) for text in hidden} == hidden
    assert not re.search("word|token|a:b|c:d", "".join(hidden.values()))
