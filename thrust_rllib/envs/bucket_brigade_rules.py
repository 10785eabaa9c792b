"""The rules of Bucket Brigade: the scenarios' constants, and a night as a pure function.

They are those of the original engine, game by game to the number.

Shapes: E environments, N agents, H houses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SAFE, BURNING, RUINED = 0, 1, 2
HOUSE, MODE, SIGNAL = 0, 1, 2  # columns of an action
REST, WORK = 0, 1  # values of MODE
REST_REWARD = 0.5


@dataclass(frozen=True)
class Scenario:
    """The constants of a game.

    Args:
        kappa: chance of one worker to put a fire out; k workers: 1 - (1 - kappa)^k.
        rho: chance of a safe house to ignite in a night, and of each house to burn at reset.
        team_reward: R, times the share of safe houses, for every agent in every night.
        team_penalty: P, times the share of ruined houses.
        own_saved: to the owner of a house that was not safe and is safe now.
        own_ruined: from the owner of a ruined house, every night again.
        work_cost: c, for working; resting gives 0.5.
        min_nights: the game cannot end before this many nights plus one.
    """

    kappa: float
    rho: float
    team_reward: float
    team_penalty: float
    own_saved: float
    own_ruined: float
    work_cost: float
    min_nights: int


SCENARIOS: dict[str, Scenario] = {
    "default": Scenario(0.5, 0.02, 100, 100, 20, 40, 0.5, 12),
    "easy": Scenario(0.8, 0.01, 100, 100, 1, 2, 0.5, 10),
    "hard": Scenario(0.3, 0.05, 100, 100, 1, 2, 0.5, 15),
    "trivial_cooperation": Scenario(0.9, 0.0, 100, 100, 1, 2, 0.5, 12),
    "rest_trap": Scenario(0.95, 0.02, 100, 100, 1, 2, 0.2, 12),
    "chain_reaction": Scenario(0.6, 0.03, 100, 100, 1, 2, 0.7, 15),
    "minimal_specialization": Scenario(0.5, 0.02, 10, 10, 50, 100, 0.5, 12),
}


class Night(NamedTuple):
    """What a night leaves: houses int [E, H], rewards float64 [N, E], terminated bool [E]."""

    houses: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


def night(
    houses: np.ndarray,
    previous_houses: np.ndarray,
    actions: np.ndarray,
    u_extinguish: np.ndarray,
    u_spark: np.ndarray,
    scenario: Scenario,
    night_index: np.ndarray,
) -> Night:
    """One night of E games.

    In this order: workers put fires out, houses that still burn are ruined, safe houses ignite, rewards, end
    test. (The original then spreads fire from burning neighbours, after the burn-out: nothing burns any
    more.)

    Args:
        houses: the houses before the night, int [E, H].
        previous_houses: the houses that a saving is judged against, int [E, H]: those before the night, but
            all safe in the first night, even where houses burn.
        actions: int [N, E, 3]: house, mode (1 = work), signal.
        u_extinguish: uniforms [E, H]; a burning house becomes safe iff u < 1 - (1 - kappa)^workers.
        u_spark: uniforms [E, H]; a safe house ignites iff u < rho.
        scenario: the constants.
        night_index: nights played before this one, int [E].

    Returns:
        The houses after the night, each agent's reward and whether the game is over.
    """
    num_agents, (num_envs, num_houses) = len(actions), houses.shape
    works = actions[..., MODE] == WORK
    visited = np.arange(num_envs) * num_houses + actions[..., HOUSE]
    workers = np.bincount(visited[works], minlength=num_envs * num_houses).reshape(num_envs, num_houses)
    put_out_chance = np.array([1 - (1 - scenario.kappa) ** k for k in range(num_agents + 1)])

    burning = houses == BURNING
    put_out = burning & (u_extinguish < put_out_chance[workers])
    after = np.where(burning, np.where(put_out, SAFE, RUINED), houses)
    after[(after == SAFE) & (u_spark < scenario.rho)] = BURNING

    safe, ruined = after == SAFE, after == RUINED
    owns = (np.arange(num_houses) % num_agents == np.arange(num_agents)[:, None]).astype(float)  # [N, H]
    saved = safe & (previous_houses != SAFE)
    share_safe, share_ruined = safe.sum(axis=1) / num_houses, ruined.sum(axis=1) / num_houses
    rewards = np.where(works, -scenario.work_cost, REST_REWARD)
    rewards += scenario.own_saved * (owns @ saved.T)
    rewards -= scenario.own_ruined * (owns @ ruined.T)
    rewards += scenario.team_reward * share_safe - scenario.team_penalty * share_ruined
    terminated = (night_index >= scenario.min_nights) & ~(after == BURNING).any(axis=1)
    return Night(after, rewards, terminated)
