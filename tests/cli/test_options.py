import math
import socket

import pytest

from thrust_rllib import AuxiliaryTarget, Constraint, GRUModule, JointPPOConfig, LSTMModule, MLPModule
from thrust_rllib.command_line.options import TrainOptions, build_config, choose_limit, parse_pairs, parse_value
from thrust_rllib.command_line.training_progress import Limit
from thrust_rllib.command_line.training_run import start_ray
from thrust_rllib.recipes import recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1e-3", 0.001), ("true", True), ("True", True), ("null", None), ("None", None), ("inf", math.inf),
        ("[[0, 1], [5, 0.1]]", [[0, 1], [5, 0.1]]), ("(1, 2)", (1, 2)), ('{"a": 1}', {"a": 1}), ("team", "team"),
        ("'3'", "3"), ("", ""),
    ],
)  # fmt: skip
def test_values(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_pairs_split_at_the_first_equals_sign():
    assert parse_pairs("--set", ["a=1", "b = x=y"]) == {"a": 1, "b": "x=y"}


def test_several_learners_take_their_batches_together():
    config = build_config(TrainOptions("climbing", learners=3, batch=64, minibatch=32, iterations=10, seed=3))
    assert config.num_learners == 3 and config.total_train_batch_size == 192
    assert config.lr == recipe(JointPPOConfig(), 1920).lr


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = build_config(TrainOptions("climbing", iterations=1, seed=3))
    for prefix in ("", "ray://"):
        with pytest.raises(ConnectionError, match=f"no cluster answers at {prefix}{address}.*ray start --head"):
            start_ray(config, address=prefix + address)


def asked_of_ray(monkeypatch):
    """What `ray.init` will have been given."""
    asked = {}
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: asked.update(options))
    return asked


def test_ray_is_started_with_what_all_processes_need(monkeypatch):
    asked = asked_of_ray(monkeypatch)
    settings = ("num_cpus_per_learner=8", "num_cpus_per_env_runner=0.5")
    start_ray(build_config(TrainOptions("climbing", runners=3, learners=2, iterations=10, settings=settings)))
    assert asked["num_cpus"] >= 1 + 2 * 8 + 2


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_is_joined_and_no_ray_started(monkeypatch, address):
    asked = asked_of_ray(monkeypatch)
    start_ray(build_config(TrainOptions("climbing", runners=2, learners=2, iterations=10, seed=3)), address=address)
    assert asked["address"] == (address or "local")
    assert ("num_cpus" in asked) == (address is None)  # a cluster has what it has
    assert address or asked["num_cpus"] >= 5


def test_limit():
    assert choose_limit(None, None, None) == Limit("iterations", 100)
    assert choose_limit(None, 5000, None) == Limit("steps", 5000)
    assert choose_limit(None, None, 0.5) == Limit("minutes", 0.5)


@pytest.mark.parametrize(
    "given, total", [({"steps": 5000}, 5000), ({"iterations": 3, "batch": 64}, 192), ({"minutes": 1.0}, None)]
)
def test_learning_rate_falls_over_the_length_of_the_run(given, total):
    config = build_config(TrainOptions("climbing", seed=3, minibatch=32, **given))
    assert config.lr == recipe(JointPPOConfig(), total).lr


@pytest.mark.parametrize(
    "settings, lr",
    [
        (["train_batch_size_per_learner=8192"], [[0, 1e-3], [819_200, 0.0]]),
        (["train_batch_size_per_learner=8192", "lr=0.5"], 0.5),
        (["train_batch_size_per_learner=8192", "lr=[[0, 0.5], [10, 0.1]]"], [[0, 0.5], [10, 0.1]]),
    ],
)
def test_the_length_of_the_run_is_known_after_set(settings, lr):
    assert build_config(TrainOptions("climbing", seed=3, batch=64, iterations=100, settings=settings)).lr == lr


def test_lr_stays_what_was_given_whatever_the_length():
    assert build_config(TrainOptions("climbing", seed=3, iterations=100, lr=0.5)).lr == 0.5


def test_options_that_are_not_given_have_the_recipes_values():
    config, expected = build_config(TrainOptions("climbing", minutes=1, seed=3)), recipe(JointPPOConfig())
    for name in ("lr", "gamma", "iterate_all_minibatches", "num_envs_per_env_runner", "entropy_coeff", "num_epochs"):
        assert getattr(config, name) == getattr(expected, name)
    assert config.seed == 3 and config.cross_agent_losses == {}


def test_options_arrive():
    config = build_config(
        TrainOptions(
            "bucket_brigade", env_config=["scenario=minimal_specialization", "num_agents=3"], runners=2,
            envs_per_runner=8, lr=1e-3, critic_lr=2e-3, gamma=0.9, lambda_=0.8, entropy=0.02, batch=512, minibatch=128,
            epochs=2, normalize_observations=True, redundancy=0.1, freeze=["agent_1"], eval_episodes=7,
            settings=["clip_param=0.1", "iterate_all_minibatches=false", "num_epochs=3"],
        )
    )  # fmt: skip
    assert config.env_config == {"scenario": "minimal_specialization", "num_agents": 3}
    assert (config.num_env_runners, config.num_envs_per_env_runner) == (2, 8)
    assert (config.lr, config.critic_lr, config.gamma, config.lambda_) == (1e-3, 2e-3, 0.9, 0.8)
    assert (config.entropy_coeff, config.train_batch_size_per_learner, config.minibatch_size) == (0.02, 512, 128)
    assert config.normalize_observations is True and config.cross_agent_coeffs == {"redundancy": 0.1}
    assert config.policies_to_train == ["agent_0", "agent_2"] and config.evaluation_duration == 7
    # --set has the last word
    assert (config.clip_param, config.iterate_all_minibatches, config.num_epochs) == (0.1, False, 3)


def modules_of(config):
    """{module: its class, and what it is configured with}."""
    codecs = config.team_codec().modules
    spaces = {module_id: (codec.encoder.encoded_space, codec.action_space) for module_id, codec in codecs.items()}
    specs = config.get_multi_rl_module_spec(spaces=spaces).rl_module_specs
    return {module_id: (spec.module_class, dict(spec.model_config)) for module_id, spec in specs.items()}


def test_constraints_and_targets_are_given_as_json():
    texts = [
        "critic=central",
        'critic_config={"fcnet_hiddens": [8]}',
        'constraints=[{"name": "collisions", "limit": 0.1, "mechanism": "pid", "kp": 1}]',
        'auxiliary_targets=[{"name": "covered", "weight": 0.5}]',
    ]
    config = build_config(TrainOptions("spread", seed=3, settings=texts))
    assert config.critic_config == {"fcnet_hiddens": [8]}
    assert config.constraints == (Constraint("collisions", 0.1, "pid", kp=1.0),)
    assert config.auxiliary_targets == (AuxiliaryTarget("covered", weight=0.5),)
    with pytest.raises(ValueError, match="has no 'limt'.*did you mean 'limit'"):
        build_config(TrainOptions("spread", seed=3, settings=['constraints=[{"name": "collisions", "limt": 0.1}]']))


@pytest.mark.parametrize(
    "cell, model, kind, expected",
    [
        ("lstm", ["cell_size=128", "max_seq_len=32", "fcnet_hiddens=[64, 32]"], LSTMModule,
         {"cell": "lstm", "cell_size": 128, "max_seq_len": 32, "fcnet_hiddens": [64, 32]}),
        ("gru", [], GRUModule, {"cell": "gru"}),
        (None, ["cell=gru", "vf_share_layers=false"], GRUModule, {"cell": "gru", "vf_share_layers": False}),
        (None, ["use_lstm=true", "lstm_cell_size=8"], LSTMModule, {"use_lstm": True, "lstm_cell_size": 8}),
        (None, ["fcnet_hiddens=[8]", "fcnet_activation=relu"], MLPModule,
         {"fcnet_hiddens": [8], "fcnet_activation": "relu"}),
        (None, [], MLPModule, {}),
    ],
)  # fmt: skip
def test_networks_are_chosen(cell, model, kind, expected):
    modules = modules_of(build_config(TrainOptions("climbing", seed=3, cell=cell, model=model)))
    assert list(modules) == ["agent_0", "agent_1"]
    for found, model_config in modules.values():
        assert found is kind
        assert expected.items() <= model_config.items()


def test_a_cell_that_is_named_twice_is_an_error():
    with pytest.raises(ValueError, match="--cell lstm and --model cell=gru: give one of them"):
        build_config(TrainOptions("climbing", cell="lstm", model=["cell=gru"]))


def test_a_seed_is_drawn_where_none_is_given():
    seeds = {build_config(TrainOptions("climbing")).seed for _ in range(3)}
    assert len(seeds) == 3 and all(isinstance(seed, int) for seed in seeds)
