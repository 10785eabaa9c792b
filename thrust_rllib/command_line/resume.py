"""`thrust-rllib train --resume RUN`: which checkpoint a run goes on from, until when, and with which options."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrust_rllib import __version__
from thrust_rllib.command_line.checkpoints import find_checkpoint
from thrust_rllib.command_line.options import (
    DEFAULT_CHECKPOINT_EVERY,
    DEFAULT_EVAL_EPISODES,
    DEFAULT_LIMIT,
    TrainOptions,
    changed_by,
    choose_limit,
    gives_lr,
    parse_pairs,
    recipe_lr,
    set_evaluation,
)
from thrust_rllib.command_line.result_log import iteration_of, read_results
from thrust_rllib.command_line.run_folder import CHECKPOINTS, CONFIG_FILE, iteration_of_checkpoint
from thrust_rllib.command_line.run_record import changes, installed_versions, origin, run_record
from thrust_rllib.command_line.training_progress import SECONDS_PER_MINUTE, Limit

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

logger = logging.getLogger(__name__)

BESIDE = (
    "resume", "iterations", "steps", "minutes", "runners", "learners", "threads", "address", "lr", "critic_lr",
    "entropy", "redundancy", "freeze", "settings", "checkpoint_every", "eval_episodes", "live", "traceback",
)  # fmt: skip
"""Options that may be given beside --resume."""
SET_NAMES = {
    "envs_per_runner": "num_envs_per_env_runner",
    "gamma": "gamma",
    "lambda_": "lambda_",
    "batch": "train_batch_size_per_learner",
    "minibatch": "minibatch_size",
    "epochs": "num_epochs",
}
"""{another option: its name for --set}."""
FIXED = (
    "env", "env_config", "seed", "policies", "policy_mapping_fn", "team", "model_config", "_model_config",
    "_rl_module_spec", "rl_module_spec", "normalize_observations", "sampling", "value_normalization",
)  # fmt: skip
"""What --set cannot change: what a checkpoint holds was made with it."""
OWN_OPTIONS = ("threads", "address", "checkpoint_every", "eval_episodes")
"""Options of `thrust-rllib train` that are no options of `JointPPOConfig`, as `config.json` names them."""
RECIPE_LR = "lr_of_recipe"
ENTRIES = {"environment": dict, "limit": dict, "run": dict, "resumed": list, "versions": dict}
"""Of `config.json`, where they are there."""


@dataclass(frozen=True)
class FoundRun:
    """A run that can go on.

    Args:
        folder: of the run.
        checkpoint: from which it goes on.
        record: its `config.json`.
        env_steps: sampled up to the checkpoint.
        seconds: trained up to there.
    """

    folder: Path
    checkpoint: Path
    record: dict[str, Any]
    env_steps: int
    seconds: float

    @property
    def iteration(self) -> int:
        """Of the checkpoint."""
        return iteration_of_checkpoint(self.checkpoint)


def find_run(path: Path) -> FoundRun:
    """The run of a folder, and its newest complete checkpoint; or a checkpoint in the folder of a run.

    Raises:
        ValueError: no run, no checkpoint in it, or one that another version has written.
    """
    checkpoint, folder = find_checkpoint(path), Path(os.path.abspath(path))
    if checkpoint == path:
        checkpoint = path.resolve()
        folder = checkpoint.parent.parent
    file = folder / CONFIG_FILE
    if not file.is_file() or checkpoint.parent.name != CHECKPOINTS or not checkpoint.name[-1].isdigit():
        raise ValueError(
            f"--resume {path}: {checkpoint} lies in no run folder of `thrust-rllib train` (needed: {file}, and "
            f"{CHECKPOINTS}/iteration_<number> beside it). In Python, JointPPO.from_checkpoint takes any checkpoint"
        )
    try:
        record = json.loads(file.read_text("utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"it holds {type(record).__name__}")
        for name, kind in ENTRIES.items():
            if not isinstance(record.get(name, kind()), kind):
                raise ValueError(f"{name!r} is {record[name]!r}")
    except ValueError as error:
        raise ValueError(f"--resume {path}: {file} cannot be read: {error}; needed: what the run wrote there") from None
    _check_versions(folder, record)
    last = {}
    for row in read_results(folder):
        if iteration_of(row) == iteration_of_checkpoint(checkpoint):
            last = row
    steps, seconds = (float(last.get(name) or 0) for name in ("timesteps_total", "time_total_s"))
    return FoundRun(folder, checkpoint, record, int(steps), seconds)


def _check_versions(folder: Path, record: Mapping[str, Any]) -> None:
    """Checkpoints hold objects of this package and of Ray, whose insides change between minor releases."""
    written = (record.get("resumed") or [record])[-1].get("versions", {})
    here = {"thrust_rllib": __version__, **installed_versions()}
    other = {
        name: str(written[name])
        for name in ("thrust_rllib", "ray")
        if name in written and str(written[name]).split(".")[:2] != here.get(name, "").split(".")[:2]
    }
    if other:
        are = " and ".join(f"{name} {number}" for name, number in other.items())
        have = " and ".join(f"{name} {here.get(name, 'none')}" for name in other)
        raise ValueError(
            f"--resume {folder}: the run was written by {are}; here is {have}, which may read its checkpoints "
            f"differently. Install those ({' '.join(f'{name}=={number}' for name, number in other.items())}), or begin "
            "a new run"
        )


def with_defaults(options: TrainOptions) -> TrainOptions:
    """`options`, with what a run does unless told otherwise."""
    every, episodes = options.checkpoint_every, options.eval_episodes
    return replace(
        options,
        checkpoint_every=DEFAULT_CHECKPOINT_EVERY if every is None else every,
        eval_episodes=DEFAULT_EVAL_EPISODES if episodes is None else episodes,
    )


def with_own_options(options: TrainOptions, found: FoundRun) -> TrainOptions:
    """`options`, with the run's own where none are given.

    Raises:
        ValueError: one that cannot be given beside --resume.
    """
    for option in fields(TrainOptions):
        value = getattr(options, option.name)
        default = None if option.default is MISSING else option.default
        if option.name in BESIDE or value == default:
            continue
        if option.name == "env":
            raise ValueError(f"{value} beside --resume: the run has an environment of its own; leave one of them out")
        flag = "--" + option.name.rstrip("_").replace("_", "-")
        how = "the run goes on with what it began with. Leave it out, or begin a new run"
        if option.name == "output":
            how = f"the run goes on in its own folder. Leave it out, or copy the folder first (cp -r {found.folder} …)"
        elif option.name in SET_NAMES:
            how = f"to change it, give --set {SET_NAMES[option.name]}={value}"
        raise ValueError(f"{flag} cannot be given beside --resume: {how}")
    for name in parse_pairs("--set", options.settings):
        if name in FIXED:
            raise ValueError(
                f"--set {name} cannot be given beside --resume: the checkpoint was made with another value"
            )
    own = {name: value for name, value in _own_options(found).items() if getattr(options, name) is None}
    return with_defaults(replace(options, env=str(found.record.get("environment", {}).get("name")), **own))


def _own_options(found: FoundRun) -> dict[str, Any]:
    recorded = found.record.get("run", {})
    return {name: recorded[name] for name in OWN_OPTIONS if recorded.get(name) is not None}


def limit_of(options: TrainOptions, found: FoundRun) -> Limit:
    """The end of the whole run; --minutes counts from where it goes on.

    Raises:
        ValueError: the run is there already.
    """
    limit = _old_limit(found)
    if not (options.iterations is options.steps is options.minutes is None):
        limit = choose_limit(options.iterations, options.steps, options.minutes)
        if limit.kind == "minutes":
            limit = Limit("minutes", limit.amount + found.seconds / SECONDS_PER_MINUTE)
    done = {"iterations": found.iteration, "steps": found.env_steps, "minutes": found.seconds / SECONDS_PER_MINUTE}
    if done[limit.kind] >= limit.amount:
        raise ValueError(
            f"--resume {found.folder}: the run has got as far as {limit} ({found.iteration:,} iterations, "
            f"{found.env_steps:,} steps). Give a limit that lies further, counted from the start of the run: "
            f"--iterations {2 * found.iteration}"
        )
    return limit


def resumed_config(options: TrainOptions, found: FoundRun, limit: Limit) -> tuple[JointPPOConfig, dict[str, Any]]:
    """The run's configuration with what the options change, validated, and the new content of `config.json`.

    Raises:
        ValueError, TypeError: the checkpoint cannot be read here, or what was given does not fit it.
    """
    config = _saved_config(found)
    before = run_record(config)["options"]
    old_limit, critic_lr, batch = _old_limit(found), config.critic_lr, config.total_train_batch_size
    follows_recipe = bool(found.record.get("run", {}).get(RECIPE_LR)) and not gives_lr(options)
    if options.eval_episodes not in (None, _own_options(found).get("eval_episodes")):
        set_evaluation(config, options.eval_episodes)
    changed_by(options, config)
    if (critic_lr is None) != (config.critic_lr is None):
        raise ValueError(
            f"critic_lr={config.critic_lr} beside --resume, and the run has critic_lr={critic_lr}: with one there are "
            "two optimizers, without it one, and checkpoints have the state of those. Leave it out, or begin a new run"
        )
    if follows_recipe and (limit.kind != "minutes" or old_limit.kind == "minutes"):
        config.training(lr=recipe_lr(limit, config))
    config.validate()
    if config.total_train_batch_size != batch:
        logger.warning(
            "an iteration has %d environment steps from now on, %d before: each learner takes %d",
            config.total_train_batch_size, batch, config.train_batch_size_per_learner,
        )  # fmt: skip
    _check_learns(config, found)
    return config, _record(options, found, limit, before, run_record(config), follows_recipe)


def _saved_config(found: FoundRun) -> JointPPOConfig:
    from ray import cloudpickle

    from thrust_rllib.algorithm import JointPPO
    from thrust_rllib.config import JointPPOConfig

    try:
        made = cloudpickle.loads((found.checkpoint / JointPPO.CLASS_AND_CTOR_ARGS_FILE_NAME).read_bytes())
        config: JointPPOConfig = JointPPOConfig.from_state(made["ctor_args_and_kwargs"][0][0])
    except Exception as error:
        missing = isinstance(error, ImportError)
        how = (
            "Run it where the environment and its packages can be imported, as in the folder where the run began"
            if missing
            else f"An earlier one may be whole: thrust-rllib train --resume {found.folder}/{CHECKPOINTS}/iteration_…"
        )
        raise ValueError(
            f"the checkpoint {found.checkpoint} cannot be read: {type(error).__name__}: {error}. {how}"
        ) from error
    return config


def _old_limit(found: FoundRun) -> Limit:
    (kind, amount), *_ = (found.record.get("limit") or {DEFAULT_LIMIT.kind: DEFAULT_LIMIT.amount}).items()
    return Limit(kind, amount)


def _check_learns(config: JointPPOConfig, found: FoundRun) -> None:
    """A schedule that has come to its end at 0 would let the run go on without learning anything."""
    if isinstance(config.lr, list) and config.lr[-1][1] == 0 and found.env_steps >= config.lr[-1][0]:
        raise ValueError(
            f"the run's learning rate has fallen to 0 at {config.lr[-1][0]:,} steps, and it has {found.env_steps:,}: "
            "it would learn nothing. Give --lr, or an end further away by --iterations or --steps"
        )


def _record(
    options: TrainOptions,
    found: FoundRun,
    limit: Limit,
    before: dict[str, Any],
    now: dict[str, Any],
    follows_recipe: bool,
) -> dict[str, Any]:
    """The run's record as it was, with the options of now, and one entry more in "resumed"."""
    old = found.record
    new = changes(before, now["options"])
    changed = {**old.get("changed", {}), **new}
    at_default = {name for name in new if name not in now["changed"]}
    entry = {**origin(), "checkpoint": f"{CHECKPOINTS}/{found.checkpoint.name}", "iteration": found.iteration}
    return {
        **old,
        "limit": {limit.kind: limit.amount},
        "run": own_options(options, follows_recipe),
        "changed": {name: value for name, value in changed.items() if name not in at_default},
        "options": {**old.get("options", {}), **new},
        "resumed": [*old.get("resumed", []), {**entry, "limit": {limit.kind: limit.amount}, "options": new}],
    }


def own_options(options: TrainOptions, follows_recipe: bool) -> dict[str, Any]:
    """What `config.json` keeps of the options that are none of `JointPPOConfig`'s.

    Args:
        options: of the run.
        follows_recipe: whether the learning rate is the recipe's for the length of the run, which may change.
    """
    given = {name: getattr(options, name) for name in OWN_OPTIONS if getattr(options, name) is not None}
    return {**given, RECIPE_LR: follows_recipe}
