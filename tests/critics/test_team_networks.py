"""The networks of the team's critic: what a set critic does not see, and what pooling leaves out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from tests.critics.both import Case, config_of
from tests.critics.support import KINDS
from tests.support import box, make_learner
from thrust_rllib.rl_modules.team_critic import SetCritic, TeamCritic

POOLINGS = ("mean", "sum", "max")
N, WIDTH, SCALARS = 4, 3, 2


def set_critic(pooling="mean", num_values=1, cell=None, widths=(WIDTH,) * N):
    torch.manual_seed(0)
    total = sum(widths) + len(widths) + SCALARS
    critic = SetCritic(
        observation_space=box(total),
        action_space=None,
        model_config={
            "pooling": pooling, "num_values": num_values, "agent_widths": list(widths), "encoder_hiddens": [6, 5],
            "agent_kinds": [f"width_{width}" for width in widths], "fcnet_hiddens": [7], "cell": cell, "cell_size": 4,
        },
    )  # fmt: skip
    with torch.no_grad():
        for p in critic.parameters():
            p.copy_(torch.randn_like(p))
    return critic.double()


def view(observations, present, scalars):
    """[R, O] of observations [R, N, WIDTH], flags [R, N] and scalars [R, SCALARS]; absent ones are 0."""
    return torch.cat([(observations * present[..., None]).flatten(1), present, scalars], dim=1)


def random_rows(rows=5):
    generator = torch.Generator().manual_seed(1)
    observations, scalars = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, N, WIDTH), (5, SCALARS))
    )
    present = torch.ones(5, N, dtype=torch.float64)
    present[1, 2] = present[2, 0] = present[2, 3] = 0.0
    return observations[:rows], present[:rows], scalars[:rows]


def values_of(critic, rows):
    batch = {Columns.OBS: rows}
    if critic.is_stateful():
        state = critic.get_initial_state()
        batch = {
            Columns.OBS: rows[:, None],
            Columns.STATE_IN: {k: x.double().expand(len(rows), -1) for k, x in state.items()},
        }
    values = critic.compute_values(batch)
    return values[:, 0] if critic.is_stateful() else values


@pytest.mark.parametrize("cell", [None, "gru", "lstm"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_order_of_the_agents_changes_nothing(pooling, cell):
    observations, present, scalars = random_rows()
    team, each = set_critic(pooling, 1, cell), set_critic(pooling, N, cell)
    whole, own = (
        values_of(team, view(observations, present, scalars)),
        values_of(each, view(observations, present, scalars)),
    )
    assert whole.shape == (5, 1) and own.shape == (5, N)
    for order in itertools.permutations(range(N)):
        order = list(order)
        permuted = view(observations[:, order], present[:, order], scalars)
        torch.testing.assert_close(values_of(team, permuted), whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values_of(each, permuted), own[:, order], rtol=1e-12, atol=1e-12)
    assert (own[:, 0] - own[:, 1]).abs().min() > 1e-3
    assert (values_of(team, view(observations, present, scalars + 1.0)) - whole).abs().max() > 1e-3


def test_a_central_critic_sees_the_order():
    critic = TeamCritic(observation_space=box(6), action_space=None, model_config={})
    x = torch.arange(6.0)[None]
    assert (critic.compute_values({"obs": x}) - critic.compute_values({"obs": x.flip(1)})).abs() > 1e-4


@pytest.mark.parametrize("pooling", POOLINGS)
def test_absent_agents_are_not_pooled(pooling):
    observations, _, scalars = random_rows(1)
    critic, present = set_critic(pooling), torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    two = set_critic(pooling, widths=(WIDTH,) * 2)
    two.load_state_dict(critic.state_dict())
    smaller = torch.cat([observations[:, [0, 2]].flatten(1), torch.ones(1, 2, dtype=torch.float64), scalars], dim=1)
    expected = values_of(two, smaller)
    torch.testing.assert_close(values_of(critic, view(observations, present, scalars)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_team_of_nobody_has_a_value_and_gradients(pooling):
    observations, present, scalars = random_rows(2)
    present[1] = 0.0
    critic = set_critic(pooling)
    values = values_of(critic, view(observations, present, scalars))
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert all(torch.isfinite(p.grad).all() for p in critic.parameters())
    other = values_of(critic, view(observations + 1.0, present, scalars))
    assert other[1] == values[1] and other[0] != values[0]


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_is_not_finite_is_not_pooled_away(pooling, number):
    observations, present, scalars = random_rows(2)
    critic = set_critic(pooling)
    with torch.no_grad():
        critic.encoders["width_3"] = torch.nn.Identity()  # tanh would bound an infinity
        critic.trunk = torch.nn.Identity()
        critic.value_head = torch.nn.Linear(WIDTH + SCALARS, 1).double()
    observations[0, 1, 0] = number
    values = values_of(critic, view(observations, present, scalars))
    assert not torch.isfinite(values[0]).any() and torch.isfinite(values[1]).all()


def test_kinds_of_agents_have_their_own_encoders():
    critic = set_critic(widths=(3, 2, 3))
    assert sorted(critic.encoders) == ["width_2", "width_3"]


def test_a_critic_does_not_act():
    with pytest.raises(RuntimeError, match="TeamCritic has no actions: it is a critic"):
        TeamCritic(observation_space=box(6), action_space=None, model_config={}).forward_inference(
            {"obs": torch.ones(1, 6)}
        )


@pytest.mark.parametrize("critic, credit, count", [("central", "shared", 1), ("central", "own", 3), ("set", "own", 3)])
def test_only_the_learner_builds_it(critic, credit, count):
    config = config_of(Case(critic, credit))
    learner = make_learner(config)
    network = learner.module["team_critic"]
    assert network.num_values == count
    assert network.observation_space.shape == (sum(kind.obs for kind in KINDS.values()) + 3,)
    spec = config.get_multi_rl_module_spec(
        spaces={m: (s.observation_space, s.action_space) for m, s in learner.module.items() if m != "team_critic"},
        inference_only=True,
    )
    assert "team_critic" not in spec.rl_module_specs
