"""Communicating modules row by row: their forms, their first weights, their memories, their settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from ray.rllib.core.columns import Columns

from tests.communicating.message_reference import exchanged, gru, mlp, parameters
from tests.communicating.networks import GRID, WIDTH, D, N, by_agent, network, observations
from thrust_rllib import CommunicatingModule, GRUModule, MLPModule
from thrust_rllib.rl_modules.communicating import EXCHANGED
from thrust_rllib.rl_modules.communicating_recurrent import CommunicatingRecurrentModule, MessageGRUModule
from thrust_rllib.rl_modules.exchange import exchange, scan
from thrust_rllib.rl_modules.memory import in_first_state
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES
from thrust_rllib.rl_modules.module_choice import module_class_for
from thrust_rllib.rl_modules.stacked import can_be_stacked

ORDER = torch.arange(N)
CELLS = [None, "gru", "lstm", "message_gru"]


def row_features(seed=1):
    """Random features of R = 6 rows behind the exchange."""
    return torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def states(module, rows):
    rng = torch.Generator().manual_seed(2)
    first = module.get_initial_state()
    return {leaf: torch.randn(rows, *x.shape, dtype=torch.float64, generator=rng) for leaf, x in first.items()}


# --- forward passes ---


@pytest.mark.parametrize(
    "space, logits", [(Discrete(3), 3), (MultiDiscrete([2, 4]), 6), (Box(-1.0, 1.0, (2,)), 4)], ids=str
)
def test_heads_behind_the_exchange(space, logits):
    module, x = network(space=space, fcnet_hiddens=[8, 5]), row_features()
    outputs = module.forward_train({EXCHANGED: x})
    weights = parameters(module)
    for row, features, inputs in zip(x, outputs[ENCODER_FEATURES], outputs[Columns.ACTION_DIST_INPUTS], strict=True):
        wanted = mlp(weights, "trunk", row.numpy())
        np.testing.assert_allclose(features.detach(), wanted, atol=1e-12)
        head = weights["policy_head.weight"] @ wanted + weights["policy_head.bias"]
        np.testing.assert_allclose(inputs[: len(head)].detach(), head, atol=1e-12)
    assert inputs.shape == (logits,) and outputs[Columns.EMBEDDINGS] is outputs[ENCODER_FEATURES]
    acting = module.forward_inference({EXCHANGED: x})
    assert acting.keys() == {Columns.ACTION_DIST_INPUTS}
    assert torch.equal(acting[Columns.ACTION_DIST_INPUTS], outputs[Columns.ACTION_DIST_INPUTS])
    values = module.compute_values({EXCHANGED: x}, outputs[Columns.EMBEDDINGS])
    wanted = outputs[ENCODER_FEATURES] @ module.value_head.weight[0] + module.value_head.bias
    torch.testing.assert_close(values, wanted, atol=1e-12, rtol=0)
    assert torch.equal(module.compute_values({EXCHANGED: x}), values)


@pytest.mark.parametrize("model", [{}, {"message_rounds": 0}, {"aggregation": "attention", "message_content": "both"}])
def test_observations_alone_are_those_of_who_hears_nobody(model):
    module, obs = network(**model), by_agent(observations(3))
    alone = module.forward_train({Columns.OBS: obs.flatten(end_dim=1)})
    silent = obs.clone()
    silent[..., :N] = 0.0
    (z,), _ = exchange([module], [silent], ORDER, None)
    exchanged_rows = module.forward_train({EXCHANGED: z.flatten(end_dim=1)})
    for name, value in exchanged_rows.items():
        torch.testing.assert_close(alone[name], value, atol=1e-12, rtol=0)
    values = module.compute_values({Columns.OBS: obs.flatten(end_dim=1)})
    torch.testing.assert_close(values, module.compute_values({EXCHANGED: z.flatten(end_dim=1)}), atol=1e-12, rtol=0)


def test_a_gru_for_each_agent_behind_the_exchange():
    module = network(cell="gru", cell_size=3, fcnet_hiddens=[4])
    x = torch.randn(2, 5, D, dtype=torch.float64)
    state = states(module, 2)
    outputs = module.forward_train({EXCHANGED: x, Columns.STATE_IN: state})
    weights = {name.removesuffix("_l0"): value for name, value in parameters(module).items()}
    for row in range(2):
        h = state["h"][row].numpy()
        for step in range(5):
            h = gru(weights, "cell", mlp(weights, "trunk", x[row, step].numpy()), h)
            np.testing.assert_allclose(outputs[ENCODER_FEATURES][row, step].detach(), h, atol=1e-12)
        np.testing.assert_allclose(outputs[Columns.STATE_OUT]["h"][row].detach(), h, atol=1e-12)
    values = module.compute_values({EXCHANGED: x, Columns.STATE_IN: state})
    assert values.shape == (2, 5)
    assert torch.equal(values, module.compute_values({}, outputs[Columns.EMBEDDINGS]))


def test_an_lstm_in_two_pieces_is_the_whole():
    module = network(cell="lstm", cell_size=3)
    obs, state = torch.from_numpy(observations(2, 6)[:, :, 0]), states(module, 2)
    assert module.get_initial_state().keys() == {"c", "h"}
    whole = module.forward_exploration({Columns.OBS: obs, Columns.STATE_IN: state})
    first = module.forward_exploration({Columns.OBS: obs[:, :2], Columns.STATE_IN: state})
    second = module.forward_exploration({Columns.OBS: obs[:, 2:], Columns.STATE_IN: first[Columns.STATE_OUT]})
    logits = torch.cat([part[Columns.ACTION_DIST_INPUTS] for part in (first, second)], dim=1)
    torch.testing.assert_close(logits, whole[Columns.ACTION_DIST_INPUTS], atol=1e-12, rtol=0)
    for leaf, value in whole[Columns.STATE_OUT].items():
        torch.testing.assert_close(second[Columns.STATE_OUT][leaf], value, atol=1e-12, rtol=0)


def test_the_memory_of_messages_passes_rows_on():
    module, x = network(cell="message_gru", fcnet_hiddens=[4]), row_features()
    state = states(module, 6)
    rows = module.forward_train({EXCHANGED: x})
    assert Columns.STATE_OUT not in rows
    steps = module.forward_train({EXCHANGED: x.unsqueeze(1), Columns.STATE_IN: state})
    assert steps[Columns.STATE_OUT] is state
    logits = steps[Columns.ACTION_DIST_INPUTS]
    assert logits.shape == (6, 1, 3)
    torch.testing.assert_close(logits.squeeze(1), rows[Columns.ACTION_DIST_INPUTS], atol=1e-12, rtol=0)
    assert module.compute_values({EXCHANGED: x}).shape == (6,)
    assert module.compute_values({EXCHANGED: x.unsqueeze(1), Columns.STATE_IN: state}).shape == (6, 1)


def test_the_memory_of_messages_runs_over_observations_alone():
    module, obs = network(cell="message_gru"), observations(1, 4)[0]  # [4, N, N + O]
    rows = torch.from_numpy(obs).transpose(0, 1)  # each agent a row, [N, 4, N + O]
    state = states(module, N)
    alone = module.forward_train({Columns.OBS: rows, Columns.STATE_IN: state})
    weights, h = parameters(module), list(state["h"].numpy())
    for t in range(4):
        features, h = exchanged([weights] * N, obs[t, :, N:], np.zeros((N, N)), 2, "max", memories=h)
        np.testing.assert_allclose(alone[ENCODER_FEATURES][:, t].detach(), features, atol=1e-12)
    np.testing.assert_allclose(alone[Columns.STATE_OUT]["h"].detach(), h, atol=1e-12)
    silent = rows.clone()
    silent[..., :N] = 0.0
    (z,), (last,) = scan([module], [silent.unsqueeze(1)], ORDER, None, [state["h"].unsqueeze(1)])
    torch.testing.assert_close(alone[ENCODER_FEATURES], z.squeeze(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(alone[Columns.STATE_OUT]["h"], last.squeeze(1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_first_step_of_an_episode(cell):
    module = network(cell=cell).float()
    outputs = module.forward_train(in_first_state(module, torch.zeros(2, N + WIDTH)))
    assert outputs[Columns.ACTION_DIST_INPUTS].shape == ((2, 3) if cell is None else (2, 1, 3))
    assert module.is_stateful() == (cell is not None)
    assert not can_be_stacked([module, module])
    if cell is not None:
        assert all(not leaf.any() for leaf in module.get_initial_state().values())
        with pytest.raises(ValueError, match="'state_in'"):
            module.forward_train({Columns.OBS: torch.zeros(2, 1, N + WIDTH)})


# --- parameters ---


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("aggregation, content", [("max", "learned"), ("attention", "both"), ("mean", "distance")])
def test_parameters_depend_neither_on_the_team_nor_on_the_grid(cell, aggregation, content):
    same = {"cell": cell, "aggregation": aggregation, "message_content": content}
    small = network(num_links=3, input_shape=(2, 8, 8), **same)
    large = network(1, num_links=7, input_shape=(2, 13, 13), **same)
    assert shapes(small) == shapes(large)
    assert shapes(network(num_links=3, **same)) == shapes(network(num_links=7, **same))
    large.set_state(small.get_state())
    torch.testing.assert_close(large.state_dict(), small.state_dict(), atol=1e-6, rtol=0)  # states are float32
    assert large.observation_space.shape == (7 + 2 * 13 * 13,) and large.settings.encoder == "conv"


def test_first_weights():
    module = built(
        {"aggregation": "attention", "message_content": "both", "input_shape": (3, 8, 8), "message_size": 16}
    )
    for name, parameter in module.named_parameters():
        if "updates" in name and ".2." in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            weight = parameter.detach().flatten(1)
            weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
            gain = 0.01 if name.startswith(("policy_head", "value_head")) else 2**0.5
            torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5, rtol=0)
    memory = built({"cell": "message_gru", "message_size": 16})
    for update in memory.updates:
        for gate, recurrent in enumerate(update.weight_hh.detach().split(16)):
            torch.testing.assert_close(recurrent @ recurrent.T, torch.eye(16), atol=1e-5, rtol=0)
            assert (update.bias_ih[16 * gate : 16 * gate + 16] == float(gate == 1)).all()
        assert not update.bias_hh.any()


@pytest.mark.parametrize(
    "other, settings",
    [
        ({"message_rounds": 1}, "message_rounds"),
        ({"message_size": 8}, "message_size"),
        ({"message_content": "both"}, "message_content"),
        ({"aggregation": "attention"}, "aggregation"),
        ({"cell": "message_gru"}, "cell"),
        ({"encoder_hiddens": [9]}, "encoder_hiddens"),
    ],
)
def test_parameters_of_another_network(other, settings):
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=f"Nothing was changed.*these decide it:.*{settings}"):
        module.set_state(network(seed=1, **other).get_state())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    state = network(seed=1).get_state(inference_only=True)
    module.set_state(state)
    assert "value_head.weight" not in state and not torch.equal(module.policy_head.weight, before["policy_head.weight"])


# --- settings ---


def built(model, space=None, kind=None):
    """With the settings given and, where they are left out, the defaults; float32."""
    torch.manual_seed(0)
    rest = int(np.prod(model.get("input_shape") or (WIDTH,)))
    config = {"message_rounds": 2, "num_links": N} | model
    kind = kind or module_class_for(config)
    space = Box(-1.0, 1.0, (N + rest,)) if space is None else space
    return kind(observation_space=space, action_space=Discrete(3), model_config=config)


def test_defaults():
    module = built({})
    assert type(module) is CommunicatingModule and (module.num_links, module.exchange_width, module.rounds) == (
        5,
        64,
        2,
    )
    assert [tuple(layer.weight.shape) for layer in module.encoder[::2]] == [(64, WIDTH), (64, 64)]
    assert module.messages[1].aggregation == "max" and module.messages[1].sent_width == 64
    assert module.messages[1].distance is None and len(module.trunk) == 0 and not module.remembers_in_exchange
    grid = built({"input_shape": GRID})
    convolutions = grid.encoder.convolutions[::2]
    assert [(layer.out_channels, layer.kernel_size) for layer in convolutions] == [(16, (3, 3)), (32, (3, 3))]
    assert grid.encoder.mlp[0].in_features == 96
    assert built({"cell": "lstm"}).cell_size == 64 and built({"cell": "message_gru"}).max_seq_len is None


@pytest.mark.parametrize(
    "model, kind",
    [
        ({"message_rounds": 0}, CommunicatingModule),
        ({"message_rounds": 2, "cell": "gru"}, CommunicatingRecurrentModule),
        ({"message_rounds": 2, "cell": "lstm", "max_seq_len": 8}, CommunicatingRecurrentModule),
        ({"message_rounds": 1, "cell": "message_gru", "cell_size": 64}, MessageGRUModule),
        ({"cell": "gru"}, GRUModule),
        ({}, MLPModule),
    ],
)
def test_the_class_follows_from_rounds_and_cell(model, kind):
    assert module_class_for(model) is kind
    if issubclass(kind, CommunicatingModule):
        module = built(model)
        assert type(module) is kind and module.remembers_in_exchange == (kind is MessageGRUModule)


@pytest.mark.parametrize(
    "model, message",
    [
        ({"cell": "message_gru"}, "needed: one of lstm, gru.*needs message_rounds"),
        ({"cell": "mesage_gru", "message_rounds": 2}, "did you mean 'message_gru'"),
        ({"message_round": 2}, "'message_round', which no module reads; did you mean 'message_rounds'"),
        ({"use_lstm": True, "message_rounds": 2}, "cell='lstm' in place of use_lstm"),
    ],
)
def test_classes_that_there_are_not(model, message):
    with pytest.raises(ValueError, match=message):
        module_class_for(model)


@pytest.mark.parametrize(
    "model, message",
    [
        ({"agregation": "max"}, "no model_config key 'agregation'; did you mean 'aggregation'"),
        (
            {"aggregation": "maximum"},
            "aggregation is 'maximum'; needed: one of max, mean, attention; did you mean 'max'",
        ),
        ({"message_content": "distances"}, "one of learned, distance, both; did you mean 'distance'"),
        ({"encoder": "cnn"}, "encoder is 'cnn'; needed: one of auto, mlp, conv"),
        ({"encoder": "conv"}, r"observations behind the links have shape \[4\]; needed: three axes"),
        ({"fcnet_activation": "rely"}, "did you mean 'relu'"),
        ({"fcnet_hiddens": [0]}, "fcnet_hiddens is"),
        ({"encoder_hiddens": "64"}, "encoder_hiddens is '64'"),
        ({"message_rounds": -1}, "message_rounds is -1; needed: a whole number ≥ 0"),
        ({"message_rounds": 1.5}, "message_rounds is 1.5"),
        ({"message_rounds": None}, "message_rounds is None; needed: a whole number"),
        ({"message_size": 0}, "message_size is 0; needed: a whole number ≥ 1"),
        ({"vf_share_layers": False}, "vf_share_layers is False.*leave vf_share_layers out"),
        ({"conv_filters": [[16, 4]]}, "kernel of 4; needed: an odd one"),
        ({"conv_filters": [[16, 3, 2]]}, "a layer .16, 3, 2.; needed.*stride is always 1"),
        ({"conv_filters": 16}, "conv_filters is 16; needed: a list"),
        ({"num_links": N + WIDTH}, "the 9 links .num_links. first"),
        ({"input_shape": [3, 2]}, "input_shape is .3, 2., which is 6 numbers, but observations have 4 behind their 5"),
        ({"cell": "gru", "cell_size": 0}, "cell_size is 0"),
        ({"cell": "gru", "max_seq_len": 0}, "max_seq_len is 0; needed: a whole number ≥ 1, or None"),
        ({"cell": "message_gru", "cell_size": 32}, "cell_size is 32 and message_size 64.*leave cell_size out"),
        ({"cell": "message_gru", "message_rounds": 0}, "message_rounds is 0 with cell='message_gru'"),
        ({"cell_size": 32}, "no model_config key 'cell_size'"),
        ({"use_lstm": True, "cell": "lstm"}, "does not read.*use_lstm"),
    ],
)
def test_settings_that_cannot_be(model, message):
    with pytest.raises(ValueError, match=message):
        built(model, Box(-1.0, 1.0, (N + WIDTH,)))


def test_links_of_which_nothing_is_known():
    with pytest.raises(ValueError, match='num_links is missing.*key "links"'):
        CommunicatingModule(
            observation_space=Box(-1.0, 1.0, (9,)), action_space=Discrete(3), model_config={"message_rounds": 2}
        )
    with pytest.raises(ValueError, match=r"observations have shape \[9, 2\]; needed: one row"):
        built({}, Box(-1.0, 1.0, (9, 2)))


@pytest.mark.parametrize(
    "kind, cell", [(CommunicatingModule, "gru"), (CommunicatingRecurrentModule, None), (MessageGRUModule, "lstm")]
)
def test_a_class_that_has_another_cell(kind, cell):
    with pytest.raises(ValueError, match=f"cell={cell!r}, but {kind.__name__} needs.*follows from message_rounds"):
        built({"cell": cell}, kind=kind)
