"""What a module is configured with: every key is read or an error, and no module may be recurrent."""

import pytest
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import box, discrete, largest_difference, make_learner, make_runner, parameters, tiny_config, update
from thrust_rllib import MLPModule, MultiDiscreteMLPModule

KEYS = "fcnet_hiddens, fcnet_activation, vf_share_layers, free_log_std, log_std_init"


def module_of(model_config, kind=MLPModule, action_space=None):
    return kind(observation_space=box(3), action_space=action_space or discrete(), model_config=model_config)


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("fcnet_hidens", "; did you mean 'fcnet_hiddens'?"),
        ("logstd_init", "; did you mean 'log_std_init'?"),
        ("zzz", "."),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_one(key, nearest):
    with pytest.raises(ValueError) as error:
        module_of({key: [7]})
    assert f"MLPModule knows no model_config key {key!r}{nearest}" in str(error.value)
    assert KEYS in str(error.value)


@pytest.mark.parametrize(
    "key, value",
    [
        ("head_fcnet_hiddens", [7]), ("conv_filters", [[16, 4, 2]]), ("use_lstm", True), ("fcnet_use_layernorm", True),
        ("fcnet_kernel_initializer", "xavier_uniform_"), ("log_std_clip_param", 2.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_dataclass", [False, True])
def test_a_setting_of_rllib_that_is_not_read_is_an_error(key, value, as_dataclass):
    given = DefaultModelConfig(**{key: value}) if as_dataclass else {key: value}
    with pytest.raises(ValueError) as error:
        module_of(given)
    assert f"MLPModule does not read the model_config {{{key!r}: {value!r}}}" in str(error.value)
    assert KEYS in str(error.value)


def test_all_settings_that_are_not_read_are_named_at_once():
    with pytest.raises(ValueError, match="'max_seq_len': 5, 'use_lstm': True"):
        module_of(DefaultModelConfig(use_lstm=True, max_seq_len=5))


@pytest.mark.parametrize("given", [None, {}, {"use_lstm": False, "head_fcnet_hiddens": ()}, DefaultModelConfig()])
def test_rllibs_defaults_pass(given):
    assert module_of(given).trunk[0].out_features == (256 if isinstance(given, DefaultModelConfig) else 64)


def test_a_dataclass_arrives_through_the_configuration():
    config = tiny_config(model=DefaultModelConfig(fcnet_hiddens=[7], fcnet_activation="relu"))
    assert make_learner(config).module["agent_0"].trunk[0].out_features == 7


@pytest.mark.parametrize("given", ["32", 32, [0], [-1], ["8"], [8.5]])
def test_widths_are_whole_numbers_not_characters(given):
    with pytest.raises(ValueError, match="fcnet_hiddens is .*; needed: layers of width 1 or more, a list"):
        module_of({"fcnet_hiddens": given}, MLPModule)


def test_a_derived_module_names_the_keys_that_it_reads():
    class Wide(MLPModule):
        model_config_keys = (*MLPModule.model_config_keys, "factor")

    assert module_of({"factor": 3}, Wide).model_config == {"factor": 3}
    with pytest.raises(ValueError, match="Wide knows no model_config key 'facto'; did you mean 'factor'"):
        module_of({"facto": 3}, Wide)
    with pytest.raises(ValueError, match="MultiDiscreteMLPModule knows no model_config key"):
        module_of({"zzz": 3}, MultiDiscreteMLPModule)


def test_rllibs_module_with_its_dataclass_trains():
    config = tiny_config()
    config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=DefaultPPOTorchRLModule),
        model_config=DefaultModelConfig(fcnet_hiddens=[8], head_fcnet_hiddens=[6]),
    )
    learner = make_learner(config)
    before = parameters(learner)
    update(learner, make_runner(config).sample(num_timesteps=64))
    assert largest_difference(parameters(learner), before) > 0.0
