"""Reference policies that place a learned return on a scale: random, and a specialist where one is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thrust_rllib.envs.bucket_brigade import BucketBrigade
from thrust_rllib.envs.bucket_brigade_policies import specialist_policy
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.registry import make_vector_env
from thrust_rllib.evaluation import MAX_ENVS, PlayedEpisodes, Policy, play_episodes, play_policy

BASELINES = ("random", "specialist")


def _bucket_brigade_specialist(env: BucketBrigade) -> Policy:
    return lambda observations: specialist_policy(env.houses, num_agents=env.num_agents)


# {name as `thrust-rllib envs` lists it: (class, what makes the policy for environments of the class)}
SPECIALISTS: dict[str, tuple[type[VectorJointEnv], Callable[[Any], Policy]]] = {
    "bucket_brigade": (BucketBrigade, _bucket_brigade_specialist)
}


def check_baseline(algo: Any, name: str, env_config: Mapping[str, Any]) -> None:
    """Whether `play_baseline` can serve.

    Raises:
        ValueError: an unknown baseline, or no specialist is known for the environment.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is unknown; there are {list(BASELINES)}")
    if name == "specialist":
        env = make_vector_env(algo.config.env_spec, dict(env_config), 1)
        env.close()
        _specialist(env, algo.config.env_spec.name)


def _specialist(env: VectorJointEnv, name: str) -> Policy:
    for kind, make in SPECIALISTS.values():
        if isinstance(env, kind):
            return make(env)
    raise ValueError(
        f"no specialist is known for the environment {name!r}; there is one for {', '.join(SPECIALISTS)}. Compare "
        "with random, or play a policy of your own with thrust_rllib.evaluation.play_policy"
    )


def play_baseline(
    algo: Any, name: str, num_episodes: int, *, seed: int = 0, env_config: Mapping[str, Any] | None = None
) -> PlayedEpisodes:
    """Plays a baseline in the environments, and with the environments' seeds, of `play_episodes`.

    Args:
        algo: says which environment.
        name: "random", everybody uniformly over what is allowed, or "specialist".
        num_episodes: how many.
        seed: as for `play_episodes`.
        env_config: settings of the environment in place of the algorithm's.

    Raises:
        ValueError: see `check_baseline`.
    """
    config = dict(algo.config.env_config if env_config is None else env_config)
    check_baseline(algo, name, config)
    if name == "random":
        everybody = list(algo.config.policy_mapping_fn.table)
        return play_episodes(algo, num_episodes, seed=seed, env_config=config, random_agents=everybody)
    env = make_vector_env(algo.config.env_spec, config, min(num_episodes, MAX_ENVS))
    try:
        return play_policy(env, _specialist(env, algo.config.env_spec.name), num_episodes, seed=seed)
    finally:
        env.close()
