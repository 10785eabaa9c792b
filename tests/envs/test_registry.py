import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from pettingzoo.classic import tictactoe_v3

from tests.envs.helpers import Pair
from thrust_rllib import envs
from thrust_rllib.envs import (
    AECJointEnv,
    BucketBrigade,
    PettingZooJointEnv,
    SyncVectorJointEnv,
    list_envs,
    make_joint_env,
    make_vector_env,
    register_joint_env,
    resolve_env,
)


def make_pair(length=4):
    return Pair(length)


def make_brigades(num_envs, scenario="easy"):
    return BucketBrigade(num_envs, scenario)


def old_style(config):
    return Pair(config["length"])


@pytest.mark.parametrize(
    ("env", "config", "kind", "count"),
    [
        (Pair, {"length": 3}, SyncVectorJointEnv, 2),
        (make_pair, {"length": 3}, SyncVectorJointEnv, 2),
        (old_style, {"length": 3}, SyncVectorJointEnv, 2),
        (lambda: Pair(), {}, SyncVectorJointEnv, 2),
        (BucketBrigade, {"scenario": "hard"}, BucketBrigade, 4),
        (make_brigades, {"scenario": "hard"}, BucketBrigade, 4),
        ("bucket_brigade", {"num_agents": 2}, BucketBrigade, 2),
        ("tests.envs.helpers:Pair", {}, SyncVectorJointEnv, 2),
        ("tests.envs.test_registry:make_brigades", {}, BucketBrigade, 4),
        ("CartPole-v1", {"sutton_barto_reward": True}, SyncVectorJointEnv, 1),
        ("gymnasium:CartPole-v1", {}, SyncVectorJointEnv, 1),
        (lambda: gym.make("CartPole-v1"), {}, SyncVectorJointEnv, 1),
        ("pettingzoo:mpe2.simple_spread_v3", {"N": 2}, SyncVectorJointEnv, 2),
        ("pettingzoo:simple_spread_v3", {}, SyncVectorJointEnv, 3),
        ("pettingzoo:tictactoe_v3", {}, SyncVectorJointEnv, 2),
        ("pettingzoo:classic.tictactoe_v3", {"screen_height": 500}, SyncVectorJointEnv, 2),
        (tictactoe_v3.env, {}, SyncVectorJointEnv, 2),
        (tictactoe_v3.raw_env, {}, SyncVectorJointEnv, 2),
        ("gymnasium:lbforaging:Foraging-8x8-3p-2f-coop-v3", {"sight": 4}, SyncVectorJointEnv, 3),
        ("lbforaging:Foraging-8x8-2p-2f-coop-v3", {}, SyncVectorJointEnv, 2),
        ("gymnasium:rware:rware-tiny-4ag-v2", {"max_steps": 9}, SyncVectorJointEnv, 4),
    ],
)
def test_everything_that_names_an_environment(env, config, kind, count):
    vector = make_vector_env(env, config, num_envs=3)
    assert type(vector) is kind and vector.num_envs == 3 and len(vector.possible_agents) == count
    again = make_vector_env(resolve_env(env), config, num_envs=1)
    assert again.possible_agents == vector.possible_agents
    assert make_joint_env(env, config).possible_agents == vector.possible_agents
    vector.reset_joint([1, 2, 3])
    vector.close()


def test_what_a_pettingzoo_module_offers_comes_as_it_is():
    assert type(make_joint_env("pettingzoo:simple_spread_v3")) is PettingZooJointEnv  # it has turns as well
    assert type(make_joint_env("pettingzoo:tictactoe_v3")) is AECJointEnv  # it has nothing else


def test_list_envs():
    names = list_envs()
    assert {"bucket_brigade", "climbing", "penalty", "two_step_game", "debug/alignment"} <= set(names)
    assert list(names) == sorted(names) and all(names.values())
    names.clear()
    assert list_envs()


def test_register(monkeypatch):
    monkeypatch.setattr(envs.registry, "_registered", {})
    register_joint_env("my/pair", make_pair, "two agents")
    register_joint_env("my/pair", make_pair, "two agents")  # the same again is no conflict
    assert list_envs()["my/pair"] == "two agents"
    assert make_vector_env("my/pair", {"length": 2}, 2).possible_agents == ["a0", "a1"]
    with pytest.raises(ValueError, match="'my/pair' is taken"):
        register_joint_env("my/pair", Pair)
    with pytest.raises(ValueError, match="'climbing' is taken"):
        register_joint_env("climbing", Pair)
    with pytest.raises(ValueError, match="has a colon"):
        register_joint_env("my:pair", Pair)
    with pytest.raises(ValueError, match="unknown environment 'my/pear'; did you mean 'my/pair'"):
        make_vector_env("my/pear")


def test_names_registered_with_ray(monkeypatch):
    from ray.tune import registry

    # A registry of this test's own, so that what it stores reaches no other test.
    monkeypatch.setattr(registry, "_global_registry", registry._Registry(prefix="test_of_envs"))
    registry.register_env("pair_of_ray", lambda config: Pair(config["length"]))
    assert make_vector_env("pair_of_ray", {"length": 2}, 2).possible_agents == ["a0", "a1"]
    registry.register_env("climbing", lambda config: Pair())  # the built-in one comes first
    assert make_vector_env("climbing").possible_agents == ["agent_0", "agent_1"]


class Forgot:
    def __init__(self):
        self.possible_agents = ["a"]


@pytest.mark.parametrize(
    ("env", "config", "error", "says"),
    [
        ("bucket_brigad", {}, ValueError, r"did you mean 'bucket_brigade'\?.*list_envs"),
        ("xyzzy", {}, ValueError, r"unknown environment 'xyzzy'\. Built-in and registered names: \['bucket_brigade'"),
        ("CartPol-v1", {}, ValueError, r"unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("gymnasium:CartPol-v1", {}, ValueError, r"unknown Gymnasium id.*did you mean 'CartPole-v1'"),
        ("pettingzoo:nothing_v0", {}, ValueError, "none of .* can be imported"),
        ("pettingzoo:tictactoe_v2", {}, ValueError, r"can be imported; did you mean 'tictactoe_v3'"),
        ("pettingzoo:simple_spred_v3", {}, ValueError, r"can be imported; did you mean 'simple_spread_v3'"),
        ("pettingzoo:collections.abc", {}, ValueError, "collections.abc has neither parallel_env nor env"),
        ("no.such.module:Env", {}, ValueError, "module 'no' is not installed or misspelt"),
        ("tests.envs.helpers:Pear", {}, ValueError, "has no 'Pear'; did you mean 'Pair'"),
        ("bucket_brigade", {"scenaro": "easy"}, ValueError, "setting 'scenaro'; did you mean 'scenario'"),
        ("bucket_brigade", {"num_envs": 3}, ValueError, "env_config of 'bucket_brigade' has num_envs"),
        (
            Pair,
            {"lenght": 3},
            ValueError,
            "env_config of 'Pair' has the unknown setting 'lenght'; did you mean 'length'",
        ),
        (make_pair, {"size": 3}, ValueError, r"unknown setting 'size'\. It takes \['length'\]"),
        (lambda size: Pair(), {}, ValueError, r"lacks \['size'\], which it needs"),
        (Forgot, {}, TypeError, "class Forgot, which is no known environment.*Derive it from thrust_rllib.JointEnv"),
        (lambda: Forgot(), {}, TypeError, "makes a Forgot; needed: a class derived from JointEnv"),
        (lambda: BucketBrigade(5), {}, ValueError, "has 5 environments, 2 were asked for"),
        (BucketBrigade(1), {}, TypeError, "env is an object of BucketBrigade; give the class"),
        (Pair(), {}, TypeError, "env is an object of Pair; give the class"),
        (3, {}, TypeError, "env is 3; needed"),
    ],
)
def test_errors(env, config, error, says):
    with pytest.raises(error, match=says):
        make_vector_env(env, config, 2)


def test_rllib_config_names_are_not_mistaken_for_settings():
    seen = []

    def creator(env_config):
        seen.append(env_config)
        return Pair()

    make_vector_env(creator, {"a": 1}, 2)
    assert seen == [{"a": 1}] * 2


def test_importing_the_package_loads_neither_ray_nor_pettingzoo_nor_torch():
    program = """
import sys
import thrust_rllib.envs as envs
import numpy as np
env = envs.make_vector_env("bucket_brigade", {}, 2)
env.reset_joint([0, 1])
envs.make_vector_env("CartPole-v1", {}, 2)
print(sorted({name.split(".")[0] for name in sys.modules} & {"ray", "pettingzoo", "torch"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "[]\n"


def test_public_names_all_load():
    for name in envs.__all__:
        assert getattr(envs, name) is not None
    assert set(dir(envs)) == set(envs.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = envs.nothing


def test_the_example_of_the_contract_runs():
    import textwrap

    text = envs.JointEnv.__doc__
    lines = [line.strip()[4:] for line in text[text.index(">>>") :].splitlines() if line.strip()[:3] in (">>>", "...")]
    names = {"JointEnv": envs.JointEnv, "JointStepResult": envs.JointStepResult, "gym": gym, "np": np}
    exec(textwrap.dedent("\n".join(lines)), names)
    env = make_vector_env(names["Echo"], {"length": 3}, 4)
    seen = env.reset_joint(range(4))
    for _ in range(7):
        result = env.step_joint(seen)
        assert (result.rewards == 1).all()
        seen = result.observations
