"""What the pages say is so: their code runs, their commands parse, the names, options and metrics on them exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from thrust_rllib import JointPPOConfig, RedundancyPenalty
from thrust_rllib.cli import app
from thrust_rllib.config import SECTIONS
from thrust_rllib.options import keyword_names

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


def blocks(text, *languages):
    """Contents of the fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def commands(text, program):
    """Lines of a page that call a program, without comments."""
    lines = "".join(blocks(text, "", "bash", "sh", "console")).replace("\\\n", " ").splitlines()
    parsed = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if program in line]
    return [words[1:] for words in parsed if words and words[0] == program]


def code(text):
    """Everything between single backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def table(text, heading):
    """Rows of the first table whose first column has this heading: lists of cells."""
    _, _, rest = text.partition(f"| {heading} |")
    assert rest, heading
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [re.split(r"\s*\|\s*", row)[1:-1] for row in rows]


# --- code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if blocks(text, "python")])
def test_the_code_of_a_page_runs(page, ray_session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    for number, block in enumerate(blocks(PAGES[page], "python"), 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert len(names) > 2  # it defined something


def test_code_that_does_not_run_is_noticed():
    (block,) = blocks("text\n```python\nimport thrust_rllib\nthrust_rllib.JointPPO2\n```\n", "python")
    with pytest.raises(AttributeError, match="JointPPO2"):
        exec(block, {})


def test_before_and_after_differ_by_two_lines():
    before, after = (
        block.splitlines()
        for block in blocks(PAGES["migrating.md"], "python")
        if ".environment(Echo)" in block and "import" in block
    )
    changed = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    assert [a.strip().split("  #")[0] for _, a in changed] == [
        "from thrust_rllib import JointPPOConfig",
        "JointPPOConfig()",
    ]


# --- commands -----------------------------------------------------------------------------------------------------


def exit_code(words):
    """How `thrust-rllib` ends with these arguments if its commands do nothing but take their options."""
    group = typer.main.get_command(app)
    for command in group.commands.values():
        command.callback = lambda **options: None
    with pytest.raises(SystemExit) as ended:
        group.main(list(words), prog_name="thrust-rllib")
    return ended.value.code


@pytest.mark.parametrize("words", [c for text in PAGES.values() for c in commands(text, "thrust-rllib")], ids=" ".join)
def test_a_command_parses(words):
    assert exit_code(words) == 0


@pytest.mark.parametrize(
    "words", [["trian", "CartPole-v1"], ["train", "CartPole-v1", "--stepz", "5"], ["train", "--runners"]]
)
def test_a_wrong_command_does_not_parse(words):
    assert exit_code(words) == 2


def test_make_targets_and_scripts_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [words for text in PAGES.values() for words in commands(text, "make")]
    assert named and {words[0] for words in named if words} <= targets
    for text in PAGES.values():
        for name in re.findall(r"\b(?:examples|docs|benchmarks|tests)/\w+\.(?:py|md)\b", text):
            assert (ROOT / name).is_file(), name


def test_links_lead_somewhere():
    def anchors(text):
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    for page, text in PAGES.items():
        folder = ROOT if page == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            other = (folder / path).resolve() if path else folder / page
            assert other.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(other.read_text()), f"{page} links to {target}"


# --- names and options --------------------------------------------------------------------------------------------


def resolve(dotted):
    """The object of a dotted name, the longest importable part being its module."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def dotted_names(text):
    return {word.split("(")[0] for word in code(text) if re.match(r"thrust_rllib(\.\w+)+", word)}


@pytest.mark.parametrize("page", PAGES)
def test_named_functions_and_classes_exist(page):
    for name in dotted_names(PAGES[page]):
        assert resolve(name) is not None, name


def test_the_formulas_name_the_functions_that_compute_them():
    from thrust_rllib import functional

    pages = PAGES["algorithm.md"] + PAGES["centralized.md"]
    named = set(re.findall(r"thrust_rllib\.functional\.(\w+)", pages))
    helpers = {"masked_mean", "masked_moments", "global_norm", "global_norms"}
    assert named == set(functional.__all__) - helpers
    with pytest.raises(AttributeError):
        resolve("thrust_rllib.functional.advantage")


OPTIONS = set(vars(JointPPOConfig())) | {name for s in SECTIONS for name in keyword_names(JointPPOConfig, s)}


def settings(text):
    """(option, value) of everything written as `option=value`."""
    found = []
    for word in code(text):
        match = re.fullmatch(r"(?:\.\w+\()?([a-z]\w*)=([^)]+\)?)\)?", word)
        if match and not word.startswith(("normalization", "direction")):
            found.append(match.groups())
    return found


@pytest.mark.parametrize("page", ["algorithm.md", "centralized.md", "migrating.md", "metrics.md", "architecture.md"])
def test_options_exist(page):
    for name, _ in settings(PAGES[page]):
        assert name in OPTIONS, name
    assert "value_normalisation" not in OPTIONS


def test_the_defaults_that_are_named_are_the_defaults():
    config = JointPPOConfig()
    _, _, tail = PAGES["algorithm.md"].partition("Other numbers:")
    numbers = settings(tail.partition("\n\n")[0])
    assert len(numbers) == 9
    for name, value in numbers:
        assert getattr(config, name) == ast.literal_eval(value), name


def test_settings_that_restore_the_seed_are_those_of_seed_defaults():
    rows = table(PAGES["algorithm.md"].partition("## Differences from the seed trainer")[2], "what")
    restored = dict(pair for row in rows for pair in settings(row[-1]))
    seed, ours = JointPPOConfig().seed_defaults(), JointPPOConfig()
    changed = {
        name for name in vars(seed) if name != "policies" and repr(getattr(seed, name)) != repr(getattr(ours, name))
    }
    assert changed == {"gae_bootstrap", "value_normalization"} <= set(restored)
    for name in changed:
        assert getattr(seed, name) == ast.literal_eval(restored[name])


EARLY_ERRORS = [
    pair
    for row in table(PAGES["migrating.md"].partition("is an error before anything runs")[2], "setting")
    for pair in settings(row[0])
]


@pytest.mark.parametrize("name, value", EARLY_ERRORS)
def test_what_is_called_an_early_error_is_one(name, value):
    config = JointPPOConfig().environment("climbing")
    with pytest.raises(ValueError, match=name):
        config.update_from_dict({name: ast.literal_eval(value)}).validate()


# --- metrics ------------------------------------------------------------------------------------------------------


def described():
    """{pattern: (its regular expression, when it is there)} of docs/metrics.md."""
    found = {}
    for line in re.findall(r"^\| `(?:env_runners|learners)/.*", PAGES["metrics.md"], re.MULTILINE):
        path, _, _, when = re.split(r"\s*\|\s*", line)[1:-1]
        path = path.strip("`")
        assert path not in found, f"{path} stands twice"
        # All modules are no module, the total of all couplings is no coupling.
        regex = re.escape(path).replace("<module>", "(?!__all_modules__)[^/]+")
        names = "<(agent|coupling|head|target|constraint|group)>"
        found[path] = re.compile(re.sub(names, "(?!total$)[^/]+", regex)), when
    return found


def flatten(result, prefix=""):
    for key, value in result.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}"


def undescribed(paths):
    patterns = [regex for regex, _ in described().values()]
    return {path for path in paths if not any(regex.fullmatch(path) for regex in patterns)}


@pytest.fixture(scope="module")
def reported(ray_session):
    """Paths of the metrics of a second iteration with a coupling, a critic optimizer and an evaluation."""
    config = (
        JointPPOConfig()
        .environment("bucket_brigade")
        .env_runners(num_envs_per_env_runner=4, normalize_observations=True)
        .multi_agent(policies={"left": ["agent_0", "agent_1"], "right": ["agent_2", "agent_3"]})
        .training(
            critic_lr=1e-3,
            train_batch_size_per_learner=128,
            minibatch_size=64,
            num_epochs=2,
            cross_agent_losses={"redundancy": RedundancyPenalty()},
        )
        .evaluation(evaluation_interval=1, evaluation_duration=4)
        .debugging(seed=0)
    )
    algo = config.build_algo()
    algo.train()
    result = algo.train()
    algo.stop()
    return result


def test_every_metric_is_described(reported):
    paths = {path for path in flatten(reported) if path.startswith(("env_runners/", "learners/"))}
    assert len(paths) > 60
    assert not undescribed(paths)
    evaluation = {p.removeprefix("evaluation/") for p in flatten(reported) if p.startswith("evaluation/env_runners/")}
    assert evaluation and not undescribed(evaluation)
    assert undescribed({"learners/left/mean_kl_loss"})  # what the page does not have is noticed


def test_every_description_fits_a_metric_or_says_when_it_does(reported):
    paths = list(flatten(reported))
    for pattern, (regex, when) in described().items():
        here = any(regex.fullmatch(path) for path in paths)
        conditional = when.startswith(("for ", "from ", "once ", "with "))
        assert when.startswith("always") or conditional, f"{pattern}: {when}"
        assert here or conditional and not when.startswith(("from", "once")), pattern


def test_metrics_that_stay_are_there(reported):
    for under, names in table(PAGES["migrating.md"].partition("Metric names that stay")[2], "under"):
        prefix = under.strip("`").replace("<module>", "left")
        for name in code(names):
            assert any(path == prefix + name or path.startswith(f"{prefix}{name}/") for path in flatten(reported)), name


def test_formulas_between_metrics(reported):
    learners, runners = reported["learners"], reported["env_runners"]
    shared = learners["__all_modules__"]
    modules = [learners["left"], learners["right"]]
    for m in modules:
        total = m["policy_loss"] - m["curr_entropy_coeff"] * m["entropy"] + 0.5 * m["vf_loss"]
        assert m["total_loss"] == pytest.approx(total, abs=1e-5)
    coupling = shared["cross_agent_loss"]
    assert coupling["total"] == pytest.approx(shared["cross_agent_coeff"]["redundancy"] * coupling["redundancy"])
    actors = sum(m["policy_loss"] - m["curr_entropy_coeff"] * m["entropy"] for m in modules)
    assert shared["total_loss"] == pytest.approx(actors + coupling["total"], abs=1e-5)
    agents = runners["agent_episode_returns_mean"]
    assert runners["episode_return_mean"] == pytest.approx(sum(agents.values()))
    assert runners["module_episode_returns_mean"]["left"] == pytest.approx(agents["agent_0"] + agents["agent_1"])
    assert reported["evaluation"]["env_runners"]["num_episodes"] == 4
    assert shared["num_minibatch_steps"] == 2  # one draw in each of two epochs


def test_the_learning_rate_that_is_reported_is_the_next_ones(ray_session):
    rates = [[0, 1.0], [1000, 0.0]]
    config = JointPPOConfig().environment("climbing").multi_agent(policies="shared").debugging(seed=0)
    config.training(lr=rates, entropy_coeff=rates, train_batch_size_per_learner=200, minibatch_size=50, num_epochs=1)
    algo = config.build_algo()
    learned = algo.train()["learners"]["shared"]
    algo.stop()
    assert learned["curr_entropy_coeff"] == pytest.approx(1.0)
    assert learned["default_optimizer_learning_rate"] == pytest.approx(0.8)
