"""Advantages and value targets of every critic with every credit equal those of loops in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests import reference as base
from tests.critics.data import EVERYTHING, RAGGED, SIMPLE, Lives, team_rollout
from tests.critics.reference import CRITIC, Credits, View
from tests.critics.support import APART, INTERLEAVED, KINDS, VIEWS, package_batch
from tests.learners.threads import talk
from thrust_rllib.functional import RunningMoments
from thrust_rllib.joint_rows import joint_rows
from thrust_rllib.ranks import ALONE
from thrust_rllib.team_credit import CriticPlan, mean_over_agents

TOLERANCE = 1e-5
PAIRS = [
    ("independent", "own"),
    ("independent", "shared"),
    ("independent", "difference"),
    ("mean", "shared"),
    ("mean", "agent"),
    ("mean", "difference"),
    *((critic, credit) for critic in ("central", "set") for credit in ("own", "shared", "agent", "difference")),
]
LIVES = {"simple": (SIMPLE,), "ragged": (RAGGED, Lives(6, 2, gaps=0.3)), "everything": (EVERYTHING, SIMPLE)}


def weights(name: str, inputs: int, outputs: int) -> np.ndarray:
    return np.random.default_rng(sum(map(ord, name))).normal(size=(inputs, outputs)) / np.sqrt(inputs)


def network(name: str, x: np.ndarray, outputs: int = 1) -> np.ndarray:
    """[…, O] to […, V]: a network without training."""
    return np.tanh(x @ weights(name, x.shape[-1], outputs)) + 0.3


class Setting:
    """A plan, and what it says about batches in both words."""

    def __init__(self, critic, credit, agents=APART, bootstrap="value", normalized=True, view="observations"):
        own = critic == "independent" or credit == "own"
        modules = sorted(set(agents.values()))
        numbers = {m: 0.9 - 0.2 * k for k, m in enumerate(modules)} if own else dict.fromkeys(modules, 0.9)
        self.agents, self.normalized = agents, normalized
        self.credits = Credits(agents, critic, credit, numbers, {m: x / 2 + 0.4 for m, x in numbers.items()}, bootstrap)
        view = VIEWS[view] if critic in ("central", "set") else None
        self.plan = CriticPlan(critic, credit, view)
        self.num_values = 1 if self.credits.of_team else len(agents)
        self.owners = list(agents.values()) if critic == "independent" else [CRITIC] * self.num_values
        self.start = {m: 0.5 * np.arange(4) - k for k, m in enumerate(dict.fromkeys(self.owners))}

    def normalizers(self):
        found = {m: RunningMoments(decay=0.95) for m in self.start}
        for m, moments in found.items():
            moments.update(self.start[m])
        return found if self.normalized else {}

    def rows(self, fixed, ranks=ALONE, batches=None, normalizers=None):
        """What the package makes of it."""

        def values_of(module_id, obs, sequences):
            count = self.num_values if module_id == CRITIC else 1
            values = torch.from_numpy(network(module_id, obs.double().numpy(), count)).float()
            return values if module_id == CRITIC and not self.plan.of_team else values.squeeze(-1)

        return joint_rows(
            batches or [package_batch(x, self.agents) for x in fixed],
            values_of=values_of,
            memories={},
            normalizers=self.normalizers() if normalizers is None else normalizers,
            gamma=self.credits.gamma,
            lambda_=self.credits.lambda_,
            bootstrap=self.credits.bootstrap == "value",
            standardize_rollout=False,
            device="cpu",
            ranks=ranks,
            plan=self.plan,
        )

    def values(self, batch):
        """[T, E, V] of rows, and of what follows."""
        shape = batch.valid.shape
        if self.plan.view is not None:
            view = View(self.plan.view.agents, bool(self.plan.view.widths), self.plan.view.state)
            seen = [
                np.array([[view.of(batch, t, e, k) for e in range(shape[1])] for t in range(shape[0])]) for k in (0, 1)
            ]
            return tuple(network(CRITIC, x, self.num_values) for x in seen)
        streams = batch.streams
        own, after = (
            np.concatenate([network(m, getattr(streams[a], name).astype(float)) for a, m in self.agents.items()], -1)
            for name in ("obs", "following")
        )
        if self.credits.critic != "mean":
            return own, after
        found = np.zeros((2, *shape, 1))
        for at in np.ndindex(*shape):
            there = [i for i, x in enumerate(streams.values()) if x.present[at]]
            stay = [i for i, x in enumerate(streams.values()) if x.present[at] and not x.terminated[at]]
            found[0][at] = np.mean([own[at][i] for i in there]) if there else 0.0
            found[1][at] = np.mean([after[at][i] for i in stay]) if stay else 0.0
        return found[0], found[1]

    def expected(self, fixed):
        """({agent: advantages [M]}, values [V, M], targets [V, M] in the network's units, counts [V, M])."""
        moments = {m: base.RunningMoments(decay=0.95) for m in self.start}
        for m, mine in moments.items():
            mine.update(self.start[m])
        mean, std = self.units(moments)
        parts, advantages = [], {agent: [] for agent in self.agents}
        for batch in fixed:
            values, after = self.values(batch)
            own, targets = self.credits.estimates(batch, values * std + mean, after * std + mean)
            for agent, x in own.items():
                advantages[agent].append(x[batch.valid])
            parts.append([x[batch.valid] for x in (values, targets, self.credits.counts(batch))])
        values, targets, counts = (np.concatenate(x) for x in zip(*parts, strict=True))
        for m, mine in moments.items():
            columns = [v for v, owner in enumerate(self.owners) if owner == m]
            mine.update(targets[:, columns][counts[:, columns]])
        mean, std = self.units(moments)
        return {a: np.concatenate(x) for a, x in advantages.items()}, values.T, ((targets - mean) / std).T, counts.T

    def units(self, moments):
        if not self.normalized:
            return 0.0, 1.0
        merged = [moments[m].merged() for m in self.owners]
        return np.array([float(mean) for _, mean, _ in merged]), np.array([np.sqrt(var) for _, _, var in merged])


def check(setting, fixed, rows):
    """Everything that counts is equal."""
    advantages, values, targets, counts = setting.expected(fixed)
    batch = package_batch(fixed[0], setting.agents)
    for n, agent in enumerate(batch.agents):
        present = np.concatenate([x.streams[agent].present[x.valid] for x in fixed])
        assert rows.present[n].tolist() == present.tolist() and present.any()
        found = rows.advantages[n].numpy()[present]
        np.testing.assert_allclose(found, advantages[agent][present], rtol=0, atol=TOLERANCE)
    order = range(1) if setting.credits.of_team else [list(setting.agents).index(agent) for agent in batch.agents]
    assert rows.values.shape == (len(order), len(rows))
    given = np.ones((len(order), len(rows)), bool) if rows.critic.present is None else rows.critic.present.numpy()
    for n, v in enumerate(order):
        mine = counts[v]
        assert given[n].tolist() == mine.tolist()
        np.testing.assert_allclose(rows.values[n].numpy()[mine], values[v][mine], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(rows.value_targets[n].numpy()[mine], targets[v][mine], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lives", LIVES)
@pytest.mark.parametrize("agents", [APART, INTERLEAVED], ids=["apart", "interleaved"])
@pytest.mark.parametrize("critic, credit", PAIRS)
def test_advantages_and_targets(critic, credit, agents, lives):
    setting = Setting(critic, credit, agents)
    for seed in range(3):
        fixed = [team_rollout(np.random.default_rng((seed, k)), KINDS, x) for k, x in enumerate(LIVES[lives])]
        check(setting, fixed, setting.rows(fixed))


@pytest.mark.parametrize("options", [{"bootstrap": "zero"}, {"normalized": False}, {"view": "state"}], ids=str)
@pytest.mark.parametrize("critic, credit", PAIRS)
def test_other_settings(critic, credit, options):
    setting = Setting(critic, credit, INTERLEAVED, **options)
    fixed = [team_rollout(np.random.default_rng(7), KINDS, EVERYTHING)]
    check(setting, fixed, setting.rows(fixed))


OTHERS = {
    ("independent", "own"): [("independent", "shared"), ("independent", "difference")],
    ("mean", "shared"): [("mean", "agent"), ("mean", "difference")],
    ("central", "agent"): [("central", "shared"), ("central", "difference")],
}


@pytest.mark.parametrize("pair, other", [(pair, other) for pair, others in OTHERS.items() for other in others])
def test_the_comparison_sees_another_credit(pair, other):
    fixed = [team_rollout(np.random.default_rng(7), KINDS, RAGGED)]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(Setting(*pair), fixed, Setting(*other).rows(fixed))


@pytest.mark.parametrize(
    "critic, credit", [("mean", "shared"), ("central", "shared"), ("set", "agent"), ("central", "own")]
)
def test_learners_that_share_the_values_find_the_same(critic, credit):
    setting = Setting(critic, credit, INTERLEAVED)
    fixed = [team_rollout(np.random.default_rng(k), KINDS, x) for k, x in enumerate((EVERYTHING, RAGGED))]
    expected = setting.rows(fixed)
    for rows, _ in talk(3, lambda ranks: setting.rows(fixed, ranks)):
        assert torch.equal(rows.columns, expected.columns)
        assert torch.equal(rows.critic.columns, expected.critic.columns)


@pytest.mark.parametrize("credit", ["shared", "agent", "difference"])
def test_a_shared_advantage_is_the_same_for_all_who_act(credit):
    fixed = [team_rollout(np.random.default_rng(2), KINDS, RAGGED)]
    rows = Setting("central", credit).rows(fixed)
    spread = rows.advantages.where(rows.present, torch.nan).nan_to_num(-torch.inf).amax(0)
    spread = spread - rows.advantages.where(rows.present, torch.nan).nan_to_num(torch.inf).amin(0)
    acting = rows.present.any(0)
    assert (spread[acting].abs().max() < 1e-6) == (credit == "shared")


def test_own_rewards_sum_to_the_teams_advantage():
    """Σ_i Â_i / N of credit "agent" is Â of credit "shared": values of the team count once in each."""
    fixed = [team_rollout(np.random.default_rng(2), KINDS, SIMPLE)]
    setting = Setting("central", "agent", normalized=False)
    agents = setting.rows(fixed).advantages.mean(0)
    team = Setting("central", "shared", normalized=False).rows(fixed).advantages[0]
    np.testing.assert_allclose(agents.numpy(), team.numpy(), rtol=0, atol=1e-5)


def test_a_team_of_one_agent_has_one_credit():
    kinds, agents = {"a0": KINDS["a0"]}, {"a0": "m0"}
    fixed = team_rollout(np.random.default_rng(5), kinds, SIMPLE)
    fixed.difference["a0"] = fixed.streams["a0"].rewards
    batch = package_batch(fixed, agents)
    found = []
    for critic, credit in [("mean", "shared"), ("mean", "agent"), ("mean", "difference"), ("independent", "own")]:
        setting = Setting(critic, credit, agents, normalized=False)
        rows = setting.rows([fixed], batches=[batch])
        found.append(torch.stack([rows.advantages[0], rows.value_targets[0]]))
    for other in found[1:]:
        np.testing.assert_allclose(other.numpy(), found[0].numpy(), rtol=0, atol=1e-6)


def test_the_mean_over_agents():
    values = torch.tensor([[[1.0], [5.0]], [[2.0], [torch.nan]], [[torch.nan], [torch.nan]]])
    present = torch.tensor([[[True], [True]], [[True], [False]], [[False], [False]]])
    assert mean_over_agents(values, present).ravel().tolist() == [3.0, 2.0, 0.0]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["independent", "mean", "central", "set"])
def test_difference_rewards_that_are_missing(critic):
    fixed = [team_rollout(np.random.default_rng(0), KINDS, SIMPLE)]
    batch = package_batch(fixed[0], with_difference=False)
    setting = Setting(critic, "difference")
    with pytest.raises(ValueError, match=r"needs the extra 'difference_reward'; the environment gives none") as error:
        setting.rows(fixed, batches=[batch])
    assert "step_joint" in str(error.value) and "WithDifferenceRewards" in str(error.value)
    given = dataclasses.replace(batch, extras={"cost": np.zeros(batch.valid.shape)})
    with pytest.raises(ValueError, match=r"the environment gives \['cost'\]"):
        setting.rows(fixed, batches=[given])


def test_difference_rewards_of_the_team():
    fixed = [team_rollout(np.random.default_rng(0), KINDS, SIMPLE)]
    batch = package_batch(fixed[0])
    wrong = dataclasses.replace(batch, extras={"difference_reward": np.zeros(batch.valid.shape, np.float32)})
    with pytest.raises(ValueError, match=r"shape \(11, 3\); needed: a number of each agent, \(11, 3, 3\)"):
        Setting("central", "difference").rows(fixed, batches=[wrong])


@pytest.mark.parametrize("critic", ["independent", "mean", "central", "set"])
@pytest.mark.parametrize("number", [np.nan, 1e39])
def test_difference_rewards_that_are_not_finite(critic, number):
    """They would be in the moments of the values for good; 1e39 is too large for float32."""
    fixed = [team_rollout(np.random.default_rng(0), KINDS, RAGGED)]
    setting = Setting(critic, "difference", INTERLEAVED)
    expected, normalizers = setting.rows(fixed), setting.normalizers()
    acts = fixed[0].streams["a1"].present
    given = fixed[0].difference["a1"] = fixed[0].difference["a1"].astype(np.float64)
    given[~acts] = np.nan
    assert torch.equal(setting.rows(fixed).advantages, expected.advantages)
    given[tuple(np.argwhere(acts)[4])] = number
    before = {m: moments.get_state() for m, moments in normalizers.items()}
    with pytest.raises(ValueError, match=r"extra 'difference_reward' of agent 'a1', who acted, is not a finite number"):
        setting.rows(fixed, normalizers=normalizers)
    assert {m: moments.get_state() for m, moments in normalizers.items()} == before


def test_difference_rewards_of_whole_numbers():
    fixed = [team_rollout(np.random.default_rng(0), KINDS, SIMPLE)]
    fixed[0].difference = {agent: np.round(10 * x).astype(np.int64) for agent, x in fixed[0].difference.items()}
    setting = Setting("independent", "difference")
    check(setting, fixed, setting.rows(fixed))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("critic, credit", PAIRS)
def test_values_that_are_not_finite_name_whose_they_are(critic, credit, normalized):
    fixed = [team_rollout(np.random.default_rng(0), KINDS, SIMPLE)]
    fixed[0].streams["b"].obs[2, 1, 0] = np.nan
    setting = Setting(critic, credit, normalized=normalized)
    name = "team_critic" if setting.plan.has_network else "m1"
    with pytest.raises(ValueError, match=f"module '{name}' gives values that are not finite"):
        setting.rows(fixed)
