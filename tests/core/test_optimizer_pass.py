"""One call for many optimizers does to the bit what each optimizer's own step does."""

from __future__ import annotations

import copy

import pytest
import torch

from thrust_rllib.optimizer_pass import OptimizerPass

MODULES = ("a", "b", "c")


class Team:
    """Three networks, their optimizers, and an objective; `b` has a parameter that the objective does not reach."""

    def __init__(self, make, rates=(1e-2, 1e-2, 3e-3)):
        torch.manual_seed(0)
        self.nets = {m: torch.nn.Linear(4, 3) for m in MODULES}
        self.nets["b"].unused = torch.nn.Parameter(torch.ones(2))
        self.optimizers = {
            m: make(list(net.parameters()), lr=rate) for (m, net), rate in zip(self.nets.items(), rates, strict=True)
        }

    def objective(self, k):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(k))
        return sum((i + 1) * net(x).square().mean() for i, net in enumerate(self.nets.values()))

    def joint_pass(self, trained=MODULES, clip=None, by="global_norm"):
        limits = dict.fromkeys(MODULES, clip) if not isinstance(clip, dict) else clip
        own = {m: [optimizer] for m, optimizer in self.optimizers.items()}
        return OptimizerPass(own, {m: m in trained for m in MODULES}, limits, by, "cpu")

    def everything(self):
        """Parameters and optimizer states, as copies."""
        states = {m: optimizer.state_dict()["state"] for m, optimizer in self.optimizers.items()}
        return copy.deepcopy([{m: net.state_dict() for m, net in self.nets.items()}, states])


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return all(equal(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, list) else a == b


def joint_steps(team, count, first=0, finite=True, **options):
    joint = team.joint_pass(**options)
    for k in range(first, first + count):
        joint.compute_gradients(team.objective(k), retain_graph=False)
        norms = joint.clip()
        joint.step(torch.tensor(finite))
    return norms


def own_steps(team, count, first=0, trained=MODULES, clip=None):
    for k in range(first, first + count):
        team.objective(k).backward()
        for m, optimizer in team.optimizers.items():
            if m in trained:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(team.nets[m].parameters(), clip)
                optimizer.step()
        for net in team.nets.values():
            net.zero_grad()


def adam(**options):
    return lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True, **options)


MAKERS = {
    "fused": adam(),
    "decay": adam(weight_decay=0.1, betas=(0.5, 0.9), eps=1e-3),
    "ascent": adam(maximize=True),
    "decoupled": adam(weight_decay=0.1, decoupled_weight_decay=True),
    "amsgrad": adam(amsgrad=True),
    "plain Adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "AdamW, fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True, weight_decay=0.2),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}


@pytest.mark.parametrize("name", MAKERS)
def test_joint_steps_equal_each_optimizers_own_to_the_bit(name):
    joint, own = Team(MAKERS[name]), Team(MAKERS[name])
    before = joint.everything()
    joint_steps(joint, 3)
    own_steps(own, 3)
    assert equal(joint.everything(), own.everything())
    assert not equal(joint.everything(), before)


def test_optimizers_of_different_kinds_step_side_by_side():
    def mixed(params, lr):
        make = MAKERS["SGD"] if lr == 3e-3 else MAKERS["fused"]
        return make(params, lr)

    joint, own = Team(mixed), Team(mixed)
    joint_steps(joint, 3)
    own_steps(own, 3)
    assert equal(joint.everything(), own.everything())


def test_a_saved_state_goes_on_to_the_same_weights():
    straight, stopped = Team(MAKERS["fused"]), Team(MAKERS["fused"])
    joint_steps(straight, 4)
    joint_steps(stopped, 2)
    resumed = Team(MAKERS["fused"])
    for m in MODULES:
        resumed.nets[m].load_state_dict(stopped.nets[m].state_dict())
        resumed.optimizers[m].load_state_dict(stopped.optimizers[m].state_dict())
    joint_steps(resumed, 2, first=2)
    assert equal(resumed.everything(), straight.everything())
    assert not equal(resumed.everything(), stopped.everything())


@pytest.mark.parametrize("name", ["fused", "SGD"])
def test_what_is_frozen_or_not_finite_does_not_move(name):
    team, own = Team(MAKERS[name]), Team(MAKERS[name])
    norms = joint_steps(team, 2, trained=("a", "c"))
    own_steps(own, 2, trained=("a", "c"))
    assert equal(team.everything(), own.everything()) and norms[1] == 0.0
    before = team.everything()
    joint_steps(team, 1, first=2, finite=False)
    after = team.everything()
    assert equal(after[0], before[0])
    joint_steps(team, 1, first=3)
    own_steps(own, 1, first=3)
    assert equal(team.everything()[0], own.everything()[0])  # the skipped step left no trace


def test_each_module_has_its_own_limit():
    team = Team(MAKERS["SGD"])
    joint = team.joint_pass(clip={"a": 0.1, "b": None, "c": 0.0})
    joint.compute_gradients(team.objective(0), retain_graph=False)
    before = {m: [None if g is None else g.clone() for g in grads] for m, grads in joint.gradients().items()}
    norms = joint.clip()
    for index, m in enumerate(MODULES):
        norm = sum(g.square().sum() for g in before[m] if g is not None).sqrt()
        torch.testing.assert_close(norms[index], norm)
        factor = 0.1 / norm if m == "a" else 1.0
        for old, new in zip(before[m], joint.gradients()[m], strict=True):
            assert (old is None) == (new is None)
            if old is not None:
                torch.testing.assert_close(new, old * factor, rtol=1e-5, atol=1e-8)
    assert norms[0] > 0.1


@pytest.mark.parametrize("by", ["norm", "value"])
def test_other_ways_to_clip(by):
    team = Team(MAKERS["fused"])
    joint = team.joint_pass(clip={"a": 1e-3, "b": None, "c": 1e-3}, by=by)
    joint.compute_gradients(team.objective(0), retain_graph=False)
    joint.clip()
    gradients = joint.gradients()
    for m in ("a", "c"):
        for grad in gradients[m]:
            size = grad.abs().max() if by == "value" else grad.norm()
            assert 0.9e-3 < size <= 1.0001e-3
    assert max(g.norm() for g in gradients["b"] if g is not None) > 1e-2


def test_a_step_replaced_on_the_object_is_called():
    team, seen = Team(MAKERS["fused"]), []
    step = team.optimizers["a"].step
    team.optimizers["a"].step = lambda: (seen.append(1), step())
    joint_steps(team, 2)
    assert len(seen) == 2


def test_a_users_hook_on_a_step_is_called():
    team, seen = Team(MAKERS["fused"]), []
    team.optimizers["a"].register_step_post_hook(lambda *_: seen.append(1))
    joint_steps(team, 2)
    assert len(seen) == 2
