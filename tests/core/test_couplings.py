"""The couplings of the package through the real learner: gradients, absence, masks, spaces, and what they train."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests import reference
from tests.support import (
    box,
    declared_config,
    discrete,
    hand_batch,
    hand_streams,
    largest_difference,
    make_learner,
    make_runner,
    parameters,
    scramble,
    tiny_config,
    update,
)
from thrust_rllib import CrossAgentLoss, FeatureSimilarity, JensenShannon, MLPModule, RedundancyPenalty
from thrust_rllib.learner_checks import prepare_couplings
from thrust_rllib.teams import AgentToModule

AGENTS = ("a0", "a1", "a2")
STEPS, ENVS = 8, 4
WIDTHS = {"a0": 8, "a1": 5, "a2": 12}
COEFFICIENT = 0.7
LOSSES = {
    "redundancy": RedundancyPenalty(),
    "similarity": FeatureSimilarity(),
    "apart": JensenShannon("raise"),
    "together": JensenShannon("lower"),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def team_learner(name=None, *, coefficient=COEFFICIENT, actions=None, **options):
    """Three agents whose features have 8, 5 and 12 columns; one step over all rows, no clipping."""
    coupled = {} if name is None else {"cross_agent_losses": {name: LOSSES[name]}}
    config = declared_config(
        [box()] * 3,
        [discrete(3) if actions is None else actions] * 3,
        AGENTS,
        **{"num_epochs": 1, "minibatch_size": STEPS * ENVS, "grad_clip": None, **options},
        **coupled,
        **({} if name is None else {"cross_agent_coeffs": {name: coefficient}}),
    )
    specs = {m: RLModuleSpec(module_class=MLPModule, model_config={"fcnet_hiddens": [WIDTHS[m]]}) for m in AGENTS}
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    learner = make_learner(config)
    scramble(learner, size=0.8)
    return learner


def team_batch(seed=0, heads=None, present=None):
    """Random data; `present` [T, N, E] says who acts."""
    rng, modules = np.random.default_rng(seed), {}
    shape = (STEPS, 1, ENVS)
    for k, agent in enumerate(AGENTS):
        flags = {}
        if present is not None:
            mine = present[:, k : k + 1]
            following = np.concatenate([mine[1:], mine[-1:]])
            flags = {"present": mine, "terminated": mine & ~following}
        modules[agent] = hand_streams(
            [agent],
            rng.normal(size=(*shape, 3)),
            actions=rng.integers(2, size=shape if heads is None else (*shape, heads)),
            rewards=rng.normal(size=shape),
            logp=-1.1 + 0.2 * rng.normal(size=shape),
            bootstrap_obs=rng.normal(size=(1, ENVS, 3)),
            **flags,
        )
    return hand_batch(modules, (STEPS - 1) * ENVS + np.arange(ENVS))


def outputs(learner, batch):
    """Features and logits [B, …] of every agent, with their graph."""
    both = [
        learner.module[agent].forward_train({"obs": torch.from_numpy(batch.stream(agent).obs.reshape(-1, 3))})
        for agent in AGENTS
    ]
    return [o["encoder_features"] for o in both], [o["action_dist_inputs"] for o in both]


def expected_loss(name, features, logits, masks=None, head_sizes=None):
    """The float64 reference of each coupling."""
    features, logits = ([x.detach().numpy() for x in xs] for xs in (features, logits))
    if name == "redundancy":
        return reference.redundancy_penalty(features, masks)
    if name == "similarity":
        return reference.linear_cka(features, masks)
    return reference.jensen_shannon(logits, masks, head_sizes) * (-1 if name == "apart" else 1)


def coupling_loss(results, name):
    return float(results["__all_modules__"]["cross_agent_loss"][name])


def first_gradients(learner, agent, optimizer="default_optimizer"):
    """{parameter: gradient of the first step}: Adam's first moment is then 0.1 times the gradient."""
    names = [name for name, _ in learner.module[agent].named_parameters()]
    state = learner._named_optimizers[f"{agent}_{optimizer}"].state_dict()["state"]
    return {name: state[k]["exp_avg"].numpy() * 10.0 for k, name in enumerate(names) if k in state}


# ------------------------------------------------------------------------------------------------- gradients


@each_loss
@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_the_only_extra_gradient_is_the_couplings(name, critic_lr):
    batch = team_batch()
    plain, coupled = team_learner(critic_lr=critic_lr), team_learner(name, critic_lr=critic_lr)
    features, logits = outputs(coupled, batch)
    own = {m: list(coupled.module[m].parameters()) for m in AGENTS}
    loss = LOSSES[name]
    if isinstance(loss, JensenShannon):
        loss = copy.deepcopy(loss)
        loss.prepare(dict.fromkeys(AGENTS, discrete(3)))
    value = loss(dict(zip(AGENTS, features)), dict(zip(AGENTS, logits)), {}, None)  # noqa: B905
    grads = iter(torch.autograd.grad(COEFFICIENT * value, [p for m in AGENTS for p in own[m]], allow_unused=True))
    extra = {m: {n: next(grads) for n, _ in coupled.module[m].named_parameters()} for m in AGENTS}

    update(plain, batch)
    results = update(coupled, batch)
    assert coupling_loss(results, name) == pytest.approx(expected_loss(name, features, logits), abs=1e-5)
    for agent in AGENTS:
        without, with_coupling = first_gradients(plain, agent), first_gradients(coupled, agent)
        assert without.keys() == with_coupling.keys() and "policy_head.weight" in without
        largest = 0.0
        for parameter, gradient in without.items():
            added = extra[agent][parameter]
            added = np.zeros_like(gradient) if added is None else added.numpy()
            np.testing.assert_allclose(with_coupling[parameter], gradient + added, atol=2e-6)
            largest = max(largest, float(np.abs(added).max()))
        assert largest > 1e-3
        # Policies couple through the heads, features through the trunk only; the critic has no part in either.
        assert (extra[agent]["policy_head.weight"] is None) == LOSSES[name].needs_features
        assert extra[agent]["value_head.weight"] is None
        if critic_lr is not None:
            critics = [first_gradients(learner, agent, "critic_optimizer") for learner in (plain, coupled)]
            assert critics[0] and largest_difference(*critics) == 0.0


@each_loss
def test_frozen_agents_count_and_do_not_move(name):
    batch, moved = team_batch(), []
    for coefficient in (0.0, 1.0):
        learner = team_learner(name, coefficient=coefficient, trained=["a0"])
        before = parameters(learner)
        features, logits = outputs(learner, batch)
        results = update(learner, batch)
        assert coupling_loss(results, name) == pytest.approx(expected_loss(name, features, logits), abs=1e-5)
        after = parameters(learner)
        assert all(largest_difference(before[m], after[m]) == 0.0 for m in ("a1", "a2"))
        moved.append(first_gradients(learner, "a0"))
    assert largest_difference(*moved) > 1e-3


# ------------------------------------------------------------------------------------------------- absence and masks


@each_loss
def test_a_pair_counts_the_rows_in_which_both_are_present(name):
    present = np.ones((STEPS, 3, ENVS), bool)
    present[:3, 1] = False  # a1 joins late, a2 leaves early
    present[6:, 2] = False
    batch = team_batch(present=present)
    learner = team_learner(name)
    features, logits = outputs(learner, batch)
    masks = present.transpose(1, 0, 2).reshape(3, -1)
    value = coupling_loss(update(learner, batch), name)
    assert value == pytest.approx(expected_loss(name, features, logits, masks), abs=1e-5)
    assert abs(value - expected_loss(name, features, logits)) > 1e-4


@pytest.mark.parametrize("name", ["apart", "together"])
def test_the_heads_of_multi_discrete_actions(name):
    learner, batch = team_learner(name, actions=gym.spaces.MultiDiscrete([3, 2])), team_batch(heads=2)
    features, logits = outputs(learner, batch)
    value = coupling_loss(update(learner, batch), name)
    assert value == pytest.approx(expected_loss(name, features, logits, head_sizes=[3, 2]), abs=1e-5)
    assert abs(value - expected_loss(name, features, logits)) > 1e-3  # the five logits are not one head


@pytest.mark.parametrize("name", ["apart", "together"])
def test_masked_actions(name):
    config = tiny_config("debug/masked_actions", cross_agent_losses={name: LOSSES[name]})
    (batch,) = make_runner(config).sample(num_timesteps=64)
    results = update(make_learner(config), batch)
    # One legal action of four against four nearly equal ones: ½ ln(1/0.625) + ½ (0.25 ln(0.25/0.625) + 0.75 ln 2).
    expected = 0.5 * np.log(1.6) + 0.5 * (0.25 * np.log(0.4) + 0.75 * np.log(2))
    assert abs(coupling_loss(results, name)) == pytest.approx(expected, abs=0.02)
    assert results["__all_modules__"]["num_non_finite_minibatches"] == 0


# ------------------------------------------------------------------------------------------------- action spaces


def test_each_learner_prepares_its_own_copy():
    seen = []

    class Spaces(CrossAgentLoss):
        needs_features = False
        spaces = None

        def prepare(self, action_spaces):
            seen.append(dict(action_spaces))
            self.spaces = action_spaces

        def __call__(self, features, logits, actions, present):
            assert {a: int(s.n) for a, s in self.spaces.items()} == {a: x.shape[-1] for a, x in logits.items()}

    loss = Spaces()
    groups = {"pair": ["a0", "a1"], "single": ["a2"]}
    small = declared_config(
        [box()] * 3, [discrete(2)] * 2 + [discrete(4)], AGENTS, policies=groups, cross_agent_losses={"spaces": loss}
    )
    large = declared_config([box()] * 2, [discrete(5)] * 2, AGENTS[:2], cross_agent_losses={"spaces": loss})
    learners = [make_learner(config) for config in (small, large)]
    assert seen[0] == {"a0": discrete(2), "a1": discrete(2), "a2": discrete(4)}
    assert seen[1] == {"a0": discrete(5), "a1": discrete(5)} and loss.spaces is None
    for config, learner in zip((small, large), learners, strict=True):
        update(learner, make_runner(config).sample(num_timesteps=64))


def test_a_plain_function_needs_no_hook():
    def same(features, logits, actions, present):
        return (logits["a0"] - logits["a1"]).square().mean()

    config = declared_config([box()] * 2, [discrete(2)] * 2, AGENTS[:2], cross_agent_losses={"same": same})
    results = update(make_learner(config), make_runner(config).sample(num_timesteps=64))
    assert coupling_loss(results, "same") > 0.0


@pytest.mark.parametrize(
    "spaces, message",
    [
        ([discrete(3), discrete(4)], r"'js': agents 'a0' and 'a1' have different actions: Discrete\(3\) and Discrete"),
        ([discrete(5), gym.spaces.MultiDiscrete([3, 2])], "compares agents with the same actions"),
        ([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.MultiDiscrete([3, 2])], "compares agents with the same actions"),
        ([discrete(2), box(2)], r"'js': agent 'a1' acts in Box.*no closed form.*FeatureSimilarity"),
    ],
)
def test_spaces_that_cannot_be_compared_are_an_early_error(spaces, message):
    config = declared_config(
        [box()] * 2, spaces, AGENTS[:2], cross_agent_losses={"js": JensenShannon("raise"), "same": FeatureSimilarity()}
    )
    with pytest.raises(ValueError, match=message):
        make_learner(config)


def test_equal_numbers_of_actions_are_enough():
    spaces = [gym.spaces.Discrete(3, start=1), discrete(3), gym.spaces.MultiDiscrete([3])]
    config = declared_config([box()] * 3, spaces, AGENTS, cross_agent_losses={"js": JensenShannon("raise")})
    results = update(make_learner(config), make_runner(config).sample(num_timesteps=64))
    assert -0.1 < coupling_loss(results, "js") < 0.0


def test_preparing_again_and_copies():
    loss, table = JensenShannon("lower"), AgentToModule({"a": "m", "b": "m"})
    logits = {"a": torch.zeros(2, 5), "b": torch.eye(5)[:2]}

    class Module:
        action_space = gym.spaces.MultiDiscrete([2, 3])

    with pytest.raises(ValueError, match="call prepare"):
        loss({}, logits, {}, None)
    prepare_couplings({"js": loss}, {"m": Module}, table)
    heads = float(loss({}, logits, {}, None))
    for same in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert float(same({}, logits, {}, None)) == heads
        prepare_couplings({"js": same}, {"m": Module}, table)
        assert float(same({}, logits, {}, None)) == heads > 0.0
    Module.action_space = discrete(5)
    prepare_couplings({"js": loss}, {"m": Module}, table)
    assert abs(float(loss({}, logits, {}, None)) - heads) > 1e-3
    with pytest.raises(ValueError, match=r"logits\[0\] has shape \(2, 4\): needed \[B, 5\]"):
        loss({}, {agent: x[:, :4] for agent, x in logits.items()}, {}, None)


@pytest.mark.parametrize("direction", ["up", "", None])
def test_another_direction_is_an_error(direction):
    with pytest.raises(ValueError, match="'raise' .act differently. or 'lower'"):
        JensenShannon(direction)


def test_representations_say_what_they_are():
    assert repr(JensenShannon("raise")) == "JensenShannon(direction='raise')"
    assert repr(FeatureSimilarity()) == "FeatureSimilarity()"


# ------------------------------------------------------------------------------------------------- training


def trained_value(env, env_config, name, coefficient, iterations=14):
    """The coupling's value after some iterations of sampling and training."""
    config = tiny_config(
        env,
        env_config,
        num_envs=8,
        train_batch_size_per_learner=128,
        minibatch_size=64,
        num_epochs=4,
        lr=1e-2,
        cross_agent_losses={name: LOSSES[name]},
        cross_agent_coeffs={name: coefficient},
    )
    runner, learner = make_runner(config), make_learner(config)
    for _ in range(iterations):
        runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
        results = update(learner, runner.sample(num_timesteps=128))
    return coupling_loss(results, name)


def test_raising_the_divergence_parts_agents_that_are_paid_for_the_same_action():
    # The loss is minus the divergence. Two agents: of three, two may settle on one action and be parted no more.
    alike = trained_value("debug/random_observations", {"agents": 2}, "apart", 0.0)
    apart = trained_value("debug/random_observations", {"agents": 2}, "apart", 10.0)
    assert -0.1 < alike <= 1e-6 and -np.log(2) - 1e-6 < apart < -0.6


def test_lowering_the_divergence_joins_agents_that_are_paid_for_different_actions():
    apart = trained_value("debug/identity", {"agents": 3}, "together", 0.0)
    alike = trained_value("debug/identity", {"agents": 3}, "together", 10.0)
    assert apart > 0.6 and 0.0 <= alike + 1e-6 < 0.05


def test_feature_similarity_falls_when_it_is_minimised():
    steps = {"agents": 3, "rewards": [1, 0, 2, 1, 0, 3, 1, 2]}  # all see the same: the one-hot of the step
    as_it_is = trained_value("debug/scripted_rewards", steps, "similarity", 0.0)
    minimised = trained_value("debug/scripted_rewards", steps, "similarity", 1.0)
    assert as_it_is > 0.9 and 0.0 <= minimised < 0.2
