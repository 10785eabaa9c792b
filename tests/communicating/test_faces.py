"""What users meet: environments of other kinds whose agents hear each other, the command line, and mistakes."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest

from tests.cli.helpers import TINY, thrust_rllib
from tests.communicating.test_ratio import Played, wrong_ratio
from tests.communicating.world import GROUPS, HEADS, ONE, Meadow, team_config
from tests.general.doors import assert_same_batches
from thrust_rllib.envs import JointEnvMultiAgentEnv, JointEnvParallel
from thrust_rllib.rl_modules.module_choice import module_class_for


class Ring(gym.Env):
    """Tuple-style: four agents on a ring hear the next one, each ends by a flag of its own, agent i after step 4 + i.

    They see their number and how often those before them acted with 1. Links point at agents that have ended, too.
    """

    def __init__(self):
        one = gym.spaces.Dict({"links": gym.spaces.Box(0, 1, (4,)), "own": gym.spaces.Box(-9, 9, (2,))})
        self.observation_space = gym.spaces.Tuple([one] * 4)
        self.action_space = gym.spaces.Tuple([gym.spaces.Discrete(3)] * 4)
        self.t, self.last = 0, (0, 0, 0, 0)

    def seen(self):
        return tuple(
            {
                "links": np.eye(4, dtype=np.float32)[(i + 1) % 4],
                "own": np.array([i + 0.3 * self.t, self.last[i - 1]], np.float32),
            }
            for i in range(4)
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, (0, 0, 0, 0)
        return self.seen(), {}

    def step(self, actions):
        self.t, self.last = self.t + 1, tuple(int(a) for a in actions)
        ended = [self.t >= 4 + i for i in range(4)]
        return self.seen(), [float(a) for a in actions], ended, [False] * 4, {}


def zoo(**meadow):
    return JointEnvParallel(Meadow(**meadow))


def multi(**meadow):
    return JointEnvMultiAgentEnv(Meadow(**meadow))


def sampled(env, cell, policies, door="arrays", env_config=None):
    """A greedy rollout, and how far its ratios are from 1."""
    env_config = {"heads": HEADS, "masked": True} if env_config is None else env_config
    played = Played(door, cell, policies, env=env, env_config=env_config, num_envs=1, runners={})
    batches = played.learner._batches(played.runner.sample(num_timesteps=40, explore=False))
    return without(batches[0]), wrong_ratio(played, played.rows(batches))


def without(batch):
    """A batch without extras, which are not told by all, and memories, which doors keep in other places."""
    modules = {m: dataclasses.replace(streams, state_in=None) for m, streams in batch.modules.items()}
    return dataclasses.replace(batch, modules=modules, sequence_rows=None, extras={})


@pytest.mark.parametrize("cell", ["none", "gru", "message_gru"])
@pytest.mark.parametrize("env", [zoo, multi])
def test_agents_that_come_and_go_speak_through_adapters(env, cell):
    expected, _ = sampled(Meadow, cell, GROUPS)
    for door in ("arrays", "episodes"):
        batch, wrong = sampled(env, cell, GROUPS, door)
        assert_same_batches(expected, batch, atol=2e-6)
        assert wrong < 1e-5 and not all(streams.present.all() for streams in batch.modules.values())


@pytest.mark.parametrize("cell", ["none", "message_gru"])
def test_agents_of_a_tuple_speak_until_they_have_ended(cell):
    batches = []
    for door in ("arrays", "episodes"):
        batch, wrong = sampled(Ring, cell, ONE, door, {})
        batches.append(batch)
        assert wrong < 1e-5 and not batch.modules["shared"].present.all()
    assert_same_batches(*batches, atol=2e-6)


SMALL = ["-e", "grid=6", "-e", "num_agents=3", "-e", "horizon=8", "-e", "observation=window", "--policies", "shared"]
SPEAK = ["--model", "message_rounds=1", "--model", "message_size=8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "message_round=2"], "has 'message_round', which no module reads; did you mean 'message_rounds'?"),
        ([*SPEAK, "-e", "links=false"], "its agents see no 'links': Box(9, 9, 9). Needed: a Dict observation with"),
        ([*SPEAK, "--model", "cell=messagegru"], "lstm, gru, message_gru; did you mean 'message_gru'?"),
        (["--cell", "message_gru"], "A memory inside the messages needs message_rounds in the model_config."),
        ([*SPEAK, "-e", "terain=rooms"], "has the unknown setting 'terain'; did you mean 'terrain'?"),
        ([*SPEAK, "--set", "ratio=per_head"], "ratio='per_head' would change nothing"),
    ],
)
def test_mistakes_end_with_one_line_and_write_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = thrust_rllib("train", "coverage", *SMALL, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"message_size": 8}, "key 'message_size'; .*: message_rounds in the model_config chooses the class"),
        ({"aggregation": "max", "cell": "gru"}, "GRUModule .* 'aggregation'; .*: message_rounds in the model_config"),
        ({"rounds": 2}, "key 'rounds'; did you mean 'message_rounds'?"),
        ({"mesage_size": 8}, "key 'mesage_size'; did you mean 'message_size'?"),
        ({"message_rounds": 2, "agregation": "max"}, "key 'agregation'; did you mean 'aggregation'?"),
        ({"message_rounds": 2, "cell_size": 8}, "key 'cell_size'; a module with a memory reads it: cell='lstm' or"),
        ({"message_rounds": 2, "max_seq_len": 8}, "{'max_seq_len': 8}; a module with a memory reads it: cell="),
    ],
)
def test_keys_that_another_class_reads_say_how_it_is_chosen(model, message):
    space = gym.spaces.Box(-1, 1, (6,))
    with pytest.raises(ValueError, match=message):
        module_class_for(model)(
            observation_space=space, action_space=gym.spaces.Discrete(2), model_config={**model, "num_links": 2}
        )


class Apart(Meadow):
    """Links leave out the own place."""

    def __init__(self):
        super().__init__()
        links = {"links": gym.spaces.Box(0, 1, (3,))}
        self.observation_spaces = {
            a: gym.spaces.Dict({**s.spaces, **links}) for a, s in self.observation_spaces.items()
        }


def test_links_without_the_own_place_are_an_early_error():
    with pytest.raises(ValueError, match=r"its agents see 3 links: Dict\(links: Box\(3,\), observations: Box\(3,\)\)"):
        team_config(env=Apart, policies=ONE).validate()


def test_a_team_from_the_command_line(ray_session, tmp_path):
    limits = (
        '[{"name": "global_lambda2", "limit": 0.01, "mechanism": "lagrangian", "rate": 0.1, "sense": "at_least"}, '
        '{"name": "local_edge_margin", "limit": 0.02, "mechanism": "pid", "kp": 2.0}]'
    )
    run, picture = tmp_path / "run", tmp_path / "episode.gif"
    options = [
        "--cell",
        "message_gru",
        "--iterations",
        "2",
        "--epochs",
        "1",
        "-o",
        run,
        "--set",
        f"constraints={limits}",
    ]
    code, out, err = thrust_rllib("train", "coverage", *SMALL, *SPEAK, *TINY, *options)
    assert code == 0, err
    assert "/ at least 0.01, λ 0" in out and "local_edge_margin: cost 0" in out and "at least 0.02" not in out
    assert (run / "report" / "constraints.png").exists()
    code, out, err = thrust_rllib("evaluate", run, "--episodes", "2", "--render", picture)
    assert code == 0 and picture.exists(), err
    assert all(f"{name}, last step" in out for name in ("global_lambda2", "coverage", "connected"))
