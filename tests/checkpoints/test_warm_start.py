"""Parameters of another run to begin with."""

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.test_going_back import assert_runners_equal_learner
from tests.support import Declared, box, discrete, largest_difference, optimizer_states, parameters, tiny_config


def config(count, size=3, **options):
    env_config = {"observation_spaces": [box(size)] * count, "action_spaces": [discrete(3)] * count}
    runners = {"normalize_observations": options.pop("normalize", True), **options.pop("runners", {})}
    return tiny_config(Declared, env_config, runners=runners, **options)


def weights(algo):
    return parameters(algo.learner_group._learner)


def value_moments(algo):
    return {m: x.get_state() for m, x in algo.learner_group._learner._value_normalizers.items()}


def moments(algo):
    return {m: x.get_state() for m, x in algo.env_runner.normalizer.moments.items()}


@pytest.fixture
def donor(build, tmp_path):
    algo = build(config(2, seed=5))
    for _ in range(2):
        algo.train()
    return algo, algo.save_to_path(tmp_path / "donor")


def test_k_of_n_agents_start_from_one_module(build, donor):
    saved, path = donor
    algo = build(config(4))
    algo.train()
    before, optimizers, kept = weights(algo), optimizer_states(algo.learner_group._learner), moments(algo)
    algo.warm_start(path, modules={"a1": "a0", "a3": "a0", "a2": "a1"})
    now = weights(algo)
    for mine, theirs in {"a1": "a0", "a3": "a0", "a2": "a1"}.items():
        assert largest_difference(now[mine], weights(saved)[theirs]) == 0.0
        assert largest_difference(value_moments(algo)[mine], value_moments(saved)[theirs]) == 0.0
        assert largest_difference(moments(algo)[mine], moments(saved)[theirs]) == 0.0
        assert moments(algo)[mine]["count"] == 128
    assert largest_difference(now["a0"], before["a0"]) == 0.0 < largest_difference(now["a1"], before["a1"])
    assert largest_difference(moments(algo)["a0"], kept["a0"]) == 0.0
    assert largest_difference(optimizer_states(algo.learner_group._learner), optimizers) == 0.0
    assert algo.iteration == 1
    assert_runners_equal_learner(algo)
    assert algo.train()["training_iteration"] == 2
    assert moments(algo)["a1"]["count"] == 192


def test_without_names_what_both_have(build, donor):
    saved, path = donor
    algo = build(config(3))
    before = weights(algo)
    algo.warm_start(Path(path))
    now = weights(algo)
    assert largest_difference({m: now[m] for m in ("a0", "a1")}, weights(saved)) == 0.0
    assert largest_difference(now["a2"], before["a2"]) == 0.0


def test_noise_is_relative_and_drawn_from_the_seed(build, donor):
    saved, path = donor
    found = []
    for seed in (3, 3, 4):
        algo = build(config(2, seed=seed))
        algo.warm_start(path, modules={"a0": "a0", "a1": "a0"}, noise=0.1)
        found.append(weights(algo))
        assert_runners_equal_learner(algo)
    assert largest_difference(found[0], found[1]) == 0.0 < largest_difference(found[0], found[2])
    assert largest_difference(found[0]["a0"], found[0]["a1"]) > 0.0
    for name, p in weights(saved)["a0"].items():
        if p.size > 100:
            added = found[0]["a0"][name] - p
            assert np.std(added) == pytest.approx(0.1 * np.std(p), rel=0.3) and abs(added.mean()) < 0.05 * np.std(p)


def test_modules_that_start_in_two_calls_differ_too(build, donor):
    """And a module's noise is the same whoever else is in the call."""
    _, path = donor
    algo, both = build(config(2)), build(config(2))
    for module in ("a0", "a1"):
        algo.warm_start(path, modules={module: "a0"}, noise=0.1)
    both.warm_start(path, modules={"a0": "a0", "a1": "a0"}, noise=0.1)
    found = weights(algo)
    assert largest_difference(found["a0"], found["a1"]) > 0.01
    assert largest_difference(found, weights(both)) == 0.0


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_several_learners_and_remote_runners_get_the_same(build, donor):
    _, path = donor
    one = build(config(2))
    options = {"num_env_runners": 1, "create_local_env_runner": False}
    many = build(config(2, runners=options, minibatch_size=8).learners(num_learners=2))
    for algo in (one, many):
        algo.warm_start(path, noise=0.05)
    assert_runners_equal_learner(many)
    states = [found.get() for found in many.learner_group.foreach_learner(parameters)]
    assert len(states) == 2 and all(largest_difference(state, weights(one)) == 0.0 for state in states)
    (counts,) = many.env_runner_group.foreach_env_runner(
        lambda runner: [x.count for x in runner.normalizer.moments.values()]
    )
    assert counts == [128.0] * 2
    many.train()  # audits that the learners' parameters are alike
    connectors = many.get_state()["env_to_module_connector"]
    (own,) = [state for name, state in connectors.items() if "ObservationNormalizer" in name]
    assert own["a0"]["total"]["count"] == 128 + 2 * 64


MISTAKES = [
    ({"modules": {"b0": "a0"}}, r"this algorithm has no module 'b0'; did you mean 'a0'\? It has \['a0', 'a1', 'a2'\]"),
    ({"modules": {"a0": "a9"}}, r"the checkpoint has no module 'a9'; did you mean .*It has \['a0', 'a1'\]"),
    ({"modules": {}}, r"no module to start from"),
    ({"noise": -0.1}, r"noise=-0.1; needed: a number ≥ 0"),
    ({"noise": float("nan")}, "noise=nan"),
    ({"noise": "0.1"}, "noise='0.1'; needed: a number"),
    ({"modules": ["a0"]}, r"modules=\['a0'\]; needed: a dict"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_change_nothing(build, donor, arguments, message):
    algo = build(config(3))
    before = weights(algo)
    with pytest.raises(ValueError, match=message):
        algo.warm_start(donor[1], **arguments)
    assert largest_difference(weights(algo), before) == 0.0


def test_other_networks_are_refused_with_both_shapes(build, donor, tmp_path):
    _, path = donor
    wide = build(config(2, model={"fcnet_hiddens": [16, 20]}, normalize=False))
    before = weights(wide)
    with pytest.raises(ValueError, match=r"'a0' cannot start from module 'a0'.*shape \(12, 16\).*\(20, 16\) here"):
        wide.warm_start(path)
    recurrent = build(config(2, model={"fcnet_hiddens": [16, 12], "cell": "lstm", "max_seq_len": 4}, normalize=False))
    with pytest.raises(ValueError, match=r"of nothing: it is not there"):
        recurrent.warm_start(path)
    with pytest.raises(
        ValueError, match=r"observations of shape \(4,\), module 'a0' of the checkpoint of shape \(3,\)"
    ):
        build(config(2, size=4)).warm_start(path)
    with pytest.raises(ValueError, match="nothing does not exist; needed: a folder that save_to_path"):
        wide.warm_start(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is no checkpoint of an algorithm: it has no rllib_checkpoint.json"):
        wide.warm_start(tmp_path)
    assert largest_difference(weights(wide), before) == 0.0


def test_observations_that_are_normalised_on_one_side_only_are_told(build, donor, tmp_path, caplog):
    _, path = donor
    raw = build(config(2, normalize=False))
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        raw.warm_start(path)
        assert "saw normalised observations" in caplog.text
        build(config(2)).warm_start(raw.save_to_path(tmp_path / "raw"))
    assert "no moments of observations for modules ['a0', 'a1']" in caplog.text


@pytest.mark.parametrize("here", [True, False])
def test_values_that_are_normalised_on_one_side_only_are_told(build, tmp_path, caplog, here):
    path = build(config(2, value_normalization=not here)).save_to_path(tmp_path / "other")
    algo = build(config(2, value_normalization=here))
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.warm_start(algo.save_to_path(tmp_path / "own"))
        assert "value_normalization" not in caplog.text
        algo.warm_start(path)
    assert "modules ['a0', 'a1'] come from a run with another value_normalization" in caplog.text


def test_a_packed_checkpoint_is_refused(build, donor):
    _, path = donor
    (state,) = Path(path, "learner_group", "learner", "rl_module", "a1").glob("module_state.pkl")
    state.rename(state.with_suffix(".msgpack"))
    with pytest.raises(ValueError, match="saved without use_msgpack"):
        build(config(2)).warm_start(path)
