"""Both doors give the same batch: same seeds, weights and actions, whatever the environment."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest

from tests.general.doors import Comers, Doors, Typed, assert_same_batches, column
from tests.support import largest_difference, parameters, runner_metrics, update
from thrust_rllib.envs import list_envs

RLLIB = "ray.rllib.examples.envs.classes.multi_agent"

# Settings under which episodes end inside a fragment.
BUILT_IN = {
    "bucket_brigade": {"scenario": "minimal_specialization"},
    "climbing": {"episode_length": 6},
    "penalty": {"episode_length": 6},
    "two_step_game": {},
    "recall": {"delay": 3},
    "relay": {"delay": 3},
    "spread": {"max_cycles": 7},
    "speaker_listener": {"max_cycles": 7},
    "coverage": {"grid": 6, "num_agents": 3, "horizon": 7, "roles": True, "mask": "safe_goals"},
    "debug/constant_reward": {"episode_length": 6, "ends": ["truncated", "terminated"]},
    "debug/scripted_rewards": {},
    "debug/identity": {},
    "debug/alignment": {},
    "debug/random_observations": {},
    "debug/multi_discrete": {},
    "debug/match_observation": {"episode_length": 6},
    "debug/match_target": {"episode_length": 6},
    "debug/mixed_spaces": {"episode_length": 6},
    "debug/observation_kinds": {"kinds": ["discrete", "multi_discrete", "dict", "image", "tuple", "multi_binary"]},
    "debug/masked_actions": {},
    "debug/faulty": {"fault": "none"},
}
OTHERS = {
    "pettingzoo:mpe2.simple_spread_v3": {"max_cycles": 7},
    "pettingzoo:mpe2.simple_speaker_listener_v4": {"max_cycles": 7},
    "pettingzoo:mpe2.simple_tag_v3": {"max_cycles": 7},
    "pettingzoo:butterfly.knights_archers_zombies_v11": {"spawn_delay": 1, "line_death": True, "max_cycles": 20},
    "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3": {"max_episode_steps": 9},
    "gymnasium:rware:rware-tiny-2ag-v2": {"max_steps": 9},
    f"{RLLIB}.two_step_game:TwoStepGame": {"one_hot_state_encoding": True},
    f"{RLLIB}:MultiAgentCartPole": {"num_agents": 3},
    "CartPole-v1": {},
}
BOX = ("debug/match_target", "debug/mixed_spaces")  # numpy and torch do not agree on the last bit of an action
# Episodes of several environments differ in length.
UNEQUAL = (
    "bucket_brigade",
    "pettingzoo:butterfly.knights_archers_zombies_v11",
    "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3",
    f"{RLLIB}:MultiAgentCartPole",
    "CartPole-v1",
)


def tolerance(env):
    return 1e-6 if env in BOX else 0.0


def check(doors, steps, atol=0.0, **options):
    """Samples from both doors and compares; the batches."""
    fast, episodes = doors.sample(steps, **options)
    general = doors.joint_batch(episodes)
    assert_same_batches(fast, general, atol)
    return fast, general


def test_all_built_in_environments_are_here():
    assert set(BUILT_IN) == {name for name in list_envs() if not name.startswith("only/")}  # other tests' own


@pytest.mark.parametrize("env", [*BUILT_IN, *OTHERS])
def test_one_environment_several_fragments(env):
    doors = Doors(env, {**BUILT_IN, **OTHERS}[env], num_envs=1)
    ended = started = 0
    for steps in (4, 13, 1, 9, 20):
        fast, _ = check(doors, steps, tolerance(env))
        ended += sum(int((s.terminated | s.truncated).sum()) for s in fast.modules.values())
        started += int(fast.episode_start.sum())
    assert started >= 2 and ended >= 2


@pytest.mark.parametrize("env", [*BUILT_IN, *OTHERS])
def test_several_environments(env):
    """Whole batches where all episodes have the same length; elsewhere what each environment played.

    RLlib's loop spends a step on every reset, and stops at a number of steps over all environments: where episodes
    differ in length, so do the columns, and the rows that both have are compared.
    """
    doors = Doors(env, {**BUILT_IN, **OTHERS}[env], num_envs=3)
    if env not in UNEQUAL:
        for steps in (4, 13, 9):
            check(doors, steps, tolerance(env))
    else:
        fast, episodes = doors.sample(60)
        assert fast.episode_start.sum() > 3
        for e in range(3):
            mine = doors.column(episodes, e)
            assert mine.num_envs == 1 and abs(mine.num_steps - 60) <= fast.episode_start.sum()
            assert_same_batches(column(fast, e), mine)


TEAMS = ["shared", {"two": ["agent_2", "agent_0"], "one": ["agent_1"]}]


@pytest.mark.parametrize("policies", TEAMS)
@pytest.mark.parametrize("env", ["debug/random_observations", "debug/masked_actions", "debug/identity"])
def test_shared_modules_and_groups(env, policies):
    doors = Doors(env, {"agents": 3, "episode_length": 6}, num_envs=2, policies=policies)
    for steps in (4, 13):
        fast, general = check(doors, steps)
    assert sorted(len(s.agents) for s in fast.modules.values()) == ([3] if policies == "shared" else [1, 2])
    np.testing.assert_array_equal(fast.modules[min(fast.modules)].actions, general.modules[min(fast.modules)].actions)


SPACES = {
    "box_actions": ([gym.spaces.Box(-3, 3, (4,))] * 2, [gym.spaces.Box(np.float32([-2, 0]), np.float32([3, 1]))] * 2),
    "multi_discrete": ([gym.spaces.Box(-1, 1, (2, 3))] * 2, [gym.spaces.MultiDiscrete([2, 4, 3])] * 2),
    "discrete_from_1": ([gym.spaces.Discrete(4, start=2)] * 2, [gym.spaces.Discrete(3, start=1)] * 2),
    "all_different": (
        [gym.spaces.Box(-1, 1, (3,)), gym.spaces.MultiBinary(3), gym.spaces.MultiDiscrete([3, 4])],
        [gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,)), gym.spaces.MultiDiscrete([2, 3])],
    ),
}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", SPACES)
def test_spaces(kind, num_envs):
    observations, actions = SPACES[kind]
    env_config = {"observation_spaces": observations, "action_spaces": actions}
    boxes = any(isinstance(space, gym.spaces.Box) for space in actions)
    doors = Doors(Typed, env_config, num_envs=num_envs)
    for steps in (3, 12):
        check(doors, steps, 1e-6 if boxes else 0.0)


@pytest.mark.parametrize("settings", [{"normalize_actions": False}, {"normalize_actions": False, "clip_actions": True}])
def test_raw_box_actions(settings):
    """The environment is paid by what it gets, so rewards show how actions are stretched or clipped."""
    observations, actions = SPACES["box_actions"]
    env_config = {"observation_spaces": observations, "action_spaces": actions}
    if not settings.get("clip_actions"):
        env_config["action_spaces"] = [gym.spaces.Box(-np.inf, np.inf, (2,))] * 2
    doors = Doors(Typed, env_config, num_envs=2, environment=settings)
    check(doors, 12, 1e-6)


def test_int_agent_ids():
    env_config = {
        "observation_spaces": [gym.spaces.Box(-1, 1, (3,))] * 3,
        "action_spaces": [gym.spaces.Discrete(3)] * 3,
        "agents": [2, 0, 10],
    }
    for policies in (None, "shared"):
        doors = Doors(Typed, env_config, num_envs=2, policies=policies)
        fast, _ = check(doors, 8)
        assert set(fast.agents) == {0, 2, 10}


@pytest.mark.parametrize("env", ["debug/random_observations", "debug/mixed_spaces", "debug/masked_actions", Comers])
def test_normalized_observations(env):
    """Moments change between rollouts, not inside one, and both doors go on with the same ones."""
    num_envs = 1 if env is Comers else 2
    doors = Doors(env, num_envs=num_envs, runners={"normalize_observations": True})
    obs = []
    for steps in (23, 12, 8):
        fast, _ = check(doors, steps, 2e-6)
        moments = [runner.normalizer.get_state() for runner in doors.runners.values()]
        assert largest_difference(*moments) < 1e-5  # sums over rows in another order
        obs.append(np.concatenate([s.obs[s.present].ravel() for s in fast.modules.values()]))
    assert abs(obs[0].mean()) > 0.3 > abs(obs[1].mean())  # only the first one is not centred yet


@pytest.mark.parametrize("policies", [None, "shared"])
def test_agents_that_come_and_go(policies):
    doors = Doors(Comers, num_envs=1, policies=policies)
    for steps in (40, 3, 1, 1, 25, 30):
        fast, _ = check(doors, steps)
        assert {name: x.ndim for name, x in fast.extras.items()} == {"cost": 2, "share": 3}
    absent = [~fast.stream(agent).present for agent in fast.agents]
    assert all(0 < mine.sum() < mine.size for mine in absent)


def test_agents_that_come_and_go_in_several_environments():
    doors = Doors(Comers, num_envs=3)
    fast, episodes = doors.sample(50)
    for e in range(3):
        assert_same_batches(column(fast, e), doors.column(episodes, e))


def test_columns_stand_in_the_order_of_the_environments():
    doors = Doors(Comers, num_envs=4)
    _, episodes = doors.sample(50)
    whole = doors.joint_batch(episodes)
    for e in range(4):
        alone = doors.column(episodes, e)
        for agent in alone.agents:
            mine, stream = alone.stream(agent), whole.stream(agent)
            np.testing.assert_array_equal(mine.obs[:, 0], stream.obs[: alone.num_steps, e])


@pytest.mark.parametrize("env", ["debug/random_observations", "debug/masked_actions", "debug/multi_discrete", Comers])
def test_exploration_without_a_choice(env):
    """Logits so far apart that a sample is the likeliest action: the whole of the exploring path, without chance."""
    doors = Doors(env, num_envs=1, weights=1e5)
    for steps in (13, 9):
        fast, _ = check(doors, steps, explore=True)
    actions = [s.actions[s.present] for s in fast.modules.values()]
    assert any(len(np.unique(a)) > 1 for a in actions)
    assert max(np.abs(s.action_logp[s.present]).max() for s in fast.modules.values()) < 1e-3


def test_other_weights_other_actions():
    doors = Doors("debug/random_observations", num_envs=2)
    first, _ = check(doors, 10)
    doors.set_weights(1)
    second, _ = check(doors, 10)
    assert any((first.modules[m].actions != second.modules[m].actions).any() for m in first.modules)


def test_another_seed_gives_another_batch():
    fast, _ = Doors("debug/random_observations", seed=3).sample(10)
    doors = Doors("debug/random_observations", seed=4)
    _, episodes = doors.sample(10)
    with pytest.raises(AssertionError, match="obs of agent_0"):
        assert_same_batches(fast, doors.joint_batch(episodes))


def test_two_workers_differ():
    pairs = []
    for worker in (1, 2):
        doors = Doors("debug/random_observations", worker_index=worker)
        pairs.append(check(doors, 10))
    for first, second in zip(*pairs, strict=True):
        assert (first.stream("agent_0").obs != second.stream("agent_0").obs).all(axis=-1).all()


@pytest.fixture(scope="module")
def masked():
    return check(Doors("debug/masked_actions", num_envs=1), 12)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("obs", 0.01), ("rewards", 0.01), ("action_logp", 0.01), ("bootstrap_obs", 0.01), ("actions", 1),
        ("present", None), ("terminated", None), ("truncated", None), ("action_mask", None),
    ],
)  # fmt: skip
def test_each_field_is_compared(masked, field, change):
    fast, general = copy.deepcopy(masked)
    array = getattr(general.modules["agent_1"], field)
    place = (0, 0) if field == "bootstrap_obs" else (4, 0, 0)
    array[place] = ~array[place] if change is None else array[place] + change
    with pytest.raises(AssertionError):
        assert_same_batches(fast, general)


COUNTED = ("episode_len", "episode_return", "agent_", "module_episode", "num_")


def counted(runner):
    """{path: number} of the runner's metrics: returns, lengths and counts."""

    def leaves(numbers, path=()):
        for key, value in numbers.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, key))
            elif (*path, key)[0].startswith(COUNTED) and "throughput" not in key:
                yield (*path, key), float(value)

    return dict(leaves(runner_metrics(runner)))


@pytest.mark.parametrize("env", ["debug/random_observations", "bucket_brigade", Comers])
def test_the_same_metrics(env):
    """Returns, lengths and counts: of fragments in a row, and of an evaluation of whole episodes.

    The last fragment must not end with an episode: the fast door begins the next one at once, the other one later, and
    the environment's generator would be elsewhere when the evaluation resets it.
    """
    doors = Doors(env, BUILT_IN.get(env), num_envs=1)
    for sampled in ({"num_timesteps": 47}, {"num_timesteps": 5}, {"num_timesteps": 29}, {"num_episodes": 3}):
        for runner in doors.runners.values():
            runner.sample(explore=False, **sampled)
        fast, general = map(counted, doors.runners.values())
        assert fast == general
        assert ("episode_return_mean",) in fast and len(fast) > 15


@pytest.mark.parametrize("env", ["debug/random_observations", "debug/mixed_spaces", "debug/masked_actions", Comers])
@pytest.mark.parametrize("options", [{}, {"policies": "shared", "critic_lr": 1e-3, "standardize_advantages": "team"}])
def test_an_update_from_either_batch(env, options):
    if env == "debug/mixed_spaces":  # its agents cannot share
        options = {name: value for name, value in options.items() if name != "policies"}
    doors = Doors(env, num_envs=1 if env is Comers else 2, lr=1e-2, **options)
    for _ in range(2):
        fast, episodes = doors.sample(32)
        doors.nudge()  # greedy actions are the mean of a Gaussian, where its gradient is rounding alone
        before = parameters(doors.learners["arrays"])
        for learner, rollouts in zip(doors.learners.values(), ([fast], episodes), strict=True):
            results = update(learner, rollouts)
            assert all(np.isfinite(results[module_id]["total_loss"]) for module_id in before)
        after = [parameters(learner) for learner in doors.learners.values()]
        assert largest_difference(*after) < 1e-6
        assert largest_difference(before, after[0]) > 1e-3
        for runner in doors.runners.values():
            runner.set_state({"rl_module": doors.learners["arrays"].module.get_state(inference_only=True)})
