"""RLlib environments that answer what a test wrote down, and a way to play them through the general door."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from pettingzoo import ParallelEnv
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.support import box, discrete, make_learner, runner_metrics, tiny_config, update
from thrust_rllib.joint_rows import JointRows

EPISODES = {"sampling": "episodes"}
ALL = {"__all__": True}
PAID = {"a0": 1.0, "a1": 1.0}
WHERE = r"environment 'Told', environment index 1, step {} of its episode: agent '{}'"


@dataclass
class Says:
    """What one step answers.

    Args:
        seen: names of the agents it shows an observation, separated by blanks.
        rewards: as the environment returns them.
        terminateds: likewise.
        truncateds: likewise.
        infos: likewise.
    """

    seen: str = ""
    rewards: Any = field(default_factory=dict)
    terminateds: Any = field(default_factory=dict)
    truncateds: Any = field(default_factory=dict)
    infos: Any = field(default_factory=dict)


GOES_ON = Says("a0 a1", PAID)


class Told(MultiAgentEnv):
    """Gives the answers of `steps`, then begins anew. An observation is (episode, step, number of the agent).

    `config`: "steps"; "start": agents seen first (default: all); "agents" (default: a0 and a1). `acted` holds a set of
    agents for each step played, `acts` all their actions as (agent, episode, step).
    """

    def __init__(self, config: dict) -> None:
        self.possible_agents = self.agents = list(config.get("agents", ("a0", "a1")))
        self.observation_spaces = dict.fromkeys(self.possible_agents, box(3, 1000.0))
        self.action_spaces = dict.fromkeys(self.possible_agents, discrete())
        self.steps, self.start = config["steps"], config.get("start", " ".join(map(str, self.possible_agents)))
        self.episode, self.t = -1, 0
        self.acted: list[set] = []
        self.acts: list[tuple] = []
        super().__init__()

    def see(self, names: str) -> dict:
        numbers = {str(agent): n for n, agent in enumerate(self.possible_agents)}
        return {
            self.possible_agents[numbers[name]]: np.array([self.episode, self.t, numbers[name]], np.float32)
            for name in names.split()
        }

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self.see(self.start), {}

    def step(self, action_dict):
        self.acted.append(set(action_dict))
        self.acts += [(agent, self.episode, self.t) for agent in action_dict]
        says = self.steps[self.t]
        self.t += 1
        return self.see(says.seen), says.rewards, says.terminateds, says.truncateds, says.infos


class Herd(ParallelEnv):
    """PettingZoo: wolf and dog from the first step to the fourth, where one terminates and one is truncated; cat comes
    in the third. The first number of an observation is drawn in `reset`, the second the step; pays the agent's number
    plus 1."""

    metadata = {"name": "herd", "render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.possible_agents, self.agents, self.render_mode = ["wolf", "dog", "cat"], [], render_mode
        self.spaces = {agent: (box(), discrete()) for agent in self.possible_agents}

    def observation_space(self, agent):
        return self.spaces[agent][0]

    def action_space(self, agent):
        return self.spaces[agent][1]

    def see(self, agents):
        return {agent: np.array([self.drawn, self.t, 1.0], np.float32) for agent in agents}

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.drawn, self.t = self.generator.uniform(-9, 9) if hasattr(self, "generator") else 0.0, 0
        self.agents = ["wolf", "dog"]
        return self.see({*self.agents}), {agent: {} for agent in self.agents}

    def step(self, actions):
        acted, self.t = set(self.agents), self.t + 1
        assert set(actions) == acted
        self.agents = [] if self.t == 4 else [*self.agents, "cat"] if self.t == 2 else self.agents
        return (
            self.see(acted | {*self.agents}),
            {agent: 1.0 + self.possible_agents.index(agent) for agent in acted},
            {agent: self.t == 4 and agent != "dog" for agent in acted},
            {agent: self.t == 4 and agent == "dog" for agent in acted},
            {},
        )

    def render(self):
        return np.full((4, 4, 3), self.t, np.uint8)


class Pack(MultiAgentEnv):
    """RLlib's old way to name agents: a set, whose order is another one in every process."""

    def __init__(self, config=None):
        self._agent_ids = {"wolf", "dog", "cat"}
        self.observation_space, self.action_space = box(), discrete()
        super().__init__()

    def see(self):
        return {agent: np.full(3, len(agent) + self.t, np.float32) for agent in self._agent_ids}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.see(), {}

    def step(self, action_dict):
        self.t += 1
        rewards = {agent: float(ord(agent[0]) % 7) for agent in self._agent_ids}
        return self.see(), rewards, {"__all__": self.t == 5}, {"__all__": False}, {}


def order_and_numbers() -> list[str]:
    """For `Herd` and `Pack`: agents and modules as a batch has them, actions, sums of data and of trained weights."""
    texts = []
    for env in (Herd, Pack):
        runner, learner, _ = general_training(episodes_config(env), steps=16)
        (batch,) = learner._batches(runner.sample(num_timesteps=16))
        sums = [float((s.obs * 3 + s.rewards[..., None]).sum()) for s in batch.streams()]
        weights = [float(p.detach().abs().sum()) for m in batch.modules for p in learner.module[m].parameters()]
        actions = [s.actions.ravel().tolist() for s in batch.streams()]
        texts.append(f"{batch.agents} {list(batch.modules)} {actions} {sums} {weights}")
    return texts


def value(obs) -> Any:
    """What `Values` says of observations (episode, step, agent): exact in float32."""
    return 0.25 * obs[..., 1] + obs[..., 2] - 1.5


class Values(TorchRLModule, ValueFunctionAPI):
    """Its value is `value`, its policy uniform over two actions."""

    def setup(self):
        self.free = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": batch["obs"].new_zeros(len(batch["obs"]), 2) + 0.0 * self.free}

    def compute_values(self, batch, embeddings=None):
        return value(batch["obs"]) + 0.0 * self.free


def episodes_config(env=Told, env_config=None, *, runners=None, **options):
    """`tiny_config` for the general door."""
    return tiny_config(env, env_config, runners={**EPISODES, **(runners or {})}, **options)


def valued(config, module=Values):
    """The configuration with `module` as every module, and targets and advantages as they are."""
    config.training(value_normalization=False, standardize_advantages=False)
    return config.rl_module(rl_module_spec=RLModuleSpec(module_class=module), model_config={})


def episodes_runner(config):
    """A runner in this process."""
    if not config._is_frozen:
        config.validate()
    return config.env_runner_cls(config=config, worker_index=0)


def general_training(config, updates=1, steps=64):
    """(runner, learner, results of its updates)."""
    runner = episodes_runner(config)
    learner = make_learner(config, runner.get_spaces())
    return runner, learner, [update(learner, runner.sample(num_timesteps=steps)) for _ in range(updates)]


@dataclass
class Row:
    """One step of one agent in the learner's rows."""

    reward: float
    terminated: bool
    truncated: bool
    target: float
    advantage: float


class Game:
    """A configuration of `Told` with its runner and learner.

    Args:
        *steps: of an episode.
        start: see `Told`.
        agents: see `Told`.
        env: in its place.
        module: knows the values.
        **options: of `tiny_config`; gamma is 0.5 and lambda_ 0 unless they say else.
    """

    def __init__(self, *steps: Says, start=None, agents=("a0", "a1"), env=Told, module=Values, **options):
        env_config = {"steps": list(steps), "agents": list(agents)}
        if start is not None:
            env_config["start"] = start
        options = {"num_envs": 1, "gamma": 0.5, "lambda_": 0.0, **options}
        self.config = valued(episodes_config(env, env_config, **options), module)
        self.runner = episodes_runner(self.config)
        self.learner = make_learner(self.config, self.runner.get_spaces())

    @property
    def envs(self) -> list:
        return [env.unwrapped for env in self.runner.env.envs]

    def sample(self, **asked):
        """Episodes; asked for nothing, one whole episode."""
        return self.runner.sample(**(asked or {"num_episodes": 1}))

    def batch(self, episodes=None):
        return self.learner._batches(self.sample() if episodes is None else episodes)[0]

    def rows(self, episodes=None) -> dict:
        """{(agent, episode, step): Row}, of the learner's own joint rows; the episode by its number in `Told`."""
        batch = self.batch(episodes)
        joint = self.learner._joint_rows([batch])
        flags = {stream.agent_id: stream for stream in batch.streams()}
        found = {}
        for n, (agent, obs) in enumerate(agent_observations(joint)):
            stream = flags[agent]
            places = np.argwhere(batch.valid)
            for b in np.flatnonzero(joint.present[n].numpy()):
                t, e = places[b]
                key = (agent, int(obs[b, 0]), int(obs[b, 1]))
                assert key not in found, f"{key} stands in two rows"
                found[key] = Row(
                    float(stream.rewards[t, e]),
                    bool(stream.terminated[t, e]),
                    bool(stream.truncated[t, e]),
                    float(joint.value_targets[n, b]),
                    float(joint.advantages[n, b]),
                )
        return found

    def metrics(self) -> dict:
        return runner_metrics(self.runner)

    def update(self, episodes):
        return update(self.learner, episodes)


def agent_observations(rows: JointRows) -> list:
    """[(agent, observations [B, 3])] of joint rows, in the order of `rows.present`."""
    return [(agent, m.obs[j].numpy()) for m in rows.modules.values() for j, agent in enumerate(m.agents)]


def joined(rows: JointRows) -> list[dict]:
    """For each joint row {agent: (episode, step)} of the agents that are present, by what they observed."""
    result: list[dict] = [{} for _ in range(len(rows))]
    for n, (agent, obs) in enumerate(agent_observations(rows)):
        for b in np.flatnonzero(rows.present[n].numpy()):
            assert obs[b, 2] == n, "an agent's row holds what another one saw"
            result[b][agent] = (int(obs[b, 0]), int(obs[b, 1]))
    return result


class Minibatches:
    """Every joint minibatch that a learner reads: its rows as `joined` says."""

    def __init__(self, monkeypatch) -> None:
        self.all: list[list[dict]] = []
        select = JointRows.select

        def watched(rows, indices):
            minibatch = select(rows, indices)
            self.all.append(joined(minibatch))
            for n, (_, obs) in enumerate(agent_observations(minibatch)):
                absent = ~minibatch.present[n]
                assert not obs[absent.numpy()].any() and not minibatch.advantages[n, absent].any()
            return minibatch

        monkeypatch.setattr(JointRows, "select", watched)

    def uses(self) -> Counter:
        """How often each (agent, episode, step) was read; checks that the agents of a row agree."""
        used: Counter = Counter()
        for minibatch in self.all:
            for row in minibatch:
                assert len(set(row.values())) == 1, f"one joint row holds {row}"
                used.update((agent, *place) for agent, place in row.items())
        return used


def lives(length: int, **last_steps: int) -> list[Says]:
    """Agents that act from step 0 (a0, a1) to the given one, where they terminate; everybody is paid 1 a step."""
    steps = []
    for t in range(length):
        acting = [agent for agent, last in last_steps.items() if t <= last]
        staying = [agent for agent, last in last_steps.items() if t < last]
        ended = {agent: True for agent in acting if agent not in staying}
        steps.append(Says(" ".join(staying), dict.fromkeys(acting, 1.0), {**ended, "__all__": t == length - 1}))
    return steps


def saw(step: int, agent: int) -> float:
    """The value of what agent number `agent` saw in a step."""
    return float(value(np.array([0, step, agent], np.float64)))


def error_of(*steps: Says, match: str, **options) -> None:
    """The second of two environments answers these steps; the first one never ends."""
    game = Game(*steps, num_envs=2, **options)
    game.envs[0].steps = [GOES_ON] * 100
    game.envs[0].start = "a0 a1"
    with pytest.raises(ValueError, match=match):
        game.sample(num_timesteps=40)
