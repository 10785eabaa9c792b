"""Encoding of observations, decoding of actions, normalisation."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from ray.rllib.utils.spaces.space_utils import clip_action, unsquash_action

from tests.support import box, discrete, make_runner, tiny_config
from thrust_rllib.connectors.action_decoding import ActionDecoder
from thrust_rllib.connectors.env_to_module_pipeline import TeamEnvToModulePipeline
from thrust_rllib.connectors.observation_encoding import ObservationEncoder
from thrust_rllib.connectors.observation_normalizer import CLIP, ObservationNormalizer
from thrust_rllib.envs.spaces import has_action_mask, map_space, mask_length

# --------------------------------------------------------------------------------------------- observations

OBSERVATIONS = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(-5, 5, (3,), np.int64),
    spaces.Box(-1, 1, (3,), np.float64),
    spaces.Box(-np.inf, np.inf, ()),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([2, 3], start=[1, -1]),
    spaces.MultiDiscrete([[2, 3], [4, 2]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3, start=1)}),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2, 2)), spaces.MultiBinary(2))),
    spaces.Dict({"x": spaces.Dict({"y": spaces.MultiDiscrete([2, 2])}), "z": spaces.Tuple((spaces.Discrete(2),))}),
]


def stack(space, samples, leading):
    """Samples as batches with these leading axes."""
    return map_space(space, lambda s, *xs: np.asarray(xs).reshape((*leading, *s.shape)), *samples)


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("leading", [(), (6,), (2, 3)])
def test_encoding_is_gymnasiums_flatten(space, leading):
    space.seed(0)
    encoder = ObservationEncoder(space)
    samples = [space.sample() for _ in range(int(np.prod(leading)))]
    encoded = encoder.encode(stack(space, samples, leading))
    assert encoded.dtype == np.float32
    assert encoded.shape == (*leading, *encoder.encoded_space.shape)
    expected = np.stack([gym.spaces.flatten(space, s) for s in samples])
    np.testing.assert_array_equal(encoded.reshape(len(samples), -1), expected.astype(np.float32))
    assert encoder.first_violation(encoded) is None
    for row in encoded.reshape(len(samples), *encoder.encoded_space.shape):
        assert encoder.encoded_space.contains(row)


def test_an_image_is_scaled_to_one():
    space = spaces.Box(0, 255, (2, 2, 3), np.uint8)
    encoder = ObservationEncoder(space)
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    np.testing.assert_allclose(encoder.encode(image[None])[0], image / 255, rtol=1e-6)
    assert encoder.encoded_space.shape == (2, 2, 3)
    assert encoder.encoded_space.low.min() == 0 and encoder.encoded_space.high.max() == 1


def test_an_image_inside_a_dict_is_scaled_too():
    space = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "x": spaces.Box(-1, 1, (1,))})
    encoded = ObservationEncoder(space).encode({"image": np.full((2, 2), 255, np.uint8), "x": np.array([0.5])})
    assert encoded.tolist() == [1, 1, 1, 1, 0.5]


def test_a_category_outside_the_space_is_an_error():
    with pytest.raises(ValueError, match="category 4, which is not in its space Discrete"):
        ObservationEncoder(spaces.Discrete(3, start=1)).encode(np.array([1, 4]))
    with pytest.raises(ValueError, match="category -1"):
        ObservationEncoder(spaces.MultiDiscrete([2, 3])).encode(np.array([[0, 1], [0, -1]]))


MASK = np.array([[1, 0, 0, 1], [0, 1, 1, 1]], np.int8)


@pytest.mark.parametrize(
    "rest, raw, encoded",
    [
        ({"observation": spaces.Box(0, 1, (3,))}, {"observation": np.ones((2, 3))}, np.ones((2, 3))),
        ({"observations": spaces.Box(0, 1, (2, 2))}, {"observations": np.ones((2, 2, 2))}, np.ones((2, 2, 2))),
        ({"view": spaces.Box(0, 1, (2, 2))}, {"view": np.ones((2, 2, 2))}, np.ones((2, 4))),
        (
            {"observation": spaces.Box(-1, 1, (2,)), "aim": spaces.Discrete(2, start=1)},
            {"observation": np.zeros((2, 2)), "aim": np.array([1, 2])},
            [[1, 0, 0, 0], [0, 1, 0, 0]],
        ),
        (
            {"observation": spaces.Dict({"x": spaces.Discrete(2), "y": spaces.MultiBinary(1)})},
            {"observation": {"x": np.array([0, 1]), "y": np.array([[1], [0]])}},
            [[1, 0, 1], [0, 1, 0]],
        ),
    ],
    ids=["PettingZoo", "RLlib", "another name", "beside others", "a Dict inside"],
)
def test_action_masks_go_their_own_way(rest, raw, encoded):
    space = spaces.Dict({**rest, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
    encoder, raw = ObservationEncoder(space), {**raw, "action_mask": MASK}
    assert has_action_mask(space) and encoder.masked
    assert encoder.encoded_space.shape == encoder.encode(raw).shape[1:]
    np.testing.assert_array_equal(encoder.encode(raw), encoded)
    assert encoder.action_mask(raw).dtype == bool and encoder.action_mask(raw).sum(1).tolist() == [2, 3]


def test_what_is_no_mask():
    assert not has_action_mask(spaces.Dict({"observation": spaces.Discrete(2)}))
    assert not has_action_mask(spaces.Dict({"x": spaces.Dict({"action_mask": spaces.MultiBinary(2)})}))
    assert not has_action_mask(spaces.Box(0, 1, (2,)))
    assert mask_length(spaces.Discrete(4)) == 4 and mask_length(spaces.MultiDiscrete([2, 3])) == 5
    assert mask_length(spaces.Box(0, 1, (2,))) is None
    with pytest.raises(ValueError, match="holds nothing to encode.*beside the action mask"):
        ObservationEncoder(spaces.Dict({"action_mask": spaces.MultiBinary(2)}))


@pytest.mark.parametrize(
    "value, problem", [(np.nan, "is nan"), (np.inf, "is inf"), (1.5, "outside"), (-0.1, "outside")]
)
def test_the_first_violation_is_found(value, problem):
    encoder = ObservationEncoder(spaces.Box(0, 1, (3,)))
    encoded = np.full((4, 2, 5, 3), 0.5, np.float32)
    encoded[2, 1, 4, 0] = value
    place, text = encoder.first_violation(encoded)
    assert place == (2, 1, 4) and problem in text and "(0,)" in text
    found = encoder.first_violation(encoded, check_bounds=False)
    assert (found is None) == (problem == "outside")


def test_an_unbounded_space_is_checked_for_nan():
    encoder = ObservationEncoder(spaces.Box(-np.inf, np.inf, (2,)))
    assert encoder.first_violation(np.array([[1e30, -1e30]], np.float32)) is None
    assert encoder.first_violation(np.array([[1.0, np.nan]], np.float32))[0] == (0,)


def test_infinity_inside_an_infinite_bound_is_found():
    encoder = ObservationEncoder(spaces.Box(0, np.inf, (2,)))
    assert encoder.first_violation(np.array([[1.0, 2.0]], np.float32)) is None
    assert encoder.first_violation(np.array([[1.0, np.inf]], np.float32)) == ((0,), "element (1,) is inf")


def test_a_space_without_an_encoding_is_an_error():
    with pytest.raises(ValueError, match="has no encoding; supported are Box, Discrete"):
        ObservationEncoder(spaces.Text(5))
    with pytest.raises(ValueError, match="has no encoding"):
        ObservationEncoder(spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}))


# --------------------------------------------------------------------------------------------- actions

BOXES = [
    spaces.Box(np.array([0.0, -3.0], np.float32), np.array([0.1, 7.0], np.float32)),
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-2.0, 5.0, (2,), np.float64),
]


@pytest.mark.parametrize("space", BOXES, ids=str)
def test_box_actions_are_unsquashed_as_rllib_does(space):
    raw = np.random.default_rng(0).normal(size=(50, *space.shape)).astype(np.float32) * 1.5
    decoded = ActionDecoder(space).decode(raw)
    for mine, action in zip(decoded, raw, strict=True):
        np.testing.assert_allclose(mine, unsquash_action(action, space), rtol=1e-5, atol=1e-6)
        assert space.contains(mine)


@pytest.mark.parametrize("space", BOXES, ids=str)
def test_box_actions_are_clipped_as_rllib_does(space):
    raw = np.random.default_rng(0).normal(size=(50, *space.shape)).astype(np.float32) * 4
    decoded = ActionDecoder(space, normalize_actions=False, clip_actions=True).decode(raw)
    for mine, action in zip(decoded, raw, strict=True):
        np.testing.assert_allclose(mine, clip_action(action, space))
        assert space.contains(mine)


def test_neither_leaves_the_action_alone():
    raw = np.array([[5.0, -7.0, 0.5]], np.float32)
    decoder = ActionDecoder(spaces.Box(-1, 1, (3,)), normalize_actions=False, clip_actions=False)
    np.testing.assert_array_equal(decoder.decode(raw), raw)


@pytest.mark.parametrize(
    "space",
    [
        *BOXES,
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(0, np.inf, (2,)),
        spaces.Box(-np.inf, 3, (2,)),
        spaces.Box(0, 10, (2,), np.int64),
        spaces.Box(0, 255, (2,), np.uint8),
    ],
    ids=str,
)
def test_every_decoded_box_action_lies_in_its_space(space):
    raw = np.random.default_rng(0).normal(size=(4, 100, *space.shape)).astype(np.float32) * 5
    for action in ActionDecoder(space).decode(raw).reshape(-1, *space.shape):
        assert space.contains(action), action


def test_categories_are_shifted_by_the_start():
    assert ActionDecoder(spaces.Discrete(3)).decode(np.array([0, 2])).tolist() == [0, 2]
    assert ActionDecoder(spaces.Discrete(3, start=1)).decode(np.array([[0, 2]])).tolist() == [[1, 3]]
    decoder = ActionDecoder(spaces.MultiDiscrete([2, 3], start=[5, -1]))
    assert decoder.decode(np.array([[[0, 0], [1, 2]]])).tolist() == [[[5, -1], [6, 1]]]


@pytest.mark.parametrize(
    "space", [spaces.MultiBinary(3), spaces.Box(0, 1, (2, 2)), spaces.Tuple((spaces.Discrete(2),))]
)
def test_other_action_spaces_are_an_error(space):
    with pytest.raises(ValueError, match="is not supported; needed: Discrete, MultiDiscrete"):
        ActionDecoder(space)


# --------------------------------------------------------------------------------------------- normalisation


def rows(seed, count, scale=1.0):
    return np.random.default_rng(seed).normal(3.0, scale, size=(count, 4)).astype(np.float32)


def normalizer():
    return ObservationNormalizer(shapes={"m": (4,), "other": (2, 3)})


def test_the_merge_of_several_runners_is_one_runner_that_saw_everything():
    alone = normalizer()
    driver, workers = normalizer(), [normalizer() for _ in range(3)]
    for iteration in range(3):
        for k, worker in enumerate(workers):
            x = rows(10 * iteration + k, 5 + 3 * k, scale=1 + k)
            worker.update("m", x)
            alone.update("m", x)
        merged = driver.merge_states([worker.get_state() for worker in workers])
        for each in (driver, *workers):
            each.set_state(merged)
        for each in (driver, *workers):
            assert each.moments["m"].count == alone.moments["m"].count
            np.testing.assert_allclose(each.moments["m"].mean, alone.moments["m"].mean, rtol=1e-12)
            np.testing.assert_allclose(each.moments["m"].std, alone.moments["m"].std, rtol=1e-12)
    assert driver.moments["other"].count == 0


def test_merging_twice_counts_no_row_twice():
    driver, worker = normalizer(), normalizer()
    worker.update("m", rows(0, 10))
    for _ in range(3):
        state = driver.merge_states([worker.get_state()])
        driver.set_state(state)
        worker.set_state(state)
    assert driver.moments["m"].count == 10


def test_a_pipeline_keeps_what_it_has_merged():
    """Without a local runner nobody hands it back: the next news are added to it."""
    driver = TeamEnvToModulePipeline(connectors=[normalizer()])
    worker = TeamEnvToModulePipeline(connectors=[normalizer()])
    for k in range(3):
        worker[ObservationNormalizer][0].update("m", rows(k, 10))
        worker.set_state(driver.merge_states([worker.get_state()]))
        for each in (driver, worker):
            assert each[ObservationNormalizer][0].moments["m"].count == 10 * (k + 1)


def test_normalised_rows_and_the_clip():
    each = normalizer()
    x = rows(0, 200)
    np.testing.assert_array_equal(each.normalize(("m",), x), x)  # nothing is known yet
    each.update("m", x)
    y = each.normalize(("m",), x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(y.std(0), 1, atol=1e-4)
    assert each.normalize(("m",), np.full((1, 4), 1e9, np.float32)).max() == CLIP


def test_masked_rows_do_not_count():
    each, other = normalizer(), normalizer()
    x = rows(0, 20)
    mask = np.arange(20) % 2 == 0
    each.update("m", x, mask)
    other.update("m", x[mask])
    np.testing.assert_allclose(each.moments["m"].mean, other.moments["m"].mean)


def test_its_state_survives_a_round_trip():
    each, other = normalizer(), normalizer()
    each.update("m", rows(0, 20))
    other.set_state(each.get_state())
    x = rows(1, 5)
    np.testing.assert_array_equal(each.normalize(("m",), x), other.normalize(("m",), x))


def test_its_pipeline_survives_a_checkpoint(tmp_path):
    runner = normalizing_runner()
    runner.sample(num_timesteps=20)
    path = runner._env_to_module.save_to_path(tmp_path / "pipeline")
    restored = EnvToModulePipeline.from_checkpoint(path)
    (mine,), (other,) = runner._env_to_module[ObservationNormalizer], restored[ObservationNormalizer]
    assert other.shapes == mine.shapes and other.moments["agent_1"].count == 20
    x = rows(1, 5)[:, :3]
    np.testing.assert_array_equal(other.normalize(("agent_1",), x), mine.normalize(("agent_1",), x))
    assert (x != mine.normalize(("agent_1",), x)).any()


def test_it_takes_the_two_spaces_as_every_connector_does():
    args, kwargs = ObservationNormalizer(box(4), discrete(), shapes={"m": (4,)}).get_ctor_args_and_kwargs()
    assert args == (box(4), discrete()) and kwargs == {"shapes": {"m": (4,)}, "links": {"m": 0}}
    assert ObservationNormalizer(*args, **kwargs).input_observation_space == box(4)


def normalizing_runner(**options):
    return make_runner(tiny_config("debug/alignment", {"episode_length": 7}, runners={"normalize_observations": True}))


def moments(runner):
    return runner._env_to_module[ObservationNormalizer][0].moments["agent_1"]


def test_the_runner_normalises_with_the_moments_of_earlier_rollouts():
    runner = normalizing_runner()
    (first,) = runner.sample(num_timesteps=20)
    raw = first.stream("agent_1").obs
    assert raw[..., 1].max() == 6  # nothing was known, nothing changed
    assert moments(runner).count == 20
    np.testing.assert_allclose(moments(runner).mean, raw.reshape(-1, 3).mean(0))
    mean, std = moments(runner).mean.copy(), moments(runner).std.copy()
    (second,) = runner.sample(num_timesteps=20)
    stream = second.stream("agent_1")
    expected = np.clip((np.array([1.0, 3.0, 1.0]) - mean) / std, -CLIP, CLIP)
    np.testing.assert_allclose(stream.obs[0, 0], expected, rtol=1e-5)
    # What follows is normalised alike: (episode 2, step 6) after 20 steps in each of 2 environments.
    following = np.clip((np.array([2.0, 6.0, 1.0]) - mean) / std, -CLIP, CLIP)
    np.testing.assert_allclose(stream.bootstrap_obs[-1], following, rtol=1e-5)
    assert moments(runner).count == 40


def test_every_change_of_the_moments_is_seen_by_the_next_normalisation():
    def one(mean):
        normalizer = ObservationNormalizer(shapes={"m": (1,)})
        normalizer.update("m", np.array([[mean - 1.0], [mean + 1.0]]))
        return normalizer

    x, normalizer = np.full((1, 1), 5.0, np.float32), one(5.0)
    assert normalizer.normalize(("m",), x) == 0.0
    normalizer.update("m", np.array([[8.0], [8.0]]))  # mean 6.5, variance 2.75
    assert normalizer.normalize(("m",), x) == pytest.approx(-1.5 / 2.75**0.5)
    normalizer.set_state(one(4.0).get_state())
    assert normalizer.normalize(("m",), x) == 1.0
    normalizer.reset_state()
    assert normalizer.normalize(("m",), x) == 5.0


def test_evaluation_leaves_the_moments_alone():
    runner = normalizing_runner()
    runner.sample(num_timesteps=20)
    runner.sample(num_episodes=4)
    assert moments(runner).count == 20
    config = tiny_config("debug/alignment", runners={"normalize_observations": True})
    config.evaluation(evaluation_interval=1)
    config.validate()
    evaluation = config.get_evaluation_config_object()
    other = make_runner_of(evaluation)
    other.sample(num_timesteps=20)
    assert moments(other).count == 0


def make_runner_of(config):
    from thrust_rllib import JointEnvRunner

    return JointEnvRunner(config=config, worker_index=0)


def test_a_module_without_moments_sees_its_observations_as_they_are_beside_one_that_has():
    each = ObservationNormalizer(shapes={"new": (3,), "old": (3,)})
    each.update("old", rows(0, 50)[:, :3])
    x = np.full((2, 4, 3), 1e3, np.float32)
    new, old = each.normalize(("new", "old"), x)
    np.testing.assert_array_equal(new, x[0])
    assert old.max() <= CLIP


def test_what_a_frozen_module_sees_does_not_change(caplog):
    config = tiny_config("debug/random_observations", runners={"normalize_observations": True}, trained=["agent_0"])
    runner = make_runner(config)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        for _ in range(3):
            runner.sample(num_timesteps=20)
    moments = runner.normalizer.moments
    assert moments["agent_0"].count == 60 and moments["agent_1"].count == 0
    told = [r.getMessage() for r in caplog.records if "has no moments of observations" in r.getMessage()]
    assert sorted(told)[0].startswith("module 'agent_1' is not trained") and len(told) == 2
