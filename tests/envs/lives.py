"""One environment whose agents come and go by a plan, in the forms of three libraries; and one of turns."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from thrust_rllib.envs import JointEnv, JointStepResult

# "a" is terminated in step 1 of 4, "b" comes in step 1 and is truncated in step 2, "c" is there all the time.
LIVES = {"a": (0, 1, "terminated"), "b": (1, 2, "truncated"), "c": (0, 3, "truncated")}


class Plan:
    """Who acts when. Agents see (episode, step, own index) and are paid 10 · index + step + 1.

    Args:
        lives: {agent: (first step, last step, "terminated" or "truncated")}; steps count from 0.
        length: steps of an episode.
        silent: agents without a last observation.
    """

    strict = True  # exactly the agents of the plan act

    def __init__(self, lives, length, silent=()):
        self.lives, self.length, self.silent = dict(lives), length, silent
        self.possible_agents = list(self.lives)
        self.observation_spaces = {a: gym.spaces.Box(-1, 1000, (3,)) for a in self.lives}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.lives}
        self.episode, self.t = -1, 0

    def start(self):
        self.episode, self.t = self.episode + 1, 0
        return self.see(self.alive())

    def alive(self):
        return [a for a, (first, last, _) in self.lives.items() if first <= self.t <= last and self.t < self.length]

    def see(self, agents):
        return {a: np.array([self.episode, self.t, self.possible_agents.index(a)], np.float32) for a in agents}

    def play(self, actions):
        """Observations, rewards, who terminated, who was truncated, whether the episode is over."""
        acted = self.alive()
        assert not self.strict or sorted(map(str, actions)) == sorted(map(str, acted)), (actions, acted)
        assert all(self.action_spaces[a].contains(action) for a, action in actions.items())
        rewards = {a: 10.0 * self.possible_agents.index(a) + self.t + 1 for a in acted}
        ended = {a: self.lives[a][2] for a in acted if self.t == self.lives[a][1]}
        self.t += 1
        seen = self.see([*self.alive(), *(a for a in ended if a not in self.silent)])
        terminated, truncated = ({a: ended.get(a) == kind for a in acted} for kind in ("terminated", "truncated"))
        return seen, rewards, terminated, truncated, self.t == self.length


class JointLives(JointEnv):
    """The plan as a JointEnv; `says_over` sets JointStepResult.over."""

    def __init__(self, says_over=True, **plan):
        self.plan, self.says_over = Plan(**plan), says_over
        self.possible_agents = self.plan.possible_agents
        self.observation_spaces, self.action_spaces = self.plan.observation_spaces, self.plan.action_spaces

    def reset_joint(self, seed=None):
        return self.plan.start()

    def step_joint(self, actions):
        *result, over = self.plan.play(actions)
        seen, rewards, terminated, truncated = result
        return JointStepResult(rewards, seen, terminated, truncated, over=over if self.says_over else None)


class ZooLives(ParallelEnv):
    """The plan as a PettingZoo environment."""

    metadata = {"name": "lives", "render_modes": []}
    render_mode = None

    def __init__(self, **plan):
        self.plan, self.agents = Plan(**plan), []
        self.plan.episode -= 1  # PettingZooJointEnv resets once to look for masks
        self.possible_agents = self.plan.possible_agents

    def observation_space(self, agent):
        return self.plan.observation_spaces[agent]

    def action_space(self, agent):
        return self.plan.action_spaces[agent]

    def reset(self, seed=None, options=None):
        seen = self.plan.start()
        self.agents = self.plan.alive()
        return seen, {a: {"kind": "reset"} for a in seen}

    def step(self, actions):
        seen, rewards, terminated, truncated, _ = self.plan.play(actions)
        self.agents = self.plan.alive()
        return seen, rewards, terminated, truncated, {a: {"kind": "step"} for a in rewards}


class MultiLives(MultiAgentEnv):
    """The plan as an RLlib environment, with flags that are True only; `key` leaves "__all__" out."""

    def __init__(self, config):
        plan = dict(config)
        self.key = plan.pop("key", True)
        self.plan = Plan(**plan)
        self.possible_agents = self.plan.possible_agents
        self.observation_spaces, self.action_spaces = self.plan.observation_spaces, self.plan.action_spaces
        super().__init__()

    def reset(self, *, seed=None, options=None):
        return self.plan.start(), {}

    def step(self, action_dict):
        seen, rewards, terminated, truncated, over = self.plan.play(action_dict)
        terminated, truncated = ({a: True for a in flags if flags[a]} for flags in (terminated, truncated))
        if self.key:
            terminated["__all__"], truncated["__all__"] = over, False
        return seen, rewards, terminated, truncated, {}


FORMS = {"joint": JointLives, "pettingzoo": ZooLives, "rllib": MultiLives}


def played(env, steps):
    """What `steps` steps of a vector environment return."""
    actions = np.zeros((len(env.possible_agents), env.num_envs), dtype=int)
    return [env.step_joint(actions) for _ in range(steps)]


class Turns(JointEnv):
    """a0 and a1 alternate for `length` steps; the mover is paid 1, and both are flagged at the end."""

    def __init__(self, length=19):
        self.possible_agents = ["a0", "a1"]
        self.observation_spaces = {a: gym.spaces.Box(0, 99, (1,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}
        self.length = length

    def _see(self):
        return {f"a{self.t % 2}": np.array([self.t], np.float32)}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        mover = f"a{self.t % 2}"
        assert list(actions) == [mover]
        self.t += 1
        over = self.t == self.length
        return JointStepResult({mover: 1.0}, {} if over else self._see(), dict.fromkeys(self.possible_agents, over))
