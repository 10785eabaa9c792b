"""The learner's heads: built for any module, and gradients through them, of one learner and of several."""

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from tests.auxiliary import reference
from tests.functional.helpers import assert_matches
from tests.learners.threads import talk
from tests.support import box, discrete
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.auxiliary_losses import auxiliary_losses, auxiliary_predictions
from thrust_rllib.joint_rows import ModuleRows
from thrust_rllib.module_axis import ModuleAxis
from thrust_rllib.ranks import ALONE
from thrust_rllib.rl_modules.auxiliary_heads import AuxiliaryHeads, auxiliary_heads_spec, feature_width
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES


class WithoutFeatures(MLPModule):
    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        outputs.pop(ENCODER_FEATURES)
        return outputs


class OwnFeatures(MLPModule):
    """A user's: features of another width than any layer."""

    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        outputs[ENCODER_FEATURES] = torch.cat([outputs[ENCODER_FEATURES], batch[Columns.OBS]], dim=-1)
        return outputs


def spec(module_class, **model_config):
    return RLModuleSpec(
        module_class=module_class, observation_space=box(3), action_space=discrete(2), model_config=model_config
    )


def test_heads_have_the_width_of_each_modules_features():
    specs = {
        "mlp": spec(MLPModule, fcnet_hiddens=[8, 5]),
        "lstm": spec(LSTMModule, cell_size=6),
        "gru": spec(GRUModule, cell_size=4, fcnet_hiddens=[9], vf_share_layers=False),
        "own.keys": spec(OwnFeatures, fcnet_hiddens=[7]),
    }
    state = torch.get_rng_state()
    built = auxiliary_heads_spec(specs, ["a", "b"])
    assert torch.equal(torch.get_rng_state(), state) and built.learner_only
    heads = built.build()
    widths = {"mlp": 5, "lstm": 6, "gru": 4, "own.keys": 10}
    assert heads.model_config["widths"] == widths and heads.targets == ("a", "b")
    for module_id, width in widths.items():
        features = torch.randn(4, 3, width)
        found = heads.predict(module_id, features)
        assert found.shape == (4, 3, 2) and found.abs().max() < 0.2
        assert torch.equal(heads.forward_train({module_id: features})[module_id], found)
    parameters = dict(heads.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == sum(2 * width + 2 for width in widths.values())
    other = auxiliary_heads_spec(specs, ["a", "b"]).build()
    other.set_state(heads.get_state())
    assert all(torch.equal(p, q) for p, q in zip(parameters.values(), other.parameters(), strict=True))


def test_a_module_without_features_is_an_early_error():
    with pytest.raises(ValueError, match=r"module 'm' \(WithoutFeatures\) gives no features .*'encoder_features'"):
        auxiliary_heads_spec({"m": spec(WithoutFeatures)}, ["a"])
    assert feature_width("m", spec(MLPModule).build()) == 64


# --- gradients ----------------------------------------------------------------------------------------------------

AGENTS = {"p": ("p0",), "q": ("q0", "q1")}  # modules with 5 and 7 features
WIDTHS, SIZES, KINDS, B = {"p": 5, "q": 7}, [1, 2], ("mse", "huber"), 6
WEIGHTS = torch.tensor([0.7, 1.5], dtype=torch.float64)


def module_rows():
    nothing = torch.zeros(0)
    return {module_id: ModuleRows(agents, nothing, nothing, None) for module_id, agents in AGENTS.items()}


def make_heads():
    heads = AuxiliaryHeads(model_config={"widths": WIDTHS, "targets": ["a", "b"]}).double()
    generator = torch.Generator().manual_seed(0)  # of its own: learners are threads
    for p in heads.parameters():
        nn.init.normal_(p, generator=generator)
    return heads


def data():
    rng = np.random.default_rng(0)
    encoders = {m: torch.tensor(rng.normal(size=(3, width)), requires_grad=True) for m, width in WIDTHS.items()}
    obs = {agent: torch.tensor(rng.normal(size=(B, 3))) for mine in AGENTS.values() for agent in mine}
    targets = torch.tensor(2 * rng.normal(size=(2, 3, B)))
    present = torch.tensor(rng.random((3, B)) < 0.7)
    return encoders, obs, targets, present


def features_of(encoders, obs, rows):
    return {agent: obs[agent][rows] @ encoders[m] for m, mine in AGENTS.items() for agent in mine}


def gradients(ranks=ALONE, sizes=(B,), live_gather=False):
    """Of heads and encoders: this learner's rows are live, predictions of all are gathered before the loss."""
    heads, (encoders, obs, targets, present) = make_heads(), data()
    start = sum(sizes[: ranks.rank])
    own = slice(start, start + sizes[ranks.rank])
    if live_gather:  # what must not be done: features of all rows through the heads of each learner
        features = features_of(encoders, obs, slice(None))
        features = {
            agent: torch.cat([x[: own.start].detach(), x[own], x[own.stop :].detach()]) for agent, x in features.items()
        }
        predictions = auxiliary_predictions(heads, features, module_rows())
    else:
        mine = auxiliary_predictions(heads, features_of(encoders, obs, own), module_rows())
        padded = nn.functional.pad(mine.detach(), (0, max(sizes) - mine.shape[-1]))
        parts = [part[..., :size] for part, size in zip(ranks.gather(padded), sizes, strict=True)]
        parts[ranks.rank] = mine
        predictions = torch.cat(parts, dim=-1)
    axis = ModuleAxis(SIZES, "cpu")
    found = auxiliary_losses(predictions, targets, present, kinds=KINDS, weights=WEIGHTS, axis=axis)
    inputs = [*heads.parameters(), *encoders.values()]
    grads = torch.autograd.grad(found.weighted.sum(), inputs, allow_unused=True)
    flat = torch.cat(
        [torch.zeros_like(x).flatten() if g is None else g.flatten() for g, x in zip(grads, inputs, strict=True)]
    )
    return ranks.sum_(flat) if ranks.size > 1 else flat


def expected_gradients():
    heads, (encoders, obs, targets, present) = make_heads(), data()
    features = [x.detach().numpy() for x in features_of(encoders, obs, slice(None)).values()]
    layers = [[heads.heads[f"of_{m}"][f"of_{name}"] for name in "ab"] for m in AGENTS]
    parts = ("weight", "bias")
    stacked = [[torch.cat([getattr(x, part) for x in own]).detach().numpy() for part in parts] for own in layers]
    of_heads, of_features = reference.gradients(
        stacked,
        features, targets.numpy(), present.numpy(), KINDS, WEIGHTS.tolist(), SIZES,
    )  # fmt: skip
    p, q = of_features[0], of_features[1:]
    of_encoders = [obs["p0"].numpy().T @ p, obs["q0"].numpy().T @ q[0] + obs["q1"].numpy().T @ q[1]]
    parts = [*(part for weights, biases in of_heads for pair in zip(weights, biases, strict=True) for part in pair)]
    parts += of_encoders
    return np.concatenate([part.ravel() for part in parts])


def test_gradients_reach_heads_and_encoders():
    found = gradients()
    assert_matches(found, expected_gradients())
    assert (found != 0).all()


@pytest.mark.parametrize("sizes", [(3, 3), (5, 1), (0, 6), (2, 2, 2), (1, 4, 1)])
def test_several_learners_gradients_add_up_to_those_of_one(sizes):
    for found, _ in talk(len(sizes), lambda ranks: gradients(ranks, sizes)):
        assert_matches(found, expected_gradients())


def test_heads_that_run_on_gathered_features_would_count_their_gradient_for_each_learner():
    num_heads = sum(2 * width + 2 for width in WIDTHS.values())
    (found, _), _ = talk(2, lambda ranks: gradients(ranks, (3, 3), live_gather=True))
    expected = expected_gradients()
    assert_matches(found[:num_heads], 2 * expected[:num_heads])
    assert_matches(found[num_heads:], expected[num_heads:])


def test_a_frozen_modules_features_are_read_and_not_moved():
    heads, (encoders, obs, targets, _) = make_heads(), data()
    features = features_of(encoders, obs, slice(None))
    features["p0"] = features["p0"].detach()
    predictions = auxiliary_predictions(heads, features, module_rows())
    found = auxiliary_losses(predictions, targets, None, kinds=KINDS, weights=WEIGHTS, axis=ModuleAxis(SIZES, "cpu"))
    first, second = torch.autograd.grad(
        found.weighted.sum(), list(encoders.values()), allow_unused=True, retain_graph=True
    )
    assert first is None and (second != 0).all()
    assert all((g != 0).any() for g in torch.autograd.grad(found.weighted.sum(), list(heads.parameters())))
