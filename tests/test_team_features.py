"""Features on fresh joint rows, and how much they correlate."""

import copy

import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core.columns import Columns

from tests.support import tiny_config
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.envs.fixed_length import FixedLengthEnv
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES
from thrust_rllib.team_features import (
    NoFeaturesError,
    feature_correlation,
    fresh_features,
    mean_squared_correlation,
    signed_correlation,
)


class ShowsObservations(MLPModule):
    """Its features are what it sees."""

    def _forward_train(self, batch, **kwargs):
        return {**super()._forward_train(batch, **kwargs), ENCODER_FEATURES: batch[Columns.OBS]}


class NoFeatures(MLPModule):
    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        del outputs[ENCODER_FEATURES]
        return outputs


class Leaving(FixedLengthEnv):
    """Sees (environment, step, agent); agent_1 is absent in odd steps, and always where `never`."""

    def __init__(self, num_envs=1, never=False):
        self.never = never
        super().__init__(num_envs, 2, spaces.Box(0, np.inf, (3,)), spaces.Discrete(2), episode_length=6)

    def _observe(self, envs):
        seen = np.empty((2, len(envs), 3), np.float32)
        seen[..., 0], seen[..., 1], seen[..., 2] = envs, self.step_count[envs], np.arange(2)[:, None]
        return seen

    def _pay(self, actions):
        return np.zeros((2, self.num_envs))

    def step_joint(self, actions):
        odd = self.step_count % 2 == 1
        result = super().step_joint(actions)
        result.present = np.stack([np.ones(self.num_envs, bool), ~odd & (not self.never)])
        return result


def algorithm(env, module_class=ShowsObservations, **options):
    config = tiny_config(env, options.pop("env_config", None), **options)
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    return config.rl_module(rl_module_spec=RLModuleSpec(module_class=module_class)).build_algo()


def aligned(features):
    """Whether row b is the same (episode or environment, step) for all agents."""
    first, *others = [z[:, :2] for z in features.values()]
    return all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("policies", [None, "shared"])
def test_rows_are_the_same_steps_for_all_agents(ray_session, policies):
    algo = algorithm("debug/alignment", env_config={"agents": 3}, policies=policies)
    features = fresh_features(algo, 600)
    algo.stop()
    assert list(features) == ["agent_0", "agent_1", "agent_2"]
    for k, z in enumerate(features.values()):
        assert z.shape == (600, 3) and z.dtype == np.float32
        assert (z[:, 2] == k).all()
    assert aligned(features)
    assert set(features["agent_0"][:, 1]) == set(range(7))
    # The check sees it when one agent's rows are a step late.
    assert not aligned({**features, "agent_1": np.roll(features["agent_1"], 2, axis=0)})


def test_only_rows_with_all_agents(ray_session):
    algo = algorithm(Leaving)
    features = fresh_features(algo, 50)
    algo.stop()
    assert aligned(features)
    assert set(features["agent_0"][:, 1]) == {0, 2, 4}


def test_agents_that_never_meet_are_an_error(ray_session):
    algo = algorithm(Leaving, env_config={"never": True})
    with pytest.raises(ValueError, match="there was none in which all agents acted"):
        fresh_features(algo, 2)
    algo.stop()


def test_a_module_without_features_is_an_error(ray_session):
    algo = algorithm("debug/alignment", NoFeatures)
    with pytest.raises(NoFeaturesError, match="'agent_0' gives no 'encoder_features'"):
        fresh_features(algo, 10)
    algo.stop()


def test_numbers_of_rows_are_checked(ray_session):
    algo = algorithm("debug/alignment")
    with pytest.raises(ValueError, match="num_rows is 0"):
        fresh_features(algo, 0)
    algo.stop()


def test_nothing_of_the_algorithm_moves(ray_session):
    algos = [algorithm("debug/random_observations", MLPModule, runners={"normalize_observations": True}) for _ in "ab"]
    for algo in algos:
        algo.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = fresh_features(algos[0], 40)
    assert torch.equal(torch.get_rng_state(), before)
    again, other = fresh_features(algos[0], 40), fresh_features(algos[0], 40, seed=1)
    for agent in first:
        np.testing.assert_array_equal(first[agent], again[agent])
        assert np.abs(first[agent] - other[agent]).max() > 1e-3
    # The second algorithm was not asked: both go on alike, with the same rollouts and updates.
    for algo in algos:
        algo.train()
    states = [algo.learner_group.get_state()["learner"]["rl_module"] for algo in algos]
    for module_id, weights in states[0].items():
        for name, value in weights.items():
            np.testing.assert_array_equal(value, states[1][module_id][name])
    for algo in algos:
        algo.stop()


def test_observations_are_normalised_as_for_the_policy(ray_session):
    algo = algorithm("debug/alignment", env_config={"agents": 2}, runners={"normalize_observations": True})
    algo.train()
    features = fresh_features(algo, 400)
    algo.stop()
    steps = features["agent_0"][:, 1]
    assert abs(steps.mean()) < 0.2 and abs(steps.std() - 1) < 0.2  # 0 to 6 as the environment shows them


def test_features_of_a_learner_in_another_process_and_of_a_critic_of_its_own(ray_session):
    model = {"fcnet_hiddens": [8], "vf_share_layers": False}
    here = tiny_config("debug/random_observations", model=model).build_algo()
    there = tiny_config("debug/random_observations", model=model).learners(num_learners=1).build_algo()
    there.set_state(here.get_state())
    expected, found = fresh_features(here, 30), fresh_features(there, 30)
    here.stop()
    there.stop()
    for agent, z in expected.items():
        assert z.shape == (30, 8)
        np.testing.assert_allclose(found[agent], z, atol=1e-6)


def features_in_time(module, observations, remembers=True):
    """float64 [steps, D] of one agent from an episode's start on, one step after the other."""
    module = copy.deepcopy(module).double()
    initial = tree.map_structure(lambda leaf: torch.as_tensor(leaf).double()[None], module.get_initial_state())
    state, found = initial, []
    for observation in observations:
        obs = torch.tensor(observation, dtype=torch.float64)[None, None]
        with torch.no_grad():
            outputs = module.forward_train({Columns.OBS: obs, Columns.STATE_IN: state if remembers else initial})
        state = outputs[Columns.STATE_OUT]
        found.append(outputs[ENCODER_FEATURES][0, 0].numpy())
    return np.array(found)


@pytest.mark.parametrize(
    "module_class, model",
    [(LSTMModule, {"cell_size": 5}), (GRUModule, {"cell_size": 4, "fcnet_hiddens": [6], "vf_share_layers": False})],
)
@pytest.mark.parametrize("policies", [None, "shared"])
def test_features_of_recurrent_modules_are_those_of_a_replay(ray_session, module_class, model, policies):
    algo = algorithm(Leaving, module_class, model=model, policies=policies, minibatch_size=32)
    found = fresh_features(algo, 18)
    learner = algo.learner_group._learner  # what the runner has is for inference only
    modules = {agent: learner.module["shared" if policies else agent].unwrapped() for agent in found}
    algo.stop()
    # Two environments, three episodes; both agents act in steps 0, 2 and 4, which are all that agent_1 remembers.
    for index, (agent, acts) in enumerate({"agent_0": range(6), "agent_1": (0, 2, 4)}.items()):
        expected, forgetful = (
            np.stack(
                [
                    features_in_time(modules[agent], [(e, t, index) for t in acts], remembers)[:: len(acts) // 3]
                    for e in range(2)
                ],
                axis=1,
            )
            for remembers in (True, False)
        )  # [step, environment, D]
        rows = found[agent].reshape(3, 3, 2, -1)  # [episode, step, environment, D]
        np.testing.assert_allclose(rows, np.broadcast_to(expected, rows.shape), atol=1e-5)
        assert np.abs(expected - forgetful)[1:].max() > 0.01  # the test can fail


def reference(features):
    """float64, pair by pair."""
    matrix = []
    for a in features.values():
        matrix.append([])
        for b in features.values():
            both = np.corrcoef(np.float64(a), np.float64(b), rowvar=False)
            matrix[-1].append((both[: a.shape[1], a.shape[1] :] ** 2).mean())
    return np.array(matrix)


@given(
    seed=st.integers(0, 1000), widths=st.lists(st.integers(2, 5), min_size=2, max_size=4), dtype=st.sampled_from("fd")
)
def test_correlation_against_numpy(seed, widths, dtype):
    generator = np.random.default_rng(seed)
    common = generator.normal(size=(50, 1))
    features = {f"a{i}": (generator.normal(size=(50, w)) + 3 + common).astype(dtype) for i, w in enumerate(widths)}
    agents, matrix = feature_correlation(features)
    atol = 1e-10 if dtype == "d" else 1e-5
    expected = reference(features)
    assert agents == list(features) and matrix.shape == (len(widths), len(widths))
    np.testing.assert_allclose(matrix, expected, atol=atol)
    upper = [expected[i, j] for i in range(len(widths)) for j in range(i + 1, len(widths))]
    assert mean_squared_correlation(features) == pytest.approx(np.mean(upper), abs=atol)
    signed = signed_correlation(features)
    np.testing.assert_allclose(signed, np.corrcoef(np.concatenate(list(features.values()), 1), rowvar=False), atol=atol)


def test_independent_features_give_one_over_the_rows_and_copies_one():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 500, 40))
    assert mean_squared_correlation({"a": a, "b": b}) == pytest.approx(1 / 499, rel=0.1)
    assert mean_squared_correlation({"a": a[:, :1], "b": -2 * a[:, :1]}) == pytest.approx(1)
    assert mean_squared_correlation({"a": a, "b": np.ones((500, 3))}) == 0
    with pytest.raises(ValueError, match="two agents"):
        mean_squared_correlation({"a": a})
