"""`load_team` and `TrainedTeam.act`: the actions of `play_episodes` and of `algo.evaluate()`, one step at a time."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.general.runs import EPISODES, Lives
from tests.general.test_frame_stacking import frames
from tests.recurrent.replay import gru_with_two_memories, lstm, rllibs_lstm
from tests.support import Declared, box, declared_config, tiny_config
from thrust_rllib import evaluation, load_team
from thrust_rllib.envs import make_joint_env
from thrust_rllib.evaluation import play_episodes, seeds_for

NORMALIZED = {"normalize_observations": True}
RLLIBS_MLP = RLModuleSpec(DefaultPPOTorchRLModule, model_config=DefaultModelConfig(fcnet_hiddens=[8]))


def with_modules(config, spec):
    return config.rl_module(rl_module_spec=spec)


TEAMS = {
    "own networks, normalised": lambda: tiny_config("debug/random_observations", runners=NORMALIZED),
    "shared module": lambda: tiny_config("bucket_brigade", policies="shared", runners=NORMALIZED),
    "Box actions": lambda: tiny_config("debug/match_target", runners=NORMALIZED),
    "MultiDiscrete actions": lambda: tiny_config("debug/multi_discrete"),
    "spaces of many kinds": lambda: tiny_config("debug/mixed_spaces", runners=NORMALIZED),
    "Dict, Tuple and image observations": lambda: tiny_config(
        "debug/observation_kinds",
        {"kinds": ["discrete", "multi_discrete", "dict", "tuple", "multi_binary"]},
    ),
    "action masks": lambda: tiny_config("debug/masked_actions"),
    "LSTM": lambda: with_modules(tiny_config("recall", policies="shared", runners=NORMALIZED), lstm(4)),
    "GRU, a critic with a memory": lambda: with_modules(tiny_config("relay"), gru_with_two_memories(4)),
    "RLlib's module": lambda: with_modules(tiny_config("debug/random_observations"), RLLIBS_MLP),
    "RLlib's LSTM": lambda: with_modules(tiny_config("recall"), rllibs_lstm(4)),
    "agents that come and go": lambda: with_modules(tiny_config(Lives, policies="shared", runners=NORMALIZED), lstm(4)),
    "turns, sampled by episodes": lambda: tiny_config("pettingzoo:tictactoe_v3"),
    "LSTM, sampled by episodes": lambda: with_modules(tiny_config("recall", runners=EPISODES | NORMALIZED), lstm(4)),
}


@pytest.fixture(scope="module")
def checkpoints(ray_session, tmp_path_factory):
    """Checkpoints of the teams after one iteration, made when they are asked for."""
    made = {}

    def checkpoint(name):
        if name not in made:
            algo = TEAMS[name]().build_algo()
            algo.train()
            made[name] = algo.save_to_path(str(tmp_path_factory.mktemp("team")))
            algo.stop()
        return made[name]

    return checkpoint


def play(team, num_episodes, seed, explore):
    """The actions of a loop that a user would write: [{agent: action}]."""
    env = make_joint_env(team.config.env_spec, team.config.env_config)
    played = []
    for episode in range(num_episodes):
        observations = env.reset_joint(seeds_for(seed, 1)[0] if episode == 0 else None)
        state, ended, over = None, set(), False
        while not over:
            shown, before = copy.deepcopy(observations), pickle.dumps(state)
            actions, after = team.act(observations, state, explore)
            assert pickle.dumps(state) == before, "a state that was given is not written into"
            assert str(observations) == str(shown)
            state = after
            assert actions.keys() == observations.keys()
            assert all(env.action_spaces[agent].contains(action) for agent, action in actions.items())
            played.append(copy.deepcopy(actions))
            result = env.step_joint(actions)
            for flags in (result.terminated, result.truncated):
                flags = flags if isinstance(flags, dict) else dict.fromkeys(env.possible_agents, flags)
                ended |= {agent for agent, flag in flags.items() if flag}
            observations = {agent: seen for agent, seen in result.observations.items() if agent not in ended}
            over = not observations or bool(result.over)
    env.close()
    return played


def same(left, right):
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("explore", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", TEAMS)
def test_acts_to_the_bit_as_play_episodes(checkpoints, monkeypatch, name, explore):
    log = []

    def recorded(*args):
        env = make_vector_env(*args)
        step = env.step_joint

        def step_joint(actions):
            actions = copy.deepcopy(actions)
            result = step(actions)
            present = [True] * len(env.possible_agents) if result.present is None else result.present[:, 0]
            by_agent = dict(zip(env.possible_agents, actions, strict=True)) if env.stacked else actions
            log.append({a: by_agent[a][0] for a, acts in zip(env.possible_agents, present, strict=True) if acts})
            return result

        env.step_joint = step_joint
        return env

    make_vector_env = evaluation.make_vector_env
    monkeypatch.setattr(evaluation, "make_vector_env", recorded)
    team = load_team(checkpoints(name), seed=7)
    evaluated = play_episodes(team, 3, seed=7, explore=explore, num_envs=1)
    steps = play(team, 3, 7, explore)
    assert len(steps) == len(log) == evaluated.lengths.sum()
    for mine, other in zip(steps, log, strict=True):
        assert mine.keys() == other.keys()
        assert all(same(mine[agent], other[agent]) for agent in mine), (mine, other)


def test_sampled_actions_depend_on_the_seed(checkpoints):
    path = checkpoints("own networks, normalised")
    one, two, other = (play(load_team(path, seed=seed), 1, 0, True) for seed in (1, 1, 2))
    assert one == two != other


# --- algo.evaluate() ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["arrays", "episodes"])
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_acts_as_the_evaluation_of_the_algorithm(build, tmp_path, monkeypatch, sampling, model):
    config = tiny_config(Lives, policies="shared", num_envs=1, runners=NORMALIZED | {"sampling": sampling})
    config.evaluation(evaluation_interval=100, evaluation_duration=3, evaluation_config={"explore": False})
    algo = build(config if model == "mlp" else with_modules(config, lstm(4)))
    algo.train()
    journal = []
    reset, step = Lives.reset, Lives.step

    def note_reset(self, **kwargs):
        observations, infos = reset(self, **kwargs)
        self.seen, self.first = observations, True
        return observations, infos

    def note_step(self, actions):
        journal.append((self.first, self.seen, dict(actions)))
        observations, *rest = step(self, actions)
        self.seen, self.first = observations, False
        return observations, *rest

    monkeypatch.setattr(Lives, "reset", note_reset)
    monkeypatch.setattr(Lives, "step", note_step)
    algo.evaluate()
    team = load_team(algo.save_to_path(str(tmp_path)))
    assert len(journal) >= 18 and any(len(actions) == 2 for _, _, actions in journal)
    state = None
    for first, observations, actions in journal:
        mine, state = team.act({agent: observations[agent] for agent in actions}, None if first else state)
        assert mine == actions


@pytest.mark.parametrize("sampling", ["arrays", "episodes"])
def test_numbers_are_those_of_the_evaluation(build, tmp_path, monkeypatch, sampling):
    """Box actions are brought into the space, in units of its bounds, as the evaluation brings them there."""
    spaces = [box(3)] * 2, [gym.spaces.Box(np.float32([-2, 0]), np.float32([3, 0.1])), gym.spaces.MultiDiscrete([3, 2])]
    config = declared_config(*spaces, num_envs=1, runners=NORMALIZED | {"sampling": sampling}, lr=0.1)
    config.evaluation(evaluation_interval=100, evaluation_duration=3, evaluation_config={"explore": False})
    algo = build(config)
    algo.train()
    journal, see, step = [], Declared._see, Declared.step_joint

    def note_see(self):
        self.seen = see(self)
        return self.seen

    def note_step(self, actions):
        journal.append((self.seen, copy.deepcopy(dict(actions))))
        return step(self, actions)

    monkeypatch.setattr(Declared, "_see", note_see)
    monkeypatch.setattr(Declared, "step_joint", note_step)
    algo.evaluate()
    team = load_team(algo.save_to_path(str(tmp_path)))
    numbers = np.array([actions["a0"] for _, actions in journal])
    assert len(numbers) == 15 and np.ptp(numbers[:, 0]) > 0.1 and np.ptp(numbers[:, 1]) < 0.11
    for observations, actions in journal:
        mine, _ = team.act(observations)
        np.testing.assert_allclose(mine["a0"], actions["a0"], rtol=1e-5, atol=1e-6)
        assert same(mine["a1"], actions["a1"])


# --- without Ray, in another process ------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import ray
import thrust_rllib
team = thrust_rllib.load_team(sys.argv[1])
env = thrust_rllib.envs.make_joint_env(team.config.env_spec, team.config.env_config)
observations, state, actions = env.reset_joint(3), None, []
for _ in range(4):
    chosen, state = team.act(observations, state)
    actions.append({agent: int(action) for agent, action in chosen.items()})
    observations = env.step_joint(chosen).observations
assert not ray.is_initialized()
print(json.dumps(actions))
"""


@pytest.mark.timeout(120)
def test_plays_in_a_process_without_ray(checkpoints):
    path = checkpoints("LSTM")
    found = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=True)
    actions = json.loads(found.stdout.splitlines()[-1])
    team = load_team(path)
    env = make_joint_env(team.config.env_spec, team.config.env_config)
    observations, state = env.reset_joint(3), None
    for theirs in actions:
        chosen, state = team.act(observations, state)
        assert chosen == theirs
        observations = env.step_joint(chosen).observations
    assert len(actions) == 4


# --- states -------------------------------------------------------------------------------------------------------


def first_observations(team):
    return make_joint_env(team.config.env_spec, team.config.env_config).reset_joint(0)


def test_a_state_belongs_to_its_game(checkpoints):
    """Two games side by side are played as one after the other."""
    team = load_team(checkpoints("LSTM"))
    seen = first_observations(team)
    other = {agent: 1.0 - observation for agent, observation in seen.items()}
    _, one = team.act(seen)
    _, two = team.act(other)
    assert any((one[agent] != two[agent]).any() for agent in one)
    _, after = team.act(seen, one)
    assert all(same(after[agent], team.act(seen, team.act(seen)[1])[1][agent]) for agent in after)


def test_who_is_absent_keeps_its_memory(checkpoints):
    team = load_team(checkpoints("agents that come and go"))
    seen = first_observations(team)
    _, state = team.act(seen)
    assert state.keys() == {"whole", "early", "late"} and not state["late"].any() and state["early"].any()
    chosen, after = team.act({"whole": seen["whole"]}, state)
    assert chosen.keys() == {"whole"}
    assert same(after["early"], state["early"]) and not same(after["whole"], state["whole"])
    assert team.act({}, after)[0] == {}


def test_a_team_without_memory_has_an_empty_state(checkpoints):
    team = load_team(checkpoints("shared module"))
    seen = first_observations(team)
    actions, state = team.act(seen)
    again, after = team.act(seen, state)
    assert state == after == {} and all(same(again[agent], actions[agent]) for agent in seen)


# --- bad input ----------------------------------------------------------------------------------------------------


def test_observations_that_do_not_fit_are_errors(checkpoints):
    team = load_team(checkpoints("own networks, normalised"))
    seen = first_observations(team)
    agent = next(iter(seen))
    for wrong, error, message in [
        ({agent[:-1]: seen[agent]}, ValueError, f"names agent '{agent[:-1]}'; did you mean 'agent_"),
        ({agent: seen[agent][:2]}, ValueError, rf"of agent '{agent}' has shape \(2,\); its observation space declares"),
        ({agent: "left"}, TypeError, f"of agent '{agent}' is a str that makes no array of numbers"),
        ({agent: np.full_like(seen[agent], np.nan)}, ValueError, rf"of agent '{agent}' is not in .* is nan"),
        ({agent: np.full_like(seen[agent], 9.0)}, ValueError, rf"of agent '{agent}' is not in .* is 9.0, outside"),
        (list(seen.values()), TypeError, "observations is a list; needed: a dict with an entry per agent"),
    ]:
        with pytest.raises(error, match=message):
            team.act(wrong)
    assert team.act({agent: seen[agent]})[0].keys() == {agent}


def test_a_mask_that_allows_nothing_is_an_error(checkpoints):
    team = load_team(checkpoints("action masks"))
    seen = copy.deepcopy(first_observations(team))
    agent = list(seen)[-1]
    seen[agent]["action_mask"][:] = 0
    with pytest.raises(ValueError, match=rf"the action mask of agent '{agent}' allows no action: \[0, 0, 0, 0\]"):
        team.act(seen)


def test_the_state_of_another_team_is_an_error(checkpoints):
    team, other = load_team(checkpoints("LSTM")), load_team(checkpoints("GRU, a critic with a memory"))
    seen = first_observations(team)
    _, state = team.act(seen)
    agent = next(iter(state))
    with pytest.raises(ValueError, match="state names agent '(speaker|listener)'"):
        team.act(seen, other.act(first_observations(other))[1])
    with pytest.raises(ValueError, match=f"state has no entry for agent '{agent}'; needed: what act"):
        team.act(seen, {})
    with pytest.raises(ValueError, match=rf"state of agent '{agent}' has shape \(3,\) .* remembers \(8,\) numbers"):
        team.act(seen, {**state, agent: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=f"state of agent '{agent}' has numbers that are not finite"):
        team.act(seen, {**state, agent: np.full_like(state[agent], np.nan)})
    with pytest.raises(TypeError, match="state is a tuple; needed: a dict"):
        team.act(seen, ({}, state))
    with pytest.raises(ValueError, match=f"state names agent '{agent}'"):
        load_team(checkpoints("shared module")).act({}, {agent: state[agent]})


def test_connector_pieces_of_ones_own_are_an_error(build, tmp_path):
    algo = build(frames())
    team = load_team(algo.save_to_path(str(tmp_path)))
    with pytest.raises(ValueError, match="connector pieces of its own"):
        team.act({})


def test_a_folder_that_is_no_checkpoint_is_an_error(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="runs does not exist; needed: a folder that save_to_path"):
        load_team(tmp_path / "runs")
    with pytest.raises(ValueError, match=r"is no checkpoint of an algorithm: it has no rllib_checkpoint\.json"):
        load_team(tmp_path)


@pytest.mark.parametrize(
    "inside", ["run/checkpoints/iteration_000002", "checkpoints/iteration_000002", "trial/checkpoint_000001"]
)
def test_the_folder_of_a_run_or_a_trial_names_its_checkpoint(checkpoints, tmp_path, inside):
    path = tmp_path / inside
    shutil.copytree(checkpoints("action masks"), path)
    for folder in list(path.parents)[: inside.count("/")]:
        with pytest.raises(ValueError, match=f"{folder} is no checkpoint, but has 1 inside; give one: {path}$"):
            load_team(folder)
    assert load_team(path).iteration == 1


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_a_seed_that_is_no_whole_number_is_an_error(checkpoints, seed):
    with pytest.raises(ValueError, match=f"seed is {seed}; needed: a whole number ≥ 0"):
        load_team(checkpoints("action masks"), seed=seed).act({})
