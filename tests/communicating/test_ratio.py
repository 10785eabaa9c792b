"""Before the first gradient step every ratio is 1, and values are those that the learner trains from.

What was heard when an agent acted is heard by the learner: the same messages of the same agents, made of observations
with the same moments and of memories that have come through all rollouts before.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.communicating.world import APART, CELLS, DEAF, GROUPS, HEADS, NORMALIZED, ONE, Meadow, Swarm, team_config
from tests.support import largest_difference, make_learner, parameters, scramble, update
from thrust_rllib.team_outputs import forward_team

TEAMS = {"one module": ONE, "groups": GROUPS, "apart": APART, "one does not speak": DEAF}
HEADED = {"heads": HEADS, "masked": True}


class Played:
    """A runner and a learner with the same random weights."""

    def __init__(self, door, cell, policies, **options):
        options = {"env_config": HEADED, "num_envs": 3, "minibatch_size": None, **options}
        runners = {**options.pop("runners", NORMALIZED), "sampling": door}
        self.config = team_config(cell, policies, runners=runners, **options)
        self.config.validate()
        self.runner = self.config.env_runner_cls(config=self.config, worker_index=0)
        self.learner = make_learner(self.config, self.runner.get_spaces())
        self.set_weights(0)

    def set_weights(self, seed):
        """Random ones, large enough that messages matter."""
        scramble(self.learner, seed)
        self.runner.set_state({"rl_module": self.learner.module.get_state(inference_only=True)})

    def sample(self, steps=13):
        """The learner's batches of a rollout, sampled with exploration."""
        return self.learner._batches(self.runner.sample(num_timesteps=steps * self.runner.num_envs, explore=True))

    def rows(self, batches):
        """Joint rows in the order of time."""
        rows = self.learner._joint_rows(batches)
        return rows.select(rows.units().rows)

    @torch.no_grad()
    def forward(self, rows):
        return forward_team(self.learner.module, rows, dict.fromkeys(rows.modules, True))


def wrong_ratio(played, rows):
    """How far a ratio of a present row is from 1."""
    ratio = torch.exp(played.forward(rows).logp - rows.action_logp)[rows.present]
    return float((ratio - 1).abs().max())


CASES = [
    *((door, cell, "one does not speak", Meadow) for door in ("arrays", "episodes") for cell in CELLS),
    *(("arrays", cell, "groups", Swarm) for cell in CELLS),
    *((door, cell, "apart", Meadow) for door, cell in (("arrays", "none"), ("episodes", "message_gru"))),
    *((door, cell, "one module", Meadow) for door, cell in (("arrays", "message_gru"), ("episodes", "none"))),
]


@pytest.mark.parametrize("door, cell, team, env", CASES)
def test_ratios_are_one_in_rollouts_that_go_on(door, cell, team, env):
    played = Played(door, cell, TEAMS[team], env=env)
    seen, cut_alone, joined = 0, 0, 0
    for rollout in range(3):
        batches = played.sample()
        rows = played.rows(batches)
        assert wrong_ratio(played, rows) < 1e-5
        outputs = played.forward(rows)
        assert float((outputs.values - rows.values)[rows.present].abs().max()) < 1e-5
        seen += int(rows.present.sum())
        for batch in batches:
            streams = [batch.stream(agent) for agent in batch.agents]
            there = np.stack([stream.present for stream in streams])
            alone = np.stack([stream.truncated for stream in streams]) & (there.sum(0) > 1)
            cut_alone += int(alone[:, :-1].sum())
            joined += int((there[:, 1:] & ~there[:, :-1] & there.any(0)[:-1] & ~batch.episode_start[1:]).sum())
        assert not rows.present.all()
        played.set_weights(rollout + 1)
    assert seen > 150 and cut_alone and joined > 2


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_heard_is_part_of_the_ratio(cell):
    """The comparison sees links that are cut, absent agents that are heard, and memories that begin with zeros."""
    played = Played("arrays", cell, GROUPS, env_config={})
    played.sample()
    rows = played.rows(played.sample())
    changed = copy.deepcopy(rows)
    for module in changed.modules.values():
        module.obs[..., :4] = 0.0
    assert wrong_ratio(played, changed) > 1e-2
    changed = copy.deepcopy(rows)
    object.__setattr__(changed, "everybody", True)
    changed.present[:] = True
    if played.learner.memories:
        object.__setattr__(changed.sequences, "present", None)
    ratio = torch.exp(played.forward(changed).logp - rows.action_logp)[rows.present]
    assert float((ratio - 1).abs().max()) > 1e-3
    if cell != "none":
        changed = copy.deepcopy(rows)
        for module in changed.modules.values():
            module.state_in.zero_()
        assert wrong_ratio(played, changed) > 1e-3


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize("cell", ["none", "message_gru"])
def test_who_is_always_there(door, cell):
    played = Played(door, cell, GROUPS, env_config={"stays": True})
    for rollout in range(3):
        rows = played.rows(played.sample())
        assert rows.everybody and wrong_ratio(played, rows) < 1e-5
        played.set_weights(rollout + 1)


@pytest.mark.parametrize(
    "door, cell, aggregation, content",
    [
        ("arrays", "none", "mean", "distance"),
        ("episodes", "message_gru", "mean", "both"),
        ("arrays", "message_gru", "attention", "learned"),
        ("episodes", "none", "attention", "distance"),
        ("arrays", "gru", "max", "both"),
    ],
)
def test_every_kind_of_message(door, cell, aggregation, content):
    model = {"aggregation": aggregation, "message_content": content, "message_rounds": 3}
    played = Played(door, cell, APART, model=model)
    for _ in range(2):
        assert wrong_ratio(played, played.rows(played.sample())) < 1e-5


@pytest.mark.parametrize("door, cell", [("arrays", "none"), ("arrays", "message_gru"), ("episodes", "gru")])
def test_a_module_without_rounds_or_frozen(door, cell):
    """A frozen module speaks and hears as every other one, and does not move."""
    model = {"message_rounds": 0} if cell != "message_gru" else {}
    played = Played(door, cell, GROUPS, model=model, trained=["left"], iterate_all_minibatches=True, lr=1e-2)
    before = parameters(played.learner)
    for _ in range(2):
        batches = played.sample()
        assert wrong_ratio(played, played.rows(batches)) < 1e-5
        update(played.learner, batches)
        played.runner.set_state({"rl_module": played.learner.module.get_state(inference_only=True)})
    after = parameters(played.learner)
    assert largest_difference(before["right"], after["right"]) == 0.0
    assert largest_difference(before["left"], after["left"]) > 1e-3


def test_gradients_go_through_what_other_modules_say():
    """The loss of one module's agents reaches the parameters by which another module's agents speak."""
    played = Played("arrays", "none", GROUPS)
    rows = played.rows(played.sample())
    outputs = forward_team(played.learner.module, rows, dict.fromkeys(rows.modules, True))
    n = len(rows.modules["left"].agents)
    left = outputs.logp[:n][rows.present[:n]].sum()
    says = played.learner.module["right"].unwrapped().messages[0].say.weight
    (gradient,) = torch.autograd.grad(left, [says])
    assert float(gradient.abs().max()) > 1e-3
