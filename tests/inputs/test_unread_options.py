"""Options that nothing reads are early errors; who plays whom comes in by every route."""

import pytest
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner

from tests.support import box, declared_config, discrete, tiny_config
from thrust_rllib import JointPPOConfig, JointPPOLearner, RedundancyPenalty


@pytest.mark.parametrize(
    "section, options, instead",
    [
        ("training", {"train_batch_size": 64}, "set train_batch_size_per_learner"),
        ("training", {"model": {"fcnet_hiddens": [7]}}, "rl_module"),
        ("training", {"optimizer": {"type": "sgd"}}, "configure_optimizers_for_module"),
        ("training", {"kl_target": 0.5}, "no KL term"),
        ("training", {"learner_class": PPOTorchLearner}, "derive yours from JointPPOLearner"),
        ("env_runners", {"observation_filter": "MeanStdFilter"}, "normalize_observations"),
        ("env_runners", {"gym_env_vectorize_mode": "async"}, "num_env_runners"),
        ("env_runners", {"compress_observations": True}, "as they are"),
        ("environment", {"action_mask_key": "legal"}, "action_mask"),
    ],
)
def test_an_option_that_would_be_ignored(section, options, instead):
    config = getattr(JointPPOConfig().environment("climbing"), section)(**options)
    with pytest.raises(ValueError, match=instead):
        config.validate()


@pytest.mark.parametrize(
    "options",
    [
        {"num_epochs": "abc"},
        {"num_epochs": True},
        {"gamma": None},
        {"lambda_": 1.5},
        {"vf_loss_coeff": "x"},
        {"vf_loss_coeff": -1.0},
        {"grad_clip": "abc"},
        {"lr": None},
        {"lr": [[0, 1e-3], [100, float("nan")]]},
        {"lr": [[0]]},
        {"entropy_coeff": "high"},
        {"critic_lr": [1e-3]},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind(options):
    ((name, _),) = options.items()
    with pytest.raises(ValueError, match=f"{name}=.*needed"):
        JointPPOConfig().environment("climbing").training(**options).validate()


def test_a_coupling_weight_of_the_wrong_kind():
    config = JointPPOConfig().environment("climbing")
    config.training(cross_agent_losses={"r": RedundancyPenalty()}, cross_agent_coeffs={"r": None})
    with pytest.raises(ValueError, match=r"cross_agent_coeffs\['r'\]=None; needed: finite numbers"):
        config.validate()


def test_an_agent_whose_name_no_module_can_have():
    config = declared_config([box()] * 2, [discrete()] * 2, agents=["team/a", "team/b"])
    with pytest.raises(ValueError, match=r"agent 'team/a' cannot give its name.*group"):
        config.validate()
    config.multi_agent(policies={"both": ["team/a", "team/b"]}).validate()


@pytest.mark.parametrize("name", ["compute_loss_for_module", "compute_losses", "compute_gradients", "apply_gradients"])
def test_a_learner_whose_override_would_not_be_called(name):
    learner_class = type("Mine", (JointPPOLearner,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=f"Mine overrides {name}"):
        tiny_config().training(learner_class=learner_class).validate()


def test_a_callback_of_the_evaluation_that_would_not_be_called():
    from ray.rllib.callbacks.callbacks import RLlibCallback

    class Ends(RLlibCallback):
        def on_episode_end(self, **kwargs):
            raise AssertionError("never called")

    config = (
        JointPPOConfig()
        .environment("climbing")
        .evaluation(evaluation_interval=1, evaluation_config={"callbacks_class": Ends})
    )
    config.validate()
    with pytest.raises(
        ValueError, match=r"own settings need episodes \(Ends overrides on_episode_end\).*sampling='epi"
    ):
        config.get_evaluation_config_object().validate()
    config.env_runners(sampling="episodes").validate()
    config.get_evaluation_config_object().validate()


def modules(config):
    config.validate()
    return {agent: config.module_for_agent(agent) for agent in ("agent_0", "agent_1")}


def test_who_plays_whom_in_a_dict():
    shared = JointPPOConfig().environment("climbing").update_from_dict({"policies": "shared"})
    assert modules(shared) == {"agent_0": "shared", "agent_1": "shared"}
    own = {"policies": {"p", "q"}, "policy_mapping_fn": lambda agent, *args, **kwargs: "pq"[int(agent[-1])]}
    config = JointPPOConfig().environment("climbing").update_from_dict(own)
    assert modules(config) == {"agent_0": "p", "agent_1": "q"} and list(config.policies) == ["p", "q"]


def test_a_whole_configuration_as_a_dict_keeps_its_team():
    groups = {"both": ["agent_0", "agent_1"]}
    first = JointPPOConfig().environment("climbing").multi_agent(policies=groups)
    first.validate()
    again = JointPPOConfig().update_from_dict(first.to_dict())
    assert modules(again) == {"agent_0": "both", "agent_1": "both"}


def test_a_module_that_plays_no_agent_is_named():
    config = JointPPOConfig().environment("climbing")
    config.multi_agent(policies={"p", "opponent"}, policy_mapping_fn=lambda agent, *args, **kwargs: "p")
    with pytest.raises(ValueError, match=r"modules \['opponent'\] play no agent"):
        config.validate()


def test_a_mapping_function_is_asked_once():
    calls = iter("pqpqpqpq")
    config = JointPPOConfig().environment("climbing")
    config.multi_agent(policies={"p", "q"}, policy_mapping_fn=lambda agent, *args, **kwargs: next(calls))
    assert modules(config) == modules(config) == {"agent_0": "p", "agent_1": "q"}
