"""All modules of a kind asked about the same observations: which ones, what is compared, and what is left alone."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from tests import reference as shared_reference
from tests.diversity import reference
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.diversity_probe import MAX_ROWS, alike_modules, probe_diversity
from thrust_rllib.joint_rows import ModuleRows
from thrust_rllib.rl_modules.categorical import FactorizedCategorical

SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "several heads": gym.spaces.MultiDiscrete([3, 2]),
    "box": gym.spaces.Box(-1, 1, (2,)),
}
TEAM = {"p": ("p0",), "q": ("q0", "q1"), "r": ("r0",)}


def module(seed, space="discrete", module_class=MLPModule, obs_size=3):
    built = RLModuleSpec(
        module_class=module_class,
        observation_space=gym.spaces.Box(-10, 10, (obs_size,)),
        action_space=SPACES[space],
        model_config={"fcnet_hiddens": [6]},
    ).build()
    generator = torch.Generator().manual_seed(seed)
    for p in built.parameters():
        nn.init.normal_(p, generator=generator)
    return built


def team(space="discrete", module_class=MLPModule):
    return {module_id: module(k, space, module_class) for k, module_id in enumerate(TEAM)}


def joint_rows(number=20, seed=0, present=None, masks=None, obs_size=3):
    """Rows of `TEAM`; NaN where somebody is absent. masks: {module: bool [n, M, A]}."""
    generator = torch.Generator().manual_seed(seed)
    here = torch.ones(4, number, dtype=torch.bool) if present is None else torch.as_tensor(present)
    modules, first = {}, 0
    for module_id, agents in TEAM.items():
        n = len(agents)
        obs = torch.randn(n, number, obs_size, generator=generator)
        obs[~here[first : first + n]] = torch.nan
        modules[module_id] = ModuleRows(
            agents=agents,
            obs=obs,
            actions=torch.zeros(n, number, dtype=torch.int64),
            action_mask=None if masks is None else masks.get(module_id),
        )
        first += n
    return modules, here


def shown(rows, present):
    """[R, 3] in loops: of each row with somebody, the observation of the one whose turn it is."""
    every, found = torch.cat([mine.obs for mine in rows.values()]), []
    for b in range(present.shape[1]):
        here = [i for i in range(4) if present[i, b]]
        if here:
            found.append(every[here[len(found) % len(here)], b])
    return torch.stack(found)


def logits_of(modules, obs):
    return [
        built.forward_train({"obs": obs})["action_dist_inputs"].detach().double().numpy() for built in modules.values()
    ]


def expected(space, logits):
    if space == "box":
        means, stds = [x[:, :2] for x in logits], [np.exp(x[:, 2:]) for x in logits]
        return {"system_neural_diversity": reference.neural_diversity(means, stds, None)}
    sizes = [4] if space == "discrete" else [3, 2]
    return {
        "total_variation": reference.total_variation(logits, None, sizes),
        "total_variation_time_averaged": reference.time_averaged(logits, None, sizes),
        "jensen_shannon": shared_reference.jensen_shannon(logits, None, sizes),
    }


@pytest.mark.parametrize("absence", [False, True])
@pytest.mark.parametrize("space", SPACES)
def test_every_module_sees_the_same_observations(space, absence):
    modules = team(space)
    present = np.random.default_rng(1).random((4, 20)) < 0.5 if absence else None
    rows = joint_rows(present=present)
    found = probe_diversity(modules, *rows)
    assert list(found) == ["p_and_2_more"]
    wanted = expected(space, logits_of(modules, shown(*rows)))
    assert found["p_and_2_more"] == pytest.approx(wanted, rel=1e-5) and min(wanted.values()) > 0.05
    # Each at its own observations gives something else.
    own = logits_of({"p": modules["p"]}, shown(*rows)) + logits_of({"q": modules["q"]}, shown(*rows).flip(0))
    assert found["p_and_2_more"] != pytest.approx(expected(space, own), rel=1e-2)


def test_equal_policies_have_no_diversity():
    modules = {module_id: module(7) for module_id in TEAM}
    found = probe_diversity(modules, *joint_rows())["p_and_2_more"]
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-6)


def test_modules_are_compared_with_their_kind_only():
    modules = team()
    modules["q"] = module(1, "box")
    assert alike_modules(modules) == [["p", "r"]]
    assert list(probe_diversity(modules, *joint_rows())) == ["p_and_1_more"]
    modules["r"] = module(2, obs_size=2)
    assert probe_diversity(modules, *joint_rows()) == {}
    many = {"a": module(0), "b": module(0, "box"), "c": module(0), "d": module(0, "box"), "e": module(0)}
    assert alike_modules(many) == [["a", "c", "e"], ["b", "d"]]


def test_policies_without_a_measure_are_left_out():
    class Conditional(FactorizedCategorical):
        layout = SimpleNamespace(conditional=True)

    class Beta:
        pass

    for space, other in (("discrete", Conditional), ("discrete", Beta), ("box", Beta)):
        modules = team(space)
        assert len(alike_modules(modules)) == 1
        for built in modules.values():
            built.action_dist_cls = other
        assert alike_modules(modules) == [] and probe_diversity(modules, *joint_rows()) == {}


def test_rllibs_distributions_are_measured():
    cut = TorchMultiCategorical.get_partial_dist_cls(input_lens=[3, 2])
    for space, other in (("discrete", TorchCategorical), ("several heads", cut), ("box", TorchDiagGaussian)):
        modules = team(space)
        needed = probe_diversity(modules, *joint_rows())
        for built in modules.values():
            built.action_dist_cls = other
        assert needed and probe_diversity(modules, *joint_rows()) == needed


class Counting(MLPModule):
    """Has batch statistics."""

    def setup(self):
        super().setup()
        self.norm = nn.BatchNorm1d(3)

    def _forward_train(self, batch, **kwargs):
        return super()._forward_train({**batch, "obs": self.norm(batch["obs"])}, **kwargs)


def test_batch_statistics_stay_the_modules_own():
    modules = team(module_class=Counting)
    before = {m: {name: x.clone() for name, x in built.named_buffers()} for m, built in modules.items()}
    assert probe_diversity(modules, *joint_rows())["p_and_2_more"]["total_variation"] > 0
    for m, built in modules.items():
        assert before[m] and all(torch.equal(x, before[m][name]) for name, x in built.named_buffers())
    modules["p"].forward_train({"obs": torch.ones(5, 3)})  # it could fail
    assert not torch.equal(modules["p"].norm.running_mean, before["p"]["norm.running_mean"])


def test_many_rows_are_sampled_the_same_each_time_and_nothing_else_is_drawn():
    modules, rows = team(), joint_rows(3000)
    state = torch.get_rng_state()
    first = probe_diversity(modules, *rows)
    assert first == probe_diversity(modules, *rows) and torch.equal(torch.get_rng_state(), state)
    sizes = []
    original = modules["p"].forward_train
    modules["p"].forward_train = lambda batch: sizes.append(batch["obs"]) or original(batch)
    assert probe_diversity(modules, *rows) == first
    (obs,) = sizes
    assert obs.shape == (MAX_ROWS, 3) and len(obs.unique(dim=0)) == MAX_ROWS
    # From all agents and from the whole of the rows.
    every = torch.cat([mine.obs for mine in rows[0].values()])
    agents, places = zip(*((int(i), int(b)) for x in obs for i, b in (every == x).all(-1).nonzero()), strict=True)
    assert np.bincount(agents).tolist() == [MAX_ROWS // 4] * 4
    assert np.histogram(places, bins=4, range=(0, 3000))[0].min() > MAX_ROWS / 8
    assert (
        abs(
            probe_diversity(modules, *joint_rows(3000, seed=1))["p_and_2_more"]["total_variation"]
            - first["p_and_2_more"]["total_variation"]
        )
        < 0.1
    )


def test_nobody_there_gives_nothing():
    assert probe_diversity(team(), *joint_rows(present=np.zeros((4, 20), bool))) == {}
    alone = np.zeros((4, 20), bool)
    alone[2, 5] = True
    found = probe_diversity(team(), *joint_rows(present=alone))["p_and_2_more"]
    assert found["total_variation"] == pytest.approx(found["total_variation_time_averaged"], rel=1e-5)


def test_masks_belong_to_the_observation():
    number = 20
    one = torch.zeros(2, number, 4, dtype=torch.bool)
    one[..., 1] = True
    free = {module_id: torch.ones(len(agents), number, 4, dtype=torch.bool) for module_id, agents in TEAM.items()}
    plain = probe_diversity(team(), *joint_rows())
    assert probe_diversity(team(), *joint_rows(masks=free)) == plain
    # Nothing to choose in the rows of q's agents, which are every second one.
    found = probe_diversity(team(), *joint_rows(masks={"q": one}))["p_and_2_more"]["total_variation"]
    obs = shown(*joint_rows())
    own = [k for k in range(number) if k % 4 in (0, 3)]
    wanted = reference.total_variation(logits_of(team(), obs[own]), None, [4]) / 2
    assert found == pytest.approx(wanted, rel=1e-5) and found < plain["p_and_2_more"]["total_variation"]


@pytest.mark.parametrize("module_class", [LSTMModule, GRUModule])
def test_modules_with_a_memory_begin_an_episode(module_class):
    modules, rows = team(module_class=module_class), joint_rows()
    obs, logits = shown(*rows), []
    for built in modules.values():
        state = {name: x.expand(len(obs), -1) for name, x in built.get_initial_state().items()}
        outputs = built.forward_train({"obs": obs[:, None], "state_in": state})["action_dist_inputs"]
        logits.append(outputs[:, 0].detach().double().numpy())
    assert probe_diversity(modules, *rows)["p_and_2_more"] == pytest.approx(expected("discrete", logits), rel=1e-5)


def test_it_leaves_no_gradient_behind():
    modules = team()
    before = [p.clone() for built in modules.values() for p in built.parameters()]
    probe_diversity(modules, *joint_rows())
    after = [p for built in modules.values() for p in built.parameters()]
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(after, before, strict=True))
