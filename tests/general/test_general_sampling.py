"""Single calls of `sample()` by episodes: what stays between them, and what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.general.counting import Counting
from tests.general.runs import Lives, batch_of, episode_runner, episodes_config
from tests.support import Declared, box, make_learner, tiny_config
from thrust_rllib.episode_runner import JointEpisodeRunner


def on_episode_end(**kwargs):
    pass


@pytest.mark.parametrize("callback", [False, True])
def test_fragments_of_episodes_that_go_on_are_kept_for_the_callback_alone(callback):
    config = episodes_config(Counting, {"length": 50}, num_envs=1)
    if callback:
        config.callbacks(on_episode_end=on_episode_end)
    runner = episode_runner(config)
    for _ in range(3):
        runner.sample(num_timesteps=5)
    kept = [fragment for fragments in runner._ongoing_episodes_for_metrics.values() for fragment in fragments]
    assert len(kept) == (3 if callback else 0)


def test_an_evaluation_on_the_training_runner_does_not_move_the_moments():
    runner = episode_runner(episodes_config(Counting, runners={"normalize_observations": True}))

    def moments():
        return {m: (x.count, x.mean.tolist(), x.std.tolist()) for m, x in runner.normalizer.moments.items()}

    runner.sample(num_timesteps=16)
    before = moments()
    assert before["left"][0] == 16
    runner.sample(num_episodes=4)
    assert moments() == before
    runner.sample(num_timesteps=16)
    assert moments()["left"][0] == 32 and moments()["left"][1] != before["left"][1]


def test_random_actions():
    runner = episode_runner(episodes_config(Counting, num_envs=1))
    episodes = runner.sample(num_timesteps=40, random_actions=True)
    assert sum(map(len, episodes)) == 40
    taken = {
        agent: np.concatenate([e.agent_episodes[agent].get_actions() for e in episodes]) for agent in ("left", "right")
    }
    assert all(set(actions) == {0, 1, 2} for actions in taken.values())
    assert [step["left"] for step in runner.env.envs[0].played] == taken["left"].tolist()
    # They have no log-probability, so nothing can be learned from them; what is sampled next can.
    with pytest.raises(ValueError, match="came without 'action_logp'"):
        batch_of(runner.config, runner, episodes)
    assert batch_of(runner.config, runner, runner.sample(num_timesteps=10)).env_steps() == 10


class Reuses(Declared):
    """Writes what it tells beside rewards into the same dicts and arrays in every step."""

    def __init__(self, **spaces):
        super().__init__(**spaces)
        self.told = {"cost": 0.0, "load": {agent: np.zeros(2, np.float32) for agent in self.possible_agents}}

    def step_joint(self, actions):
        result = super().step_joint(actions)
        self.told["cost"] = float(self.t)
        for i, load in enumerate(self.told["load"].values()):
            load[:] = 10 * i + self.t
        result.extras = self.told
        return result


@pytest.mark.parametrize("sampling", ["arrays", "episodes"])
def test_extras_in_dicts_that_the_environment_uses_again(sampling):
    config = tiny_config(
        Reuses,
        {"observation_spaces": [box()] * 2, "action_spaces": [box(1, 1.0)] * 2},
        runners={"sampling": sampling},
        num_envs=1,
    )
    runner = episode_runner(config)
    (batch,) = make_learner(config, runner.get_spaces())._batches(runner.sample(num_timesteps=7))
    steps = [1, 2, 3, 4, 5, 1, 2]
    assert batch.extras["cost"][:, 0].tolist() == steps
    assert batch.extras["load"][:, :, 0, 1].tolist() == [[t, 10 + t] for t in steps]


def test_the_next_sample_after_an_error_begins_anew():
    class Trips(Lives):
        trips = True

        def step(self, actions):
            if self.trips and self.t == 3:
                raise ZeroDivisionError("by hand")
            return super().step(actions)

    runner = episode_runner(episodes_config(Trips))
    assert isinstance(runner, JointEpisodeRunner)
    runner.sample(num_timesteps=4)
    with pytest.raises(RuntimeError, match="failed in a step .*ZeroDivisionError: by hand"):
        runner.sample(num_timesteps=8)
    runner.env.envs[1].unwrapped.trips = runner.env.envs[0].unwrapped.trips = False
    episodes = runner.sample(num_timesteps=20)
    assert all(episode.env_t_started == 0 for episode in episodes) and sum(map(len, episodes)) == 20
    batch = batch_of(runner.config, runner, episodes)
    assert batch.episode_start[0].all() and batch.stream("whole").obs[:6, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
