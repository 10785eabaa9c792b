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
from thrust_rllib.sampling.acting import ModuleActing, TeamActor
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.sampling.plain_acting import Noise, PlainActing

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
    together = torch.from_numpy(StackedPolicies(modules)(obs.numpy()))
    assert together.dtype == torch.float32
    for each, mine, logits in zip(modules, obs, together, strict=True):
        with torch.no_grad():
            alone = each.forward_exploration({Columns.OBS: mine})[Columns.ACTION_DIST_INPUTS]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


class Doubled(MLPModule):
    def _logits(self, features):
        return 2.0 * super()._logits(features)


class Residual(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2.0


def with_other(part, **changes):
    changed = module()
    for name, value in changes.items():
        setattr(getattr(changed, part) if part else changed, name, value)
    return changed


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
        lambda: module(fcnet_activation="gelu"),
        lambda: module().double(),
        lambda: with_other(None, trunk=Residual(*module().trunk)),
        lambda: with_other(None, trunk=torch.nn.Sequential(torch.nn.Tanh(), *module().trunk)),
        lambda: with_other(None, policy_head=torch.nn.Linear(7, 5, bias=False)),
        lambda: with_other("policy_head", forward=lambda x: x[:, :5]),
        lambda: with_other(None, forward_exploration=lambda batch: batch),
        hooked,
        constrained,
        lambda: torch.nn.Linear(6, 5),
    ],
)
def test_what_is_not_alike_or_not_plain_is_not_stacked(other):
    assert can_be_stacked([module(), module()])
    assert not can_be_stacked([module(), other()]) and not can_be_stacked([other(), module()])


def acting_of(space, plain, seed=0):
    """Two agents with equal networks in both cases, acting by numpy or by their modules."""
    torch.manual_seed(1)
    config = declared_config([box(3)] * 2, [space] * 2)
    runner = make_runner(config)
    for each in runner.module.values():
        for param in each.parameters():
            torch.nn.init.normal_(param, std=0.7)
    (group,) = agent_groups(runner.env, runner.module_of, True, False)
    modules = [runner.module[m].unwrapped() for m in group.module_ids]
    generator = torch.Generator().manual_seed(seed)
    if plain:
        return PlainActing(group, modules, Noise(generator))
    return ModuleActing(group, modules, generator, torch.device("cpu"))


@pytest.mark.parametrize("name", SPACES)
def test_plain_acting_is_the_twin_of_the_modules(name):
    """Same inputs of the distribution, same mode, and samples of the same distribution."""
    space = SPACES[name]
    fast, slow = acting_of(space, True), acting_of(space, False)
    obs = np.repeat(np.random.default_rng(0).normal(size=(2, 1, 3)).astype(np.float32), 20_000, axis=1)
    mask = None
    if name != "box":
        mask = np.ones((2, 20_000, distribution_class(space).required_input_dim(space)), bool)
        mask[:, :, 0] = False
    for explore in (True, False):
        (logits, actions, _), (right, expected, _) = (x.act(obs, mask, explore, False, None) for x in (fast, slow))
        np.testing.assert_allclose(logits, right, rtol=1e-5, atol=1e-5)
        assert actions.shape == expected.shape and actions.dtype == expected.dtype
        if not explore:
            np.testing.assert_allclose(actions, expected, atol=1e-5)
            continue
        flat, wanted = actions.reshape(2, 20_000, -1), expected.reshape(2, 20_000, -1)
        if name == "box":
            np.testing.assert_allclose(flat.mean(1), wanted.mean(1), atol=0.1)
            np.testing.assert_allclose(flat.std(1), wanted.std(1), rtol=0.05)
        else:
            assert (flat[..., 0] > 0).all()
            for category in range(5):
                np.testing.assert_allclose((flat == category).mean(1), (wanted == category).mean(1), atol=0.02)


def test_steps_draw_different_numbers_and_the_same_for_the_same_seed():
    obs = np.zeros((2, 7, 3), np.float32)

    def played(seed):
        acting = acting_of(SPACES["discrete"], True, seed)
        steps = [
            acting.act(obs, None, False, random_actions=True, memory=None)[1] for _ in range(2000)
        ]  # several blocks of numbers
        return np.stack(steps).reshape(2000, -1)

    first = played(0)
    np.testing.assert_array_equal(first, played(0))
    assert abs((first == played(1)).mean() - 0.2) < 0.02
    assert len(np.unique(first, axis=0)) == 2000
    for i in range(14):  # agents and environments draw for themselves
        for j in range(i):
            assert abs((first[:, i] == first[:, j]).mean() - 0.2) < 0.05


def test_groups_draw_for_themselves():
    runner = make_runner(declared_config([box(3), box(4)], [discrete(2)] * 2, agents=["a", "b"]))
    encoded = [np.zeros((1, 1, 3), np.float32), np.zeros((1, 1, 4), np.float32)]
    drawn = [runner._actor.act(encoded, [None, None], False, random_actions=True) for _ in range(2000)]
    a, b = (np.concatenate([acted[group].actions.ravel() for acted in drawn]) for group in (0, 1))
    assert abs((a == b).mean() - 0.5) < 0.06 and abs(a.mean() - 0.5) < 0.06


@pytest.mark.parametrize("env", ["debug/random_observations", "debug/multi_discrete", "debug/match_target"])
def test_log_probabilities_of_a_rollout_are_the_modules(env):
    runner = make_runner(tiny_config(env))
    (batch,) = runner.sample(num_timesteps=40)
    for module_id, streams in batch.modules.items():
        obs, actions = (torch.from_numpy(x).flatten(0, 2) for x in (streams.obs, streams.actions))
        module = runner.module[module_id]
        with torch.no_grad():
            inputs = module.forward_exploration({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
        logp = module.get_exploration_action_dist_cls().from_logits(inputs).logp(actions)
        np.testing.assert_allclose(streams.action_logp.ravel(), logp.numpy(), atol=1e-5)


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


def test_bounds_that_are_close_are_not_equal():
    """gymnasium takes Box(-1e5, 1e5) and Box(-1e5 - 0.5, 1e5 + 0.5) for equal; each agent keeps its own bounds."""
    spaces = [box(3, 1e5), box(3, 1e5 + 0.5)]
    assert spaces[0] == spaces[1]
    config = declared_config(spaces, [discrete(2)] * 2, agents=["a", "b"])
    assert groups_of(config) == [(("a",), ("a",)), (("b",), ("b",))]
    runner = make_runner(config)
    assert [group.encoder.encoded_space.high.max() for group in runner._groups] == [1e5, 1e5 + 0.5]


def test_environments_that_are_made_anew_are_played_on():
    config = declared_config([box(3)] * 2, [discrete(2)] * 2, agents=["a", "b"])
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Doubled, model_config={"fcnet_hiddens": [4]}))
    runner = make_runner(config)
    (before,) = runner.sample(num_timesteps=8)
    runner.make_env()
    (batch,) = runner.sample(num_timesteps=8)
    assert batch.env_steps() == 8 and list(batch.modules) == ["a", "b"]
    assert (batch.modules["a"].obs != before.modules["a"].obs).any()


def test_weights_that_have_diverged_warn_as_little_as_torch_does():
    acting = acting_of(SPACES["box"], True)
    acting._policies._layers[0][0][:] = 3e38
    with np.errstate(all="raise"):
        logits, *_ = acting.act(np.full((2, 1, 3), 1e10, np.float32), None, True, False, None)
    assert logits.shape == (2, 1, 4)


# ------------------------------------------------------------------------------------------- random numbers


def test_two_rollouts_continue_as_one():
    def actions(*lengths):
        runner = make_runner(tiny_config("debug/random_observations"))
        batches = [runner.sample(num_timesteps=length)[0] for length in lengths]
        return np.concatenate([batch.modules["agent_1"].actions for batch in batches])

    np.testing.assert_array_equal(actions(20, 30), actions(50))


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
