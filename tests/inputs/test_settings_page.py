"""`docs/settings.md` says of every option of RLlib what becomes of it, and says so truly.

A new release of RLlib with a new option fails here, by the option's name.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from tests.support import tiny_config
from thrust_rllib import JointPPOConfig
from thrust_rllib.options import keyword_names
from thrust_rllib.unserved_options import NOT_SERVED, OFFLINE, SWALLOWED, UNREAD, deprecated_options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
SECTIONS = (
    "python_environment", "resources", "framework", "api_stack", "environment", "env_runners", "learners", "training",
    "callbacks", "evaluation", "offline_data", "multi_agent", "reporting", "checkpointing", "debugging",
    "fault_tolerance", "rl_module", "experimental",
)  # fmt: skip
STATUSES = ("honoured by RLlib", "honoured", "early error", "set by RLlib")

# Where a keyword and the attribute that it sets have different names; callbacks: on_x sets callbacks_on_x.
ATTRIBUTES = {
    "framework": "framework_str", "is_atari": "_is_atari", "env_to_module_connector": "_env_to_module_connector",
    "module_to_env_connector": "_module_to_env_connector", "learner_connector": "_learner_connector",
    "learner_class": "_learner_class", "train_batch_size_per_learner": "_train_batch_size_per_learner",
    "model_config": "_model_config", "rl_module_spec": "_rl_module_spec",
    "dataset_num_iters_per_offline_eval_runner": "dataset_num_iters_per_eval_runner",
    "custom_stats_cls_lookup": "stats_cls_lookup",
}  # fmt: skip

# Not options: the machinery of a configuration, which no user sets.
MACHINERY = {
    "_is_frozen", "_is_online", "_per_module_overrides", "_prior_exploration_config",
    "_dont_auto_sync_env_runner_states",
}  # fmt: skip

# A value that a user might give; elsewhere one is made up from the default.
OTHER_VALUES = {
    "batch_mode": "complete_episodes", "exploration_config": {"type": "EpsilonGreedy"}, "preprocessor_pref": "rllib",
    "gym_env_vectorize_mode": "async", "observation_filter": "MeanStdFilter", "model": {"fcnet_hiddens": [7]},
    "learner_connector": lambda *args: None, "env_to_module_connector": lambda *args: None,
    "module_to_env_connector": lambda *args: None, "framework": "tf2", "is_atari": True, "clip_rewards": True,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of the page."""

    section: str
    option: str
    default: str
    text: str
    test: str

    @property
    def status(self):
        return next((s for s in STATUSES if self.text.startswith(s)), self.text)


def rows_of(page: str, own: bool = False) -> list[Row]:
    """The rows of RLlib's options, or of our own."""
    rows, section = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:].strip("` .()…")
        elif line.startswith("| `") and (section == "Options of this package") == own:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 4, f"a row of docs/settings.md has {len(cells)} cells: {line}"
            option, default, text, test = cells
            rows.append(Row(section, option.strip("`"), default.strip("`"), text, test.strip("`")))
    return rows


ROWS = rows_of(PAGE.read_text())


def attribute_of(option: str) -> str:
    return ATTRIBUTES.get(option, f"callbacks_{option}" if option.startswith("on_") else option)


def options_of_rllib() -> set[str]:
    """Keywords of all sections, and attributes that no keyword sets."""
    keywords = {name for section in SECTIONS for name in keyword_names(PPOConfig, section)}
    covered = {attribute_of(name) for name in keywords}
    return keywords | {name for name in vars(PPOConfig()) if name not in covered | MACHINERY}


def check_rows(options: set[str], rows: list[Row]) -> None:
    named = [row.option for row in rows]
    missing, unknown = sorted(options - set(named)), sorted(set(named) - options)
    twice = sorted({name for name in named if named.count(name) > 1})
    assert not missing, f"options of RLlib that docs/settings.md says nothing about: {missing}"
    assert not unknown, f"docs/settings.md names options that RLlib does not have: {unknown}"
    assert not twice, f"docs/settings.md names options twice: {twice}"


def test_every_option_of_rllib_is_on_the_page_once():
    check_rows(options_of_rllib(), ROWS)


def test_a_new_option_a_dropped_one_and_a_double_are_told():
    options = options_of_rllib()
    with pytest.raises(AssertionError, match=r"says nothing about: \['brand_new'\]"):
        check_rows(options | {"brand_new"}, ROWS)
    with pytest.raises(AssertionError, match=r"does not have: \['gamma'\]"):
        check_rows(options - {"gamma"}, ROWS)
    with pytest.raises(AssertionError, match=r"twice: \['gamma'\]"):
        check_rows(options, [*ROWS, next(row for row in ROWS if row.option == "gamma")])


def test_all_sections_of_rllib_are_looked_at_in_their_order():
    given = {name for name, method in vars(JointPPOConfig).items() if inspect.isfunction(method)}
    assert set(SECTIONS) <= given
    headings = [row.section for row in ROWS]
    order = sorted(set(headings), key=headings.index)
    assert [section for section in order if section in SECTIONS] == [s for s in SECTIONS if s in order]


def test_an_option_stands_under_a_section_that_takes_it():
    for row in ROWS:
        if row.section in SECTIONS:
            assert row.option in keyword_names(PPOConfig, row.section), row
        else:
            assert not any(row.option in keyword_names(PPOConfig, section) for section in SECTIONS), row


def test_the_status_agrees_with_the_tables():
    tables = {*NOT_SERVED, *UNREAD, *OFFLINE, *deprecated_options(PPOConfig())}
    tables |= {name for names in SWALLOWED.values() for name in names}
    for row in ROWS:
        assert row.status in STATUSES, f"{row.option}: {row.text!r} starts with none of {STATUSES}"
        if attribute_of(row.option) in tables or row.option in tables:
            assert row.status == "early error", row
        if row.status == "early error":
            assert row.text.startswith("early error: "), f"{row.option}: say why"


def other_value(option: str):
    if option in OTHER_VALUES:
        return OTHER_VALUES[option]
    default = vars(JointPPOConfig()).get(attribute_of(option))
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 7
    return {str: "other", dict: {"other": 1}, list: ["other"]}.get(type(default), "other")


@pytest.mark.parametrize("row", [r for r in ROWS if r.status == "early error"], ids=lambda row: row.option)
def test_an_option_that_is_refused(row):
    config, value = tiny_config("climbing"), other_value(row.option)
    with pytest.raises(ValueError, match=re.escape(row.option)):
        if row.section in SECTIONS:
            getattr(config, row.section)(**{row.option: value})
        else:
            config.update_from_dict({row.option: value})
        config.validate()


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_test_that_is_named_exists():
    found = {}
    for row in [*ROWS, *rows_of(PAGE.read_text(), own=True)]:
        if row.status in ("set by RLlib", "early error"):
            continue
        file, _, test = row.test.partition("::")
        assert test.startswith("test_"), f"{row.option}: no test is named"
        if file not in found:
            found[file] = functions_of(ROOT / "tests" / file)
        assert test in found[file], f"{row.option}: tests/{file} has no {test}"


def test_the_default_is_told_where_it_is_not_rllibs():
    ours, theirs = vars(JointPPOConfig()), vars(PPOConfig())
    for row in ROWS:
        attribute = attribute_of(row.option)
        if row.option not in ("algo_class", "policies"):  # who plays whom is told in words
            value = ours.get(attribute)
            assert row.default == ("" if value == theirs.get(attribute) else repr(value)), row


def test_the_options_of_this_package_are_all_on_the_page(monkeypatch):
    monkeypatch.delenv("THRUST_RLLIB_AUDIT")  # which conftest.py sets
    rows = rows_of(PAGE.read_text(), own=True)
    own = {
        name
        for section in ("training", "env_runners")
        for name in keyword_names(JointPPOConfig, section) - keyword_names(PPOConfig, section)
    }
    assert {row.option for row in rows} == own and len(rows) == len(own)
    documented = set(re.findall(r"`(\w+)`", inspect.getdoc(JointPPOConfig)))
    for row in rows:
        assert row.option in documented, f"{row.option} is not in the docstring of JointPPOConfig"
        assert row.default == repr(getattr(JointPPOConfig(), row.option)), row
