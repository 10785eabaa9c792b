"""EpisodesToJointBatch: which step of which agent stands where. Episodes are made by hand (`plans`)."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from tests.general.plans import (
    AGENTS,
    PLAIN,
    TERMINATED,
    TRUNCATED,
    collect,
    finish,
    following,
    joint,
    play,
    see,
    steps_of,
    team,
)
from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH, EpisodesToJointBatch
from thrust_rllib.connectors.fragments import fragments_of
from thrust_rllib.connectors.sequence_states import sequence_rows
from thrust_rllib.joint_episode import ALL

# --- rows and columns -------------------------------------------------------------------------------------------------


def test_an_agent_that_dies_unobserved_and_one_that_goes_on():
    """Case 1 of the reported inputs."""
    batch = collect(play({"a0": "oot....", "a1": "ooooooo"}, over="terminated"), team(AGENTS[:2]))
    assert batch.valid.all() and batch.valid.shape == (6, 1)
    assert steps_of(batch, "a0") == {(0, 0): (0, 0.0, *PLAIN), (1, 0): (1, 1.0, *TERMINATED)}
    assert steps_of(batch, "a1") == {(t, 0): (t, 10.0 + t, *(TERMINATED if t == 5 else PLAIN)) for t in range(6)}
    assert batch.bootstrap_rows.tolist() == []
    assert batch.episode_start[:, 0].tolist() == [True] + [False] * 5


def test_one_terminates_while_the_other_is_truncated():
    """Case 2."""
    batch = collect(play({"a0": "oooT", "a1": "oooX"}), team(AGENTS[:2]))
    assert steps_of(batch, "a0")[2, 0] == (2, 2.0, *TERMINATED)
    assert steps_of(batch, "a1")[2, 0] == (2, 12.0, *TRUNCATED)
    assert following(batch, "a0") == {} and following(batch, "a1") == {(2, 0): 3}


def test_steps_without_anybody_are_rows_too():
    """Case 3."""
    batch = collect(play({"a0": "oooT.......", "a1": ".....oooooo"}, over="terminated"), team(AGENTS[:2]))
    assert batch.valid.shape == (10, 1) and batch.valid.all()
    assert [t for t, _ in steps_of(batch, "a0")] == [0, 1, 2]
    assert [t for t, _ in steps_of(batch, "a1")] == [5, 6, 7, 8, 9]
    assert batch.episode_start.sum() == 1


def test_what_is_paid_early_stands_in_the_first_step():
    """Case 4: the batch's rewards sum to what the environment paid."""
    (episode,) = [joint(AGENTS[:2])]
    episode.add_env_reset(observations={"a0": see(0, 0, 0)})
    for t in range(1, 5):
        acts = ["a0"] if t < 4 else ["a0", "a1"]
        sees = ["a0"] if t < 3 else ["a0", "a1"]
        episode.add_env_step(
            {a: see(0, t, AGENTS.index(a)) for a in sees},
            dict.fromkeys(acts, 0),
            {**dict.fromkeys(acts, 1.0), **({"a1": 5.0} if t < 3 else {})},
            truncateds={ALL: t == 4},
            extra_model_outputs={a: {"action_logp": 0.0} for a in acts},
        )
    batch = collect([episode], team(AGENTS[:2]))
    assert batch.stream("a1").rewards[:, 0].tolist() == [0.0, 0.0, 0.0, 11.0]
    assert sum(float(s.rewards.sum()) for s in batch.streams()) == 4.0 + 11.0


def test_the_end_of_a_fragment_that_goes_on_is_bootstrapped_without_a_mark():
    first, second = play({"a0": "oooo", "a1": "oooo"}, cuts=[2], over="truncated")
    codec = team(AGENTS[:2])
    batch = collect([first], codec)
    assert batch.bootstrap_rows.tolist() == [1]
    assert steps_of(batch, "a0") == {(0, 0): (0, 0.0, *PLAIN), (1, 0): (1, 1.0, *PLAIN)}
    assert following(batch, "a0") == following(batch, "a1") == {(1, 0): 2}
    batch = collect([second], codec)
    assert not batch.episode_start.any()  # step 2 of its episode
    assert steps_of(batch, "a1") == {(0, 0): (2, 12.0, *TRUNCATED)}
    assert following(batch, "a1") == {(0, 0): 3}


def test_fragments_behind_each_other_are_marked_as_cut():
    """Two samples in one batch: rows of the second are no successors of those of the first."""
    fragments = play({"a0": "oooo", "a1": "oooo"}, cuts=[2], over="terminated")
    batch = collect(fragments, team(AGENTS[:2]))
    assert batch.valid.shape == (3, 1)
    assert steps_of(batch, "a0") == {
        (0, 0): (0, 0.0, *PLAIN), (1, 0): (1, 1.0, *TRUNCATED), (2, 0): (2, 2.0, *TERMINATED)
    }  # fmt: skip
    assert following(batch, "a0") == {(1, 0): 2}


def test_episodes_of_one_environment_stand_in_one_column_in_their_order():
    first = play({"a0": "ooT", "a1": "ooT"}, joint(AGENTS[:2], env=3, number=0), number=0, over="terminated")
    second = play({"a0": "ooo", "a1": "ooo"}, joint(AGENTS[:2], env=3, number=1), number=1)
    batch = collect([*first, *second], team(AGENTS[:2]))
    assert batch.valid.shape == (4, 1)
    assert batch.stream("a0").obs[:, 0, :2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert batch.episode_start[:, 0].tolist() == [True, False, True, False]
    assert batch.bootstrap_rows.tolist() == [3]


def test_every_environment_of_every_runner_has_a_column():
    places = [(0, 0), (0, 1), (1, 0), (2, 1)]
    episodes = []
    for k, (runner, env) in enumerate(places):
        plan = {"a0": "o" * (k + 2), "a1": "o" * (k + 2)}
        episodes += play(plan, joint(AGENTS[:2], runner, env, number=k), number=k)
    # A second piece of the first one comes after all others.
    episodes += play({"a0": "oo", "a1": "oo"}, joint(AGENTS[:2], 0, 0, number=9), number=9)
    batch = collect(episodes, team(AGENTS[:2]))
    assert batch.valid.sum(0).tolist() == [2, 2, 3, 4] and batch.env_steps() == 11
    assert batch.valid[:2].all() and not batch.valid[3, :3].any()
    assert [batch.stream("a1").obs[0, e, 0] for e in range(4)] == [0, 1, 2, 3]
    assert batch.stream("a1").obs[1, 0, 0] == 9
    # The last row of each column, and the end of the piece that another one follows.
    assert sorted(following(batch, "a0")) == [(0, 0), (1, 0), (1, 1), (2, 2), (3, 3)]
    assert batch.stream("a0").truncated.sum() == 1 and batch.stream("a0").truncated[0, 0]
    assert batch.agent_steps() == 22


def test_a_step_open_at_a_cut_stands_in_front_alone():
    """a1 waits from step 1 on; its step is completed in the second fragment, where a0 has no step at 1 any more."""
    plan = {"a0": "oooooo", "a1": "oo..oo"}
    first, second = play(plan, cuts=[3], wait_pay=100.0, over="truncated")
    codec = team(AGENTS[:2])
    before = collect([first], codec)
    assert steps_of(before, "a1") == {(0, 0): (0, 10.0, *PLAIN)}
    assert following(before, "a1") == {(0, 0): 1} and following(before, "a0") == {(2, 0): 3}
    batch = collect([second], codec)
    assert batch.valid.shape == (3, 1) and batch.valid.all() and not batch.episode_start.any()
    assert steps_of(batch, "a1") == {
        (0, 0): (1, 11.0 + 200.0, *PLAIN), (2, 0): (4, 14.0, *TRUNCATED)
    }  # fmt: skip
    assert steps_of(batch, "a0") == {(1, 0): (3, 3.0, *PLAIN), (2, 0): (4, 4.0, *TRUNCATED)}
    assert batch.modules["m_a1"].origin[:, 0, 0, 1].tolist() == [1, -1, 4]
    # Both samples in one batch.
    both = collect([first, second], codec)
    assert [step for step, *_ in steps_of(both, "a1").values()] == [0, 1, 4]
    assert following(both, "a1") == {(0, 0): 1, (5, 0): 5}
    assert both.valid.shape == (6, 1)


def test_open_steps_of_several_agents_share_the_rows_of_their_moments():
    plan = {"a0": "oooooo", "a1": "oo..oo", "a2": "o...oo"}
    _, second = play(plan, cuts=[3])
    batch = collect([second])
    assert list(steps_of(batch, "a2")) == [(0, 0), (3, 0)]
    assert list(steps_of(batch, "a1")) == [(1, 0), (3, 0)]
    assert list(steps_of(batch, "a0")) == [(2, 0), (3, 0)]


def test_a_step_of_the_first_moment_that_is_completed_later_does_not_begin_the_episode_again():
    """What a0 does behind it goes on from the first fragment, with the memory that it has."""
    fragments = play({"a0": "oooooo", "a1": "o...oo"}, cuts=[3], over="truncated")
    batch = collect(fragments, team(AGENTS[:2]))
    assert [step for step, *_ in steps_of(batch, "a1").values()] == [0, 4]
    assert [step for step, *_ in steps_of(batch, "a0").values()] == [0, 1, 2, 3, 4]
    assert np.flatnonzero(batch.episode_start[:, 0]).tolist() == [0]
    # A training sequence begins with each fragment, and behind the steps that it completes.
    assert sequence_rows(list(fragments_of(fragments)), 1, None).tolist() == [0, 3, 4]


def test_a_fragment_whose_last_step_ends_a_life_goes_on_where_others_wait():
    """a0 dies in the last step before the cut, a1 goes on with what it saw then."""
    codec = team(AGENTS[:2])
    fragments = play({"a0": "o.ot..", "a1": ".o.ooo"}, cuts=[3], over="terminated")
    for episodes in (fragments[:1], fragments):
        batch = collect(episodes, codec)
        assert batch.bootstrap_rows.tolist() == [1, 2] and batch.stream("a0").terminated[2, 0]
        assert following(collect(fragments[:1], codec), "a1") == {(1, 0): 3}
    assert collect(play({"a0": "o.ot", "a1": ".o.T"}, over="terminated"), codec).bootstrap_rows.size == 0


def test_fragments_that_do_not_say_where_they_come_from_do_not_follow_each_other():
    """Behind another episode a fragment from the middle of one would be taken for what follows."""
    plan = dict.fromkeys(AGENTS[:2], "ooooo")
    whole, short = (
        play(dict.fromkeys(AGENTS[:2], moments), MultiAgentEpisode(id_=str(k)), number=k, over="terminated")
        for k, moments in ((0, "ooT"), (1, "oT"))
    )
    long, fragment = play(plan, MultiAgentEpisode(id_="2"), number=2), play(plan, MultiAgentEpisode(), cuts=[3])[1]
    batch = collect([*long, *whole, fragment, *short], team(AGENTS[:2]))
    assert batch.valid.sum(0).tolist() == [4, 2, 2] and batch.episode_start.sum(0).tolist() == [1, 1, 1]
    assert not batch.episode_start[0, 2] and batch.episode_start[1, 2]


def test_two_players_in_turn():
    """Case 7: T = 19, reward 1 to the mover: 10 and 9 steps, and no row holds two agents."""
    moments = [("o." if t % 2 == 0 else ".o") for t in range(19)] + ["TT"]
    plan = {a: "".join(m[i] for m in moments) for i, a in enumerate(AGENTS[:2])}
    (episode,) = play(plan, over="terminated", reward=lambda t, i: 1.0)
    batch = collect([episode], team(AGENTS[:2]))
    s0, s1 = batch.stream("a0"), batch.stream("a1")
    assert (s0.rewards.sum(), s1.rewards.sum()) == (10.0, 9.0)
    assert (s0.present.sum(), s1.present.sum()) == (10, 9)
    assert not (s0.present & s1.present).any() and (s0.present | s1.present).all()
    # The last move of a1 began at step 17; it terminates there.
    assert s1.terminated[17, 0] and s0.terminated[18, 0] and batch.bootstrap_rows.tolist() == []


# --- who is not there -------------------------------------------------------------------------------------------------


def test_an_agent_and_a_module_without_a_step():
    """a2 comes to life in the last moment, a1 not at all."""
    batch = collect(play({"a0": "ooo", "a1": "...", "a2": "..o"}))
    for agent in ("a1", "a2"):
        assert steps_of(batch, agent) == {} and following(batch, agent) == {}
        s = batch.modules[f"m_{agent}"]
        assert s.obs.shape == (2, 1, 1, 3) and s.bootstrap_obs.shape == (1, 1, 3)
        assert (s.origin == -1).all()
    assert batch.agent_steps() == 2 and batch.env_steps() == 2


def test_agents_of_one_module_keep_their_places():
    codec = team(modules={"a0": "rest", "a1": "mid", "a2": "rest"})
    batch = collect(play({"a0": "oT.", "a1": "ooo", "a2": ".oo"}, over="truncated"), codec)
    assert {m: s.agents for m, s in batch.modules.items()} == {"mid": ("a1",), "rest": ("a0", "a2")}
    assert batch.modules["rest"].present[:, :, 0].tolist() == [[True, False], [False, True]]
    assert steps_of(batch, "a2") == {(1, 0): (1, 21.0, *TRUNCATED)}
    assert following(batch, "a2") == {(1, 0): 2}


def test_episodes_of_one_step():
    """Case 11's data."""
    episodes = [
        episode
        for k in range(3)
        for episode in play({"a0": "oX", "a1": "oT"}, joint(AGENTS[:2], number=k), number=k, over="truncated")
    ]
    batch = collect(episodes, team(AGENTS[:2]))
    assert batch.valid.shape == (3, 1) and batch.episode_start.all()
    assert batch.stream("a0").truncated.all() and batch.stream("a1").terminated.all()
    assert following(batch, "a0") == {(t, 0): 1 for t in range(3)}


@pytest.mark.parametrize("make", [list, lambda: play({"a0": "o", "a1": "o"}), lambda: [MultiAgentEpisode()]])
def test_nothing_at_all_is_an_error(make):
    with pytest.raises(ValueError, match=r"the rollout is empty: no episode came with a step in it"):
        collect(make(), team(AGENTS[:2]))


def test_a_fragment_in_which_nobody_completes_a_step_is_rows_of_nobody():
    fragments = play({"a0": "oooT.......", "a1": ".....oooooo"}, cuts=[3, 5])
    batch = collect([fragments[1]], team(AGENTS[:2]))
    assert batch.env_steps() == 2 and batch.agent_steps() == 0 and batch.bootstrap_rows.tolist() == []


# --- in a pipeline ----------------------------------------------------------------------------------------------------


def test_the_pipeline_gets_the_batch_under_its_name():
    piece = EpisodesToJointBatch(codec=team(AGENTS[:2]))
    result = piece(episodes=play({"a0": "ooo", "a1": "ooo"}), batch={})
    assert list(result) == [JOINT_BATCH] and result[JOINT_BATCH].env_steps() == 2
    assert all(s.origin is None for s in result[JOINT_BATCH].modules.values())  # audit=False
    _, options = piece.get_ctor_args_and_kwargs()
    assert options == {
        "codec": piece.codec,
        "check_bounds": True,
        "audit": False,
        "with_extra_step": False,
        "whole_episodes": False,
        "per_head": False,
    }


def test_observations_that_another_connector_wrote_are_taken():
    (episode,) = play({"a0": "oooo"}, over="truncated")
    written = {("episode0", "a0", "m_a0"): [np.full(3, 7.0 + k, np.float32) for k in range(4)]}
    batch = EpisodesToJointBatch(codec=team(("a0",)))(episodes=[episode], batch={"obs": written})[JOINT_BATCH]
    assert batch.stream("a0").obs[:, 0, 0].tolist() == [7.0, 8.0, 9.0]
    assert batch.stream("a0").bootstrap_obs[0].tolist() == [10.0] * 3


# --- spaces -----------------------------------------------------------------------------------------------------------

SPACES = {
    "discrete": (Discrete(4, start=1), lambda n, t, i: np.int64(1 + t % 4)),
    "dict": (
        Dict({"z": Discrete(3), "a": Box(-9, 9, (2,), np.float32)}),
        lambda n, t, i: {"z": np.int64(t % 3), "a": np.array([t, i], np.float32)},
    ),
    "tuple": (
        Tuple([MultiDiscrete([2, 3]), Box(-9, 9, (1, 2), np.float32)]),
        lambda n, t, i: (np.array([t % 2, t % 3]), np.array([[t, i]], np.float32)),
    ),
    "masked": (
        Dict({"observation": Box(-9, 9, (2,), np.float32), "action_mask": Box(0, 1, (5,), np.int8)}),
        lambda n, t, i: {
            "observation": np.array([t, i], np.float32),
            "action_mask": (np.arange(5) != t % 5).astype(np.int8),
        },
    ),
}


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("name", sorted(SPACES))
def test_structured_observations_are_encoded(name, numpy):
    space, observe = SPACES[name]
    plan = {"a0": "ooooo", "a1": "o.ooT"}
    codec = team(tuple(plan), space)
    episodes = play(plan, over="truncated", observe=observe)
    batch = collect(finish(episodes) if numpy else episodes, codec)
    encoder = codec.modules["m_a0"].encoder
    one = lambda t, i: encoder.encode(gym.vector.utils.batch_space(space, 1) and stacked(space, observe(0, t, i)))[0]  # noqa: E731
    for i, agent in enumerate(plan):
        s = batch.stream(agent)
        for t in np.flatnonzero(s.present[:, 0]):
            np.testing.assert_array_equal(s.obs[t, 0], one(t, i))
            if name == "masked":
                assert s.action_mask[t, 0].tolist() == [k != t % 5 for k in range(5)]
    np.testing.assert_array_equal(batch.stream("a0").bootstrap_obs[0], one(4, 0))
    if name == "masked":
        assert batch.stream("a1").action_mask[1, 0].all()  # absent: all ones
        assert batch.stream("a0").action_mask.dtype == bool
    else:
        assert batch.stream("a0").action_mask is None


def stacked(space, value):
    """One observation as [1, …]."""
    if isinstance(space, Dict):
        return {k: stacked(s, value[k]) for k, s in space.items()}
    if isinstance(space, Tuple):
        return tuple(stacked(s, v) for s, v in zip(space, value, strict=True))
    return np.asarray(value)[None]


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [(Box(-1, 1, (2,)), (2,), np.float32), (MultiDiscrete([5, 5]), (2,), np.int64), (Discrete(5), (), np.int64)],
)
def test_actions_have_the_shape_and_type_of_their_space(space, shape, dtype):
    episode = joint(("a0",))
    episode.add_env_reset(observations={"a0": see(0, 0, 0)})
    action = np.asarray(space.sample(), dtype)
    episode.add_env_step(
        {"a0": see(0, 1, 0)}, {"a0": action}, {"a0": 1.0}, extra_model_outputs={"a0": {"action_logp": -1.0}}
    )
    actions = collect([episode], team(("a0",), action_space=space)).stream("a0").actions
    assert actions.shape == (1, 1, *shape) and actions.dtype == dtype
    np.testing.assert_array_equal(actions[0, 0], action)


def test_what_the_environment_tells_beside_rewards_stands_in_its_row():
    first, second = play({"a0": "ooooo", "a1": "oo..o"}, cuts=[2])
    first.extras = {0: {"cost": 1.5, "load": {}}, 1: {"cost": 2.5, "load": {"a1": np.array([1.0, 2.0])}}}
    second.extras = {1: first.extras[1], 2: {"cost": 0, "load": {}}, 3: {"cost": 4.5, "load": {}}}
    batch = collect([first, second], team(AGENTS[:2]))
    # Rows: steps 0 and 1; a1's step 1 once more, which was open; steps 2 and 3.
    assert batch.extras["cost"].tolist() == [[1.5], [2.5], [2.5], [0.0], [4.5]]
    assert batch.extras["load"].shape == (5, 2, 1, 2)
    assert batch.extras["load"][1:3, 1, 0].tolist() == [[1.0, 2.0]] * 2 and batch.extras["load"].sum() == 6.0
    del second.extras[2]
    with pytest.raises(ValueError, match=r"step 2: extras are \[\], in other steps \['cost', 'load'\]"):
        collect([first, second], team(AGENTS[:2]))
    assert collect(play({"a0": "oo"}), team(("a0",))).extras == {}
