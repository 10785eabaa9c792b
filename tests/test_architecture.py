"""Imports point one way, importing the package imports no Ray, and nothing patches Ray."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import thrust_rllib

PACKAGE = Path(thrust_rllib.__file__).parent

# From the bottom up: a file imports from its own layer or from those above it in this list, never from below.
# A name with a dot at its end stands for a whole folder.
LAYERS: dict[str, list[str]] = {
    "mathematics, data, environments": ["functional.", "joint_batch", "cross_agent_losses", "action_spread", "envs."],
    "names and episodes": [
        "options", "checkpoints", "teams", "joint_episode", "resources", "constraints", "joint_costs",
    ],
    "modules and connectors": ["rl_modules.", "connectors."],
    "sampling": ["sampling.", "env_runner", "episode_runner"],
    "losses": [
        "ranks", "minibatches", "sequences", "joint_values", "valid_rows", "joint_advantages", "joint_rows", "audit",
        "exchanged_rows",
        "team_lives", "team_view", "team_rewards", "team_credit", "team_critics", "module_forward", "auxiliary_targets",
        "module_axis", "auxiliary_losses", "team_outputs",
        "loss_settings", "joint_losses", "shared_minibatch", "minibatch_losses", "optimizer_pass", "coupling_gradients",
        "gradient_sum", "diversity_probe",
    ],
    "learning": [
        "metrics", "target_kl", "entropy_guard", "notices", "learner_checks", "learners_alike", "rollouts",
        "multipliers", "learner_state", "team_learner", "update_inputs", "learner", "learner_group",
    ],
    "algorithm": [
        "communicating_teams", "unserved_options", "config_checks", "doors", "pipelines", "config", "team_changes",
        "runner_states", "algorithm_state", "warm_start", "team_algorithm", "algorithm", "registration",
    ],
    "runs": ["confidence", "recipes", "evaluation", "baselines", "trained_team", "team_features",
        "search_space", "sweep_trial", "sweep_results", "sweep_callbacks", "sweep_schedulers", "sweeps",
    ],
    "command line": ["command_line.", "reporting.", "report", "cli", "__main__"],
}  # fmt: skip
FACADE = "__init__"
# Imports inside a function, where two files need each other; everything else is imported at the top.
LATE = {("config", "algorithm")}


def files() -> dict[str, ast.Module]:
    """{module name inside the package: its syntax tree}."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name] = ast.parse(path.read_text())
    return found


FILES = files()


def layer_of(name: str) -> int:
    for index, members in enumerate(LAYERS.values()):
        if any(name == member or (member.endswith(".") and f"{name}.".startswith(member)) for member in members):
            return index
    raise AssertionError(f"thrust_rllib/{name.replace('.', '/')}.py is in no layer; add it to LAYERS in {__file__}")


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Nodes inside `if TYPE_CHECKING:`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(name: str, late: bool) -> set[str]:
    """Modules of the package that `name` imports at the top, or (late) inside functions."""
    tree = FILES[name]
    skipped = only_for_types(tree)
    inside = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in skipped or (node in inside) != late:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for full in names:
            parts = full.split(".")
            if parts[0] != "thrust_rllib":
                continue
            # A name in a module, a module in a package, or a name of the facade.
            candidates = [".".join(parts[1:k]) for k in range(len(parts), 1, -1)]
            known = [c for c in candidates if c in FILES or f"{c}.__init__" in FILES]
            found.add(known[0] if known else FACADE)
    return found


def plain(name: str) -> str:
    """A package is named like its folder."""
    return name.removesuffix(".__init__")


def test_every_file_is_in_a_layer():
    for name in FILES:
        if name != FACADE:
            layer_of(plain(name))
    members = {member for layer in LAYERS.values() for member in layer}
    for member in members:
        exists = any(name.startswith(member) if member.endswith(".") else name == member for name in FILES)
        assert exists, f"LAYERS names {member}, which does not exist"


@pytest.mark.parametrize("name", [name for name in FILES if name != FACADE])
def test_imports_point_one_way(name):
    mine = layer_of(plain(name))
    for other in imports(name, late=False):
        if other == FACADE:
            assert mine == len(LAYERS) - 1 or "version" in ast.unparse(FILES[name]), f"{name} imports the facade"
            continue
        assert layer_of(other) <= mine, f"{name} imports {other}, which stands above it"
    for other in imports(name, late=True) - {FACADE}:
        allowed = layer_of(other) < mine or (name, other) in LATE or name.startswith("envs.")
        # Command line: heavy imports inside functions, so that --help answers at once.
        allowed = allowed or mine >= list(LAYERS).index("runs")
        assert allowed, f"{name} imports {other} inside a function"


def test_there_is_no_cycle():
    graph = {plain(name): {plain(o) for o in imports(name, late=False)} - {FACADE} for name in FILES if name != FACADE}
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, f"cycle: {' -> '.join([*path, name])}"
        if name not in done:
            for other in graph.get(name, ()):
                if other != name:
                    visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


@pytest.mark.parametrize("folder", ["functional", "envs"])
def test_the_lowest_folders_know_only_themselves(folder):
    for name in FILES:
        if name.startswith(f"{folder}."):
            for other in imports(name, late=False) | imports(name, late=True):
                assert other.startswith(folder), (name, other)


SCRIPT = """
import json, sys
import {module}
{code}
heavy = ["ray", "pettingzoo", "matplotlib", "typer", "pandas"]
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


@pytest.mark.parametrize(
    "module, code, loaded",
    [
        ("thrust_rllib", "dir(thrust_rllib), thrust_rllib.__version__", []),
        ("thrust_rllib.functional", "", []),
        ("thrust_rllib.envs", "thrust_rllib.envs.list_envs(); thrust_rllib.envs.make_vector_env('climbing')", []),
        ("thrust_rllib", "thrust_rllib.JointEnv, thrust_rllib.JointStepResult, thrust_rllib.JointBatch", []),
        ("thrust_rllib", "thrust_rllib.RedundancyPenalty()", []),
        ("thrust_rllib", "thrust_rllib.JointPPOConfig", ["ray"]),  # the check itself sees Ray where there is Ray
    ],
)
def test_what_an_import_loads(module, code, loaded):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module, code=code)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert [name for name in found if name in ("ray", "pettingzoo", "matplotlib", "typer")][
        : len(loaded) or None
    ] == loaded


def test_public_names_exist_and_unknown_ones_are_errors():
    assert thrust_rllib.__all__ == sorted(thrust_rllib.__all__) and set(thrust_rllib.__all__) <= set(dir(thrust_rllib))
    for name in thrust_rllib.__all__:
        assert getattr(thrust_rllib, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'JointPPO2'"):
        thrust_rllib.JointPPO2  # noqa: B018


def names_from_ray(tree: ast.Module) -> set[str]:
    """Names that a file binds to something of Ray, RLlib or Tune."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            bound |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            bound |= {alias.asname or "ray" for alias in node.names if alias.name.split(".")[0] == "ray"}
    return bound


@pytest.mark.parametrize("name", FILES)
def test_nothing_patches_ray(name):
    tree = FILES[name]
    bound = names_from_ray(tree)

    def root(node):
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return node.id if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript):
                assert root(target) not in bound, f"{name}, line {node.lineno}: {ast.unparse(target)} is set"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            assert root(node.args[0]) not in bound, f"{name}, line {node.lineno}: {ast.unparse(node)}"
