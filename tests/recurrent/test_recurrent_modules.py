"""LSTM and GRU modules: the cells' formulas, sequences, first weights, settings and saved parameters."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from tests.recurrent.reference import walk
from tests.support import box, discrete
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES

KINDS = [LSTMModule, GRUModule]
R, T, D, H = 3, 11, 4, 5


def module_of(kind=LSTMModule, action_space=None, scrambled=True, inference_only=False, **model_config):
    module = kind(
        observation_space=box(D),
        action_space=action_space or discrete(3),
        inference_only=inference_only,
        model_config={"cell_size": H, **model_config},
    )
    if scrambled:
        generator = torch.Generator().manual_seed(0)
        for param in module.parameters():
            torch.nn.init.normal_(param, std=0.6, generator=generator)
    return module


def batch_of(module, obs, vectors):
    return {Columns.OBS: obs, Columns.STATE_IN: MemoryLayout.of(module).unflatten(vectors)}


def random_batch(module, steps=T, seed=1):
    """A batch in the module's own precision, memories and all."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    obs = torch.randn(R, steps, D, generator=generator, dtype=dtype)
    vectors = torch.randn(R, MemoryLayout.of(module).size, generator=generator)
    batch = batch_of(module, obs, vectors)
    batch[Columns.STATE_IN] = tree.map_structure(lambda leaf: leaf.to(dtype), batch[Columns.STATE_IN])
    return batch, vectors


def outputs_of(module, batch):
    """(logits, features, values, state)."""
    outputs = module.forward_train(batch)
    values = module.compute_values(batch, embeddings=outputs[Columns.EMBEDDINGS])
    return outputs[Columns.ACTION_DIST_INPUTS], outputs[ENCODER_FEATURES], values, outputs[Columns.STATE_OUT]


# ------------------------------------------------------------------------------------------- the cells' formulas


def reference_parameters(module):
    """The module's parameters in float64, under the reference's names."""
    named = {}
    for name, param in module.named_parameters():
        name = re.sub(r"trunk\.(\d+)", lambda found: f"trunk_{int(found[1]) // 2}", name)
        name = name.replace("_l0", "").replace("_head.", ".")
        named[name] = param.detach().double().requires_grad_()
    return named


def by_the_loop(p, batch, vectors, restarts):
    """(logits, features, values) of the loop over rows and time; each row's memory restarts at `restarts` [R, T]."""
    results = []
    for obs, begins, vector in zip(batch[Columns.OBS], restarts, vectors, strict=True):
        rows = walk(p, obs.numpy(), np.ones(len(obs), bool), begins, {0: vector.numpy()})
        results.append([step[:3] for _, step in rows])
    features, logits, values = (torch.stack([torch.stack([s[k] for s in row]) for row in results]) for k in range(3))
    return logits, features, values


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("hiddens", [[], [7, 6]])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_the_loop_over_time(kind, hiddens, shared, precise):
    module = module_of(kind, fcnet_hiddens=hiddens, vf_share_layers=shared)
    module = module.double() if precise else module
    batch, vectors = random_batch(module)
    p = reference_parameters(module)
    found = outputs_of(module, batch)[:3]
    expected = by_the_loop(p, batch, vectors, np.zeros((R, T), bool))
    tolerance = 1e-10 if precise else 1e-5
    loss, wanted = torch.zeros(()), torch.zeros(())
    for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
        weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(k))
        loss, wanted = loss + (mine * weights).sum(), wanted + (theirs * weights).sum()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    theirs = torch.autograd.grad(wanted, list(p.values()))
    for name, mine, reference in zip(p, grads, theirs, strict=True):
        assert reference.abs().max() > 1e-3, name
        scale = float(reference.abs().max())
        torch.testing.assert_close(mine.double(), reference, rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_are_sequences_of_their_own(kind):
    """One row of 11 steps that restarts at 4 and 8 is three sequences of 4, 4 and 3, padded at their ends."""
    module = module_of(kind).double()
    batch, vectors = random_batch(module)
    restarts = np.zeros((R, T), bool)
    restarts[:, [4, 8]] = True
    logits, features, values = by_the_loop(reference_parameters(module), batch, vectors, restarts)
    obs = torch.nn.functional.pad(batch[Columns.OBS], (0, 0, 0, 1), value=1e6).view(3 * R, 4, D)
    entering = torch.zeros(R, 3, vectors.shape[1])
    entering[:, 0] = vectors
    in_pieces = batch_of(module, obs, entering.flatten(0, 1))
    in_pieces[Columns.STATE_IN] = tree.map_structure(torch.Tensor.double, in_pieces[Columns.STATE_IN])
    for mine, expected in zip(outputs_of(module, in_pieces)[:3], (logits, features, values), strict=True):
        mine = mine.reshape(R, 12, *mine.shape[2:])[:, :T]
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
    without = by_the_loop(reference_parameters(module), batch, vectors, np.zeros((R, T), bool))[0]
    assert (without[:, 4:] - logits[:, 4:]).abs().max() > 0.1


# ------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_at_the_end_changes_nothing_before_it(kind, shared):
    module = module_of(kind, vf_share_layers=shared, fcnet_hiddens=[6])
    batch, vectors = random_batch(module)

    def at_real_steps(padding):
        obs = torch.cat([batch[Columns.OBS], torch.full((R, 3, D), padding)], dim=1)
        outputs = [x[:, :T] for x in outputs_of(module, batch_of(module, obs, vectors))[:3]]
        grads = torch.autograd.grad(sum(x.square().sum() for x in outputs), list(module.parameters()))
        return [*outputs, *grads]

    for zeros, huge in zip(at_real_steps(0.0), at_real_steps(1e6), strict=True):
        torch.testing.assert_close(huge, zeros, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_that_comes_out_goes_on(kind, shared):
    module = module_of(kind, vf_share_layers=shared)
    batch, _ = random_batch(module)
    whole = outputs_of(module, batch)
    first = outputs_of(module, {**batch, Columns.OBS: batch[Columns.OBS][:, :4]})
    second = outputs_of(module, {Columns.OBS: batch[Columns.OBS][:, 4:], Columns.STATE_IN: first[3]})
    for left, right, expected in zip(first[:3], second[:3], whole[:3], strict=True):
        torch.testing.assert_close(torch.cat([left, right], dim=1), expected, rtol=1e-5, atol=1e-6)
    layout = MemoryLayout.of(module)
    torch.testing.assert_close(layout.flatten(second[3]), layout.flatten(whole[3]), rtol=1e-5, atol=1e-6)
    from_anew = outputs_of(module, {**batch, Columns.OBS: batch[Columns.OBS][:, 4:]})[0]
    assert (from_anew - whole[0][:, 4:]).abs().max() > 1e-2


@pytest.mark.parametrize("inference_only", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_acting_step_by_step_is_the_training_sequence(kind, shared, inference_only):
    module = module_of(kind, vf_share_layers=shared, fcnet_hiddens=[6])
    actor = module_of(kind, inference_only=inference_only, vf_share_layers=shared, fcnet_hiddens=[6], scrambled=False)
    actor.set_state(module.get_state(inference_only=inference_only))
    batch, _ = random_batch(module)
    logits, _, _, after = outputs_of(module, batch)
    state = batch[Columns.STATE_IN]
    for t in range(T):
        step = actor.forward_exploration({Columns.OBS: batch[Columns.OBS][:, t : t + 1], Columns.STATE_IN: state})
        assert not step[Columns.ACTION_DIST_INPUTS].requires_grad
        torch.testing.assert_close(step[Columns.ACTION_DIST_INPUTS][:, 0], logits[:, t], rtol=1e-5, atol=1e-6)
        state = step[Columns.STATE_OUT]
    layout = MemoryLayout.of(module)
    torch.testing.assert_close(layout.flatten(state), layout.flatten(after), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values_need_no_embeddings(kind, shared):
    module = module_of(kind, vf_share_layers=shared)
    batch, _ = random_batch(module)
    outputs = module.forward_train(batch)
    torch.testing.assert_close(
        module.compute_values(batch), module.compute_values(batch, embeddings=outputs[Columns.EMBEDDINGS])
    )
    assert (outputs[Columns.EMBEDDINGS] is outputs[ENCODER_FEATURES]) == shared
    assert module.compute_values(batch).shape == (R, T)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_is_walked_back_twice(kind):
    """As two optimizers, and the couplings' gradients, need it."""
    module = module_of(kind)
    batch, _ = random_batch(module)
    logits, _, values, _ = outputs_of(module, batch)
    parameters = list(module.cell.parameters())
    separate = [torch.autograd.grad(x.square().sum(), parameters, retain_graph=True) for x in (logits, values)]
    together = torch.autograd.grad(logits.square().sum() + values.square().sum(), parameters)
    for actor, critic, both in zip(*separate, together, strict=True):
        torch.testing.assert_close(actor + critic, both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "space, logits",
    [(discrete(3), 3), (gym.spaces.MultiDiscrete([3, 2, 4]), 9), (gym.spaces.Box(-1.0, 1.0, (2,), np.float32), 4)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_action_spaces(kind, space, logits):
    module = module_of(kind, space, log_std_init=-0.5)
    batch, _ = random_batch(module)
    outputs = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    assert outputs.shape == (R, T, logits)
    actions = module.get_train_action_dist_cls().from_logits(outputs).sample()
    assert actions.shape == (R, T, *space.shape)
    if isinstance(space, gym.spaces.Box):
        torch.testing.assert_close(outputs[..., 2:], module.log_std.expand(R, T, 2))


def test_observations_of_several_axes_are_flattened():
    space = gym.spaces.Box(-1.0, 1.0, (2, 3))
    module = LSTMModule(observation_space=space, action_space=discrete(2), model_config={"cell_size": H})
    obs = torch.randn(R, T, 2, 3)
    state = MemoryLayout.of(module).unflatten(torch.zeros(R, 2 * H))
    found, flat = (outputs_of(module, {Columns.OBS: x, Columns.STATE_IN: state})[0] for x in (obs, obs.flatten(2)))
    torch.testing.assert_close(found, flat)


def test_a_batch_without_a_state_is_an_error():
    with pytest.raises(ValueError, match=r"got \['obs'\]; needed: 'obs' \[rows, steps, …\] and 'state_in'"):
        module_of().forward_train({Columns.OBS: torch.zeros(R, T, D)})


# ------------------------------------------------------------------------------------------- first weights


@pytest.mark.parametrize("kind, gates", [(LSTMModule, 4), (GRUModule, 3)])
def test_first_weights(kind, gates):
    module = module_of(kind, scrambled=False, vf_share_layers=False)
    for cell in (module.cell, module.critic_cell):
        for gate in range(gates):
            mine = slice(gate * H, (gate + 1) * H)
            inputs, recurrent = cell.weight_ih_l0[mine], cell.weight_hh_l0[mine]
            torch.testing.assert_close(inputs.mT @ inputs, torch.eye(D), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(recurrent.mT @ recurrent, torch.eye(H), rtol=1e-5, atol=1e-5)
            # The forget gate of the LSTM, the update gate of the GRU.
            assert (cell.bias_ih_l0[mine] == float(gate == 1)).all() and (cell.bias_hh_l0[mine] == 0).all()
    assert module.policy_head.weight.abs().max() < 0.011 and module.value_head.weight.abs().max() < 0.011
    assert {name: tuple(x.shape) for name, x in module.get_initial_state()["actor"].items()} == (
        {"c": (H,), "h": (H,)} if kind is LSTMModule else {"h": (H,)}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_one_lets_the_memory_last(kind):
    """With no input a memory of 1 has more left after one step than it would with biases of 0."""
    module = module_of(kind, scrambled=False)
    name = "c" if kind is LSTMModule else "h"
    for param in (module.cell.weight_ih_l0, module.cell.weight_hh_l0):
        torch.nn.init.zeros_(param)
    state = {name: torch.zeros(1, H) for name in module.get_initial_state()}
    state[name] = torch.ones(1, H)
    batch = {Columns.OBS: torch.zeros(1, 1, D), Columns.STATE_IN: state}
    left = module.forward_inference(batch)[Columns.STATE_OUT][name]
    torch.testing.assert_close(left, torch.sigmoid(torch.ones(1, H)))


# ------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "kind, given, size, length",
    [
        (LSTMModule, {}, 64, None),
        (LSTMModule, {"cell": "lstm", "cell_size": 7, "max_seq_len": 5}, 7, 5),
        (LSTMModule, {"use_lstm": True}, 256, 20),
        (LSTMModule, {"use_lstm": True, "cell_size": 9, "max_seq_len": None}, 9, None),
        (LSTMModule, {"use_lstm": True, "lstm_cell_size": 9, "max_seq_len": 4}, 9, 4),
        (LSTMModule, DefaultModelConfig(use_lstm=True, lstm_cell_size=8, fcnet_hiddens=[6]), 8, 20),
        (GRUModule, {"cell": "gru"}, 64, None),
        (GRUModule, {"cell": None, "max_seq_len": 3}, 64, 3),
    ],
)
def test_sizes_and_lengths(kind, given, size, length):
    module = kind(observation_space=box(D), action_space=discrete(2), model_config=given)
    assert (module.cell.hidden_size, module.max_seq_len) == (size, length)
    assert len(module.trunk) == (2 if isinstance(given, DefaultModelConfig) else 0)


@pytest.mark.parametrize(
    "kind, given, message",
    [
        (LSTMModule, {"cell": "gru"}, "cell='gru', but LSTMModule has cell='lstm'"),
        (GRUModule, {"cell": "lstm"}, "cell='lstm', but GRUModule has cell='gru'"),
        (GRUModule, {"use_lstm": True}, "GRUModule does not read the model_config {'use_lstm': True}"),
        (MLPModule, {"cell": "lstm"}, "cell='lstm', but MLPModule has no memory"),
        (MLPModule, {"cell_size": 4}, "MLPModule knows no model_config key 'cell_size'"),
        (LSTMModule, {"cell_size": 0}, "cell_size is 0; needed: a whole number ≥ 1"),
        (LSTMModule, {"cell_size": 8.0}, "cell_size is 8.0"),
        (GRUModule, {"cell_size": True}, "cell_size is True"),
        (LSTMModule, {"use_lstm": True, "lstm_cell_size": -1}, "cell_size is -1"),
        (LSTMModule, {"cell_size": 4, "lstm_cell_size": 5}, "two names of one number"),
        (GRUModule, {"max_seq_len": 0}, "max_seq_len is 0; needed: a whole number ≥ 1, or None for the whole rollout"),
        (LSTMModule, {"max_seq_len": 2.5}, "max_seq_len is 2.5"),
        (LSTMModule, {"cell_sise": 4}, "LSTMModule knows no model_config key 'cell_sise'; did you mean 'cell_size'"),
        (GRUModule, {"fcnet_hiddens": [0]}, "fcnet_hiddens is [0]; needed: layers of width 1 or more"),
        (LSTMModule, DefaultModelConfig(lstm_use_prev_action=True), "does not read the model_config"),
        (MLPModule, {"fcnet_hiddens": []}, "needed: at least one layer"),
    ],
)
def test_bad_settings_are_early_errors(kind, given, message):
    with pytest.raises(ValueError) as error:
        kind(observation_space=box(D), action_space=discrete(2), model_config=given)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------- saved parameters


def mlp(inference_only=False, **model_config):
    return MLPModule(
        observation_space=box(D), action_space=discrete(3), inference_only=inference_only, model_config=model_config
    )


@pytest.mark.parametrize(
    "saved, into, messages",
    [
        (
            lambda **k: module_of(cell_size=6, **k),
            lambda **k: module_of(**k),
            [
                "cell.weight_hh_l0 is [24, 6], needed [20, 5]",
                "policy_head.weight is [3, 6], needed [3, 5]",
                "cell_size",
            ],
        ),
        (
            lambda **k: mlp(**k),
            lambda **k: module_of(**k),
            ["cell.weight_ih_l0 is not there, needed [20, 4]", "trunk.0.weight is [64, 4], needed not there", "cell"],
        ),
        (
            lambda **k: module_of(GRUModule, **k),
            lambda **k: module_of(**k),
            ["cell.bias_ih_l0 is [15], needed [20]", "cell, cell_size"],
        ),
        # Every parameter of the MLP is there, with the right shape.
        (
            lambda **k: module_of(cell_size=7, fcnet_hiddens=[7], **k),
            lambda **k: mlp(fcnet_hiddens=[7], **k),
            ["cell.weight_hh_l0 is [28, 7], needed not there"],
        ),
        (
            lambda **k: module_of(vf_share_layers=False, **k),
            lambda **k: module_of(**k),
            ["critic_cell.weight_hh_l0 is [20, 5], needed not there", "these decide it: vf_share_layers."],
        ),
        (
            lambda **k: mlp(fcnet_hiddens=[7], **k),
            lambda **k: mlp(fcnet_hiddens=[7, 7], **k),
            ["trunk.2.weight is not there, needed [7, 7]", "these decide it: fcnet_hiddens (and"],
        ),
    ],
)
@pytest.mark.parametrize("inference_only", [True, False])
def test_parameters_of_another_network_change_nothing(saved, into, messages, inference_only):
    module = into(inference_only=inference_only)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    state = saved().get_state(inference_only=inference_only)
    with pytest.raises(ValueError) as error:
        module.set_state({name: np.full_like(x, 7.0) for name, x in state.items()})
    for message in messages:
        assert message in str(error.value)
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("make", [mlp, lambda **k: module_of(**k), lambda **k: module_of(GRUModule, **k)])
def test_what_only_training_needs_may_be_missing_or_too_much(make, shared):
    learns, acts = (make(inference_only=x, vf_share_layers=shared) for x in (False, True))
    for state in (learns.get_state(), learns.get_state(inference_only=True)):
        changed = {name: x + 1.0 for name, x in state.items()}
        acts.set_state(changed)
        for name, x in acts.state_dict().items():
            np.testing.assert_array_equal(x, changed[name])
    value_head = learns.value_head.weight.clone()
    learns.set_state(acts.get_state())
    assert torch.equal(learns.value_head.weight, value_head)
    assert torch.equal(learns.policy_head.weight, acts.policy_head.weight)
    parts = {name.split(".")[0] for name in acts.state_dict()}
    assert "value_head" not in parts and "critic_trunk" not in parts
    assert ("critic_cell" in parts) == (not shared and type(learns) is not MLPModule)
