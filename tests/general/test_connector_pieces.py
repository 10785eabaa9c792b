"""Connector pieces of RLlib's users, through the general door."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import (
    EnvToModulePipeline,
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.env_to_module.observation_preprocessor import MultiAgentObservationPreprocessor
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from tests.general.counting import (
    LENGTH,
    Counting,
    Decides,
    Half,
    PaysByStep,
    Wider,
    assert_the_learner_sees_what_the_modules_saw,
    general_config,
    runner_and_learner,
)
from tests.general.random_envs import Episode, Journal, Kind, Life, Script, ScriptedMultiAgentEnv
from tests.support import Declared, largest_difference, parameters, runner_metrics, update
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.evaluation import play_episodes

# --- env-to-module pieces ---------------------------------------------------------------------------------------------


class HalfTogether(MultiAgentObservationPreprocessor):
    def preprocess(self, observations, episode):
        return {agent: observation / 2 for agent, observation in observations.items()}


@pytest.mark.parametrize("piece", [Half, HalfTogether])
@pytest.mark.parametrize("as_list", [False, True], ids=["one piece", "a list"])
def test_pieces_rewrite_what_the_modules_see(piece, as_list):
    config = general_config(pieces=lambda env, spaces, device: [piece()] if as_list else piece())
    (first, *_) = assert_the_learner_sees_what_the_modules_saw(config)
    np.testing.assert_array_equal(first.stream("left").obs[:3, 0, 0], [500.5, 501.0, 501.5])


def test_pieces_go_one_after_another_in_a_pipeline_too():
    def pipeline(env, spaces, device):
        space = (env.single_observation_space, env.single_action_space)
        return EnvToModulePipeline(*space, connectors=[Half(), HalfTogether()])

    (first, *_) = assert_the_learner_sees_what_the_modules_saw(general_config(pieces=pipeline))
    assert first.stream("right").obs[0, 0, 0] == 0.25


def test_a_piece_that_changes_the_observation_space_changes_the_module():
    config = general_config(pieces=lambda env, spaces, device: Wider())
    runner, learner = runner_and_learner(config)
    for modules in (runner.module, learner.module):
        assert next(p for p in modules["left"].parameters() if p.ndim == 2).shape[1] == 4
    (first, *_) = assert_the_learner_sees_what_the_modules_saw(config)
    assert first.stream("left").obs[:6, 0, -1].tolist() == [0, 1, 2, 3, 4, 0]
    before = parameters(learner)
    update(learner, runner.sample())
    assert largest_difference(before, parameters(learner)) > 0.0


@pytest.mark.parametrize("last", [True, False], ids=["seen off", "unseen"])
def test_a_piece_meets_each_observation_once_where_agents_die_and_take_turns(last):
    lives = (Life("A.A.A."), Life(".A.", end="terminated", last=last), Life("..A.A", end="terminated", last=last))
    script = Script((Kind(),) * 3, (Episode(lives, over="terminated"),))
    config = general_config(
        ScriptedMultiAgentEnv, {"script": script, "journal": Journal()}, pieces=lambda env, spaces, device: Wider()
    )
    runner, learner = runner_and_learner(config)
    (batch,) = learner._batches(runner.sample(num_timesteps=24))
    for stream in batch.streams():
        assert stream.obs.shape[-1] == 4 and stream.present.any()


DICTS = [gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(-1.0, 1.0, (2, 2)))] * 2
DECLARED = (Declared, {"observation_spaces": DICTS, "action_spaces": [gym.spaces.Discrete(2)] * 2})


@pytest.mark.parametrize(
    "env, make, width",
    [
        (DECLARED, lambda: FlattenObservations(multi_agent=True), 7),
        ((Counting,), lambda: MeanStdFilter(multi_agent=True), 3),
        (
            (Counting,),
            lambda: [
                PrevActionsPrevRewards(multi_agent=True, n_prev_actions=2, n_prev_rewards=2),
                FlattenObservations(multi_agent=True),
            ],
            3 + 2 * 3 + 2,
        ),
    ],
    ids=["FlattenObservations", "MeanStdFilter", "PrevActionsPrevRewards"],
)
def test_rllibs_own_pieces(env, make, width):
    config = general_config(
        *env, pieces=lambda env, spaces, device: make(), runners={"episode_lookback_horizon": 2}, seed=5
    )
    for batch in assert_the_learner_sees_what_the_modules_saw(config):
        assert all(stream.obs.shape[-1] == width for stream in batch.streams())


def test_previous_rewards_are_those_of_the_step_before():
    def make(env, spaces, device):
        return [
            PrevActionsPrevRewards(multi_agent=True, n_prev_actions=1, n_prev_rewards=1),
            FlattenObservations(multi_agent=True),
        ]

    (batch, *_) = assert_the_learner_sees_what_the_modules_saw(general_config(pieces=make))
    left = batch.stream("left")
    assert left.obs[:7, 0, -1].tolist() == [0, 1, 1, 1, 1, 0, 1]
    np.testing.assert_array_equal(left.obs[1:5, 0, 3:6], np.eye(3)[left.actions[:4, 0]])


@pytest.mark.parametrize("make", [FlattenObservations, MeanStdFilter, PrevActionsPrevRewards, FrameStackingEnvToModule])
def test_a_piece_for_a_single_agent_is_an_early_error(make):
    config = general_config(pieces=lambda env, spaces, device: make())
    with pytest.raises(ValueError, match=r"env_to_module_connector made a (\w+) for a single.*\1\(multi_agent=True"):
        config.validate()


class Forgets(ConnectorV2):
    def recompute_output_observation_space(self, input_observation_space, input_action_space):
        return gym.spaces.Box(0.0, 1.0, (2,))

    def __call__(self, *, batch, **kwargs):
        return batch


def test_spaces_that_are_not_those_of_the_agents_are_an_early_error():
    with pytest.raises(ValueError, match=r"leave the observation space Box.*one space for each agent of \['right'"):
        general_config(pieces=lambda env, spaces, device: Forgets()).validate()


def test_observations_outside_the_space_that_a_piece_declares():
    runner, _ = runner_and_learner(
        general_config(pieces=lambda env, spaces, device: PrevActionsPrevRewards(multi_agent=True, n_prev_actions=2))
    )
    # Without FlattenObservations behind it, RLlib's piece puts out other shapes than it declares.
    with pytest.raises(ValueError, match=r"agents \['left'\] of module 'left': what they saw is not in the space"):
        runner.sample(num_timesteps=8)


@pytest.mark.parametrize("made", ["x", None, Half, [Half()] + [3]], ids=str)
@pytest.mark.parametrize("option", ["pieces", "to_env", "learner"])
def test_a_function_that_makes_something_else_is_an_error(option, made):
    name = {"pieces": "env_to_module", "to_env": "module_to_env", "learner": "learner"}[option]
    with pytest.raises(ValueError, match=f"{name}_connector made .*; needed: a ConnectorV2, or a list of them"):
        runner_and_learner(general_config(**{option: lambda *args: made}))


class WritesIntoTheBatch(Wider):
    """Widens what the module sees, and not what the episodes keep."""

    def __call__(self, *, batch, episodes, **kwargs):
        for single in self.single_agent_episode_iterator(episodes):
            wide = np.append(single.get_observations(-1), single.t).astype(np.float32)
            self.add_batch_item(batch, Columns.OBS, wide, single)
        return batch


class Looks(ConnectorV2):
    """Changes nothing."""

    def __call__(self, *, batch, **kwargs):
        return batch


def test_a_piece_without_its_counterpart_is_told_by_the_learner():
    config = general_config(pieces=lambda env, spaces, device: WritesIntoTheBatch(), learner=lambda *spaces: Looks())
    runner, learner = runner_and_learner(config)
    episodes = runner.sample()
    with pytest.raises(
        ValueError, match=r"in its episodes have shape \(3,\), what it saw has \(4,\): .*wrote into the"
    ):
        update(learner, episodes)


class Doubles(ConnectorV2):
    """Writes twice what was observed into the batch; the episodes keep what was observed."""

    def __call__(self, *, batch, episodes, **kwargs):
        for single in self.single_agent_episode_iterator(episodes):
            self.add_batch_item(batch, Columns.OBS, 2 * single.get_observations(-1), single)
        return batch


@pytest.mark.parametrize("piece", [WritesIntoTheBatch, Doubles])
def test_written_observations_need_a_piece_of_the_learner(piece):
    runner, _ = runner_and_learner(general_config(pieces=lambda env, spaces, device: piece()))
    with pytest.raises(ValueError, match=r"wrote observations into the batch.*learner_connector"):
        runner.sample(num_timesteps=8)


# --- module-to-env pieces ---------------------------------------------------------------------------------------------


class Prefers(ConnectorV2):
    """Adds 50 to the logit of one action, of one module or all."""

    def __init__(self, action, module_id=None):
        super().__init__()
        self.action, self.module_id = action, module_id

    def __call__(self, *, batch, **kwargs):
        for module_id, outputs in batch.items():
            if self.module_id in (None, module_id):
                outputs[Columns.ACTION_DIST_INPUTS] = outputs[Columns.ACTION_DIST_INPUTS].clone()
                outputs[Columns.ACTION_DIST_INPUTS][..., self.action] += 50.0
        return batch


def test_a_piece_changes_logits_and_what_was_done_is_stored():
    runner, learner = runner_and_learner(general_config(to_env=lambda env, spaces: Prefers(1, "left"), num_envs=1))
    (batch,) = learner._batches(runner.sample(num_timesteps=30))
    left, right = batch.stream("left"), batch.stream("right")
    assert (left.actions == 1).all() and len(np.unique(right.actions)) == 3
    assert np.abs(left.action_logp).max() < 1e-6  # of the changed distribution
    played = runner.env.envs[0].played
    assert [actions["right"] for actions in played] == right.actions[:, 0].tolist()
    assert [actions["left"] for actions in played] == left.actions[:, 0].tolist()


@pytest.mark.parametrize("explore", [True, False])
def test_a_piece_chooses_actions(explore):
    runner, learner = runner_and_learner(general_config(to_env=lambda env, spaces: [Decides()], num_envs=1))
    (batch,) = learner._batches(runner.sample(num_timesteps=8, explore=explore))
    assert all(set(actions.values()) == {2} for actions in runner.env.envs[0].played)
    learner.module.set_state(runner.module.get_state())
    for stream in batch.streams():
        assert (stream.actions == 2).all()
        module = learner.module[stream.agent_id]
        out = module.forward_train({Columns.OBS: torch.from_numpy(np.ascontiguousarray(stream.obs[:, 0]))})
        logp = torch.log_softmax(out[Columns.ACTION_DIST_INPUTS], -1)[:, 2]
        np.testing.assert_allclose(stream.action_logp[:, 0], logp.detach().numpy(), atol=1e-5)


class Redirects(ConnectorV2):
    """Plays action 1 for all, whatever was chosen, and notes the number of its call."""

    calls = 0

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            rows = len(outputs[Columns.ACTION_DIST_INPUTS])
            outputs[Columns.ACTIONS_FOR_ENV] = torch.ones(rows, dtype=torch.long)
            outputs["call"] = torch.full((rows,), self.calls)
        self.calls += 1
        return batch


def test_a_piece_chooses_what_is_played_and_episodes_keep_what_it_puts_out():
    runner, learner = runner_and_learner(general_config(to_env=lambda env, spaces: Redirects(), num_envs=1))
    episodes = runner.sample(num_timesteps=20)
    assert all(set(actions.values()) == {1} for actions in runner.env.envs[0].played)
    (batch,) = learner._batches(episodes)
    for agent in ("left", "right"):
        assert set(batch.stream(agent).actions[:, 0]) == {0, 1, 2}  # what the module chose
        kept = [e.agent_episodes[agent].extra_model_outputs for e in episodes]
        assert np.diff(np.concatenate([np.asarray(x["call"]) for x in kept])).min() >= 1
        assert all(np.asarray(x[Columns.ACTION_DIST_INPUTS]).shape[1:] == (3,) for x in kept)


@pytest.mark.parametrize(
    "option", [{"pieces": lambda env, spaces, device: Half()}, {"to_env": lambda env, spaces: Redirects()}]
)
def test_outside_of_rllibs_loop_a_team_with_pieces_cannot_be_played(option):
    config = general_config(**option)
    runner, _ = runner_and_learner(config)
    with pytest.raises(ValueError, match=r"trained with connector pieces of its own .*play with algo.evaluate\(\)"):
        play_episodes(SimpleNamespace(config=config, env_runner=runner), 2)


# --- learner pieces ---------------------------------------------------------------------------------------------------


# RLlib's episodes look whether each single reward lies in a Box.
set_rewards_warns = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")


@set_rewards_warns
@pytest.mark.parametrize("to_numpy", [True, False])
def test_a_learner_piece_changes_rewards(to_numpy):
    config = general_config(learner=lambda *spaces: PaysByStep(), runners={"episodes_to_numpy": to_numpy})
    runner, learner = runner_and_learner(config)
    (batch,) = learner._batches(runner.sample(num_timesteps=16))
    for stream in batch.streams():
        np.testing.assert_array_equal(stream.rewards[:, 0], [0, 10, 20, 30, 40, 0, 10, 20])
    # What the runner reports is what the environment paid.
    assert runner_metrics(runner)["episode_return_mean"] == 2.0 * LENGTH


def test_a_learner_piece_that_changes_nothing_changes_nothing():
    results = []
    for learner_connector in (None, lambda *spaces: Looks()):
        config = general_config(learner=learner_connector, runners={"sampling": "episodes"})
        runner, learner = runner_and_learner(config)
        for _ in range(2):
            update(learner, runner.sample())
        results.append(parameters(learner))
    assert largest_difference(*results) == 0.0


def test_the_extra_step_stands_in_front_already():
    with pytest.raises(ValueError, match="AddOneTsToEpisodesAndTruncate, which already stands in front"):
        runner_and_learner(general_config(learner=lambda *spaces: AddOneTsToEpisodesAndTruncate()))


# --- columns for modules of one's own ---------------------------------------------------------------------------------


class Reads(TorchRLModule, ValueFunctionAPI):
    """Its logits at sampling are the column "wish", which a piece puts in."""

    def setup(self):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.value = torch.nn.Linear(3, 1)

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self.weight + batch.get("wish", torch.zeros(len(batch[Columns.OBS]), 3))}

    def compute_values(self, batch, embeddings=None):
        return self.value(batch[Columns.OBS]).squeeze(-1)


class Wishes(ConnectorV2):
    def __call__(self, *, batch, episodes, **kwargs):
        for single in self.single_agent_episode_iterator(episodes):
            wish = np.eye(3, dtype=np.float32)[0 if single.agent_id == "left" else 2] * 50
            self.add_batch_item(batch, "wish", wish, single)
        return batch


def test_a_column_that_a_piece_adds_reaches_the_module():
    config = general_config(pieces=lambda env, spaces, device: Wishes(), num_envs=1)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Reads))
    runner, _ = runner_and_learner(config)
    runner.sample(num_timesteps=8)
    assert all(actions == {"left": 0, "right": 2} for actions in runner.env.envs[0].played)


# --- state: RLlib's filter, merging -----------------------------------------------------------------------------------


def moments_of_left(runner):
    """Number and mean that RLlib's filter has of what agent "left" saw."""
    (stats,) = tree.flatten(runner._env_to_module[MeanStdFilter][0]._filters["left"].running_stats)
    return stats.num_pushes, float(stats.mean_array.mean())


def test_rllibs_filter_in_an_algorithm(build):
    config = general_config(pieces=lambda env, spaces, device: MeanStdFilter(multi_agent=True))
    config.evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_config={"explore": False})
    algo = build(config)
    for _ in range(2):
        algo.train()
    count, mean = moments_of_left(algo.env_runner)
    # RLlib's piece takes in every observation, those that follow an episode's last step, too.
    assert count >= 2 * 64 and 1000.0 < mean < 5000.0
    # The evaluation began with the moments of the training, and took in its own.
    assert moments_of_left(algo.eval_env_runner)[0] > count


def test_rllibs_filter_in_remote_runners_is_an_early_error():
    config = general_config(pieces=lambda env, spaces, device: MeanStdFilter(multi_agent=True))
    with pytest.raises(ValueError, match="num_env_runners=2: RLlib 2.60 merges its moments wrongly.*normalize_obs"):
        config.env_runners(num_env_runners=2).validate()


def test_states_are_merged_by_the_piece_they_belong_to():
    """RLlib's pipeline takes the k-th state to the k-th piece; a piece without a state has none in the list."""
    config = general_config(
        pieces=lambda env, spaces, device: [Half(), Counts()], runners={"normalize_observations": True}
    )
    runners = [runner_and_learner(config)[0] for _ in range(2)]
    for runner in runners:
        runner.sample(num_timesteps=20)
    states = [runner._env_to_module.get_state() for runner in runners]
    assert [list(state) for state in states] == [["Counts", "ObservationNormalizer"]] * 2
    merged = JointEpisodeRunner(config=config, worker_index=0)._env_to_module.merge_states(states)
    assert merged["Counts"]["calls"] == sum(state["Counts"]["calls"] for state in states) > 20
    assert merged["ObservationNormalizer"]["left"]["total"]["count"] == 2 * 20


class Counts(ConnectorV2):
    """Counts its calls; merged by adding."""

    calls = 0

    def __call__(self, *, batch, **kwargs):
        self.calls += 1
        return batch

    def get_state(self, components=None, *, not_components=None, **kwargs):
        return {"calls": self.calls}

    def merge_states(self, states):
        return {"calls": sum(state["calls"] for state in states)}
