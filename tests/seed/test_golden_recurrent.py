"""What the seed's recurrent trainer computes, case by case, through the public classes."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from tests.support import (
    Declared,
    box,
    declared_config,
    discrete,
    hand_batch,
    hand_streams,
    largest_difference,
    make_learner,
    make_runner,
    parameters,
    scramble,
    tiny_config,
    update,
)
from thrust_rllib import CrossAgentLoss, LSTMModule

MODEL = {"cell": "lstm", "cell_size": 8}
STATE = 16  # the cell's memory and its output


def seed_config(action_space=None, observation_space=None, *, steps=4, envs=4, **training):
    """One agent with an LSTM of 8, two numbers to see; two whole environments in a minibatch, two epochs."""
    options = {
        "train_batch_size_per_learner": steps * envs,
        "minibatch_size": 2 * steps,
        "iterate_all_minibatches": True,
        "standardize_advantages": "minibatch",
        "value_normalization": False,
        "target_kl": 1.0,
        "lr": 1e-3,
        "num_epochs": 2,
    }
    spaces = [observation_space or box(2)], [action_space or discrete()]
    return declared_config(*spaces, num_envs=envs, model=MODEL, **{**options, **training})


def whole_environments(obs, *, state_in=None, episode_start=None, bootstrap_rows=(), **fields):
    """A batch of one agent, obs [T, E, O]; every environment is one training sequence."""
    steps, envs = obs.shape[:2]
    arrays = {name: x if name == "bootstrap_obs" else np.asarray(x)[:, None] for name, x in fields.items()}
    streams = hand_streams(["a0"], obs[:, None], **arrays)
    streams.state_in = np.zeros((1, envs, STATE), np.float32) if state_in is None else state_in
    return hand_batch(
        {"a0": streams},
        bootstrap_rows,
        episode_start=np.zeros((steps, envs), bool) if episode_start is None else episode_start,
        sequence_rows=np.arange(envs),
    )


def synthetic_batch(steps=4, envs=4):
    """The golden cases' rollout: obs .1 (t + e + d), actions by turns, rewards 1; environment 0 terminates midway."""
    t, e = np.meshgrid(np.arange(steps), np.arange(envs), indexing="ij")
    terminated = (e == 0) & (t == steps // 2)
    start = (t == 0) | np.roll(terminated, 1, axis=0)
    return whole_environments(
        0.1 * (t + e)[..., None] + 0.1 * np.arange(2),
        actions=t % 2,
        rewards=np.ones((steps, envs)),
        logp=np.full((steps, envs), -0.7),
        terminated=terminated,
        episode_start=start,
        bootstrap_rows=np.arange((steps - 1) * envs, steps * envs),
        bootstrap_obs=np.zeros((1, envs, 2)),
    )


# ------------------------------------------------------------------------------------------ golden cases


def test_recurrent_trainer_constructs():
    learner = make_learner(seed_config())
    module = learner.module["a0"]
    assert isinstance(module, LSTMModule) and module.is_stateful()
    assert {name: tuple(x.shape) for name, x in module.get_initial_state().items()} == {"c": (8,), "h": (8,)}
    for optimizer in learner._named_optimizers.values():
        assert optimizer.state_dict()["state"] == {}  # no step was taken


def test_recurrent_trainer_train_step_runs():
    learner = make_learner(seed_config())
    before = parameters(learner)
    results = update(learner, synthetic_batch())
    assert results["__all_modules__"]["num_minibatch_steps"] == 4
    for name in ("policy_loss", "vf_loss", "entropy", "approx_kl", "clip_fraction", "vf_explained_var"):
        assert np.isfinite(results["a0"][name])
    assert largest_difference(parameters(learner), before) > 0.0


def test_recurrent_trainer_applies_max_grad_norm():
    moved = {}
    for limit in (1e-6, 1e9):
        learner = make_learner(seed_config(grad_clip=limit, num_epochs=1, minibatch_size=16))
        before = parameters(learner)["a0"]
        assert update(learner, synthetic_batch())["__all_modules__"]["num_minibatch_steps"] == 1
        after = parameters(learner)["a0"]
        moved[limit] = np.sqrt(sum(np.square(after[name] - before[name]).sum() for name in before))
    assert 0.0 < moved[1e-6] < 0.2 * moved[1e9]


# ------------------------------------------------------------------------------------------ two masks

END = 2


def learned(flag=None, following=7.0):
    """Of six rows: values, advantages, observations, learner and batch; with a flag an episode ends after row `END`."""
    learner = make_learner(seed_config(steps=6, envs=1, standardize_advantages=False, minibatch_size=6))
    scramble(learner)
    rng = np.random.default_rng(0)
    obs, state = rng.normal(size=(6, 1, 2)), rng.normal(size=(1, 1, STATE)).astype(np.float32)
    ends = {} if flag is None else {flag: np.arange(6)[:, None] == END}
    rows = [END, 5] if flag == "truncated" else [5]
    batch = whole_environments(
        obs,
        rewards=np.ones((6, 1)),
        episode_start=(np.arange(6)[:, None] == END + 1) & (flag is not None),
        state_in=state,
        bootstrap_rows=rows,
        bootstrap_obs=np.concatenate([np.full((len(rows) - 1, 2), following), np.zeros((1, 2))])[None],
        **ends,
    )
    rows = learner._joint_rows([batch])
    return rows.values[0], rows.advantages[0], torch.tensor(obs[:, 0], dtype=torch.float32), learner, batch


def test_the_memory_restarts_where_an_episode_starts_whatever_ended_the_one_before():
    truncated, terminated = learned("truncated")[0], learned("terminated")[0]
    goes_on = learned()[0]
    assert torch.equal(truncated, terminated)
    assert torch.equal(truncated[: END + 1], goes_on[: END + 1])
    assert (truncated - goes_on)[END + 1 :].abs().min() > 1e-3
    # Behind the start everything is as in a rollout that begins there with an empty memory.
    _, _, obs, learner, _ = learned()
    fresh = whole_environments(obs[END + 1 :, None].numpy(), bootstrap_rows=[2], bootstrap_obs=np.zeros((1, 1, 2)))
    torch.testing.assert_close(learner._joint_rows([fresh]).values[0], truncated[END + 1 :])


def test_gae_stops_at_terminated_alone_and_bootstraps_a_truncated_row_before_the_reset():
    values, advantages, *_ = learned("terminated")
    assert advantages[END].item() == pytest.approx(1.0 - values[END].item(), abs=1e-6)
    values, advantages, _, learner, _ = learned("truncated")
    # What followed the truncated row is one more step of the same memory: what the row would see if it went on.
    *_, longer = learned()
    longer.modules["a0"].obs[END + 1] = 7.0
    following = learner._joint_rows([longer]).values[0, END + 1]
    expected = 1.0 + 0.99 * following - values[END]
    assert advantages[END].item() == pytest.approx(expected.item(), abs=1e-6)
    assert abs(following.item() - values[END + 1].item()) > 1e-3


class Alternating(Declared):
    """Episodes of three steps, terminated and truncated by turns."""

    def reset_joint(self, seed=None):
        self.count = getattr(self, "count", -1) + 1
        return super().reset_joint(seed)

    def step_joint(self, actions):
        result = super().step_joint(actions)
        over = self.t == 3
        terminated, truncated = over and self.count % 2 == 0, over and self.count % 2 == 1
        return dataclasses.replace(result, terminated=terminated, truncated=truncated)


def test_episode_starts_are_the_ends_of_the_row_before_carried_over_rollouts():
    spaces = {"observation_spaces": [box(2)], "action_spaces": [discrete()], "length": 99}
    config = tiny_config(Alternating, spaces, model=MODEL, minibatch_size=64)
    runner = make_runner(config)
    carried, ends = np.ones(2, bool), {"terminated": 0, "truncated": 0}
    for _ in range(3):
        (batch,) = runner.sample(num_timesteps=16)
        stream = batch.stream("a0")
        for name in ends:
            ends[name] += int(getattr(stream, name).sum())
        over = stream.terminated | stream.truncated
        np.testing.assert_array_equal(batch.episode_start, np.concatenate([carried[None], over[:-1]]))
        carried = over[-1]
    assert min(ends.values()) > 2


# ------------------------------------------------------------------------------------------ minibatches


class Recorder(CrossAgentLoss):
    """Keeps the actions of every minibatch; couples nothing."""

    needs_features, min_agents = False, 1

    def __init__(self):
        self.seen = []

    def __call__(self, features, logits, actions, present):
        self.seen.append(actions["a0"].numpy().round().astype(int))


def test_minibatches_are_whole_environments_shuffled_in_each_epoch_and_the_short_last_one_is_kept():
    steps, envs, epochs = 4, 5, 6
    config = seed_config(
        gym.spaces.Box(-10, 10, (2,)),
        steps=steps,
        envs=envs,
        num_epochs=epochs,
        target_kl=None,
        lr=0.0,
        cross_agent_losses={"recorder": Recorder()},
    )
    learner = make_learner(config)
    t, e = np.meshgrid(np.arange(steps), np.arange(envs), indexing="ij")
    batch = whole_environments(
        np.zeros((steps, envs, 2)),
        actions=np.stack([t, e], -1).astype(np.float32),
        logp=np.full((steps, envs), -20.0),
        terminated=t == steps - 1,
    )
    update(learner, batch)
    seen = learner.config.cross_agent_losses["recorder"].seen
    assert [len(rows) for rows in seen] == [2 * steps, 2 * steps, steps] * epochs
    orders = []
    for epoch in range(epochs):
        orders.append([])
        for rows in seen[3 * epoch : 3 * epoch + 3]:
            for environment in rows.reshape(-1, steps, 2):
                assert environment[:, 0].tolist() == list(range(steps))  # in the order of time
                assert len(set(environment[:, 1])) == 1
                orders[-1].append(int(environment[0, 1]))
        assert sorted(orders[-1]) == list(range(envs))
    assert len(set(map(tuple, orders))) > 1


def on_policy(learner, batch):
    """Gives the batch the log-probabilities of the learner's own policy, by one forward over whole environments."""
    module, streams = learner.module["a0"].unwrapped(), batch.modules["a0"]
    obs = torch.from_numpy(streams.obs[:, 0]).transpose(0, 1)
    c, h = torch.from_numpy(streams.state_in[0]).chunk(2, dim=1)
    with torch.no_grad():
        outputs = module.forward_train({Columns.OBS: obs, Columns.STATE_IN: {"c": c, "h": h}})
    logits = outputs[Columns.ACTION_DIST_INPUTS].transpose(0, 1)
    distribution = module.get_train_action_dist_cls().from_logits(logits)
    streams.action_logp = distribution.logp(torch.from_numpy(streams.actions[:, 0])).numpy()[:, None]
    return batch


def random_batch(steps=4, envs=4, seed=0):
    rng = np.random.default_rng(seed)
    return whole_environments(
        rng.normal(size=(steps, envs, 2)),
        actions=rng.integers(2, size=(steps, envs)),
        rewards=rng.normal(size=(steps, envs)),
        bootstrap_rows=np.arange((steps - 1) * envs, steps * envs),
        bootstrap_obs=rng.normal(size=(1, envs, 2)),
        state_in=rng.normal(size=(1, envs, STATE)).astype(np.float32),
    )


@pytest.mark.parametrize("scope, mean_is_0", [("minibatch", True), ("rollout", False)])
def test_advantages_are_standardised_in_each_minibatch(scope, mean_is_0):
    """Where every ratio is 1, the policy loss is minus the mean advantage of the minibatch."""
    config = seed_config(standardize_advantages=scope, num_epochs=1, max_minibatches_per_epoch=1)
    learner = make_learner(config)
    scramble(learner)
    loss = update(learner, on_policy(learner, random_batch()))["a0"]["policy_loss"]
    assert abs(loss) < 1e-5 if mean_is_0 else abs(loss) > 1e-2


# ------------------------------------------------------------------------------------------ stops, guard, rate


@pytest.mark.parametrize(
    "target, scope, steps", [(None, "epoch", 6), (0.5, "epoch", 6), (0.1, "epoch", 3), (0.1, "update", 1)]
)
def test_a_kl_over_the_target_skips_the_rest_of_the_epoch_alone(target, scope, steps):
    config = seed_config(target_kl=target, target_kl_scope=scope, num_epochs=3, lr=0.0)
    learner = make_learner(config)
    scramble(learner)
    batch = on_policy(learner, random_batch())
    batch.modules["a0"].action_logp += 0.3  # the k1 estimator is .3 in every minibatch
    results = update(learner, batch)
    assert results["__all_modules__"]["num_minibatch_steps"] == steps
    assert results["a0"]["approx_kl"] == pytest.approx(0.3, abs=1e-5)


def test_the_step_whose_kl_is_over_the_target_is_still_taken():
    learner = make_learner(seed_config(target_kl=0.1, target_kl_scope="update"))
    batch = on_policy(learner, random_batch())
    batch.modules["a0"].action_logp += 0.3
    before = parameters(learner)
    update(learner, batch)
    assert largest_difference(parameters(learner), before) > 0.0


def test_an_entropy_under_the_limit_in_three_updates_running_ends_the_training(ray_session):
    config = seed_config(min_entropy=0.05, lr=0.0)
    algo = config.build_algo()
    try:

        def become(certain):
            def change(learner):
                with torch.no_grad():
                    learner.module["a0"].policy_head.bias.copy_(torch.tensor([20.0 * certain, 0.0]))

            algo.learner_group.foreach_learner(change)

        outcomes = []
        for certain in (True, True, False, True, True, True):  # an update in between with entropy starts the count anew
            become(certain)
            results = algo.train()
            outcomes.append(bool(results.get("done")))
            assert (results["learners"]["a0"]["entropy"] < 0.05) == certain
        assert outcomes == [False] * 5 + [True]
        assert "entropy" in results["stop_reason"] and "'a0'" in results["stop_reason"]
        with pytest.raises(RuntimeError, match="entropy guard.*'a0'"):
            algo.train()
    finally:
        algo.stop()


def test_the_rate_can_change_between_updates():
    learner = make_learner(seed_config(lr=[[0, 1e-3], [16, 0.0]]))
    moved = []
    for steps in (16, 32):  # with which this update ends: it trains at the rate of its beginning
        before = parameters(learner)
        update(learner, synthetic_batch(), steps=steps)
        moved.append(largest_difference(parameters(learner), before))
    assert moved[0] > 0.0 and moved[1] == 0.0


# ------------------------------------------------------------------------------------------ the seed's known gap


def test_the_state_that_enters_a_rollout_is_stored_so_that_every_first_ratio_is_1():
    """With ε = 1e-5 the clip fraction is 0 only if no ratio is further from 1."""
    config = seed_config(steps=7, envs=3, clip_param=1e-5, lr=0.0, target_kl=None)
    runner, learner = make_runner(config), make_learner(config)
    scramble(learner, size=1.0)
    runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
    for k in range(3):  # episodes of 5 steps: they end inside rollouts of 7
        (batch,) = runner.sample(num_timesteps=21)
        states = batch.modules["a0"].state_in
        assert states.shape == (1, 3, STATE) and (states == 0.0).all() == (k == 0)
        results = update(learner, batch)["a0"]
        assert results["clip_fraction"] == 0.0 and abs(results["approx_kl"]) < 1e-6
    # The seed trained from a zero state instead.
    batch.modules["a0"].state_in = np.zeros_like(states)
    assert update(learner, batch)["a0"]["clip_fraction"] > 0.1
