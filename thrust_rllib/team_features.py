"""What the agents' features say together: features of a trained team on fresh joint rows, and their correlation.

Letters: N agents, E environments, D_i width of agent i's features, ΣD = D_1 + … + D_N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from thrust_rllib.envs.joint_env import AgentID, VectorJointEnv, over_after
from thrust_rllib.envs.registry import make_vector_env
from thrust_rllib.evaluation import seeds_for, team_actor
from thrust_rllib.functional import cross_correlation
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.rl_modules.joint_input import input_column
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES
from thrust_rllib.sampling.acting import Acted, TeamActor
from thrust_rllib.sampling.agent_groups import env_actions

_ROWS_OF_A_FORWARD = 512  # images of a large team would not fit into memory at once
_PATIENCE = 20  # rows played for each one that is asked for
_FIRST_PATIENCE = 5_000  # rows played until the first one must have come


class NoFeaturesError(ValueError):
    """A module gives no `encoder_features`."""


def fresh_features(algo: Any, num_rows: int, *, seed: int = 0, explore: bool = True) -> dict[AgentID, np.ndarray]:
    """Plays fresh environments with the current weights and returns every agent's features on the same joint rows.

    Row b of every array is the same step of the same environment; steps in which an agent is absent are left out.
    Played in this process, in as many environments as a runner has. The algorithm's runners, environments, moments and
    random streams stay as they were. Observations are normalised as for the policy.

    Args:
        algo: a `JointPPO`.
        num_rows: how many joint rows.
        seed: of environments and sampled actions.
        explore: sample actions; False takes the distribution's mode.

    Returns:
        {agent: float32 [num_rows, D]} in the environment's order.

    Raises:
        NoFeaturesError: a module gives no features.
        ValueError: no row is asked for, the algorithm has no local runner, or all agents are hardly ever present at
            the same time.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; needed: at least 1")
    config = algo.config
    env = make_vector_env(config.env_spec, dict(config.env_config), config.num_envs_per_env_runner)
    try:
        seeds = seeds_for(seed, env.num_envs)
        actor = team_actor(algo, env, seeds.pop())
        found = _collect(algo, actor, _play(env, actor, seeds, explore), num_rows)
        return {agent: found[agent] for agent in env.possible_agents}
    finally:
        env.close()


def feature_correlation(features: Mapping[AgentID, np.ndarray]) -> tuple[list[AgentID], np.ndarray]:
    """How much of each agent's features another agent's features have too.

    matrix[i, j] = ‖corr(Z_i, Z_j)‖²_F / (D_i D_j), in [0, 1]

    Independent features give about 1 / num_rows, not 0. On the diagonal stand features with themselves: from
    1 / D_i (none has anything of another) to 1 (all are the same).

    Args:
        features: {agent: [num_rows, D_i]} on the same joint rows.

    Returns:
        The agents and the matrix, float64 [N, N].
    """
    widths = [z.shape[1] for z in features.values()]
    return list(features), mean_squares(signed_correlation(features), widths)


def mean_squared_correlation(features: Mapping[AgentID, np.ndarray]) -> float:
    """The mean of `feature_correlation` over pairs of different agents.

    Raises:
        ValueError: fewer than two agents.
    """
    agents, matrix = feature_correlation(features)
    if len(agents) < 2:
        raise ValueError(f"the features are of {agents}; needed: two agents or more")
    return float(matrix[np.triu_indices(len(agents), 1)].mean())


def signed_correlation(features: Mapping[AgentID, np.ndarray]) -> np.ndarray:
    """Pearson correlation of every feature with every feature, [ΣD, ΣD], agents behind each other.

    A constant feature correlates with nothing.
    """
    together = torch.cat([torch.from_numpy(np.ascontiguousarray(z)) for z in features.values()], dim=1)
    with torch.no_grad():
        return cross_correlation(together, together).numpy()


def mean_squares(signed: np.ndarray, widths: list[int]) -> np.ndarray:
    """Mean of the squares of each agent's block: [ΣD, ΣD] to float64 [N, N].

    Args:
        signed: of `signed_correlation`.
        widths: D_1 … D_N.
    """
    first = np.concatenate([[0], np.cumsum(widths)[:-1]])
    squares = np.square(signed, dtype=np.float64)
    sums = np.add.reduceat(np.add.reduceat(squares, first, axis=0), first, axis=1)
    return sums / np.outer(widths, widths)


def _play(
    env: VectorJointEnv, actor: TeamActor, seeds: list[int], explore: bool
) -> Iterator[tuple[list[Acted], np.ndarray]]:
    """Step by step, without end: what each of the actor's groups saw and did, and where all acted, bool [E]."""
    observations, groups = env.reset_joint(seeds), actor.groups
    while True:
        there = env.acts_next() if actor.exchanges_messages else None
        encoded, masks = [g.encode(observations) for g in groups], [g.masks(observations) for g in groups]
        acted = actor.act(encoded, masks, explore, present=there)
        result = env.step_joint(env_actions(groups, [done.actions for done in acted]))
        present = np.ones(env.num_envs, bool) if result.present is None else result.present.all(axis=0)
        yield acted, present
        actor.advance(result.present, over_after(result))
        observations = result.observations


def _collect(
    algo: Any, actor: TeamActor, steps: Iterator[tuple[list[Acted], np.ndarray]], num_rows: int
) -> dict[AgentID, np.ndarray]:
    """{agent: [num_rows, D]}, the first joint rows of `steps`; forwards take many steps at once."""
    parts: dict[AgentID, list[np.ndarray]] = {agent: [] for group in actor.groups for agent in group.agents}
    found = played = 0
    while found < num_rows:
        if not found and played >= _FIRST_PATIENCE:
            raise ValueError(f"in {played} steps there was none in which all agents acted: they share no joint row")
        if played >= _PATIENCE * max(num_rows, _ROWS_OF_A_FORWARD):
            raise ValueError(
                f"all agents acted in {found} of {played} steps; needed: {num_rows} such steps. Ask for fewer rows"
            )
        seen: list[list[Acted]] = []
        present: list[np.ndarray] = []
        while sum(map(len, present)) < min(_ROWS_OF_A_FORWARD, num_rows - found):
            acted, everyone = next(steps)
            seen.append(acted)
            present.append(everyone)
        keep = np.stack(present)
        played, found = played + keep.size, found + int(keep.sum())
        rows: dict[ModuleID, tuple[np.ndarray, np.ndarray | None]] = {}
        agents: dict[ModuleID, tuple[AgentID, ...]] = {}
        for group, of_steps in zip(actor.groups, zip(*seen, strict=True), strict=True):
            obs = np.stack([acted.read[0] for acted in of_steps])  # [steps, k, E, …]
            memories = [acted.read[1] for acted in of_steps if acted.read[1] is not None]
            states = np.stack(memories) if memories else None
            for module_id, mine in group.by_module:
                rows[module_id] = _flat(obs[:, mine]), None if states is None else _flat(states[:, mine])
                agents[module_id] = group.agents[mine]
        for module_id, features in _forward(algo, rows).items():
            by_step = features.reshape(len(keep), len(agents[module_id]), *keep.shape[1:], -1)
            for k, agent in enumerate(agents[module_id]):
                parts[agent].append(by_step[:, k][keep])
    return {agent: np.concatenate(rows)[:num_rows] for agent, rows in parts.items()}


def _flat(x: np.ndarray) -> np.ndarray:
    """[steps, n, E, …] to [B, …]."""
    return x.reshape(-1, *x.shape[3:])


def _forward(algo: Any, rows: Mapping[ModuleID, tuple[np.ndarray, np.ndarray | None]]) -> dict[ModuleID, np.ndarray]:
    """Features [B, D] of what modules read [B, …], from the learner: a runner's module may be for inference only.

    Args:
        algo: a `JointPPO`.
        rows: {module: its observations, and the states [B, S] in which a recurrent module meets each of them}.
    """
    outputs: dict[ModuleID, np.ndarray | None] = algo.learner_group.ask_first(_features_in_learner, rows=rows)
    for module_id, features in outputs.items():
        if features is None:
            raise NoFeaturesError(
                f"module {module_id!r} gives no '{ENCODER_FEATURES}' in forward_train; return the actor's features "
                "[B, D] ([B, T, D] where it is recurrent) under that key, or use one of this package's modules"
            )
    return {module_id: features for module_id, features in outputs.items() if features is not None}


def _features_in_learner(
    learner: Any, rows: Mapping[ModuleID, tuple[np.ndarray, np.ndarray | None]]
) -> dict[ModuleID, np.ndarray | None]:
    features: dict[ModuleID, np.ndarray | None] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module_id, (obs, states) in rows.items():
            module = learner.module[module_id].unwrapped()
            # Copies: arrays out of Ray's object store are read-only.
            batch: dict[str, Any] = {input_column(module): torch.tensor(obs, device=learner._device)}
            if states is not None:
                batch = learner.memories[module_id].one_step(batch, torch.tensor(states, device=learner._device))
            found = module.forward_train(batch).get(ENCODER_FEATURES)
            features[module_id] = None if found is None else found.flatten(0, -2).float().cpu().numpy()
    return features
