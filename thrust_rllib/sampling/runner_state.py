"""What a runner is in the middle of, as a plain dict, so that another one samples what it would have sampled.

| key                       | what                                                                                  |
|---------------------------|---------------------------------------------------------------------------------------|
| version, door             | of this layout; "arrays" or "episodes"                                                |
| num_envs, worker_index, in_evaluation | of the runner                                                             |
| env_seeds, actor_seeds    | where the generators of seeds are                                                     |
| lasting                   | what goes on over resets, above all where the random numbers of actions are           |
| team                      | agents, their modules, spaces, and sizes of memories: to whom the rest belongs        |
| finished                  | the window of finished episodes, which reported means are taken over                  |
| metrics                   | RLlib's own: moving averages, and what nobody has asked for yet                       |
| envs                      | the environments' own state; None where they have none, or where a reset comes next   |
| playing                   | with `envs`: everything else in the middle of episodes; the door's own                |

Weights, and what connector pieces have gathered (moments of observations), are other components of a runner's state.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import cloudpickle

from thrust_rllib.rl_modules.memory import RecurrentModules

logger = logging.getLogger(__name__)

VERSION = 1


def seed_generators(runner: Any, numbers: tuple[int, ...] = ()) -> tuple[np.random.Generator, np.random.Generator]:
    """The generators of the environments' and of the actions' seeds.

    Args:
        runner: whose seed, index and kind (for training or for evaluation) they depend on; without a seed on none.
        numbers: other numbers give other streams.
    """
    # RLlib's own seed, seed + worker index, gives worker 2 of seed 0 the streams of worker 1 of seed 1.
    config = runner.config
    entropy = None if config.seed is None else [config.seed, runner.worker_index or 0, int(config.in_evaluation)]
    env_seeds, actor_seeds = np.random.SeedSequence(entropy, spawn_key=numbers).spawn(2)
    return np.random.default_rng(env_seeds), np.random.default_rng(actor_seeds)


def sampling_state(runner: Any) -> dict[str, Any]:
    """The state of a runner with environments, between two calls to `sample`: sampling on does not change it."""
    envs, playing = _middle_of_episodes(runner)
    return {
        "version": VERSION,
        "door": runner.door,
        "num_envs": runner.num_envs,
        "worker_index": runner.worker_index or 0,
        "in_evaluation": bool(runner.config.in_evaluation),
        "env_seeds": copy.deepcopy(runner._env_seeds.bit_generator.state),
        "actor_seeds": copy.deepcopy(runner._actor_seeds.bit_generator.state),
        "lasting": runner._get_lasting_state(),
        "team": _team(runner),
        "finished": runner._statistics.get_finished(),
        "metrics": copy.deepcopy(runner.metrics.get_state()),  # moving averages go on from rollout to rollout
        "envs": envs,
        "playing": playing,
    }


def _middle_of_episodes(runner: Any) -> tuple[Any, Any]:
    """Copies of `envs` and `playing`, or twice None."""
    if runner._needs_initial_reset:
        return None, None
    try:
        return _copy((runner.env.get_state(), runner._get_playing_state()))
    except NotImplementedError:
        return None, None
    except Exception as error:  # noqa: BLE001 - it is a user's code that fails, and a checkpoint is worth more
        logger.warning(
            "the episodes in progress of environment %r (runner %s) cannot be saved: after a restore the environments "
            "are reset. get_state must return what can be pickled: %s: %s",
            runner._env_name,
            runner.worker_index or 0,
            type(error).__name__,
            error,
        )
        return None, None


def _copy(state: Any) -> Any:
    """A copy that shares nothing, of what can be sent and stored."""
    return cloudpickle.loads(cloudpickle.dumps(state))


def set_sampling_state(runner: Any, state: Mapping[str, Any]) -> None:
    """Lets a runner go on from `sampling_state` of this or of another one; its weights are as they should be.

    Of another door, number of environments or team it takes the generators only, and resets next.

    Raises:
        ValueError: no such state.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        got = f"version {state.get('version')!r}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise ValueError(f"set_sampling_state got {got}; needed: version {VERSION}, as get_sampling_state() returns")
    runner._needs_initial_reset = True
    same_door, same_team = state["door"] == runner.door, state["team"] == _team(runner)
    if same_door and same_team and state["num_envs"] == runner.num_envs and state["envs"] is not None:
        _go_on(runner, state)
    if same_team:  # behind environments that are made anew, with new statistics
        runner._statistics.set_finished(state["finished"])
        runner.metrics.set_state(copy.deepcopy(state["metrics"]))
    runner._env_seeds.bit_generator.state = copy.deepcopy(state["env_seeds"])
    runner._actor_seeds.bit_generator.state = copy.deepcopy(state["actor_seeds"])
    if same_door:
        runner._set_lasting_state(state["lasting"])
    else:
        runner._reseed_actions()


def _go_on(runner: Any, state: Mapping[str, Any]) -> None:
    envs, playing = _copy((state["envs"], state["playing"]))
    try:
        runner.env.set_state(envs)
    except Exception as error:  # noqa: BLE001 - a user's code again; the run goes on with new episodes
        logger.warning(
            "environment %r (runner %s) does not go on from its saved state and is made anew: %s: %s",
            runner._env_name,
            runner.worker_index or 0,
            type(error).__name__,
            error,
        )
        runner.make_env()
        return
    runner._set_playing_state(playing)
    runner._needs_initial_reset = False


def _team(runner: Any) -> dict[str, Any]:
    """What must be equal for a state to fit: plain, and the same in every process."""
    env = runner.env
    agents = [
        (agent, module_id, str(env.observation_spaces[agent]), str(env.action_spaces[agent]))
        for agent, module_id in runner.module_of.items()
    ]
    layouts = RecurrentModules.of(runner.module).layouts
    return {"agents": agents, "memories": {module_id: layout.size for module_id, layout in layouts.items()}}
