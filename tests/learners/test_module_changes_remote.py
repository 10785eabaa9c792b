"""Changed teams and runners in other processes that Ray has started again; and states of other teams."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import ray
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import largest_difference, tiny_config
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.teams import AgentToModule

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(180)]

DEADLINE_S = 60
LSTM = {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [12], "max_seq_len": 8}


def plays(**others):
    """A mapping function: agents play themselves, but for some."""
    return lambda agent, *args, **kwargs: others.get(agent, agent)


def table_and_moments(runner):
    return runner.module_of, {m: float(x.count) for m, x in runner.normalizer.moments.items()}


def process_id(_):
    return os.getpid()


def start_again(groups):
    """Ends each group's only runner; returns when Ray has them up again, before anybody has called them in vain."""
    runners = [runner for group in groups for runner in group._worker_manager.actors().values()]
    before = ray.get([runner.apply.remote(process_id) for runner in runners])
    for runner in runners:
        ray.kill(runner, no_restart=False)
    deadline = time.monotonic() + DEADLINE_S
    for runner, old in zip(runners, before, strict=True):
        now = old
        while now == old:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            with contextlib.suppress(ray.exceptions.RayError):
                now = ray.get(runner.apply.remote(process_id))


@pytest.mark.slow_learners
def test_a_restart_that_nobody_noticed_loses_no_team(build):
    """Without a local runner: moments are kept beside the learner."""
    runners = {
        "sampling": "episodes",
        "normalize_observations": True,
        "num_env_runners": 1,
        "create_local_env_runner": False,
        "num_cpus_per_env_runner": 0.5,
    }
    config = tiny_config(model=LSTM, runners=runners)
    config.evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_num_env_runners=1)
    algo = build(config)
    groups = algo.env_runner_group, algo.eval_env_runner_group

    def own():
        return {m: float(x.count) for m, x in algo.env_to_module_connector[ObservationNormalizer][0].moments.items()}

    algo.train()
    algo.train()
    assert set(own().values()) == {128.0}, "each iteration adds to those before"
    algo.add_module("new", new_agent_to_module_mapping_fn=plays(agent_1="new"))
    assert own() == {"agent_0": 128.0, "agent_1": 128.0, "agent_2": 128.0, "new": 0.0}
    algo.train()
    start_again(groups)
    for group in groups:
        (answer,) = group.foreach_env_runner(table_and_moments)
        assert answer[0]["agent_1"] == "agent_1" and "new" not in answer[1], "it is as it was built"
    result = algo.train()
    assert result["env_runners"]["num_module_steps_sampled"]["new"] == 64
    assert "new" in result["evaluation"]["env_runners"]["module_episode_returns_mean"]
    learner = algo.learner_group.get_weights()
    for group in groups:
        ((table, moments),) = group.foreach_env_runner(table_and_moments)
        assert table == {"agent_0": "agent_0", "agent_1": "new", "agent_2": "agent_2"}
        assert moments["agent_1"] == 128.0 and moments["new"] > 0.0
        (weights,) = group.foreach_env_runner(lambda r: {m: r.module[m].get_state() for m in r.module.keys()})
        assert sorted(weights) == sorted(learner)
    (weights,) = groups[0].foreach_env_runner(lambda r: {m: r.module[m].get_state() for m in r.module.keys()})
    for module_id, state in weights.items():
        assert largest_difference(state, {name: learner[module_id][name] for name in state}) == 0.0
    assert own() == {"agent_0": 256.0, "agent_1": 128.0, "agent_2": 256.0, "new": 128.0}


@pytest.mark.slow_learners
@pytest.mark.parametrize("call", ["none", "add_module", "copy_module", "remove_module"])
def test_a_runner_that_is_back_samples_with_the_weights_and_moments_of_now(build, monkeypatch, call):
    """Without a notice of its restart it would sample with the weights of its seed, and without moments."""
    runners = {"num_env_runners": 1, "normalize_observations": True, "num_cpus_per_env_runner": 0.5}
    algo = build(tiny_config(runners=runners, lr=0.01))
    if call in ("copy_module", "remove_module"):
        algo.add_module("new")
    algo.train()
    algo.train()
    assert {n for m, n in moments_of(algo.env_runner).items() if m != "new"} == {128.0}
    start_again([algo.env_runner_group])
    calls = {
        "none": lambda: None,
        "add_module": lambda: algo.add_module("new"),
        "copy_module": lambda: algo.copy_module("agent_0", "new"),
        "remove_module": lambda: algo.remove_module("new"),
    }
    calls[call]()
    learner = algo.learner_group.get_weights()
    sample, sampled = algo._sample, []

    def watched():
        found = sample()
        sampled.extend(algo.env_runner_group.foreach_env_runner(weights_and_moments, local_env_runner=False))
        return found

    monkeypatch.setattr(algo, "_sample", watched)
    algo.train()
    ((weights, moments),) = sampled
    assert sorted(weights) == sorted(learner)
    for module_id, state in weights.items():
        assert largest_difference(state, {name: learner[module_id][name] for name in state}) == 0.0
    # It has let its own rollout of 64 rows in after it had sampled.
    waiting = {"add_module": {"new": 0.0}, "copy_module": {"new": 128.0}}.get(call, {})
    assert moments == dict.fromkeys(("agent_0", "agent_1", "agent_2"), 192.0) | waiting


def weights_and_moments(runner):
    return {m: runner.module[m].get_state() for m in runner.module.keys()}, moments_of(runner)


def moments_of(runner):
    return {m: float(x.count) for m, x in runner.normalizer.moments.items()}


def test_a_runner_that_is_up_to_date_resets_nothing(build):
    algo = build(tiny_config())
    algo.train()
    algo.add_module("new", new_agent_to_module_mapping_fn=plays(agent_1="new"))
    algo.train()
    runner = algo.env_runner
    assert not runner._needs_initial_reset and runner.team_number == 1
    assert not runner.change_team(algo._team_change) and not runner._needs_initial_reset
    algo.remove_module("agent_1")
    assert runner._needs_initial_reset and runner.team_number == 2


def test_a_checkpoint_with_other_modules_is_refused(build, tmp_path):
    config = tiny_config()
    algo, first = build(config), build(config)
    same = algo.save_to_path(str(tmp_path / "first"))
    algo.add_module("new", new_agent_to_module_mapping_fn=plays(agent_1="new"))
    algo.train()
    path = algo.save_to_path(str(tmp_path / "changed"))
    before = first.learner_group.get_weights()
    with pytest.raises(ValueError, match=r"has modules \['new'\].*from_checkpoint"):
        first.restore_from_path(path)
    assert largest_difference(first.learner_group.get_weights(), before) == 0.0
    first.restore_from_path(same)
    first.add_module("new", new_agent_to_module_mapping_fn=plays(agent_1="new"))
    first.restore_from_path(path)
    assert largest_difference(first.learner_group.get_weights(), algo.learner_group.get_weights()) == 0.0


def test_weights_that_are_set_reach_the_runners_at_once(build):
    """What RLlib's examples of self-play do in place of `copy_module`."""
    algo = build(tiny_config())
    algo.train()
    main = algo.get_module("agent_0")
    algo.add_module("snapshot", RLModuleSpec.from_module(main))
    assert largest_difference(algo.get_module("snapshot").get_state(), main.get_state()) > 0.0
    state = algo.learner_group.get_weights()["agent_0"]
    algo.set_state({"learner_group": {"learner": {"rl_module": {"snapshot": state}}}})
    assert largest_difference(algo.get_module("snapshot").get_state(), algo.get_module("agent_0").get_state()) == 0.0


def test_a_table_with_an_unknown_agent_is_told(build):
    algo = build(tiny_config())
    table = {"agent_0": "new", "agent_1": "agent_1", "agent_2": "agent_2"}
    with pytest.raises(
        ValueError, match=r"names agents \['agent_9'\].*Its agents: \['agent_0', 'agent_1', 'agent_2'\]"
    ):
        algo.add_module("new", new_agent_to_module_mapping_fn=AgentToModule({**table, "agent_9": "new"}))
    algo.add_module("new", new_agent_to_module_mapping_fn=AgentToModule(table))
    assert algo.config.policy_mapping_fn.table == table
