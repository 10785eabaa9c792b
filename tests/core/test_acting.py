"""How a team acts: stacked policies against single ones, groups of agents, and where random numbers come from."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import box, declared_config, discrete, make_runner, tiny_config
from thrust_rllib import MLPModule
from thrust_rllib.rl_modules.distributions import MASKED_LOGIT, distribution_class, mask_logits
from thrust_rllib.rl_modules.stacked import StackedPolicies, can_be_stacked
from thrust_rllib.sampling.acting import TeamActor
from thrust_rllib.sampling.agent_groups import agent_groups

SPACES = {
    "discrete": gym.spaces.Discrete(5),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 2, 4]),
    "box": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
}


def module(action_space=SPACES["discrete"], obs=(6,), cls=MLPModule, **model):
    return cls(
        observation_space=gym.spaces.Box(-1.0, 1.0, obs, np.float32),
        action_space=action_space,
        model_config={"fcnet_hiddens": [8, 7], **model},
    )


# ------------------------------------------------------------------------------------------- stacked policies


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_stacked_policies_equal_the_modules_one_by_one(name, activation):
    modules = [module(SPACES[name], obs=(2, 3), fcnet_activation=activation) for _ in range(3)]
    for each in modules:
        for param in each.parameters():
            torch.nn.init.normal_(param)
    obs = torch.randn(3, 9, 2, 3)
    assert can_be_stacked(modules)
    with torch.no_grad():
        together = StackedPolicies(modules)(obs)
        for each, mine, logits in zip(modules, obs, together, strict=True):
            alone = each.forward_exploration({Columns.OBS: mine})[Columns.ACTION_DIST_INPUTS]
            torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(together[0], together[1], atol=1e-2)


class Doubled(MLPModule):
    def _logits(self, features):
        return 2.0 * super()._logits(features)


def hooked():
    with_hook = module()
    with_hook.trunk[0].register_forward_hook(lambda *_: None)
    return with_hook


def constrained():
    with_constraint = module()
    torch.nn.utils.parametrizations.spectral_norm(with_constraint.policy_head)
    return with_constraint


@pytest.mark.parametrize(
    "other",
    [
        lambda: module(cls=Doubled),
        lambda: module(fcnet_hiddens=[8, 8]),
        lambda: module(fcnet_activation="relu"),
        hooked,
        constrained,
        lambda: torch.nn.Linear(6, 5),
    ],
)
def test_what_is_not_alike_or_not_plain_is_not_stacked(other):
    assert can_be_stacked([module(), module()])
    assert not can_be_stacked([module(), other()]) and not can_be_stacked([other(), module()])


@pytest.mark.parametrize("rows", [1, 10**6])
def test_many_rows_and_few_rows_act_alike(monkeypatch, rows):
    monkeypatch.setattr("thrust_rllib.sampling.acting.STACKED_ROWS", 0 if rows == 1 else rows)
    (batch,) = make_runner(tiny_config("debug/random_observations")).sample(num_timesteps=40)
    monkeypatch.undo()
    (usual,) = make_runner(tiny_config("debug/random_observations")).sample(num_timesteps=40)
    for module_id, streams in usual.modules.items():
        np.testing.assert_array_equal(batch.modules[module_id].actions, streams.actions)
        np.testing.assert_allclose(batch.modules[module_id].action_logp, streams.action_logp, atol=1e-6)


def test_weights_that_change_between_rollouts_are_taken_over():
    runner = make_runner(tiny_config("debug/random_observations"))
    runner.sample(num_timesteps=8)
    for index, module_id in enumerate(sorted(runner.module.keys())):
        head = runner.module[module_id].policy_head
        torch.nn.init.zeros_(head.weight)
        head.bias.data = torch.full_like(head.bias, -100.0)
        head.bias.data[index % len(head.bias)] = 100.0
    (batch,) = runner.sample(num_timesteps=8)
    for index, streams in enumerate(batch.modules.values()):
        assert (streams.actions == index % len(head.bias)).all()


# ------------------------------------------------------------------------------------------- groups


def groups_of(config):
    runner = make_runner(config)
    return [(group.module_ids, group.agents) for group in runner._actor.groups]


def test_alike_neighbours_form_a_group_others_do_not():
    spaces = [box(3), box(3), box(4), box(3)]
    config = declared_config(spaces, [discrete(2)] * 4, agents=["a", "b", "c", "d"])
    assert groups_of(config) == [(("a", "b"), ("a", "b")), (("c",), ("c",)), (("d",), ("d",))]


def test_modules_with_other_numbers_of_agents_are_apart():
    config = declared_config([box(3)] * 5, [discrete(2)] * 5, agents=["a", "b", "c", "d", "e"])
    config.multi_agent(policies={"left": ["a", "c"], "middle": ["b", "e"], "right": ["d"]})
    assert groups_of(config) == [(("left", "middle"), ("a", "c", "b", "e")), (("right",), ("d",))]


def test_modules_of_another_kind_act_apart():
    config = declared_config([box(3)] * 2, [discrete(2)] * 2, agents=["a", "b"])
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Doubled, model_config={"fcnet_hiddens": [4]}))
    assert groups_of(config) == [(("a",), ("a",)), (("b",), ("b",))]


def test_every_agent_gets_its_own_data_whatever_the_order_of_names():
    """agent_10 sorts before agent_2; each agent sees its number, and its stream must hold that."""
    config = tiny_config("debug/identity", {"agents": 12})
    runner = make_runner(config)
    (batch,) = runner.sample(num_timesteps=6)
    for agent in runner.env.possible_agents:
        number = int(str(agent).rsplit("_", 1)[-1])
        assert (batch.stream(agent).obs.argmax(-1) == number).all()


# ------------------------------------------------------------------------------------------- random numbers


def test_noise_of_exactly_zero_never_chooses_what_is_masked(monkeypatch):
    mask = torch.tensor([[True, False, True]])
    logits = mask_logits(torch.zeros(1, 3), mask)

    def with_zero(self, *, generator=None):
        return self.copy_(torch.tensor([1.0, 0.0, 2.0]).view_as(self))

    monkeypatch.setattr(torch.Tensor, "exponential_", with_zero)
    assert distribution_class(gym.spaces.Discrete(3)).from_logits(logits).sample() == 0
    # Without a mask the tiny number is a very large preference, as it must be.
    assert distribution_class(gym.spaces.Discrete(3)).from_logits(torch.zeros(1, 3)).sample() == 1
    assert logits[0, 1] == MASKED_LOGIT


class Noisy(MLPModule):
    def _forward(self, batch, **kwargs):
        outputs = super()._forward(batch, **kwargs)
        logits = outputs[Columns.ACTION_DIST_INPUTS]
        outputs[Columns.ACTION_DIST_INPUTS] = logits + torch.randn_like(logits)
        return outputs


def test_a_module_that_draws_numbers_draws_from_the_runners_generator():
    def logps():
        config = tiny_config("debug/random_observations")
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=Noisy, model_config={"fcnet_hiddens": [4]}))
        runner = make_runner(config)
        before = torch.get_rng_state()
        (batch,) = runner.sample(num_timesteps=20)
        assert torch.equal(torch.get_rng_state(), before)
        return np.stack([streams.action_logp for streams in batch.modules.values()])

    torch.manual_seed(0)
    first = logps()
    torch.manual_seed(0)
    second = logps()
    np.testing.assert_array_equal(first, second)
    assert np.ptp(first) > 0.1  # the noise reached the logits


@pytest.mark.parametrize("name", SPACES)
def test_random_actions_cover_what_is_allowed(name):
    config = declared_config([box(3)] * 2, [SPACES[name]] * 2)
    runner = make_runner(config)
    actor = TeamActor(agent_groups(runner.env, runner.module_of, True, False), runner.module, None, "cpu", seed=0)
    encoded = [np.zeros((2, 500, 3), np.float32)]
    (acted,) = actor.act(encoded, [None], explore=False, random_actions=True)
    if name == "box":
        assert abs(acted.actions.mean()) < 0.05 and acted.actions.min() < -0.98 and acted.actions.max() > 0.98
    else:
        sizes = [5] if name == "discrete" else [3, 2, 4]
        for size, column in zip(sizes, np.moveaxis(acted.actions.reshape(2, 500, -1), -1, 0), strict=True):
            shares = np.bincount(column.ravel(), minlength=size) / column.size
            np.testing.assert_allclose(shares, 1 / size, atol=0.06)
