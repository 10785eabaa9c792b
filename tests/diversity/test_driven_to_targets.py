"""A constraint on the weight of a coupling drives the agents to a given distance."""

import gymnasium as gym
import pytest
import torch

from thrust_rllib.action_spread import ActionSpread
from thrust_rllib.constraints import Constraint
from thrust_rllib.functional import system_neural_diversity, total_variation
from thrust_rllib.multipliers import Multipliers

AGENTS = ("a", "b", "c")
SPACES = {"discrete": gym.spaces.Discrete(3), "box": gym.spaces.Box(-1, 1, (2,))}
UPDATES, STEPS = 80, 3


def task_loss(space, logits):
    """All agents are paid for the same action; what they would do alone is nearly alike."""
    if space == "discrete":
        p = [x.softmax(-1) for x in logits.values()]
        return sum(((q - torch.tensor([0.6, 0.3, 0.1])) ** 2).sum(-1).mean() for q in p)
    return sum(((x - torch.tensor([0.5, -0.5, -1.0, -1.0])) ** 2).sum(-1).mean() for x in logits.values())


def trained_distance(space, constraint):
    generator = torch.Generator().manual_seed(0)
    obs = {agent: torch.randn(64, 5, generator=generator) for agent in AGENTS}
    width = 3 if space == "discrete" else 4
    weights = {agent: (0.1 * torch.randn(6, width, generator=generator)).requires_grad_() for agent in AGENTS}
    optimizer = torch.optim.Adam(weights.values(), lr=0.03)
    loss = ActionSpread("lower")
    loss.prepare(dict.fromkeys(AGENTS, SPACES[space]))
    multipliers = Multipliers([constraint] if constraint else [])

    def logits():
        return {agent: obs[agent] @ weights[agent][:5] + weights[agent][5] for agent in AGENTS}

    for _ in range(UPDATES):
        coefficient, values = multipliers.coupling_coeffs({"spread": 0.0})["spread"], []
        for _ in range(STEPS):
            spread = loss({}, now := logits(), {}, None)
            optimizer.zero_grad()
            (task_loss(space, now) + coefficient * spread).backward()
            optimizer.step()
            values.append(float(spread.detach()))
        multipliers.update({}, {"spread": sum(values) / STEPS})
    final = [x.detach() for x in logits().values()]
    if space == "discrete":
        return float(total_variation(final))
    return float(system_neural_diversity([x[:, :2] for x in final], [x[:, 2:].exp() for x in final]))


@pytest.mark.parametrize(("space", "targets"), [("discrete", (0.2, 0.4, 0.6)), ("box", (0.5, 1.0, 2.0))])
def test_three_targets_are_reached(space, targets):
    assert trained_distance(space, None) < targets[0] / 2
    for target in targets:
        constraint = Constraint("spread", target, "lagrangian", rate=0.3, of="coupling", sense="equal")
        assert trained_distance(space, constraint) == pytest.approx(target, rel=0.1)
