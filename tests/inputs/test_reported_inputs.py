"""Cases of the collection of reported inputs, through the fast door: the right value, or an error that says what to do.

The numbers are those of the collection. Cases 1 to 9 are in `test_presence_inputs.py`; `test_general_inputs.py` and
`test_general_other_inputs.py` hold those of the general door.
"""

from __future__ import annotations

import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.tune.utils import flatten_dict

from tests.support import (
    Declared,
    box,
    declared_config,
    discrete,
    largest_difference,
    make_learner,
    make_runner,
    optimizer_states,
    parameters,
    runner_metrics,
    tiny_config,
    update,
)
from thrust_rllib import JointEnv, JointStepResult, MLPModule, RedundancyPenalty, VectorJointEnv

COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundancy": 0.5}}


def trained(config, updates=1, steps=64):
    runner, learner = make_runner(config), make_learner(config)
    results = [update(learner, runner.sample(num_timesteps=steps)) for _ in range(updates)]
    return runner, learner, results


class Half(TorchRLModule, ValueFunctionAPI):
    """Its value is 0.5 everywhere, its policy uniform over two actions."""

    def setup(self):
        self.free = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": batch["obs"].new_zeros(len(batch["obs"]), 2) + 0.0 * self.free}

    def compute_values(self, batch, embeddings=None):
        return batch["obs"].new_full((len(batch["obs"]),), 0.5) + 0.0 * self.free


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "cut"])
def test_case_10_targets_of_three_kinds_of_end(ends, lambda_):
    config = tiny_config(
        "debug/scripted_rewards",
        {"rewards": [1, 2, 3], "ends": "truncated" if ends == "truncated" else "terminated"},
        num_envs=1,
        gamma=0.9,
        lambda_=lambda_,
        value_normalization=False,
        standardize_advantages=False,
    )
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Half), model_config={})
    (batch,) = make_runner(config).sample(num_timesteps=2 if ends == "cut" else 3)
    rows = make_learner(config)._joint_rows([batch])
    last = 3.0 if ends == "terminated" else 3.0 + 0.9 * 0.5
    if ends == "cut":
        expected = [1 + 0.9 * 0.5, 2 + 0.9 * 0.5] if lambda_ == 0 else [1 + 0.9 * (2 + 0.9 * 0.5), 2 + 0.9 * 0.5]
    elif lambda_ == 0:
        expected = [1 + 0.9 * 0.5, 2 + 0.9 * 0.5, last]
    else:
        expected = [1 + 0.9 * (2 + 0.9 * last), 2 + 0.9 * last, last]
    for agent in range(2):
        assert rows.value_targets[agent].tolist() == pytest.approx(expected, abs=1e-6)
        assert rows.advantages[agent].tolist() == pytest.approx([x - 0.5 for x in expected], abs=1e-6)


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "team", False])
def test_case_11_episodes_of_one_step(scope):
    config = tiny_config(
        "debug/constant_reward", {"episode_length": 1, "ends": "terminated"}, standardize_advantages=scope
    )
    runner, learner, (result,) = trained(config)
    (batch,) = runner.sample(num_timesteps=64)
    assert batch.stream("agent_0").terminated.all() and batch.bootstrap_rows.size == 0
    # The observation and the reward never change: every advantage is the same, and standardised to 0.
    rows = learner._joint_rows([batch])
    assert rows.advantages.isfinite().all()
    if scope == "rollout":
        assert (rows.advantages == 0).all()
    assert all(np.isfinite(v) for v in flatten_dict(result["agent_0"]).values())
    assert runner_metrics(runner)["episode_len_mean"] == 1.0


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "team"])
def test_case_11_one_row(scope):
    config = tiny_config(num_envs=1, standardize_advantages=scope, **COUPLED)
    _, _, (result,) = trained(config, steps=1)
    for agent in ("agent_0", "agent_1", "agent_2"):
        assert all(np.isfinite(v) for v in flatten_dict(result[agent]).values())
        if scope != "team":
            assert result[agent]["policy_loss"] == 0.0
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 0


class TurnsNaN(MLPModule):
    """Gives NaN logits in the third minibatch of its life."""

    def setup(self):
        super().setup()
        self.calls = 0

    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        self.calls += 1
        if self.calls == 3:
            outputs["action_dist_inputs"] = outputs["action_dist_inputs"] * float("nan")
        return outputs


@pytest.mark.parametrize("options", [{}, {"critic_lr": 1e-2}], ids=["one optimizer", "critic_lr"])
def test_case_12_a_nan_in_minibatch_3(caplog, options):
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec

    config = tiny_config(iterate_all_minibatches=True, **options)
    model = {"fcnet_hiddens": [8]}
    kinds = {"agent_0": TurnsNaN, "agent_1": MLPModule, "agent_2": MLPModule}
    config.rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={m: RLModuleSpec(module_class=k, model_config=model) for m, k in kinds.items()}
        )
    )
    with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
        _, learner, (first, second) = trained(config, updates=2)
    shared = first["__all_modules__"]
    assert shared["num_non_finite_minibatches"] == 1 and shared["num_minibatch_steps"] == 7
    assert second["__all_modules__"]["num_minibatch_steps"] == 8
    assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())
    assert all(np.isfinite(x).all() for state in optimizer_states(learner).values() for x in state)
    for name, optimizer in learner._named_optimizers.items():  # nobody stepped, on either optimizer
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {15}, name
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(told) == 1 and "module 'agent_0'" in told[0]
    for result in (first, second):
        for module_id in kinds:
            assert all(np.isfinite(v) for v in flatten_dict(result[module_id]).values())


def test_case_13_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="policies_to_train is empty.*at least one module, or leave it None"):
        tiny_config(trained=[]).validate()
    with pytest.raises(ValueError, match="policies_to_train names module 'agent_7'.*did you mean 'agent_"):
        tiny_config(trained=["agent_7"]).validate()


@pytest.mark.parametrize("chosen", [["agent_0"], lambda module_id, batch=None: module_id == "agent_0"])
def test_case_13_the_frozen_stay_equal_to_the_bit(chosen):
    config = tiny_config(trained=chosen, **COUPLED)
    learner = make_learner(config)
    before, moments = parameters(learner), optimizer_states(learner)
    runner = make_runner(config)
    for _ in range(2):
        update(learner, runner.sample(num_timesteps=64))
    for module_id in ("agent_1", "agent_2"):
        assert largest_difference(before[module_id], parameters(learner)[module_id]) == 0.0
    assert largest_difference(before["agent_0"], parameters(learner)["agent_0"]) > 0.0
    frozen = {name: x for name, x in optimizer_states(learner).items() if not name.startswith("agent_0")}
    assert frozen == {name: moments[name] for name in frozen} and frozen


@pytest.mark.parametrize("coupled", [{}, COUPLED], ids=["plain", "coupled"])
@pytest.mark.parametrize("explore", [True, False])
def test_case_14_a_different_space_for_every_agent(coupled, explore):
    actions = [discrete(2), gym.spaces.Discrete(3, start=1), gym.spaces.MultiDiscrete([2, 3]), box(2, 1.0)]
    config = declared_config([box(3), box(4), box(5), box(3)], actions, runners={"explore": explore}, **coupled)
    _, _, (result,) = trained(config)  # `Declared` asserts that each action is in its space
    for agent in ("a0", "a1", "a2", "a3"):
        assert all(np.isfinite(v) for v in flatten_dict(result[agent]).values())


def test_case_14_multi_binary_is_an_early_error_that_names_the_agent():
    config = declared_config([box()] * 2, [discrete(), gym.spaces.MultiBinary(3)])
    with pytest.raises(ValueError, match="agent 'a1': action space MultiBinary.* needed: Discrete"):
        config.validate()


class OneLegal(JointEnv):
    """Agent a0 has one legal action of three, the others all; an illegal one is an error."""

    def __init__(self):
        self.possible_agents = ["a0", "a1"]
        masked = gym.spaces.Dict({"observation": box(), "action_mask": gym.spaces.Box(0, 1, (3,), np.int8)})
        self.observation_spaces = {"a0": masked, "a1": box()}
        self.action_spaces = dict.fromkeys(self.possible_agents, discrete(3))
        self.t = 0

    def _see(self):
        self.legal = self.t % 3
        mask = np.eye(3, dtype=np.int8)[self.legal]
        return {"a0": {"observation": np.ones(3, np.float32), "action_mask": mask}, "a1": np.ones(3, np.float32)}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        assert actions["a0"] == self.legal
        self.t += 1
        return JointStepResult({"a0": 1.0, "a1": 1.0}, self._see(), False, self.t == 8)


@pytest.mark.parametrize("explore", [True, False])
def test_case_15_one_legal_action_for_one_agent_only(explore):
    config = tiny_config(OneLegal, iterate_all_minibatches=True, runners={"explore": explore}, **COUPLED)
    runner, _, results = trained(config, updates=2)
    for result in results:
        assert all(np.isfinite(v) for agent in ("a0", "a1") for v in flatten_dict(result[agent]).values())
        assert result["a0"]["entropy"] == 0.0 and result["a0"]["approx_kl"] == 0.0
        assert result["a1"]["entropy"] > 0.5
    runner.sample(num_episodes=3)
    runner.sample(num_timesteps=10, random_actions=True)


class Masked(JointEnv):
    """Agent a1 may do what `legal` says, agent a0 everything; an illegal action is counted, not refused.

    Args:
        legal: the mask of a1.
        keys: of the observation, beside "action_mask".
        actions: the action space of both.
        mask_size: length of the declared masks.
        stuck: the step, from 0, in which a1 may do nothing.
    """

    def __init__(self, legal, keys=("observation",), actions=None, mask_size=None, stuck=None):
        self.possible_agents = ["a0", "a1"]
        self.legal, self.keys, self.stuck = np.array(legal, np.int8), keys, stuck
        size = len(legal) if mask_size is None else mask_size
        space = {key: box(2) for key in keys} | {"action_mask": gym.spaces.Box(0, 1, (size,), np.int8)}
        self.observation_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Dict(space))
        self.action_spaces = dict.fromkeys(self.possible_agents, actions or discrete(len(legal)))
        self.illegal = 0

    def _see(self):
        mask = np.zeros_like(self.legal) if self.t == self.stuck else self.legal
        seen = {key: np.ones(2, np.float32) for key in self.keys}
        return {"a0": {**seen, "action_mask": np.ones_like(mask)}, "a1": {**seen, "action_mask": mask}}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        space = self.action_spaces["a1"]
        sizes = [space.n] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
        chosen = np.ravel(actions["a1"]) + np.cumsum([0, *sizes[:-1]])
        self.illegal += int((self.legal[chosen] == 0).any())
        self.t += 1
        return JointStepResult({"a0": 1.0, "a1": 1.0}, self._see(), False, self.t == 5)


def masked_runner(**settings):
    return make_runner(tiny_config(Masked, settings, num_envs=2))


@pytest.mark.parametrize(
    "keys, width",
    [
        (("observation",), 2),
        (("observations",), 2),
        (("view",), 2),
        (("observation", "goal"), 4),
        (("goal", "observations"), 4),
    ],
    ids=str,
)
def test_case_15_a_mask_is_honoured_whatever_lies_beside_it(keys, width):
    runner = masked_runner(legal=[0, 1, 0, 1], keys=keys)
    (batch,) = runner.sample(num_timesteps=60)
    assert batch.stream("a1").obs.shape[2:] == (width,)
    assert set(np.unique(batch.stream("a1").actions)) == {1, 3}
    assert set(np.unique(batch.stream("a0").actions)) == {0, 1, 2, 3}
    runner.sample(num_episodes=4)
    assert sum(env.illegal for env in runner.env.envs) == 0


@pytest.mark.parametrize("actions", [discrete(4), gym.spaces.MultiDiscrete([2, 2])], ids=str)
@pytest.mark.parametrize("size", [3, 5])
def test_case_15_a_mask_that_does_not_fit_the_actions_is_an_early_error(actions, size):
    config = tiny_config(Masked, {"legal": [1] * 4, "actions": actions, "mask_size": size})
    with pytest.raises(ValueError, match=rf"agent 'a0'.*action mask .*{size},.*needed: .* shape \(4,\)"):
        config.validate()


def test_case_15_a_mask_of_continuous_actions_is_an_early_error():
    config = tiny_config(Masked, {"legal": [1, 1], "keys": ["observation", "goal"], "actions": box(2)})
    with pytest.raises(ValueError, match="agent 'a0' has an action mask, but its action space Box.*cannot be masked"):
        config.validate()


def test_case_15_no_legal_action_is_an_error_that_names_agent_environment_and_step():
    message = "agent 'a1'.*allows no action.*environment index 0, step 3 .*return at least one legal action"
    for run in ({"num_timesteps": 40}, {"num_episodes": 4}):
        runner = masked_runner(legal=[0, 1, 1], stuck=3)
        with pytest.raises(ValueError, match=message):
            runner.sample(**run)
    # Nobody acts on the mask of a last observation.
    runner = masked_runner(legal=[0, 1, 1], stuck=5)
    runner.sample(num_timesteps=40)
    runner.sample(num_episodes=4)
    assert sum(env.illegal for env in runner.env.envs) == 0


def test_case_15_every_dimension_needs_a_legal_action():
    actions = gym.spaces.MultiDiscrete([2, 3])
    runner = masked_runner(legal=[0, 1, 0, 0, 1], actions=actions)
    (batch,) = runner.sample(num_timesteps=20)
    assert (batch.stream("a1").actions == [1, 2]).all()
    for legal in ([0, 0, 0, 0, 1], [0, 1, 0, 0, 0]):
        with pytest.raises(ValueError, match="agent 'a1'.*environment index 0, step 0 .*at least one legal action"):
            masked_runner(legal=legal, actions=actions).sample(num_timesteps=20)


def test_case_15_an_agent_that_is_not_there_needs_no_legal_action():
    class Absent(VectorJointEnv):
        def __init__(self, num_envs=1):
            self.num_envs, self.possible_agents, self.t = num_envs, ["a", "b"], 0
            mask = gym.spaces.Box(0, 1, (2,), np.int8)
            space = gym.spaces.Dict({"observation": box(1), "action_mask": mask})
            self.observation_spaces = dict.fromkeys("ab", space)
            self.action_spaces = dict.fromkeys("ab", discrete())

        def reset_joint(self, seeds=None):
            seen = {"observation": np.ones((self.num_envs, 1), np.float32)}
            return {a: {**seen, "action_mask": np.full((self.num_envs, 2), a == "a", np.int8)} for a in "ab"}

        def step_joint(self, actions):
            present = np.array([[True], [False]]).repeat(self.num_envs, axis=1)
            return JointStepResult(present.astype(np.float32), self.reset_joint(), ~present & False, present=present)

    (batch,) = make_runner(tiny_config(Absent)).sample(num_timesteps=20)
    assert batch.stream("a").present.all() and not batch.stream("b").present.any()


def test_case_20_agents_named_by_numbers():
    config = declared_config([box()] * 2, [discrete()] * 2, agents=[0, 1], **COUPLED)
    runner, learner, (result,) = trained(config)
    assert sorted(learner.module.keys()) == ["0", "1"]
    (batch,) = runner.sample(num_timesteps=10)
    assert batch.agents == (0, 1) and batch.stream(1).module_id == "1"
    metrics = runner_metrics(runner)
    assert set(metrics["agent_episode_returns_mean"]) == {"0", "1"} == set(metrics["num_agent_steps_sampled"])
    assert {"0", "1"} <= set(result)
    grouped = declared_config([box()] * 3, [discrete()] * 3, agents=[0, 1, 2], policies={"x": [2, 0], "y": [1]})
    (batch,) = make_runner(grouped).sample(num_timesteps=10)
    assert batch.agents == (0, 2, 1)


# ----------------------------------------------------------------------------------- case 21: NaN


@pytest.mark.parametrize(
    "fault, message",
    [
        ("nan_observation", "agent 'agent_1'.*environment index 1, step 3.*element .1,. is nan"),
        ("nan_reward", "paid agent 'agent_1' the reward nan in environment index 1, step 2"),
        ("outside", "agent 'agent_1'.*environment index 1, step 3.*7.*outside the space's bounds"),
    ],
)
def test_case_21_bad_numbers_name_agent_environment_and_step(fault, message):
    class OneIsFaulty(VectorOf):
        def spoil(self, observations, rewards, t):
            if t == 3 and fault == "nan_reward":
                rewards[1, 1] = np.nan
            if t == 3 and fault != "nan_reward":
                observations[1, 1, 1] = np.nan if fault == "nan_observation" else 7.0

    runner = make_runner(tiny_config(OneIsFaulty, num_envs=2))
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=20)


class VectorOf(VectorJointEnv):
    """Two agents, zeros in [-1, 1]; subclasses spoil what is returned in step t (counted from 1)."""

    def __init__(self, num_envs=1):
        self.num_envs, self.stacked, self.t = num_envs, True, 0
        self.possible_agents = ["agent_0", "agent_1"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, box(3, 1.0))
        self.action_spaces = dict.fromkeys(self.possible_agents, discrete())

    def reset_joint(self, seeds=None):
        self.t = 0
        return np.zeros((2, self.num_envs, 3), np.float32)

    def spoil(self, observations, rewards, t):
        pass

    def step_joint(self, actions):
        self.t += 1
        t = self.t
        observations, rewards = np.zeros((2, self.num_envs, 3), np.float32), np.ones((2, self.num_envs), np.float32)
        self.spoil(observations, rewards, t)
        over = np.full((2, self.num_envs), t == 5)
        final = observations
        if t == 5:
            observations = self.reset_joint()
        return JointStepResult(rewards, observations, np.zeros_like(over), over, final_observations=final)


@pytest.mark.parametrize("fault", ["nan_observation", "nan_reward"])
def test_case_21_a_nan_in_an_evaluation_is_an_error_too(fault):
    runner = make_runner(tiny_config("debug/faulty", {"fault": fault}, num_envs=2))
    with pytest.raises(ValueError, match="agent 'agent_1'.*environment index 0, step"):
        runner.sample(num_episodes=4)


def test_case_21_a_nan_in_the_last_observation_of_an_episode():
    class BadEnd(VectorOf):
        def spoil(self, observations, rewards, t):
            if t == 5:
                observations[0, 0, 2] = np.nan

    runner = make_runner(tiny_config(BadEnd, num_envs=2))
    with pytest.raises(ValueError, match="agent 'agent_0'.*environment index 0, step 5.*nan"):
        runner.sample(num_timesteps=20)


def test_case_21_nothing_reached_a_weight_or_the_moments():
    config = tiny_config(
        "debug/faulty", {"fault": "nan_observation", "step": 3}, runners={"normalize_observations": True}
    )
    runner = make_runner(config)
    with pytest.raises(ValueError, match="is nan"):
        runner.sample(num_timesteps=20)
    state = runner.get_state(components="env_to_module_connector")["env_to_module_connector"]
    assert state["ObservationNormalizer"]["agent_0"]["total"]["count"] == 0


def test_case_21_the_comparison_with_bounds_can_be_switched_off_the_search_for_nan_cannot():
    config = tiny_config("debug/faulty", {"fault": "outside"})
    config.environment(disable_env_checking=True)
    make_runner(config).sample(num_timesteps=20)
    config = tiny_config("debug/faulty", {"fault": "nan_observation"})
    config.environment(disable_env_checking=True)
    with pytest.raises(ValueError, match="is nan"):
        make_runner(config).sample(num_timesteps=20)


def test_an_environment_that_raises_is_named_with_its_step_and_cause():
    runner = make_runner(tiny_config("debug/faulty", {"fault": "raise"}))
    with pytest.raises(RuntimeError, match="debug/faulty.*lost its connection") as caught:
        runner.sample(num_timesteps=20)
    assert caught.value.__cause__ is not None and "OSError" in str(caught.value)


# ----------------------------------------------------------------------------------- case 22: forgotten things


class NoBase:
    """Everything an environment needs, save the base class."""

    def __init__(self):
        self.possible_agents = ["a0"]


def test_case_22_a_forgotten_base_class():
    with pytest.raises(TypeError, match="NoBase, which is no known environment; needed: a class derived from JointEnv"):
        tiny_config(NoBase).validate()


class ReturnsList(Declared):
    def step_joint(self, actions):
        result = super().step_joint(actions)
        result.observations = list(result.observations.values())
        return result


class ReturnsTuple(Declared):
    def step_joint(self, actions):
        result = super().step_joint(actions)
        return result.observations, result.rewards, result.terminated, result.truncated, {}


class ForgetsAgent(Declared):
    def step_joint(self, actions):
        result = super().step_joint(actions)
        del result.rewards["a1"]
        return result


@pytest.mark.parametrize(
    "kind, message",
    [
        (ReturnsList, "list.*dict|dict.*list"),
        (ReturnsTuple, "step_joint returned a tuple; return JointStepResult"),
        (ForgetsAgent, "'a1'"),
    ],
)
def test_case_22_wrong_return_types_say_what_to_return(kind, message):
    config = tiny_config(kind, {"observation_spaces": [box()] * 2, "action_spaces": [discrete()] * 2})
    with pytest.raises(RuntimeError, match=message):
        make_runner(config).sample(num_timesteps=10)


def test_case_22_an_observation_of_another_shape():
    class Wide(Declared):
        def _see(self):
            return {agent: np.zeros(4, np.float32) for agent in self.possible_agents}

    config = tiny_config(Wide, {"observation_spaces": [box()] * 2, "action_spaces": [discrete()] * 2})
    with pytest.raises(ValueError, match="'a0'.*\\(4,\\).*\\(3,\\)"):
        make_runner(config).sample(num_timesteps=10)
