"""From what a user typed to a `JointPPOConfig`."""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrust_rllib.command_line.training_progress import Limit
from thrust_rllib.envs.names import nearest

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

DEFAULT_LIMIT = Limit("iterations", 100)
# No run gets there: RLlib builds a runner for evaluation when an interval is set, and we evaluate at the end.
_NEVER = 10**9


def parse_value(text: str) -> Any:
    """`text` as JSON, else as a Python literal, else as it is: 3, 1e-3, inf, true, None, [1, 2], (1, 2), fast."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return {"inf": math.inf, "-inf": -math.inf}.get(text, text)


def parse_pairs(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    """{name: value} from "name=value" texts.

    Raises:
        ValueError: a text without a name or "=", or the same name twice.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name.strip() and equals):
            raise ValueError(f"{option} {pair!r}; needed: NAME=VALUE, e.g. {option} {(name.strip() or 'name')}=1")
        if name.strip() in values:
            raise ValueError(f"{option} sets {name.strip()!r} twice")
        values[name.strip()] = parse_value(text.strip())
    return values


def choose_limit(iterations: int | None, steps: int | None, minutes: float | None) -> Limit:
    """The end of the run.

    Raises:
        ValueError: more than one, or none that is positive.
    """
    amounts = {"iterations": iterations, "steps": steps, "minutes": minutes}
    given = {kind: amount for kind, amount in amounts.items() if amount is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join('--' + kind for kind in given)} exclude each other: give one")
    for kind, amount in given.items():
        if not amount > 0:
            raise ValueError(f"--{kind} {amount}; needed: more than 0")
        return Limit(kind, amount)
    return DEFAULT_LIMIT


@dataclass(frozen=True)
class TrainOptions:
    """What `thrust-rllib train` was given; None and empty lists stand for not given. See its help."""

    env: str
    env_config: Sequence[str] = ()
    iterations: int | None = None
    steps: int | None = None
    minutes: float | None = None
    runners: int | None = None
    envs_per_runner: int | None = None
    learners: int | None = None
    threads: int | None = None
    address: str | None = None
    seed: int | None = None
    lr: float | None = None
    critic_lr: float | None = None
    gamma: float | None = None
    lambda_: float | None = None
    entropy: float | None = None
    batch: int | None = None
    minibatch: int | None = None
    epochs: int | None = None
    normalize_observations: bool | None = None
    settings: Sequence[str] = ()
    redundancy: float | None = None
    policies: str | None = None
    cell: str | None = None
    model: Sequence[str] = ()
    freeze: Sequence[str] = ()
    output: Path | None = None
    checkpoint_every: int = 50
    eval_episodes: int = 100
    live: bool | None = None
    traceback: bool = False


def _total_steps(options: TrainOptions, batch: int) -> int | None:
    """Environment steps that the run is going to take, `batch` in an iteration; None where it is limited by time."""
    limit = choose_limit(options.iterations, options.steps, options.minutes)
    if limit.kind == "minutes":
        return None
    return int(limit.amount) * (batch if limit.kind == "iterations" else 1)


def build_config(options: TrainOptions) -> JointPPOConfig:
    """The validated configuration: the recipe, then the options, then `--set`.

    Raises:
        ValueError, TypeError: what was given, what is needed.
    """
    from thrust_rllib.config import JointPPOConfig
    from thrust_rllib.cross_agent_losses import RedundancyPenalty
    from thrust_rllib.recipes import recipe

    # A failing environment would otherwise be restarted without end, and its message lost.
    config = JointPPOConfig().fault_tolerance(restart_failed_env_runners=False)
    recipe(config)
    config.environment(options.env, env_config=parse_pairs("--env-config", options.env_config))
    config.debugging(seed=secrets.randbelow(2**31) if options.seed is None else options.seed)
    config.env_runners(
        **_given(
            num_env_runners=options.runners,
            num_envs_per_env_runner=options.envs_per_runner,
            normalize_observations=options.normalize_observations,
        )
    )
    config.training(
        **_given(
            lr=options.lr,
            critic_lr=options.critic_lr,
            gamma=options.gamma,
            lambda_=options.lambda_,
            entropy_coeff=options.entropy,
            train_batch_size_per_learner=options.batch,
            minibatch_size=options.minibatch,
            num_epochs=options.epochs,
        )
    )
    config.learners(**_given(num_learners=options.learners))
    if options.policies is not None:
        config.multi_agent(policies=options.policies)
    model_config = parse_pairs("--model", options.model)
    if options.cell is not None and "cell" in model_config:
        raise ValueError(f"--cell {options.cell} and --model cell={model_config['cell']}: give one of them")
    if model_config := model_config | _given(cell=options.cell):
        config.rl_module(model_config=model_config)
    if options.redundancy is not None:
        config.training(
            cross_agent_losses={"redundancy": RedundancyPenalty()},
            cross_agent_coeffs={"redundancy": options.redundancy},
        )
    if options.eval_episodes:
        # Greedy, as `thrust-rllib evaluate` plays unless told otherwise.
        config.evaluation(
            evaluation_interval=_NEVER,
            evaluation_duration=options.eval_episodes,
            evaluation_config={"explore": False},
        )
    settings = parse_pairs("--set", options.settings)
    config.update_from_dict(settings)
    if options.lr is None and "lr" not in settings:
        # Only now is it known how many steps an iteration takes.
        config.training(lr=recipe(JointPPOConfig(), _total_steps(options, config.total_train_batch_size)).lr)
    if options.freeze:
        config.multi_agent(policies_to_train=_trained_modules(config, options.freeze))
    config.validate()
    return config


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _trained_modules(config: JointPPOConfig, freeze: Sequence[str]) -> list[str]:
    """Modules that play no agent in `freeze`."""
    from thrust_rllib.envs import make_vector_env
    from thrust_rllib.teams import team_table

    env = make_vector_env(config.env, config.env_config, 1)
    agents = list(env.possible_agents)
    env.close()
    table = {str(a): m for a, m in team_table(config.team or "per_agent", agents).items()}
    for agent in freeze:
        if agent not in table:
            raise ValueError(f"--freeze {agent}: no such agent{nearest(agent, table)} The agents are {list(table)}")
    frozen = {table[agent] for agent in freeze}
    also = sorted(agent for agent, module in table.items() if module in frozen and agent not in freeze)
    if also:
        raise ValueError(
            f"--freeze {' '.join(freeze)} would also freeze {also}, which have the same module. Freeze them too, or "
            "use --policies per_agent"
        )
    trained = sorted(set(table.values()) - frozen)
    if not trained:
        raise ValueError("--freeze names every agent: nothing would be trained")
    return trained
