"""A team in a small world begins one of more agents in a larger world, as one module or as forked groups."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.communicating.message_reference import exchanged, layer
from tests.support import largest_difference, optimizer_states, parameters, scramble, tiny_config
from thrust_rllib import load_team
from thrust_rllib.envs.coverage import CoverageWorld
from thrust_rllib.teams import forked_groups

SMALL, LARGE = {"grid": 8, "num_agents": 3}, {"grid": 12, "num_agents": 5}
AGENTS = [f"agent_{i}" for i in range(5)]
WINDOW = {"observation": "window", "window": 2}
NETWORKS = {"mlp": {"encoder": "mlp"}, "conv": {"encoder": "conv", "conv_filters": [[4, 3], [6, 3]]}}
ROUNDS, LEVEL = 2, "updates.0.2.weight"


def config(size, sees="window", encoder="mlp", normalize=True, policies="shared", **options):
    world = {**size, "horizon": 8, "comm_r": 3, **(WINDOW if sees == "window" else {}), **options.pop("world", {})}
    model = {"message_rounds": ROUNDS, "message_size": 8, "encoder_hiddens": [9], **NETWORKS[encoder]}
    runners = {"normalize_observations": normalize}
    return tiny_config("coverage", world, policies=policies, model=model, runners=runners, **options)


@pytest.fixture(scope="module")
def donor(ray_session, tmp_path_factory):
    """What the small worlds leave: {what the agents see: path, parameters, moments, value moments}."""
    left = {}
    for sees, encoder, normalize, seed in (("window", "mlp", True, 0), ("planes", "conv", False, 3)):
        algo = config(SMALL, sees, encoder, normalize).build_algo()
        algo.train()
        learner = algo.learner_group._learner
        assert all(optimizer_states(learner).values()), "the donor's optimizer has moments to be left behind"
        scramble(learner, seed)  # a team of several minds: its greedy actions differ
        with torch.no_grad():  # all alike: their deviation is 0, their root mean square is not
            dict(learner.module["shared"].named_parameters())[LEVEL].fill_(1.5)
        path = algo.save_to_path(tmp_path_factory.mktemp("donor"))
        left[sees] = SimpleNamespace(
            path=path, weights=parameters(learner)["shared"], moments=moments(algo).get("shared"),
            values=value_moments(learner)["shared"],
        )  # fmt: skip
        algo.stop()
    return left


def weights(algo):
    return parameters(algo.learner_group._learner)


def moments(algo):
    normalizer = algo.env_runner.normalizer
    return {} if normalizer is None else {m: x.get_state() for m, x in normalizer.moments.items()}


def value_moments(learner):
    return {m: x.get_state() for m, x in learner._value_normalizers.items()}


def logits(by_agent, rests, links, shape):
    """[N, A] of one joint step, in float64 and by loops; `by_agent`: each agent's parameters."""
    mine = [{name: p.astype(np.float64) for name, p in own.items()} for own in by_agent]
    features, _ = exchanged(mine, list(rests.astype(np.float64)), links.astype(np.float64), ROUNDS, "max", shape)
    return np.stack([layer(own, "policy_head", z) for own, z in zip(mine, features, strict=True)])


def normalised(rests, state):
    if state is None:
        return rests
    std = np.maximum(np.sqrt(state["m2"] / state["count"]), 1e-6)
    return np.clip((rests - state["mean"]) / std, -10.0, 10.0)


TEAMS = [
    pytest.param("window", "mlp", 1, id="window"),
    pytest.param("planes", "conv", 1, id="planes"),
    pytest.param("window", "mlp", 3, id="forked"),
]


@pytest.mark.parametrize(("sees", "encoder", "groups"), TEAMS)
def test_the_larger_team_acts_as_its_network_says(build, donor, tmp_path, sees, encoder, groups):
    left, shape = donor[sees], (5, 12, 12) if encoder == "conv" else None
    policies = "shared" if groups == 1 else forked_groups(AGENTS, groups)
    algo = build(config(LARGE, sees, encoder, left.moments is not None, policies))
    names = ["shared"] if groups == 1 else list(policies)
    algo.warm_start(left.path, dict.fromkeys(names, "shared"), group_noise=0.02)
    plays = [names[i * groups // 5] for i in range(5)]
    by_agent = [weights(algo)[m] for m in plays]
    if groups == 1:
        by_agent = [left.weights] * 5  # of the small world, not as they came here

    # What is played, from what the world shows.
    team = load_team(algo.save_to_path(tmp_path / "large"))
    env = CoverageWorld(**LARGE, horizon=8, comm_r=3, **(WINDOW if sees == "window" else {}))
    seen, taken, heard = env.reset_joint([5]), [], 0.0
    for _ in range(4):
        now = {agent: {key: x[0] for key, x in seen[agent].items()} for agent in AGENTS}
        actions, _ = team.act(now)
        rests = np.stack([now[agent]["observations"].ravel() for agent in AGENTS]).astype(np.float64)
        links = np.stack([now[agent]["links"] for agent in AGENTS])
        rests = normalised(rests, left.moments)
        found = logits(by_agent, rests, links, shape)
        heard = max(heard, np.abs(found - logits(by_agent, rests, 0 * links, shape)).max())
        chosen = found[np.arange(5), [actions[agent] for agent in AGENTS]]
        np.testing.assert_allclose(chosen, found.max(axis=1), rtol=0, atol=1e-4)
        taken += list(actions.values())
        seen = env.step_joint({agent: np.array([actions[agent]]) for agent in AGENTS}).observations
    assert len(set(taken)) > 1 and heard > 0.1

    # What is sampled for training.
    (batch,) = algo.env_runner.sample(num_timesteps=16)
    streams = batch.modules
    row = {a: (m, k) for m, own in streams.items() for k, a in enumerate(own.agents)}
    assert [row[agent][0] for agent in AGENTS] == plays
    first = np.stack([streams[m].obs[0, k, 0] for m, k in (row[agent] for agent in AGENTS)])
    found = logits(by_agent, first[:, 5:], first[:, :5], shape)
    logp = found - np.log(np.exp(found).sum(axis=1, keepdims=True))
    for i, (m, k) in enumerate(row[agent] for agent in AGENTS):
        action = streams[m].actions[0, k, 0]
        assert streams[m].action_logp[0, k, 0] == pytest.approx(logp[i, action], abs=1e-4)


def test_forked_groups_are_one_copy_and_others_near_it(build, donor):
    left, policies = donor["window"], forked_groups(AGENTS, 3)
    start, found = dict.fromkeys(policies, "shared"), []
    for _ in range(2):
        algo = build(config(LARGE, policies=policies))
        optimizers = optimizer_states(algo.learner_group._learner)
        algo.warm_start(left.path, start, group_noise=0.02)
        found.append(weights(algo))
    assert largest_difference(found[0], found[1]) == 0.0  # drawn from the seed
    assert largest_difference(found[0]["group_0"], left.weights) == 0.0
    assert largest_difference(found[0]["group_1"], found[0]["group_2"]) > 1e-3
    for group in ("group_1", "group_2"):
        parts = []
        for name, p in left.weights.items():
            p = p.astype(np.float64)
            parts.append(((found[0][group][name] - p) / np.sqrt(np.mean(p**2))).ravel())
            assert np.abs(parts[-1]).max() > 0, name
        added = np.concatenate(parts)  # about 2,500 numbers: their deviation is known to 1.4 %
        assert np.std(added) == pytest.approx(0.02, rel=0.07) and abs(added.mean()) < 0.002
        level = (found[0][group][LEVEL] - 1.5) / 1.5
        assert 0.002 < np.std(level) < 0.05
    for group in policies:
        assert largest_difference(moments(algo)[group], left.moments) == 0.0
        assert largest_difference(value_moments(algo.learner_group._learner)[group], left.values) == 0.0
    now = optimizer_states(algo.learner_group._learner)
    assert largest_difference(now, optimizers) == 0.0 and not any(np.any(x) for own in now.values() for x in own)
    assert algo.train()["training_iteration"] == 1
    trained = weights(algo)
    assert all(largest_difference(trained[m], found[1][m]) > 0.0 for m in policies)


def test_noise_for_all_is_measured_by_the_deviation(build, donor):
    algo = build(config(LARGE, policies=forked_groups(AGENTS, 2)))
    algo.warm_start(donor["window"].path, {"group_0": "shared", "group_1": "shared"}, noise=0.02)
    for own in weights(algo).values():
        assert np.all(own[LEVEL] == 1.5) and largest_difference(own, donor["window"].weights) > 1e-3


def test_each_source_has_an_exact_copy(build, donor, tmp_path, caplog):
    forked = build(config(LARGE, policies=forked_groups(AGENTS, 2), seed=8))
    before = weights(forked)
    path = forked.save_to_path(tmp_path / "two")
    algo = build(config(LARGE, policies=forked_groups(AGENTS, 4)))
    start = {"group_3": "group_0", "group_1": "group_1", "group_2": "group_0", "group_0": "group_1"}
    algo.warm_start(path, start, group_noise=0.1)
    now = weights(algo)
    for m, exact in {"group_0": True, "group_1": False, "group_2": True, "group_3": False}.items():
        assert (largest_difference(now[m], before[start[m]]) == 0.0) is exact
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.warm_start(path, group_noise=0.1)  # each from the one of its name
    assert "group_noise changes nothing: no two modules start from the same one" in caplog.text
    now = weights(algo)
    assert largest_difference({m: now[m] for m in before}, before) == 0.0


MISTAKES = [
    ({"noise": 0.1, "group_noise": 0.02}, r"noise=0.1 and group_noise=0.02; needed: one of them"),
    ({"group_noise": -0.02}, r"group_noise=-0.02; needed: a number ≥ 0"),
    ({"group_noise": float("inf")}, r"group_noise=inf"),
    ({"group_noise": "0.02"}, r"group_noise='0.02'; needed: a number"),
    ({"modules": {"group_7": "shared"}}, r"this algorithm has no module 'group_7'; did you mean"),
]


def test_mistakes_change_nothing(build, donor):
    algo = build(config(LARGE, policies=forked_groups(AGENTS, 2)))
    before, kept = weights(algo), moments(algo)
    for arguments, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            algo.warm_start(donor["window"].path, **{"modules": {"group_0": "shared"}, **arguments})
    assert largest_difference(weights(algo), before) == 0.0 == largest_difference(moments(algo), kept)


def test_what_cannot_grow_is_told_with_a_way_out(build, tmp_path):
    def refused(size, message, **options):
        path = build(config(SMALL, **options)).save_to_path(tmp_path / f"{size}{len(message)}")
        algo = build(config(LARGE, **{**options, **({"world": {"window": 3}} if size == "window" else {})}))
        before = weights(algo)
        with pytest.raises(ValueError, match=message):
            algo.warm_start(path)
        assert largest_difference(weights(algo), before) == 0.0

    refused(
        "grid",
        r"encoder.0.weight has the shape \(9, 320\) in the checkpoint and \(9, 720\) here .*number of agents .* may "
        "differ, .*a window of one size, or where encoder is 'conv'",
        sees="planes",
        normalize=False,
    )
    moved = "moments of observations come along. Needed: .*a window of one size .* without .*normalize_observations"
    refused("planes", rf"shape \(720,\), .*of shape \(320,\) \(links are not counted\), and {moved}", sees="planes",
            encoder="conv")  # fmt: skip
    refused("window", rf"shape \(441,\), .*of shape \(225,\).*{moved}", encoder="conv")


def test_groups_of_neighbours():
    assert forked_groups("a b c d e".split(), 3) == {"group_0": ["a", "b"], "group_1": ["c", "d"], "group_2": ["e"]}
    assert forked_groups(("a", "b"), 1) == {"group_0": ["a", "b"]}
    twelve = forked_groups(range(12), 12)
    assert list(twelve) == [f"group_{g}" for g in range(12)] and list(twelve.values()) == [[i] for i in range(12)]
    for wrong in (0, 4, 1.5, True, "2"):
        with pytest.raises(ValueError, match=rf"groups={wrong!r}; needed: a whole number from 1 to 3"):
            forked_groups(["a", "b", "c"], wrong)
    for agents in ("agent_0", {"a", "b"}, 3):
        with pytest.raises(ValueError, match="needed: a list of all agents of the environment"):
            forked_groups(agents, 1)
