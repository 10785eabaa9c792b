"""Options and names that users mistype, and settings that are not served: early errors on every route."""

from __future__ import annotations

import gymnasium as gym
import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from tests.general.counting import Decides, PaysByStep
from tests.support import box, declared_config, discrete, tiny_config
from thrust_rllib import JointPPO, JointPPOConfig, RedundancyPenalty
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.unserved_options import NOT_SERVED


@pytest.mark.parametrize(
    "section, option, nearest",
    [
        ("training", "clip_parm", "clip_param"),
        ("training", "critic_learning_rate", None),
        ("training", "iterate_all_minibatch", "iterate_all_minibatches"),
        ("training", "cross_agent_coefs", "cross_agent_coeffs"),
        ("env_runners", "num_env_runner", "num_env_runners"),
        ("env_runners", "normalise_observations", "normalize_observations"),
        ("multi_agent", "policy", "policies"),
        ("environment", "env_cfg", "env_config"),
        ("evaluation", "evaluation_intervall", "evaluation_interval"),
        ("learners", "num_learner", "num_learners"),
        ("debugging", "sed", "seed"),
    ],
)
def test_a_misspelt_option_of_a_section(section, option, nearest):
    with pytest.raises(ValueError, match=f"'{option}' is not an option of .{section}\\(\\)") as caught:
        getattr(JointPPOConfig(), section)(**{option: 1})
    if nearest:
        assert f"did you mean '{nearest}'?" in str(caught.value)


def test_an_option_of_another_section_is_sent_there():
    with pytest.raises(
        ValueError, match=r"'num_env_runners' .*\.training\(\); it belongs to \.env_runners\(num_env_runn"
    ):
        JointPPOConfig().training(num_env_runners=2)
    with pytest.raises(ValueError, match=r"it belongs to \.training\(lr="):
        JointPPOConfig().env_runners(lr=1e-3)


@pytest.mark.parametrize("route", ["update_from_dict", "from_dict", "overrides"])
def test_a_misspelt_key_of_a_dict(route):
    with pytest.raises(
        ValueError, match="'entropy_coef' is not an option of JointPPOConfig; did you mean 'entropy_coeff'"
    ):
        if route == "update_from_dict":
            JointPPOConfig().update_from_dict({"entropy_coef": 0.1})
        elif route == "from_dict":
            JointPPOConfig.from_dict({"entropy_coef": 0.1})
        else:
            tiny_config(overrides={"agent_0": {"entropy_coef": 0.1}}).validate()
            tiny_config(overrides={"agent_0": {"entropy_coef": 0.1}}).get_config_for_module("agent_0")


def test_a_dict_of_known_keys_works():
    config = JointPPOConfig().update_from_dict(
        {"lr": 1e-3, "critic_lr": 1e-2, "lambda": 0.8, "env": "climbing", "num_env_runners": 0, "seed": 1}
    )
    assert (config.lr, config.critic_lr, config.lambda_, config.env, config.seed) == (1e-3, 1e-2, 0.8, "climbing", 1)
    again = JointPPOConfig.from_dict(config.to_dict())
    assert again.critic_lr == 1e-2 and again.team == "per_agent"


def test_a_misspelt_key_in_tunes_param_space(ray_session, tmp_path):
    from ray import tune

    space = tiny_config("climbing").to_dict() | {"critic_rl": tune.grid_search([1e-3])}
    tuner = tune.Tuner(
        JointPPO,
        param_space=space,
        run_config=tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0),
    )
    with pytest.raises(ValueError, match="'critic_rl' is not an option of JointPPOConfig; did you mean 'critic_lr'"):
        tuner.fit()


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("bucket_brigad", "bucket_brigade"),
        ("climbign", "climbing"),
        ("debug/identiti", "debug/identity"),
        ("CartPol-v1", "CartPole-v"),
    ],
)
def test_an_unknown_environment_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"unknown environment '{name}'; did you mean '{nearest}"):
        tiny_config(name).validate()


def test_no_environment_is_an_early_error():
    with pytest.raises(ValueError, match="no environment is set; give one with .environment"):
        JointPPOConfig().validate()


def test_an_unknown_setting_of_the_environment():
    with pytest.raises(ValueError, match="unknown setting 'episode_len'; did you mean 'episode_length'"):
        tiny_config("debug/identity", {"episode_len": 3}).validate()


# ------------------------------------------------------------------------------------------ contradictions


def test_a_minibatch_larger_than_the_batch():
    config = tiny_config(minibatch_size=100, train_batch_size_per_learner=64)
    with pytest.raises(ValueError, match="minibatch_size=100 is larger .*train_batch_size_per_learner=64.*lower"):
        config.validate()


def test_a_coupling_with_one_agent():
    config = tiny_config("CartPole-v1", cross_agent_losses={"redundancy": RedundancyPenalty()})
    with pytest.raises(ValueError, match="'redundancy' couples 2 or more agents, the environment has 1"):
        config.validate()


@pytest.mark.parametrize("what", ["observation", "action"])
def test_agents_of_one_module_with_different_spaces(what):
    observations = [box(3), box(4 if what == "observation" else 3)]
    actions = [discrete(2), discrete(3 if what == "action" else 2)]
    for policies in ("shared", {"m": ["a0", "a1"]}):
        config = declared_config(observations, actions, policies=policies)
        with pytest.raises(ValueError, match=f"'a0' and 'a1' share module .* their {what} spaces differ.*per_agent"):
            config.validate()


@pytest.mark.parametrize(
    "policies, message",
    [
        ("per_agnet", "unknown; did you mean 'per_agent'"),
        ({"m": ["agent_0", "agent_1"]}, "leaves agents \\['agent_2'\\] without a module"),
        ({"m": ["agent_0", "agent_1", "agent_2", "agent_9"]}, "names agent 'agent_9'.*did you mean 'agent_"),
        ({"m": ["agent_0", "agent_1"], "k": ["agent_1", "agent_2"]}, "'agent_1' stands in two groups"),
    ],
)
def test_teams_that_do_not_fit(policies, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(policies=policies).validate()


def test_rllibs_own_policies_and_mapping():
    config = JointPPOConfig().environment("debug/random_observations")
    config.multi_agent(policies={"x", "y"}, policy_mapping_fn=lambda agent, episode, **kw: "x" if "0" in agent else "y")
    config.validate()
    assert [config.module_for_agent(f"agent_{i}") for i in range(3)] == ["x", "y", "y"]
    config.multi_agent(policies={"x"}, policy_mapping_fn=lambda agent, episode, **kw: "z")
    with pytest.raises(ValueError, match="maps agent 'agent_0' to module 'z', which is not in policies"):
        config.validate()
    config.multi_agent(policies={"x"}, policy_mapping_fn=lambda agent, episode, **kw: episode.id)
    with pytest.raises(ValueError, match="policy_mapping_fn.'agent_0', None. failed.*decide by the agent id alone"):
        config.validate()
    with pytest.raises(ValueError, match="already says which module"):
        JointPPOConfig().multi_agent(policies="shared", policy_mapping_fn=lambda *a, **k: "shared")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gae_bootstrap": "values"}, "gae_bootstrap='values'; needed: one of 'value', 'zero'; did you mean 'value'"),
        ({"standardize_advantages": True}, "standardize_advantages=True; needed: one of 'rollout'"),
        ({"standardize_advantages": "batch"}, "needed: one of 'rollout', 'minibatch'"),
        ({"grad_clip_by": "norms"}, "grad_clip_by.*norms.*must be one of.*'global_norm'"),
        ({"minibatch_size": 0}, "minibatch_size=0; needed: a positive number"),
        ({"max_minibatches_per_epoch": -1}, "max_minibatches_per_epoch=-1; needed: None"),
        ({"max_minibatches_per_epoch": 1.5}, "max_minibatches_per_epoch=1.5"),
        ({"num_epochs": 0}, "num_epochs=0; needed"),
        ({"clip_param": 0.0}, "clip_param=0.0; needed: a number > 0"),
        ({"value_clip_range": -1.0}, "value_clip_range=-1.0"),
        ({"vf_clip_param": "big"}, "vf_clip_param='big'"),
        ({"gamma": 1.5}, "gamma=1.5; needed: a number in"),
        ({"lambda_": -0.1}, "lambda_=-0.1"),
        ({"critic_lr": "fast"}, "critic_lr"),
        ({"critic_lr": [[5, 1e-3], [10, 1e-4]]}, "critic_lr"),
        ({"critic_lr": float("nan")}, "critic_lr=nan; needed: finite"),
        ({"cross_agent_losses": {"x": 3}}, "cross_agent_losses\\['x'\\] is 3; needed: a CrossAgentLoss, or a function"),
        ({"cross_agent_losses": {"x": RedundancyPenalty}}, "is the class RedundancyPenalty; give an object"),
        ({"cross_agent_losses": {"total": RedundancyPenalty()}}, "cannot be called 'total'"),
        ({"cross_agent_losses": {"a/b": RedundancyPenalty()}}, "cannot be called 'a/b'"),
        ({"cross_agent_coeffs": {"x": 1.0}}, "cross_agent_coeffs has 'x', cross_agent_losses has"),
        (
            {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundance": 1.0}},
            "did you mean 'redundancy'",
        ),
        (
            {"cross_agent_losses": {"r": RedundancyPenalty()}, "cross_agent_coeffs": {"r": float("inf")}},
            "needed: finite numbers",
        ),
    ],
)
def test_values_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**options).validate()


# ------------------------------------------------------------------------------------------ not served

OTHER_VALUES = {
    "use_critic": False, "use_gae": False, "use_kl_loss": True, "torch_skip_nan_gradients": True,
    "restart_failed_sub_environments": True, "framework_str": "tf2",
    "enable_rl_module_and_learner": False, "enable_env_runner_and_connector_v2": False, "clip_rewards": True,
    "_is_atari": True, "_use_msgpack_checkpoints": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*NOT_SERVED, *OTHER_VALUES}))
def test_a_setting_that_is_not_served_is_an_early_error(name):
    config = tiny_config()
    setattr(config, name, OTHER_VALUES[name])
    with pytest.raises(ValueError, match=f"{name}=.* is not served: .* Set {name}="):
        config.validate()


def test_several_learners_do_not_compile():
    config = tiny_config().framework(torch_compile_learner=True)
    config.learners(num_learners=1).copy().validate()
    with pytest.raises(ValueError, match="torch_compile_learner=True with num_learners=2: .* Set torch_compile"):
        config.learners(num_learners=2).validate()


class Watches(RLlibCallback):
    def on_episode_end(self, **kwargs):
        pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda c: c.env_runners(sampling="episodes"), "sampling='episodes'"),
        (lambda c: c.env_runners(batch_mode="complete_episodes"), "batch_mode='complete_episodes'"),
        (lambda c: c.env_runners(env_runner_cls=MultiAgentEnvRunner), "env_runner_cls=MultiAgentEnvRunner"),
        (lambda c: c.env_runners(env_to_module_connector=flatten), "env_to_module_connector is set"),
        (lambda c: c.env_runners(module_to_env_connector=lambda *args: Decides()), "module_to_env_connector is set"),
        (lambda c: c.learners(learner_connector=lambda *args: PaysByStep()), "learner_connector is set"),
        (lambda c: c.callbacks(Watches), "Watches overrides on_episode_end"),
        (lambda c: c.callbacks([RLlibCallback, Watches]), "Watches overrides on_episode_end"),
        (lambda c: c.callbacks(on_episode_step=lambda **kw: None), "the callback on_episode_step is set"),
        (lambda c: c.callbacks(on_episode_created=lambda **kw: None), "the callback on_episode_created is set"),
    ],
)
def test_what_only_episodes_can_serve_is_sampled_by_them(change, reason, caplog):
    config = tiny_config()
    change(config)
    with caplog.at_level("INFO", logger="thrust_rllib"):
        config.validate()
    own = MultiAgentEnvRunner if reason.startswith("env_runner_cls") else JointEpisodeRunner
    assert config.samples_episodes and config.env_runner_cls is own
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("sampling by")]
    assert told == [f"sampling by episodes ({own.__name__}): {reason}"] == [config.door]
    if reason != "sampling='episodes'":
        config = tiny_config(runners={"sampling": "arrays"})
        change(config)
        with pytest.raises(
            ValueError, match=f"sampling='arrays' cannot serve this: {reason}.*Leave sampling at 'auto'"
        ):
            config.validate()


def flatten(env, spaces, device):
    return FlattenObservations(multi_agent=True)


def test_an_unknown_way_to_sample():
    with pytest.raises(ValueError, match="sampling='episode'; needed: one of .*did you mean 'episodes'"):
        tiny_config(runners={"sampling": "episode"}).validate()


@pytest.mark.parametrize("option, value", [("episode_lookback_horizon", 5), ("episodes_to_numpy", False)])
def test_what_only_episodes_read_is_an_early_error_with_arrays(option, value):
    with pytest.raises(ValueError, match=f"{option}={value} would be ignored: .*set .env_runners.sampling='episodes'"):
        tiny_config(runners={option: value}).validate()
    tiny_config(runners={option: value, "sampling": "episodes"}).validate()


@pytest.mark.parametrize(
    "options",
    [
        {"agent_0": {"minibatch_size": 8}},
        {"agent_0": {"num_epochs": 9}},
        {"agent_0": {"standardize_advantages": False}},
        {"agent_0": {"iterate_all_minibatches": True}},
        {"agent_0": {"gae_bootstrap": "zero"}},
        {"agent_0": {"grad_clip_by": "value"}},
        {"agent_0": {"cross_agent_coeffs": {}}},
    ],
    ids=str,
)
def test_an_option_of_the_whole_team_cannot_be_set_for_one_module(options):
    (name,) = options["agent_0"]
    with pytest.raises(ValueError, match=f"algorithm_config_overrides_per_module.*'agent_0'.*'{name}'.*whole team"):
        tiny_config(overrides=options).validate()


@pytest.mark.parametrize("whole, own", [(None, 1e-3), (1e-3, None)])
def test_a_critic_optimizer_for_some_modules_only_is_an_early_error(whole, own):
    config = tiny_config(critic_lr=whole, overrides={"agent_0": {"critic_lr": own}})
    with pytest.raises(ValueError, match="of 'agent_0'.*critic_lr.*every module"):
        config.validate()


def test_critic_rates_may_differ_between_modules():
    config = tiny_config(critic_lr=1e-3, overrides={"agent_0": {"critic_lr": 1e-2}})
    config.validate()
    assert [config.get_config_for_module(m).critic_lr for m in ("agent_0", "agent_1")] == [1e-2, 1e-3]


def test_an_override_for_an_unknown_module():
    with pytest.raises(ValueError, match="names module 'agent_O'; the modules are .*did you mean"):
        tiny_config(overrides={"agent_O": {"lr": 1e-3}}).validate()


def test_a_bad_value_for_one_module():
    with pytest.raises(ValueError, match="'agent_1'.*clip_param=-1"):
        tiny_config(overrides={"agent_1": {"clip_param": -1}}).validate()


def test_observation_spaces_without_an_encoding():
    config = declared_config([box(), gym.spaces.Text(4)], [discrete()] * 2)
    with pytest.raises(TypeError, match="a1.*Text"):
        config.validate()
