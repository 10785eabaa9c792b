"""PettingZoo's turn-based environments as joint environments."""

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from pettingzoo import AECEnv
from pettingzoo.butterfly import knights_archers_zombies_v11
from pettingzoo.classic import connect_four_v3, tictactoe_v3

from tests.envs.helpers import Pair, assert_same
from thrust_rllib.envs import AECJointEnv, JointEnvMultiAgentEnv, RLlibJointEnv, make_joint_env
from thrust_rllib.envs.adapt import takes_turns


def choose(space, seen, rng):
    """A random action that the mask, if there is one, allows."""
    if isinstance(seen, dict):
        return rng.choice(np.flatnonzero(seen["action_mask"]))
    return rng.integers(space.n)


def straight_loop(env, seed, limit):
    """PettingZoo's own way to play: {agent: return}, {agent: moves}."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    returns, moves = dict.fromkeys(env.possible_agents, 0.0), dict.fromkeys(env.possible_agents, 0)
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        if terminated or truncated:
            env.step(None)
            continue
        if sum(moves.values()) == limit:
            break
        moves[agent] += 1
        env.step(choose(env.action_space(agent), seen, rng))
    return returns, moves


def joint_loop(env, seed, limit):
    rng = np.random.default_rng(seed)
    seen = env.reset_joint(seed)
    returns, moves = dict.fromkeys(env.possible_agents, 0.0), dict.fromkeys(env.possible_agents, 0)
    ended = set()
    while True:
        acting = [agent for agent in seen if agent not in ended]
        if not acting or sum(moves.values()) == limit:
            return returns, moves
        (agent,) = acting
        moves[agent] += 1
        result = env.step_joint({agent: choose(env.action_spaces[agent], seen[agent], rng)})
        for paid, reward in result.rewards.items():
            assert paid not in ended
            returns[paid] += reward
        seen = result.observations
        for flags in (result.terminated, result.truncated):
            by_agent = flags if isinstance(flags, dict) else dict.fromkeys(env.possible_agents, flags)
            ended |= {agent for agent, flag in by_agent.items() if flag}
        assert result.over == (not env.unwrapped.agents)


@pytest.mark.parametrize("module", [tictactoe_v3, connect_four_v3])
def test_the_books_are_those_of_a_straight_loop(module):
    decided = 0
    for seed in range(12):
        expected = straight_loop(module.env(), seed, 1000)
        assert joint_loop(AECJointEnv(module.env()), seed, 1000) == expected
        around = RLlibJointEnv(JointEnvMultiAgentEnv(AECJointEnv(module.env())))
        assert joint_loop(around, seed, 1000) == expected
        decided += max(expected[0].values()) == 1
    assert decided > 4


def test_the_comparison_of_books_notices_a_lost_reward(monkeypatch):
    monkeypatch.setattr(tictactoe_v3.raw_env, "_accumulate_rewards", lambda env: None)
    books = [
        (straight_loop(tictactoe_v3.env(), s, 99), joint_loop(AECJointEnv(tictactoe_v3.env()), s, 99)) for s in range(6)
    ]
    assert any(straight != joint for straight, joint in books)
    assert all(straight[1] == joint[1] for straight, joint in books)


def test_the_books_of_agents_that_die_one_by_one():
    config = {"max_zombies": 20, "spawn_delay": 1}
    expected = straight_loop(knights_archers_zombies_v11.env(**config), 3, 1000)
    assert joint_loop(AECJointEnv(knights_archers_zombies_v11.env, **config), 3, 1000) == expected
    assert len(set(expected[1].values())) > 1 and max(expected[0].values()) > 0


def test_turns_and_common_steps_of_the_same_environment():
    joint, parallel = AECJointEnv(simple_spread_v3.env(max_cycles=4)), simple_spread_v3.parallel_env(max_cycles=4)
    seen, (first, _) = joint.reset_joint(7), parallel.reset(seed=7)
    assert_same(seen, {"agent_0": first["agent_0"]})
    for cycle in range(4):
        paid = dict.fromkeys(joint.possible_agents, 0.0)
        for agent in joint.possible_agents:
            assert list(seen) == [agent]
            result = joint.step_joint({agent: cycle % 5})
            for other, reward in result.rewards.items():
                paid[other] += reward
            seen = result.observations
        expected, rewards, _, truncated, _ = parallel.step(dict.fromkeys(joint.possible_agents, cycle % 5))
        assert_same(paid, rewards)
        np.testing.assert_array_equal(joint.state(), parallel.state())
    assert result.over and result.truncated == truncated == dict.fromkeys(joint.possible_agents, True)
    assert_same(seen, expected)


def test_the_end_of_a_game_is_everybodys_end():
    env = make_joint_env("pettingzoo:tictactoe_v3")
    seen = env.reset_joint()
    players = env.possible_agents
    for turn, field in enumerate([0, 1, 3, 4]):
        (player,) = seen
        assert player == players[turn % 2] and env.observation_spaces[player].contains(seen[player])
        result = env.step_joint({player: field})
        assert result.rewards == {player: 0} and not result.over and result.terminated == {player: False}
        seen = result.observations
    result = env.step_joint({players[0]: 6})
    assert result.over and result.terminated == dict.fromkeys(players, True) and not any(result.truncated.values())
    assert result.rewards == {players[0]: 1, players[1]: -1} and list(result.observations) == players
    for player, last in result.observations.items():
        assert env.observation_spaces[player].contains(last) and last["action_mask"].all()
        assert last["observation"].sum() == 5
    with pytest.raises(RuntimeError, match="tictactoe_v3: step_joint was called but no episode runs"):
        env.step_joint({players[1]: 7})
    assert list(env.reset_joint()) == [players[0]]


def test_images_and_seeds():
    env = make_joint_env("pettingzoo:connect_four_v3", {"render_mode": "rgb_array"})
    env.reset_joint(0)
    image = env.render()
    assert image.ndim == 3 and image.dtype == np.uint8 and env.render_mode == "rgb_array"
    env.close()
    kaz = AECJointEnv(knights_archers_zombies_v11.env())
    assert_same(kaz.reset_joint(5), kaz.reset_joint(5))
    assert kaz.state_space.shape == kaz.state().shape
    kaz.close()


class Script(AECEnv):
    """Three players in turn; `script[t]` may change the environment in the step t."""

    metadata = {"name": "script_v0", "render_modes": []}

    def __init__(self, script=None, masks=(), size=2):
        self.possible_agents = ["c", "a", "b"]
        self.script, self.masks, self.size = script or {}, masks, size
        self.resets = 0

    def observation_space(self, agent):
        return gym.spaces.Box(0, 100, (self.size,))

    def action_space(self, agent):
        return gym.spaces.Box(0, 1, (1,)) if agent == "b" else gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        self.resets += 1
        self.agent_selection = "c"
        for name, value in (
            ("rewards", 0),
            ("_cumulative_rewards", 0),
            ("terminations", False),
            ("truncations", False),
        ):
            setattr(self, name, dict.fromkeys(self.agents, value))
        self._show()

    def _show(self):
        mask = {"action_mask": np.array([0, 1, 0])} if self.agent_selection in self.masks else {}
        self.infos = {a: {"t": self.t, **(mask if a == self.agent_selection else {})} for a in self.agents}

    def observe(self, agent):
        return np.full(self.size, self.t, np.float32)

    def step(self, action):
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            self._show()
            return
        self._clear_rewards()
        self.t += 1
        after = self.agents.index(self.agent_selection) + 1
        self.agent_selection = self.agents[after % len(self.agents)]
        self.script.get(self.t, lambda env: None)(self)
        self._show()


def end(env, rewards=(), **flags):
    """Sets flags ("terminated", "truncated") of agents and pays rewards."""
    for agent, kind in flags.items():
        (env.terminations if kind == "terminated" else env.truncations)[agent] = True
    env.rewards.update(rewards)


def test_agents_that_end_while_they_wait():
    # c moves, a is truncated; b moves and ends with c.
    script = {
        1: lambda env: (end(env, {"a": 2.0, "b": 1.0}, a="truncated"), env._deads_step_first()),
        2: lambda env: (end(env, {"c": -1.0}, b="terminated", c="truncated"), env._deads_step_first()),
    }
    # The turn after c's is that of a, which is gone: the environment goes on with b.
    script[1] = lambda env: (setattr(env, "agent_selection", "b"), end(env, {"a": 2.0, "b": 1.0}, a="truncated"),
                             env._deads_step_first())  # fmt: skip
    env = AECJointEnv(Script(script))
    env.reset_joint()
    result = env.step_joint({"c": 0})
    assert result.rewards == {"c": 0, "a": 2, "b": 1}
    assert result.truncated == {"c": False, "a": True} and not any(result.terminated.values()) and not result.over
    assert_same(result.observations, {"a": [1.0, 1.0], "b": [1.0, 1.0]})
    result = env.step_joint({"b": np.zeros(1)})
    assert result.rewards == {"b": 0, "c": -1} and result.over
    assert result.terminated == {"b": True, "c": False} and result.truncated == {"b": False, "c": True}
    assert list(result.observations) == ["c", "b"]


def test_rewards_after_an_agents_end_are_told_once():
    # a stays in env.agents, flagged, until its turn; meanwhile it is paid twice.
    def script():
        return {
            1: lambda env: (end(env, {"a": 1.0}, a="terminated"), setattr(env, "agent_selection", "b")),
            2: lambda env: end(env, {"a": 5.0, "c": 3.0}),
            3: lambda env: (end(env, {"a": 0.5}), setattr(env, "agent_selection", "b")),
            4: lambda env: (end(env, b="terminated", c="terminated"), env._deads_step_first()),
        }

    env = AECJointEnv(Script(script()))

    def play():
        env.reset_joint()
        total = dict.fromkeys(env.possible_agents, 0.0)
        for agent, action in [("c", 0), ("b", np.zeros(1)), ("c", 1), ("b", np.zeros(1))]:
            result = env.step_joint({agent: action})
            for paid, reward in result.rewards.items():
                total[paid] += reward
        assert result.over and total == {"c": 3, "a": 1, "b": 0}

    with pytest.warns(UserWarning, match=r"script_v0 paid rewards .* in one episode: 5.5 to 'a'\. They are left out"):
        play()
    play()  # warnings are errors here: it is told once


def test_masks_in_infos():
    env = AECJointEnv(Script(masks=("c", "a")))
    spaces = env.observation_spaces
    assert isinstance(spaces["b"], gym.spaces.Box)  # Box actions cannot be masked
    assert spaces["a"]["action_mask"].shape == (3,) and spaces["a"] == spaces["c"]
    seen = env.reset_joint()
    assert seen["c"]["action_mask"].tolist() == [0, 1, 0] and spaces["c"].contains(seen["c"])
    seen = env.step_joint({"c": 1}).observations
    assert list(seen) == ["a"] and spaces["a"].contains(seen["a"]) and seen["a"]["action_mask"].tolist() == [0, 1, 0]
    assert spaces["b"].contains(env.step_joint({"a": 1}).observations["b"])
    assert all(isinstance(space, gym.spaces.Box) for space in AECJointEnv(Script()).observation_spaces.values())
    ending = {1: lambda env: (end(env, c="truncated"), env._deads_step_first())}
    env = AECJointEnv(Script(ending, masks=("c", "a")))
    env.reset_joint()
    assert env.step_joint({"c": 1}).observations["c"]["action_mask"].tolist() == [1, 1, 1]


def test_extras():
    env = AECJointEnv(Script(), extras_from_infos=["t"])
    env.reset_joint()
    assert env.step_joint({"c": 0}).extras == {"t": {"c": 1}} and env.infos["a"] == {"t": 1}
    env = AECJointEnv(Script(), extras_from_infos=["cost"])
    env.reset_joint()
    with pytest.raises(ValueError, match=r"the info of agent 'c' has no 'cost'.*it has \['t'\]"):
        env.step_joint({"c": 0})


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (lambda env: env.agents.remove("a"), "agent 'a' left env.agents without an end"),
        (lambda env: setattr(env, "agent_selection", "d"), "agent 'd' is to act, but it is not in possible_agents"),
    ],
)
def test_environments_that_break_the_contract(script, says):
    env = AECJointEnv(Script({1: script}))
    env.reset_joint()
    with pytest.raises(ValueError, match=says):
        env.step_joint({"c": 0})


def test_an_agent_that_comes_back_and_one_that_is_not_removed():
    revive = {
        1: lambda env: (end(env, c="terminated"), env._deads_step_first()),
        2: lambda env: (env.agents.append("c"), env.terminations.update(c=False), env.truncations.update(c=False),
                        env.rewards.update(c=0), setattr(env, "agent_selection", "c")),
    }  # fmt: skip
    env = AECJointEnv(Script(revive))
    env.reset_joint()
    env.step_joint({"c": 0})
    with pytest.raises(ValueError, match="agent 'c' is to act, but it has ended before"):
        env.step_joint({"a": 0})

    class Stays(Script):
        def _was_dead_step(self, action):
            pass

    env = AECJointEnv(Stays({1: lambda env: (end(env, c="terminated"), env._deads_step_first())}))
    env.reset_joint()
    with pytest.raises(ValueError, match=r"agent 'c' has ended, but its step\(None\) does not remove it"):
        env.step_joint({"c": 0})


def test_errors_of_the_caller():
    with pytest.raises(TypeError, match="got a Pair; needed: a PettingZoo AECEnv"):
        AECJointEnv(Pair)
    with pytest.raises(TypeError, match="got a int; needed"):
        AECJointEnv(3)
    with pytest.raises(TypeError, match="an environment and settings for one, \\['size'\\]"):
        AECJointEnv(Script(), size=3)
    env = AECJointEnv(Script, size=3)
    assert env.observation_spaces["a"].shape == (3,)
    with pytest.raises(RuntimeError, match="no episode runs; call reset_joint first"):
        env.step_joint({"c": 0})
    env.reset_joint()
    with pytest.raises(ValueError, match=r"got actions of \['c', 'a'\]; needed: of 'c', whose turn it is"):
        env.step_joint({"c": 0, "a": 0})
    with pytest.raises(ValueError, match=r"got actions of \['a'\]; needed: of 'c'"):
        env.step_joint({"a": 0})
    nobody = Script()
    nobody.possible_agents = []
    with pytest.raises(TypeError, match="script_v0 has no possible_agents"):
        AECJointEnv(nobody)


RAY = "ray.rllib.examples.envs.classes.multi_agent."


@pytest.mark.parametrize(
    ("env", "turns"),
    [
        (Script, True),
        ("pettingzoo:connect_four_v3", True),
        (RAY + "tic_tac_toe:TicTacToe", True),
        (RAY + "guess_the_number_game:GuessTheNumberGame", True),
        (RAY + "rock_paper_scissors:RockPaperScissors", False),
        ("pettingzoo:mpe2.simple_spread_v3", False),
        ("bucket_brigade", False),
        ("CartPole-v1", False),
        (Pair, False),
    ],
)
def test_takes_turns(env, turns):
    assert takes_turns(make_joint_env(env)) is turns
