"""What each shipped config resolves to, key by key: what leaves a file must equal its key's default."""

import json

import pytest
from support.helpers import ROOT

from training.configuration import rules
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS

# {config: the values that differ from the keys' defaults}
RESOLVED = json.loads((ROOT / "tests/support/golden/configs.json").read_text())


def values(name: str, *flags: str) -> dict:
    config = load_config([str(ROOT / "config" / name), *flags]).to_dict()
    return {key: value for key, value in config.items() if value != KEYS[key].default}


def test_every_config_is_listed():
    assert RESOLVED.keys() == {path.name for path in (ROOT / "config").glob("*.py")}


@pytest.mark.parametrize("name", RESOLVED)
def test_a_config_resolves_to_what_it_always_did(name, monkeypatch):
    monkeypatch.setattr(rules, "require_tracker", lambda name: None)
    assert values(name) == RESOLVED[name]
    assert values(name, "--max_iters=200") == {**RESOLVED[name], "max_iters": 200}
