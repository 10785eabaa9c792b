"""Which module a configuration asks for: by cell, by RLlib's `use_lstm`, by class, and module by module."""

import pytest
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import make_runner, tiny_config
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.rl_modules.module_choice import module_class_for
from thrust_rllib.rl_modules.recurrent import RecurrentModule

AGENTS = ("agent_0", "agent_1", "agent_2")


class Mine(MLPModule):
    """Reads a key of the same name for itself."""

    model_config_keys = (*MLPModule.model_config_keys, "cell")


def config_of(model=None, spec=None):
    config = tiny_config("debug/random_observations", {"agents": len(AGENTS)}, model={} if model is None else model)
    return config if spec is None else config.rl_module(rl_module_spec=spec)


def built(config):
    """{module: the module as the learner builds it}."""
    config.validate()
    spaces = make_runner(config).get_spaces()
    modules = config.get_multi_rl_module_spec(spaces=spaces).build()
    return {module_id: modules[module_id] for module_id in AGENTS}


def classes_of(config):
    return [type(module) for module in built(config).values()]


@pytest.mark.parametrize(
    "model, kind",
    [
        ({}, MLPModule),
        ({"cell": None}, MLPModule),
        (DefaultModelConfig(), MLPModule),
        ({"cell": "lstm"}, LSTMModule),
        ({"cell": "gru", "cell_size": 8, "max_seq_len": 10}, GRUModule),
        ({"use_lstm": True, "max_seq_len": 10}, LSTMModule),
        ({"use_lstm": True, "cell": "lstm", "max_seq_len": 10}, LSTMModule),
        (DefaultModelConfig(use_lstm=True, lstm_cell_size=8, max_seq_len=10), LSTMModule),
    ],
)
def test_one_model_config_for_all(model, kind):
    assert classes_of(config_of(model)) == [kind] * 3
    assert classes_of(config_of({}, RLModuleSpec(model_config=model))) == [kind] * 3
    assert config_of(model).rl_module_spec.module_class is kind
    assert module_class_for(model) is kind and module_class_for(None) is MLPModule


def test_sizes_arrive():
    for module in built(config_of({"cell": "gru", "cell_size": 7, "fcnet_hiddens": [5]})).values():
        assert (module.cell.input_size, module.cell.hidden_size) == (5, 7)
    for module in built(config_of(DefaultModelConfig(use_lstm=True, max_seq_len=10))).values():
        assert (module.cell.input_size, module.cell.hidden_size, module.max_seq_len) == (256, 256, 10)


def team(**specs):
    return MultiRLModuleSpec(rl_module_specs={m: RLModuleSpec(**spec) for m, spec in specs.items()})


def test_a_team_of_three_kinds():
    spec = team(
        agent_0={"model_config": {"cell": "gru", "cell_size": 8, "max_seq_len": 10}},
        agent_1={"model_config": DefaultModelConfig(use_lstm=True, max_seq_len=10)},
        agent_2={"model_config": {"fcnet_hiddens": [9]}},
    )
    config = config_of({"fcnet_activation": "relu"}, spec)
    for _ in range(2):  # what was found once is not the user's choice
        assert classes_of(config) == [GRUModule, LSTMModule, MLPModule]
    assert built(config)["agent_0"].cell.hidden_size == 8
    assert [each.module_class for each in spec.rl_module_specs.values()] == [None] * 3


def test_modules_that_are_not_named_follow_the_common_model_config():
    spec = team(agent_1={"model_config": {"cell": "lstm"}}, agent_2={"model_config": {"cell": None}})
    assert classes_of(config_of({"cell": "gru"}, spec)) == [GRUModule, LSTMModule, MLPModule]


def test_a_class_that_is_named_wins():
    assert classes_of(config_of({"cell": "gru"}, RLModuleSpec(module_class=Mine))) == [Mine] * 3
    assert classes_of(config_of({}, RLModuleSpec(module_class=LSTMModule))) == [LSTMModule] * 3
    config = config_of({"cell": "one of mine"}, RLModuleSpec(module_class=Mine))
    assert classes_of(config) == [Mine] * 3 and config.rl_module_spec.module_class is Mine
    named = {"module_class": Mine, "model_config": {"cell": "another"}}
    spec = team(agent_0=named, agent_1=named, agent_2={"model_config": {"cell": "gru"}})
    assert classes_of(config_of({"cell": "one of mine"}, spec)) == [Mine, Mine, GRUModule]


@pytest.mark.parametrize(
    "config, message",
    [
        (
            config_of({"cell": "lstmm"}),
            "cell='lstmm' in the model_config; needed: one of lstm, gru; did you mean 'lstm'?",
        ),
        (config_of({"cell": 3}), "cell=3 in the model_config; needed: one of lstm, gru."),
        (config_of({"cell": ["gru"]}), "needed: one of lstm, gru"),
        (config_of({}, RLModuleSpec(model_config={"cell": "gr"})), "did you mean 'gru'?"),
        (config_of({}, team(agent_1={"model_config": {"cell": "LSTM"}})), "cell='LSTM' in the model_config"),
        (config_of({"cell": "rnn"}, team(agent_1={"model_config": {"cell": "gru"}})), "cell='rnn'"),
    ],
)
def test_an_unknown_cell_is_an_early_error(config, message):
    with pytest.raises(ValueError) as error:
        config.validate()
    assert message in str(error.value)


def test_a_cell_that_contradicts_the_class_is_an_error():
    config = config_of({"cell": "gru"}, RLModuleSpec(module_class=LSTMModule))
    with pytest.raises(ValueError, match="cell='gru', but LSTMModule has cell='lstm'"):
        make_runner(config)
    assert issubclass(LSTMModule, RecurrentModule)
