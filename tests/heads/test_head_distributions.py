"""Log-probabilities and entropies head by head, and heads that depend on others, against enumerations in float64."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given as examples_of
from hypothesis import strategies as st

from tests.functional.helpers import examples
from tests.heads import enumeration
from thrust_rllib.rl_modules.categorical import ConditionalCategorical
from thrust_rllib.rl_modules.distributions import distribution_class, logits_width, mask_logits, runs_alike

SKILLS = gym.spaces.MultiDiscrete([3, 4])
PARENTS = (None, 0)
WIDTH = 3 + 3 * 4


def random_logits(width, rows=6, seed=0, dtype=torch.float64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(5), gym.spaces.MultiDiscrete([3, 2, 4]), gym.spaces.MultiDiscrete([3, 3])], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_joint_numbers_are_sums_over_heads(space, dtype):
    logits = random_logits(logits_width(space), rows=50, dtype=dtype)
    distribution = distribution_class(space).from_logits(logits)
    actions = distribution.sample()
    sizes = [space.n] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
    parts, entropies = distribution.head_logp(actions), distribution.head_entropy(actions)
    assert parts.shape == entropies.shape == (50, len(sizes)) and parts.dtype == entropies.dtype == dtype
    assert torch.equal(parts.sum(-1), distribution.logp(actions))
    torch.testing.assert_close(entropies.sum(-1), distribution.entropy())
    if len(sizes) == 1:
        assert torch.equal(entropies[:, 0], distribution.entropy())
    for head, own in enumerate(logits.double().split(sizes, dim=-1)):
        single = torch.distributions.Categorical(logits=own)
        chosen = actions if len(sizes) == 1 else actions[:, head]
        torch.testing.assert_close(parts[:, head].double(), single.log_prob(chosen), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(entropies[:, head].double(), single.entropy(), rtol=1e-5, atol=1e-6)


def test_a_box_is_one_head():
    distribution = distribution_class(gym.spaces.Box(-1, 1, (3,))).from_logits(random_logits(6))
    actions = distribution.sample()
    assert torch.equal(distribution.head_logp(actions), distribution.logp(actions)[:, None])
    assert torch.equal(distribution.head_entropy(actions), distribution.entropy()[:, None])


def test_golden_numbers_of_a_skill_and_its_goal():
    """Two skills, two goals: skill 0 with 3/4, its goals 1/2 and 1/2, those of skill 1 with 1/5 and 4/5."""
    logits = torch.log(torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0, 4.0]], dtype=torch.float64))
    distribution = distribution_class(gym.spaces.MultiDiscrete([2, 2]), PARENTS).from_logits(logits)
    assert isinstance(distribution, ConditionalCategorical)
    actions = torch.tensor([[1, 1]])
    np.testing.assert_allclose(distribution.head_logp(actions)[0], np.log([0.25, 0.8]), rtol=1e-12)
    assert float(distribution.logp(actions)) == pytest.approx(np.log(0.2), rel=1e-12)
    skill, first, second = 0.5623351446188083, np.log(2), 0.5004024235381879
    np.testing.assert_allclose(distribution.head_entropy(actions)[0], [skill, second], rtol=1e-12)
    np.testing.assert_allclose(distribution.head_entropy(torch.tensor([[0, 1]]))[0], [skill, first], rtol=1e-12)
    assert float(distribution.entropy()) == pytest.approx(skill + 0.75 * first + 0.25 * second, rel=1e-12)
    # The mode is the skill's mode and then its goal's, not the goal that is most probable over all skills.
    assert distribution.to_deterministic().sample().tolist() == [[0, 0]]


@st.composite
def kinds(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    root = draw(st.integers(0, len(sizes) - 1))
    parents = [draw(st.sampled_from([None, root])) if head != root else None for head in range(len(sizes))]
    return sizes, tuple(parents)


@examples
@examples_of(kinds(), st.integers(0, 2**16), st.booleans())
def test_everything_against_an_enumeration(kind, seed, masked):
    sizes, parents = kind
    rng = np.random.default_rng(seed)
    distribution_of = distribution_class(gym.spaces.MultiDiscrete(sizes), parents)
    width = distribution_of.required_input_dim(None)
    assert width == sum(k * (1 if p is None else sizes[p]) for k, p in zip(sizes, parents, strict=True))
    logits, others = rng.normal(size=(2, 2, 1, width))
    mask = None
    if masked:
        mask = rng.random(sum(sizes)) < 0.6
        mask[np.cumsum([0, *sizes[:-1]]) + rng.integers(sizes)] = True  # something to choose in each head

    def of(numbers):
        allowed = None if mask is None else torch.from_numpy(np.broadcast_to(mask, (2, 1, len(mask))).copy())
        return distribution_of.from_logits(mask_logits(torch.from_numpy(numbers), allowed, distribution_of))

    mine, other = of(logits), of(others)
    for row in range(2):
        p, q = (enumeration.joint(x[row, 0], sizes, parents, mask) for x in (logits, others))
        tables = enumeration.tables(logits[row, 0], sizes, parents, mask)
        assert sum(probability for probability, _ in p.values()) == pytest.approx(1.0)
        for action, (probability, parts) in p.items():
            value = torch.tensor(action).expand(2, 1, -1)
            np.testing.assert_allclose(mine.head_logp(value)[row, 0], parts, rtol=1e-9, atol=1e-9)
            assert float(mine.logp(value)[row, 0]) == pytest.approx(np.log(probability), abs=1e-9)
            expected = [
                enumeration.entropy(tables[h, enumeration.given(action, parents, h)]) for h in range(len(sizes))
            ]
            np.testing.assert_allclose(mine.head_entropy(value)[row, 0], expected, rtol=1e-9, atol=1e-9)
        whole = np.array([probability for probability, _ in p.values()])
        assert float(mine.entropy()[row, 0]) == pytest.approx(enumeration.entropy(whole), abs=1e-9)
        divergence = sum(x * (np.log(x) - np.log(q[a][0])) for a, (x, _) in p.items())
        assert float(mine.kl(other)[row, 0]) == pytest.approx(divergence, abs=1e-9)
        modes = [int(tables[h, None].argmax()) if parents[h] is None else None for h in range(len(sizes))]
        modes = [int(tables[h, modes[parents[h]]].argmax()) if mode is None else mode for h, mode in enumerate(modes)]
        assert mine.to_deterministic().sample()[row, 0].tolist() == modes


def test_samples_have_the_joint_distribution():
    logits = random_logits(WIDTH, rows=1)
    distribution = distribution_class(SKILLS, PARENTS).from_logits(logits.expand(60_000, -1))
    actions = distribution.sample(torch.Generator().manual_seed(3)).numpy()
    assert actions.shape == (60_000, 2) and actions.dtype == np.int64
    for action, (probability, _) in enumeration.joint(logits[0].numpy(), [3, 4], PARENTS).items():
        assert (actions == action).all(1).mean() == pytest.approx(probability, abs=0.01), action
    # It could fail: the goal does depend on the skill.
    by_skill = [np.bincount(actions[actions[:, 0] == s, 1], minlength=4) / (actions[:, 0] == s).sum() for s in range(3)]
    assert np.abs(by_skill[0] - by_skill[1]).max() > 0.1


def test_only_the_logits_of_the_stored_skill_move_the_goal():
    logits = random_logits(WIDTH, rows=1).requires_grad_()
    goal = distribution_class(SKILLS, PARENTS).from_logits(logits).head_logp(torch.tensor([[1, 2]]))[0, 1]
    (gradient,) = torch.autograd.grad(goal, logits)
    moved = gradient[0].nonzero().ravel().tolist()
    assert moved == [3 + 4 + i for i in range(4)]


@pytest.mark.parametrize("parents", [None, PARENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ratios_are_exactly_1_where_the_logits_are_the_same(parents, dtype):
    """Whatever other rows stand beside them, in whatever order."""
    of = distribution_class(SKILLS, parents)
    logits = random_logits(of.required_input_dim(SKILLS), rows=257, dtype=dtype)
    actions = of.from_logits(logits).sample()
    old = of.from_logits(logits).head_logp(actions)
    rows = torch.randperm(257, generator=torch.Generator().manual_seed(0))[:61]
    new = of.from_logits(logits[rows]).head_logp(actions[rows])
    assert torch.equal(torch.exp(new - old[rows]), torch.ones(61, 2, dtype=dtype))
    assert (torch.exp(of.from_logits(logits[rows] * 1.1).head_logp(actions[rows]) - old[rows]) != 1).any()


def test_masked_heads_have_finite_numbers_and_gradients():
    of = distribution_class(SKILLS, PARENTS)
    mask = torch.tensor([[False, True, False, True, False, False, True]]).expand(6, -1)
    logits = random_logits(WIDTH, dtype=torch.float32).requires_grad_()
    distribution = of.from_logits(mask_logits(logits, mask, of))
    actions = distribution.sample()
    assert (actions[:, 0] == 1).all() and set(actions[:, 1].tolist()) <= {0, 3}
    entropies = distribution.head_entropy(actions)
    assert (entropies[:, 0] == 0).all() and (entropies[:, 1] <= np.log(2) + 1e-6).all() and (entropies[:, 1] > 0).all()
    numbers = distribution.logp(actions).sum() + distribution.entropy().sum() + entropies.sum()
    (gradient,) = torch.autograd.grad(numbers, logits)
    allowed = mask[:, of.layout.mask_columns]
    assert gradient.isfinite().all() and (gradient[~allowed] == 0).all() and (gradient[allowed] != 0).any()


def test_modules_with_other_dependencies_are_not_evaluated_together():
    plain, goal, skill = (distribution_class(SKILLS, p) for p in (None, PARENTS, (1, None)))
    assert distribution_class(SKILLS, list(PARENTS)) is goal and len({plain, goal, skill}) == 3
    logits = [torch.zeros(2, of.required_input_dim(SKILLS)) for of in (plain, goal, goal, skill)]
    assert runs_alike([plain, goal, goal, skill], logits) == [slice(0, 1), slice(1, 3), slice(3, 4)]


def test_both_ways_of_picking_agree():
    layout = distribution_class(gym.spaces.MultiDiscrete([3, 4, 2]), (None, 0, 0)).layout
    rng = np.random.default_rng(0)
    categories = np.stack([rng.integers(k, size=(5, 7)) for k in layout.sizes], axis=-1)
    picked = layout.pick_numpy(categories)
    np.testing.assert_array_equal(picked, layout.pick(torch.from_numpy(categories)).numpy())
    assert picked.shape == (5, 7, 3) and (picked[..., 1] == categories[..., 1]).any()
    np.testing.assert_array_equal(picked[2, 3, 1], categories[2, 3, 1 + picked[2, 3, 0]])


def test_logits_of_the_wrong_width_are_named():
    with pytest.raises(ValueError, match=r"logits have 7 columns, the action space has 15 categories"):
        distribution_class(SKILLS, PARENTS).from_logits(torch.zeros(2, 7))
