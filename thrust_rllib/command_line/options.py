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
DEFAULT_CHECKPOINT_EVERY = 50
DEFAULT_EVAL_EPISODES = 100
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
    """What `thrust-rllib train` was given; None and empty lists stand for not given. See its help.

    Beside `resume`, `env` and most others stay out: the run has its own.
    """

    env: str | None = None
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
    checkpoint_every: int | None = None
    eval_episodes: int | None = None
    live: bool | None = None
    traceback: bool = False
    resume: Path | None = None


def recipe_lr(limit: Limit, config: JointPPOConfig) -> Any:
    """The recipe's learning rate for a run of this length: it falls to 0 at the end, where that is known."""
    from thrust_rllib.config import JointPPOConfig
    from thrust_rllib.recipes import recipe

    if limit.kind == "minutes":
        return recipe(JointPPOConfig()).lr
    steps = int(limit.amount) * (config.total_train_batch_size if limit.kind == "iterations" else 1)
    return recipe(JointPPOConfig(), steps).lr


def build_config(options: TrainOptions) -> JointPPOConfig:
    """The validated configuration: the recipe, then the options, then `--set`.

    Raises:
        ValueError, TypeError: what was given, what is needed.
    """
    from thrust_rllib.config import JointPPOConfig
    from thrust_rllib.recipes import recipe

    config = JointPPOConfig()
    recipe(config)
    config.environment(options.env, env_config=parse_pairs("--env-config", options.env_config))
    config.debugging(seed=secrets.randbelow(2**31) if options.seed is None else options.seed)
    config.env_runners(
        **_given(
            num_envs_per_env_runner=options.envs_per_runner,
            normalize_observations=options.normalize_observations,
        )
    )
    config.training(
        **_given(
            gamma=options.gamma,
            lambda_=options.lambda_,
            train_batch_size_per_learner=options.batch,
            minibatch_size=options.minibatch,
            num_epochs=options.epochs,
        )
    )
    if options.policies is not None:
        config.multi_agent(policies=options.policies)
    model_config = parse_pairs("--model", options.model)
    if options.cell is not None and "cell" in model_config:
        raise ValueError(f"--cell {options.cell} and --model cell={model_config['cell']}: give one of them")
    if model_config := model_config | _given(cell=options.cell):
        config.rl_module(model_config=model_config)
    set_evaluation(config, DEFAULT_EVAL_EPISODES if options.eval_episodes is None else options.eval_episodes)
    changed_by(options, config)
    if not gives_lr(options):
        # Only now is it known how many steps an iteration takes.
        config.training(lr=recipe_lr(choose_limit(options.iterations, options.steps, options.minutes), config))
    config.validate()
    return config


def gives_lr(options: TrainOptions) -> bool:
    """Whether a learning rate was given, in place of the recipe's."""
    return options.lr is not None or "lr" in parse_pairs("--set", options.settings)


def set_evaluation(config: JointPPOConfig, episodes: int) -> None:
    """An evaluation at the end of the run; greedy, as `thrust-rllib evaluate` plays unless told otherwise."""
    if episodes:
        config.evaluation(
            evaluation_interval=_NEVER, evaluation_duration=episodes, evaluation_config={"explore": False}
        )
    else:
        config.evaluation(evaluation_interval=None, evaluation_config=None)


def changed_by(options: TrainOptions, config: JointPPOConfig) -> None:
    """Sets the options that may change while a run goes on, and `--set`.

    Raises:
        ValueError, TypeError: what was given, what is needed.
    """
    from thrust_rllib.cross_agent_losses import RedundancyPenalty

    config.env_runners(**_given(num_env_runners=options.runners))
    config.learners(**_given(num_learners=options.learners))
    config.training(**_given(lr=options.lr, critic_lr=options.critic_lr, entropy_coeff=options.entropy))
    if options.redundancy is not None:
        config.training(
            cross_agent_losses={"redundancy": RedundancyPenalty(), **config.cross_agent_losses},
            cross_agent_coeffs={**config.cross_agent_coeffs, "redundancy": options.redundancy},
        )
    config.update_from_dict(parse_pairs("--set", options.settings))
    if options.freeze:
        config.multi_agent(policies_to_train=_trained_modules(config, options.freeze))


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
