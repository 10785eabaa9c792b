"""A high-level agent that acts every fifth step beside one that acts in each: T = 17, fragments of 10, both with LSTM.

Its step is open wherever a fragment is cut. Stock RLlib raises in its second iteration (ray#60205, see
`tests.test_rllib_contract`).
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.general.runs import episodes_config
from tests.recurrent.replay import gru_with_two_memories, lstm

LENGTH, EVERY, FRAGMENT, ITERATIONS = 17, 5, 10, 3
GAMMA, LAMBDA = 0.9, 0.8


class Hierarchy(MultiAgentEnv):
    """ "high" acts in steps 0, 5, 10 and 15, and is paid in each; "low" acts in all; everybody terminates after 17."""

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["low", "high"]
        self.observation_spaces = {a: gym.spaces.Box(-2.0, 2.0, (3,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(3) for a in self.agents}
        self.episode = -1

    def _see(self):
        return {a: see(self.episode, self.t, a) for a in acts_at(self.t)}

    def reset(self, *, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        return self._see(), {}

    def step(self, actions):
        assert set(actions) == set(acts_at(self.t))
        rewards = {agent: pay(self.episode, self.t, agent) for agent in self.agents}
        self.t += 1
        over = self.t == LENGTH
        seen = {a: see(self.episode, self.t, a) for a in self.agents} if over else self._see()
        return seen, rewards, {"__all__": over}, {"__all__": False}, {}


def acts_at(t):
    return ["low", "high"] if t % EVERY == 0 else ["low"]


def see(episode, t, agent):
    """Episode and step can be read off the first two numbers."""
    return np.array([episode / 10, t / 20, np.sin(3 * t + episode + len(agent))], np.float32)


def pay(episode, t, agent):
    return float(np.cos(2 * t + episode + len(agent)))


# --- the replay -------------------------------------------------------------------------------------------------------


@dataclass
class OwnStep:
    """An agent's own step: what it saw, all it was paid for it, and the iterations it was taken and completed in."""

    t: int
    obs: np.ndarray
    reward: float
    taken: int
    completed: int
    state: object = field(default=None)


def own_steps(agent, episode):
    """All steps of one episode of which the first fragments hold something; played one after the other."""
    began = episode * LENGTH
    times = [t for t in range(LENGTH) if agent in acts_at(t)]
    steps = []
    for t, after in zip(times, [*times[1:], LENGTH], strict=True):
        reward = sum(pay(episode, s, agent) for s in range(t, after))
        steps.append(
            OwnStep(t, see(episode, t, agent), reward, (began + t) // FRAGMENT, (began + after - 1) // FRAGMENT)
        )
    return steps


def one_step(module, obs, state):
    """Value and next state, in float64."""
    batch = {Columns.OBS: torch.as_tensor(obs, dtype=torch.float64)[None, None], Columns.STATE_IN: state}
    with torch.no_grad():
        value = module.compute_values(batch)
        return float(value[0, 0]), module.forward_inference(batch)[Columns.STATE_OUT]


def expected(agent, modules, forget=False):
    """{(iteration, episode, t): (advantage, target)} of every step that was completed.

    Args:
        agent: who.
        modules: its module, as it was in each iteration.
        forget: every fragment begins with the initial state.
    """
    found = {}
    for episode in range(ITERATIONS * FRAGMENT // LENGTH + 1):
        steps = own_steps(agent, episode)
        initial = tree.map_structure(lambda x: x.double()[None], modules[0].get_initial_state())
        state, before = initial, 0
        for step in steps:
            if forget and step.taken != before:
                state, before = initial, step.taken
            if step.taken < ITERATIONS:
                step.state = state
                _, state = one_step(modules[step.taken], step.obs, state)
        for iteration, module in enumerate(modules):
            mine = [i for i, step in enumerate(steps) if step.completed == iteration]
            if not mine:
                continue
            values = [one_step(module, steps[i].obs, steps[i].state)[0] for i in mine]
            last = mine[-1]
            if last + 1 == len(steps):
                values.append(0.0)
            else:  # one more step of the cell, by the weights that train
                _, state = one_step(module, steps[last].obs, steps[last].state)
                values.append(one_step(module, steps[last + 1].obs, state)[0])
            advantage = 0.0
            for k in reversed(range(len(mine))):
                delta = steps[mine[k]].reward + GAMMA * values[k + 1] - values[k]
                advantage = delta + GAMMA * LAMBDA * advantage
                found[iteration, episode, steps[mine[k]].t] = (advantage, advantage + values[k])
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def recorded(learner):
    """[(modules, rows)] of every update, growing: weights in float64 as they were, and what was learned from."""
    record, joint_rows = [], learner._joint_rows

    def note(batches):
        rows = joint_rows(batches)
        modules = {m: copy.deepcopy(learner.module[m].unwrapped()).double() for m in ("high", "low")}
        record.append((modules, rows))
        return rows

    learner._joint_rows = note
    return record


@pytest.mark.parametrize("spec", [lstm, gru_with_two_memories])
@pytest.mark.parametrize("length", [None, 3])
def test_values_over_three_iterations(build, spec, length):
    config = episodes_config(
        Hierarchy,
        num_envs=1,
        train_batch_size_per_learner=FRAGMENT,
        minibatch_size=FRAGMENT,
        gamma=GAMMA,
        lambda_=LAMBDA,
        lr=0.01,
        standardize_advantages=False,
        value_normalization=False,
        audit=True,
    )
    algo = build(config.rl_module(rl_module_spec=spec(length)))
    learner = algo.learner_group._learner
    for module_id in ("high", "low"):  # larger heads, so that values and actions differ
        for name, parameter in learner.module[module_id].unwrapped().named_parameters():
            if "head" in name:
                parameter.data += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    algo.env_runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
    record = recorded(learner)
    for _ in range(ITERATIONS):
        algo.train()
    assert len(record) == ITERATIONS

    seen = {"high": [], "low": []}
    for n, agent in enumerate(("high", "low")):
        truth = expected(agent, [modules[agent] for modules, _ in record])
        for iteration, (_, rows) in enumerate(record):
            assert list(rows.modules) == ["high", "low"]
            for b in torch.nonzero(rows.present[n])[:, 0].tolist():
                episode, t = np.round(rows.modules[agent].obs[0, b, :2].numpy() * [10, 20]).astype(int).tolist()
                numbers = float(rows.advantages[n, b]), float(rows.value_targets[n, b])
                place = iteration, episode, t
                np.testing.assert_allclose(numbers, truth.pop(place), rtol=0, atol=2e-5, err_msg=str((agent, place)))
                seen[agent].append(place)
        assert not truth, f"{agent}: not learned from {sorted(truth)}"
    # Step 0 of the second episode was open at the second cut, step 10 is at the third one.
    assert seen["high"] == [(0, 0, 0), (0, 0, 5), (1, 0, 10), (1, 0, 15), (2, 1, 0), (2, 1, 5)]
    assert len(seen["low"]) == ITERATIONS * FRAGMENT


def test_the_replay_knows_what_is_forgotten_at_a_cut():
    torch.manual_seed(0)
    space = gym.spaces.Box(-2.0, 2.0, (3,)), gym.spaces.Discrete(3)
    specs = [dataclasses.replace(lstm(), observation_space=space[0], action_space=space[1]) for _ in range(ITERATIONS)]
    modules = [spec.build().double() for spec in specs]
    for agent in ("high", "low"):
        remembered, forgotten = (expected(agent, modules, forget=forget) for forget in (False, True))
        assert remembered.keys() == forgotten.keys()
        differs = {place for place in remembered if not np.allclose(remembered[place], forgotten[place], atol=1e-6)}
        assert differs and all(iteration > 0 for iteration, *_ in differs)
