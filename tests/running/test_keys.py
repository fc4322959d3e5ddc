"""docs/keys.md: the page that the code prints, with a meaning for every key that the commands have."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import keys
from otb.records.config_keys import flatten
from tests.support.commands import ROOT


def test_every_group_is_documented():
    groups = {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml")}
    assert keys.TITLES.keys() == groups | {"hydra/launcher"}
    documented = keys.document()
    sections = set(yaml.safe_load((ROOT / "conf" / "plan.yaml").read_text()))
    assert [name for name in sections if f"`{name}`" not in documented] == []


def test_documented_keys_are_those_of_the_yamls():
    documented = (ROOT / "docs" / "keys.md").read_text()
    assert documented == keys.document(), "run: python -m experiments.keys > docs/keys.md"


@pytest.mark.parametrize("group", ["", *keys.TITLES])
def test_every_key_has_a_comment_beside_it_in_a_yaml_of_its_group(group):
    """An experiment sets keys of the run, which have theirs in config.yaml."""
    commands = [ROOT / "conf" / f"{name}.yaml" for name in ("config", "variance", "warm_start")]
    files = keys.choices(group) if group else commands
    found = [] if group == "experiment" else keys.with_meanings([key for file in files for key in keys.keys_of(file)])
    assert [key.name for key in found if not key.meaning] == []


@pytest.mark.parametrize("command", ["config", "variance", "warm_start"])
def test_every_key_that_a_command_composes_is_documented(command):
    documented = (ROOT / "docs" / "keys.md").read_text()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = flatten(OmegaConf.to_container(compose(command)))
    names = [name for name in composed if not name.split(".")[-1].startswith("_")]
    assert len(names) > 15
    assert [name for name in names if f"| `{name}` |" not in documented] == []


def test_a_key_is_read_with_its_default_and_its_comment(tmp_path):
    (tmp_path / "some.yaml").write_text(
        "# What it is,\n# in two lines.\n#   python a command\n"
        "_target_: x.y\n"
        "defaults:\n  - /task@evaluation: aime24 # held-out rows\n"
        'mark: "####" # what follows it\n'
        "limits:\n  _target_: z\n  seconds: 1.0e-6 # of a call\n"
        "plain: null\n"
        "# said above\nlong: a text # not in quotes\n"
        "# said above\nalone: [1, 2]\n"
    )
    assert keys.header(tmp_path / "some.yaml") == "What it is, in two lines."
    assert keys.keys_of(tmp_path / "some.yaml") == [
        ("evaluation", "aime24", "held-out rows", "some"),
        ("mark", '"####"', "what follows it", "some"),
        ("limits.seconds", "1.0e-6", "of a call", "some"),
        ("plain", "null", "", "some"),
        ("long", "a text", "not in quotes", "some"),
        ("alone", "[1, 2]", "said above", "some"),
    ]


def test_choices_that_differ_stand_beside_their_default():
    of = [keys.Key("steps", value, "how many", choice) for value, choice in (("1", "a"), ("2", "b"), ("1", "c"))]
    assert keys.default_cell(of, choices_of_group=3) == "`1` (a, c); `2` (b)"
    assert keys.default_cell(of[:1], choices_of_group=3) == "`1` (a)"
    alike = [of[0]._replace(choice=choice) for choice in "abcd"]
    assert keys.default_cell(alike, choices_of_group=5) == "`1` (a, b, c, ...)"
    assert keys.default_cell([key._replace(default=key.choice * 2) for key in alike], 4) == "set by the choice"
    assert keys.default_cell([of[0], of[2]], choices_of_group=2) == "`1`"
    row = keys.table([keys.Key("tail", "own", "own | carry", "a")]).splitlines()[-1]
    assert row == r"| `tail` | `own` | own \| carry |"
