"""EpisodesToJointBatch on episodes made by hand, of both classes.

A *plan* says for each agent what it is shown at the moments 0 (reset), 1, 2, …: o an observation, . nothing,
T its termination with an observation, t without one, X its truncation with an observation.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH, EpisodesToJointBatch
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_episode import ALL, JointEpisode
from thrust_rllib.joint_rows import joint_rows

BOUND = 1000.0
AGENTS = ("a0", "a1", "a2")

# --- by hand ----------------------------------------------------------------------------------------------------------


def team(agents=AGENTS, space=None, action_space=None, modules=None):
    """One module per agent, unless said otherwise."""
    space = Box(-BOUND, BOUND, (3,), np.float32) if space is None else space
    action_space = Discrete(5) if action_space is None else action_space
    return TeamCodec.of(
        modules or {agent: f"m_{agent}" for agent in agents},
        dict.fromkeys(agents, space),
        dict.fromkeys(agents, action_space),
        normalize_actions=True,
        clip_actions=False,
    )


def see(number, t, i):
    """(episode, moment, agent)."""
    return np.array([number, t, i], np.float32)


def pay(t, i):
    """For what agent i did at step t."""
    return t + 10.0 * i


def joint(agents=AGENTS, runner=0, env=0, number=0):
    return JointEpisode(env_name="village", runner_index=runner, env_index=env, agents=agents, id_=f"episode{number}")


def play(plan, episode=None, *, number=0, over=None, cuts=(), lookback=0, wait_pay=0.0, observe=see, reward=pay):
    """Fragments of one episode; a fragment begins before each step whose number is in `cuts`.

    Args:
        plan: {agent: moments}, see the module's text.
        episode: that grows; default: a `JointEpisode`.
        number: of the episode, in its observations.
        over: "terminated" or "truncated": how the last step ends the episode.
        cuts: see above.
        lookback: of the fragments.
        wait_pay: what a waiting agent is paid at each step.
        observe: (episode number, moment, agent's index) to its observation.
        reward: (step, agent's index) to what an agent is paid that acts.
    """
    episode = joint(tuple(plan), number=number) if episode is None else episode
    index = {agent: i for i, agent in enumerate(plan)}
    length = len(next(iter(plan.values())))
    shown = lambda t: {a: observe(number, t, index[a]) for a in plan if plan[a][t] in "oTX"}  # noqa: E731
    episode.add_env_reset(observations=shown(0))
    fragments, waiting = [episode], set()
    for t in range(1, length):
        if t - 1 in cuts:
            fragments.append(fragments[-1].cut(len_lookback_buffer=lookback))
        acts = [a for a in plan if plan[a][t - 1] == "o"]
        waiting = (waiting | set(acts)) - {a for a in plan if plan[a][t - 1] in "TtX"}
        rewards = {a: reward(t - 1, index[a]) for a in acts}
        rewards |= {a: wait_pay for a in waiting if a not in acts and wait_pay}
        fragments[-1].add_env_step(
            observations=shown(t),
            actions={a: (t - 1 + index[a]) % 5 for a in acts},
            rewards=rewards,
            terminateds={a: True for a in plan if plan[a][t] in "Tt"} | {ALL: over == "terminated" and t == length - 1},
            truncateds={a: True for a in plan if plan[a][t] == "X"} | {ALL: over == "truncated" and t == length - 1},
            extra_model_outputs={a: {"action_logp": np.float32(-0.25 * t)} for a in acts},
        )
        waiting -= set(shown(t))
    return fragments


def collect(episodes, codec=None, **options):
    """The batch of these episodes, with `origin`."""
    return EpisodesToJointBatch(codec=codec or team(), audit=True, **options).joint_batch(episodes)


def finish(episodes):
    """What RLlib's runner does to episodes that it returns."""
    for episode in episodes:
        MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)
        episode.to_numpy()
    return episodes


def steps_of(batch, agent):
    """{row t, column e}: (step, reward, terminated, truncated) of the steps an agent has in the batch.

    Observation, action and log-probability are compared with the step on the way.
    """
    s = batch.stream(agent)
    found = {}
    for t, e in np.argwhere(s.present):
        number, moment, i = s.obs[t, e]
        assert i == AGENTS.index(agent)
        assert s.actions[t, e] == (moment + i) % 5
        assert s.action_logp[t, e] == np.float32(-0.25 * (moment + 1))
        found[int(t), int(e)] = (int(moment), float(s.rewards[t, e]), bool(s.terminated[t, e]), bool(s.truncated[t, e]))
    for name in ("obs", "actions", "action_logp", "rewards", "terminated", "truncated"):
        assert not getattr(s, name)[~s.present].any(), f"{name} of an absent agent"
    return found


def following(batch, agent):
    """{row t, column e}: moment of the observation that follows, where it is read: truncated, or last of the column."""
    s, envs = batch.stream(agent), batch.num_envs
    places = [(int(row) // envs, int(row) % envs) for row in batch.bootstrap_rows]
    read = {
        (t, e)
        for t, e in zip(*np.nonzero(s.present & ~s.terminated), strict=True)
        if s.truncated[t, e] or not s.present[t + 1 :, e].any()
    }
    assert read <= set(places)
    return {place: int(s.bootstrap_obs[k, 1]) for k, place in enumerate(places) if place in read}


def assert_same(left, right):
    for name in ("bootstrap_rows", "episode_start", "valid"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert list(left.modules) == list(right.modules)
    for module_id, mine in left.modules.items():
        other = right.modules[module_id]
        assert mine.agents == other.agents
        for name in (
            "obs", "actions", "action_logp", "rewards", "present", "terminated", "truncated", "bootstrap_obs",
            "action_mask", "origin",
        ):  # fmt: skip
            x, y = getattr(mine, name), getattr(other, name)
            assert (x is None) == (y is None), name
            if x is not None:
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y, err_msg=f"{name} of {module_id}")


# --- rows and columns -------------------------------------------------------------------------------------------------

PLAIN = (False, False)
TERMINATED = (True, False)
TRUNCATED = (False, True)


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


# --- lists and arrays, both classes -----------------------------------------------------------------------------------

PLANS = [
    ({"a0": "ooooo", "a1": "ooooo"}, (), None),
    ({"a0": "ooooo", "a1": "ooooo"}, (1, 3), "truncated"),
    ({"a0": "ooooooo", "a1": "ooT....", "a2": "..ooooX"}, (), "terminated"),
    ({"a0": "o.o.ooo", "a1": ".o.o.oo", "a2": "..o..oo"}, (2, 3), "truncated"),
    ({"a0": "oo.t...", "a1": "ooooooo"}, (3, 5), "terminated"),
]


@pytest.mark.parametrize("lookback", [0, 1, 3])
@pytest.mark.parametrize(("plan", "cuts", "over"), PLANS)
def test_lists_and_arrays_give_the_same_batch(plan, cuts, over, lookback):
    codec = team(tuple(plan))
    lists = collect(play(plan, cuts=cuts, over=over, wait_pay=0.5), codec)
    arrays = collect(finish(play(plan, cuts=cuts, over=over, wait_pay=0.5, lookback=lookback)), codec)
    assert_same(lists, arrays)


STOCK = [
    ({"a0": "ooooo", "a1": "ooooo"}, "truncated"),
    ({"a0": "oooooo", "a1": "ooT...", "a2": "..oooo"}, "terminated"),
    ({"a0": "oot....", "a1": "ooooooo"}, "terminated"),  # N1: RLlib's index has one entry too many
    ({"a0": "o.o.ooo", "a1": "oo.o.oo", "a2": "..o..oo"}, None),
    ({"a0": "ooooo", "a1": "oo..."}, None),  # a1's step is open at the end
]


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize(("plan", "over"), STOCK)
def test_rllibs_own_class_gives_the_same_batch(plan, over, numpy):
    codec = team(tuple(plan))
    ours = play(plan, over=over)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), over=over)
    if numpy:
        finish(theirs)
    assert_same(collect(ours, codec), collect(theirs, codec))


@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_fragments_of_rllibs_own_class(lookback):
    plan = {"a0": "oooooo", "a1": "oooooo"}
    codec = team(tuple(plan))
    ours = play(plan, cuts=[2], over="truncated", lookback=lookback)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[2], over="truncated", lookback=lookback)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(collect([mine], codec), collect([other], codec))


@st.composite
def plans(draw):
    """Plans of three agents that RLlib's class stores rightly but for the index: the first one always acts."""
    length = draw(st.integers(2, 7))
    over = draw(st.sampled_from(["terminated", "truncated", None]))
    plan = {"a0": "o" * (length + 1)}
    for agent in AGENTS[1:]:
        birth = draw(st.integers(0, length - 1))
        death = draw(st.none() | st.integers(birth + 1, length - 1)) if birth + 1 < length else None
        moments = ["."] * birth + ["o"] + [draw(st.sampled_from("o.o")) for _ in range(length - birth)]
        if over:
            moments[-1] = "o"
        if death is not None:
            moments[death:] = [draw(st.sampled_from("TX")), *["."] * (length - death)]
        plan[agent] = "".join(moments)
    return plan, over


@settings(max_examples=25, deadline=None, derandomize=True)
@given(plans(), st.data(), st.sampled_from([1, 3]))
def test_fragments_of_rllibs_own_class_with_agents_that_come_and_go(plan_and_end, data, lookback):
    """With a lookback, as RLlib's default is: without one its class loses the steps that are open at a cut. Without
    unobserved terminations, whose step it loses after a cut."""
    plan, over = plan_and_end
    cut = data.draw(st.integers(0, len(plan["a0"]) - 2))
    ours = play(plan, cuts=[cut], over=over, lookback=lookback)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[cut], over=over, lookback=lookback)
    for mine, other in zip(ours, theirs, strict=True):
        if len(mine):
            assert_same(collect([mine]), collect([other]))


def test_an_agent_born_in_a_later_fragment_of_rllibs_own_class():
    """RLlib counts it from the episode's beginning, not from the fragment's: its steps stood outside the batch."""
    plan = {"a0": "ooooooo", "a1": "....ooo"}
    fragments = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[2], over="truncated", lookback=1)
    batch = collect(fragments[1:], team(AGENTS[:2]))
    assert steps_of(batch, "a1") == {(2, 0): (4, 14.0, *PLAIN), (3, 0): (5, 15.0, *TRUNCATED)}


def test_rllibs_own_episodes_fill_columns_as_high_as_the_longest():
    lengths = [4, 2, 2, 3, 1]
    episodes = [
        play({"a0": "o" * n + "T"}, MultiAgentEpisode(), number=k, over="terminated")[0] for k, n in enumerate(lengths)
    ]
    batch = collect(episodes, team(("a0",)))
    assert batch.num_steps == 4 and batch.env_steps() == sum(lengths)
    rows = [(int(n), int(t)) for n, t, _ in batch.stream("a0").obs[batch.valid].tolist()]
    assert sorted(rows) == [(k, t) for k, n in enumerate(lengths) for t in range(n)]
    assert batch.episode_start.sum() == 5 and batch.stream("a0").terminated.sum() == 5
    assert batch.num_envs == 3


def test_rllibs_extra_step_is_left_out():
    """A user's learner pieces stand behind RLlib's AddOneTsToEpisodesAndTruncate."""
    plan = {"a0": "ooooo", "a1": "oo.oo"}
    codec = team(tuple(plan))
    whole, extended = (finish(play(plan, over="truncated"))[0] for _ in range(2))
    AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=[extended], shared_data={})
    assert len(extended.agent_episodes["a0"]) == 5
    expected, got = collect([whole], codec), collect([extended], codec, with_extra_step=True)
    for batch in (expected, got):
        for s in batch.modules.values():
            s.origin = s.origin[..., 1:].repeat(2, -1)  # RLlib has changed the episode's id
    assert_same(expected, got)


def test_the_pipeline_gets_the_batch_under_its_name():
    piece = EpisodesToJointBatch(codec=team(AGENTS[:2]))
    result = piece(episodes=play({"a0": "ooo", "a1": "ooo"}), batch={})
    assert list(result) == [JOINT_BATCH] and result[JOINT_BATCH].env_steps() == 2
    assert all(s.origin is None for s in result[JOINT_BATCH].modules.values())  # audit=False
    _, options = piece.get_ctor_args_and_kwargs()
    assert options == {"codec": piece.codec, "check_bounds": True, "audit": False, "with_extra_step": False}


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
    first.extras = {0: {"cost": 1.5}, 1: {"cost": 2.5, "load": {"a1": np.array([1.0, 2.0])}}}
    second.extras = {3: {"cost": 4.5}}
    batch = collect([first, second], team(AGENTS[:2]))
    # Rows: steps 0 and 1; a1's step 1 once more, which was open; steps 2 and 3.
    assert batch.extras["cost"].tolist() == [[1.5], [2.5], [0.0], [0.0], [4.5]]
    assert batch.extras["load"].shape == (5, 2, 1, 2)
    assert batch.extras["load"][1, 1, 0].tolist() == [1.0, 2.0] and batch.extras["load"].sum() == 3.0
    assert collect(play({"a0": "oo"}), team(("a0",))).extras == {}


# --- what is refused --------------------------------------------------------------------------------------------------


def said(*parts):
    """A pattern for a message that holds all of these, in any order."""
    return "".join(rf"(?=[\s\S]*{part})" for part in parts)


WHERE = said("environment 'village'", "environment index 3", "runner 2", "agent 'a1'")


def at(bad, moment, agent=1):
    """Observations with one bad one."""
    return lambda n, t, i: np.full(3, bad, np.float32) if (t, i) == (moment, agent) else see(n, t, i)


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("cuts", [(), (1,), (2,)])
def test_a_reward_that_is_no_number(cuts, numpy):
    episodes = play(
        {"a0": "ooooo", "a1": "ooooo"},
        joint(AGENTS[:2], 2, 3),
        cuts=cuts,
        reward=lambda t, i: np.nan if (t, i) == (2, 1) else 0.0,
    )
    with pytest.raises(ValueError, match=WHERE + said("reward nan", r"step 2\b", "finite")):
        collect(finish(episodes) if numpy else episodes, team(AGENTS[:2]))


@pytest.mark.parametrize(("bad", "told"), [(np.nan, "nan"), (np.inf, "inf"), (BOUND + 1, "1001")])
@pytest.mark.parametrize("moment", [0, 2, 4])
def test_a_bad_observation(bad, told, moment):
    episodes = play({"a0": "ooooo", "a1": "ooooo"}, joint(AGENTS[:2], 2, 3), observe=at(bad, moment))
    with pytest.raises(
        ValueError, match=WHERE + said("observation", rf"step {moment}\b", told, "disable_env_checking")
    ):
        collect(episodes, team(AGENTS[:2]))


def test_a_bad_observation_in_a_later_fragment_names_the_step_of_the_episode():
    episodes = play({"a0": "oooooo", "a1": "oooooo"}, joint(AGENTS[:2], 2, 3), cuts=[2], observe=at(np.nan, 4))
    collect(episodes[:1], team(AGENTS[:2]))
    with pytest.raises(ValueError, match=WHERE + said(r"step 4\b")):
        collect(episodes, team(AGENTS[:2]))


def test_bounds_are_not_compared_where_that_is_off_but_nan_is_still_found():
    make = lambda bad: play({"a0": "ooo", "a1": "ooo"}, joint(AGENTS[:2], 2, 3), observe=at(bad, 1))  # noqa: E731
    batch = collect(make(BOUND + 1), team(AGENTS[:2]), check_bounds=False)
    assert batch.stream("a1").obs[1, 0, 0] == BOUND + 1
    with pytest.raises(ValueError, match=WHERE):
        collect(make(np.nan), team(AGENTS[:2]), check_bounds=False)


def test_what_stands_behind_a_termination_is_not_looked_at():
    batch = collect(play({"a0": "ooo", "a1": "ooT"}, observe=at(np.nan, 2)), team(AGENTS[:2]))
    assert batch.stream("a1").terminated[1, 0]
    assert np.isfinite(batch.stream("a1").bootstrap_obs).all()


def test_errors_name_the_episode_of_rllibs_own_class():
    episodes = play({"a0": "ooo"}, MultiAgentEpisode(id_="abc"), observe=at(np.nan, 1, agent=0))
    with pytest.raises(ValueError, match=said("episode abc", "agent 'a0'", "observation", r"step 1\b")):
        collect(episodes, team(("a0",)))


def test_a_step_without_its_log_probability():
    episode = joint(("a0",))
    episode.add_env_reset(observations={"a0": see(0, 0, 0)})
    episode.add_env_step({"a0": see(0, 1, 0)}, {"a0": 0}, {"a0": 1.0}, extra_model_outputs={"a0": {"vf_preds": 0.0}})
    with pytest.raises(ValueError, match=r"agent 'a0'.*without 'action_logp'.*must put it out"):
        collect([episode], team(("a0",)))


def test_an_agent_that_is_not_of_the_team():
    episodes = play({"a0": "ooo", "a1": "ooo"}, MultiAgentEpisode(id_="abc"))
    with pytest.raises(ValueError, match=r"episode abc has steps of \['a1'\], but the team is \['a0'\]; declare"):
        collect(episodes, team(("a0",)))


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(batch, agent, gamma, lambda_, value=lambda obs: 0.5 + 0 * obs[:, 0]):
    """Value targets of an agent's rows, as the learner computes them."""
    rows = joint_rows(
        [batch],
        values_of=lambda _, obs: value(obs),
        normalizers={},
        gamma=dict.fromkeys(batch.modules, gamma),
        lambda_=dict.fromkeys(batch.modules, lambda_),
        bootstrap=True,
        standardize_rollout=False,
        device="cpu",
    )
    i = batch.agents.index(agent)
    return rows.value_targets[i][rows.present[i]].double().numpy()


@pytest.mark.parametrize(
    ("end", "lambda_", "expected"),
    [
        # γ = 0.9, rewards 1, 2, 3, V = 0.5: r + 0.45 where something follows (λ = 0); discounted sums (λ = 1).
        ("terminated", 0.0, [1.45, 2.45, 3.0]),
        ("terminated", 1.0, [1 + 0.9 * 4.7, 2 + 0.9 * 3.0, 3.0]),
        ("truncated", 0.0, [1.45, 2.45, 3.45]),
        ("truncated", 1.0, [1 + 0.9 * 5.105, 2 + 0.9 * 3.45, 3.45]),
        ("cut", 0.0, [1.45, 2.45, 3.0]),
        ("cut", 1.0, [1 + 0.9 * 2.45, 2.45, 3.0]),
    ],
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("partner", ["there", "dead", "late"])
def test_targets_computed_by_hand(end, lambda_, expected, together, partner):
    """Case 10; another agent that comes or goes meanwhile changes nothing."""
    cut = end == "cut"
    plan = {"a0": "oooo", "a1": {"there": "oooo", "dead": "oT..", "late": ".ooo"}[partner]}
    fragments = play(plan, over="terminated" if cut else end, cuts=[2] if cut else (), reward=lambda t, i: t + 1.0)
    codec = team(AGENTS[:2])
    batches = [collect(fragments, codec)] if together else [collect([f], codec) for f in fragments]
    found = np.concatenate([targets(batch, "a0", 0.9, lambda_) for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def reference(rewards, values, following, gamma, lambda_):
    """R_i = A_i + V_i with A_i = delta_i + gamma lambda A_{i+1}; float64."""
    out, advantage = [], 0.0
    next_value = following
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lambda_ * advantage
        out.append(advantage + value)
        next_value = value
    return np.array(out[::-1], np.float64)


def value_of(obs):
    """[R, 3] to [R]: something that depends on all components."""
    return 0.3 * obs[:, 0] - 0.07 * obs[:, 1] ** 2 + 0.5 * obs[:, 2] + torch.sin(obs[:, 1])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
def test_targets_of_agents_that_come_go_and_wait(lambda_, together):
    plan = {"a0": "o.oo..ooo", "a1": "oo..oo.t.", "a2": "..ooooooo"}
    cuts, gamma = [3, 5], 0.9
    fragments = play(plan, cuts=cuts, over="truncated", wait_pay=0.25)
    groups = [fragments] if together else [[f] for f in fragments]
    v = lambda t, i: float(value_of(torch.tensor([[0.0, float(t), float(i)]], dtype=torch.float64))[0])  # noqa: E731
    for agent, (i, moments) in zip(plan, enumerate(plan.values()), strict=True):
        expected = []
        starts = [t for t, m in enumerate(moments[:-1]) if m == "o"]
        ends = [next((u for u in range(t + 1, len(moments)) if moments[u] != "."), None) for t in starts]
        rewards = [pay(t, i) + 0.25 * (end - t - 1) for t, end in zip(starts, ends, strict=True)]
        # A step belongs to the fragment in which it ends.
        limits = [0, *cuts, len(moments) - 1]
        for low, high in zip(limits, limits[1:], strict=False):
            mine = [k for k, end in enumerate(ends) if low < end <= high]
            if mine:
                last = ends[mine[-1]]
                after = 0.0 if moments[last] in "tT" else v(last, i)
                picked = [rewards[k] for k in mine], [v(starts[k], i) for k in mine]
                expected.append(reference(*picked, after, gamma, lambda_))
        batches = [collect(group, team()) for group in groups]
        found = np.concatenate([targets(batch, agent, gamma, lambda_, value_of) for batch in batches])
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5, atol=1e-5)


def test_a_missing_mark_of_a_cut_would_be_noticed():
    fragments = play({"a0": "oooo"}, over="terminated", cuts=[2], reward=lambda t, i: t + 1.0)
    batch = collect(fragments, team(("a0",)))
    assert batch.modules["m_a0"].truncated.sum() == 1
    batch.modules["m_a0"].truncated[:] = False
    assert abs(targets(batch, "a0", 0.9, 1.0)[1] - 2.45) > 0.1
