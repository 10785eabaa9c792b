"""Connector pieces and callbacks of RLlib's users, through the general door."""

from __future__ import annotations

from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import (
    EnvToModulePipeline,
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    MultiAgentObservationPreprocessor,
    SingleAgentObservationPreprocessor,
)
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.general.random_envs import Episode, Journal, Kind, Life, Script, ScriptedMultiAgentEnv
from tests.support import Declared, largest_difference, make_learner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnvRunner
from thrust_rllib.connectors.team_observations import ACTING
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.joint_episode import JointEpisode

LENGTH = 5


class Counting(MultiAgentEnv):
    """Two agents see 1 + t + 20·episode + 1000·(agent's index) in every element, and earn 1; cut after `length` steps.

    Keeps what it was told to do: `self.played`, a list of {agent: action}.
    """

    def __init__(self, config):
        super().__init__()
        self.agents = self.possible_agents = ["right", "left"]
        self.shape, self.length = tuple(config.get("shape", (3,))), config.get("length", LENGTH)
        action_space = config.get("action_space", gym.spaces.Discrete(3))
        self.observation_spaces = {a: gym.spaces.Box(0.0, 5000.0, self.shape) for a in self.agents}
        self.action_spaces = {a: action_space for a in self.agents}
        self.episode, self.played = -1, []

    def _see(self):
        return {
            agent: np.full(self.shape, 1 + self.t + 20 * self.episode + 1000 * i, np.float32)
            for i, agent in enumerate(self.agents)
        }

    def reset(self, *, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        self.played.append(actions)
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": self.t == self.length}, {}


def general_config(env=Counting, env_config=None, *, pieces=None, to_env=None, learner=None, runners=None, **options):
    """`tiny_config` with connector functions; sampling is left at "auto"."""
    set_ = {"env_to_module_connector": pieces, "module_to_env_connector": to_env}
    runners = {**(runners or {}), **{name: value for name, value in set_.items() if value is not None}}
    config = tiny_config(env, env_config or {}, runners=runners, **options)
    return config if learner is None else config.learners(learner_connector=learner)


def runner_and_learner(config):
    config.validate()
    assert config.env_runner_cls is JointEpisodeRunner
    runner = JointEpisodeRunner(config=config, worker_index=0)
    return runner, make_learner(config, runner.get_spaces())


def watch(runner):
    """{(agent, environment index): what its module saw, step by step}, growing."""
    seen = defaultdict(list)
    forward = runner.module.forward_exploration

    def forward_and_note(batch, **kwargs):
        for module_id, acting in runner._shared_data[ACTING].items():
            for (env, agent), obs in zip(acting.rows, batch[module_id][Columns.OBS].numpy(), strict=True):
                seen[agent, env].append(obs.copy())
        return forward(batch, **kwargs)

    runner.module.forward_exploration = forward_and_note
    return seen


def assert_the_learner_sees_what_the_modules_saw(config, num_samples=3, steps=16):
    """Of several samples that cut episodes; also what an episode that goes on bootstraps from.

    Returns:
        The batches.
    """
    runner, learner = runner_and_learner(config)
    seen, batches, following = watch(runner), [], {}
    for _ in range(num_samples):
        seen.clear()
        (batch,) = learner._batches(runner.sample(num_timesteps=steps))
        batches.append(batch)
        for stream in batch.streams():
            for env in range(runner.num_envs):
                key, acted = (stream.agent_id, env), stream.present[:, env]
                np.testing.assert_array_equal(stream.obs[acted, env], np.stack(seen[key]))
                if key in following:
                    np.testing.assert_array_equal(following[key], seen[key][0])
        following = {
            (agent, env): streams.bootstrap_obs[i, np.searchsorted(batch.bootstrap_rows, row)]
            for env, episode in enumerate(runner._ongoing_episodes)
            if len(episode.agent_episodes) and (row := last_row(batch, env)) is not None
            for streams in batch.modules.values()
            for i, agent in enumerate(streams.agents)
        }
        assert following or config.batch_mode == "complete_episodes"
    return batches


def last_row(batch, env):
    t = int(np.flatnonzero(batch.valid[:, env])[-1])
    return t * batch.valid.shape[1] + env


# --- env-to-module pieces ---------------------------------------------------------------------------------------------


class Half(SingleAgentObservationPreprocessor):
    def preprocess(self, observation, episode):
        return observation / 2


class HalfTogether(MultiAgentObservationPreprocessor):
    def preprocess(self, observations, episode):
        return {agent: observation / 2 for agent, observation in observations.items()}


class Wider(SingleAgentObservationPreprocessor):
    """Puts the number of its agent's steps behind each observation."""

    def recompute_output_observation_space(self, input_observation_space, input_action_space):
        return gym.spaces.Dict(
            {a: gym.spaces.Box(0.0, 5000.0, (s.shape[0] + 1,)) for a, s in input_observation_space.spaces.items()}
        )

    def preprocess(self, observation, episode):
        return np.append(observation, episode.t).astype(np.float32)


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


# --- frames -----------------------------------------------------------------------------------------------------------


def frames(horizon=2, num=3, **options):
    return general_config(
        env_config={"shape": (2, 2, 1)},
        pieces=lambda env, spaces, device: FrameStackingEnvToModule(num_frames=num, multi_agent=True),
        learner=lambda observation_space, action_space: FrameStackingLearner(num_frames=num, multi_agent=True),
        runners={"episode_lookback_horizon": horizon},
        **options,
    )


def stack(t, episode, agent):
    """The right stack of Counting's agent, as [3] numbers."""
    return [0 if t - k < 0 else 1 + t - k + 20 * episode + 1000 * agent for k in (2, 1, 0)]


def test_frames_are_stacked_alike_at_both_ends():
    config = frames()
    batches = assert_the_learner_sees_what_the_modules_saw(config, num_samples=4, steps=14)
    steps = 0
    for batch in batches:
        for index, agent in enumerate(("right", "left")):
            stream = batch.stream(agent)
            for t in range(7):
                episode, step = divmod(steps + t, LENGTH)
                assert stream.obs[t, 0, 0, 0].tolist() == stack(step, episode, index)
                row = np.flatnonzero(batch.bootstrap_rows == 2 * t)
                assert bool(row.size) == (step == LENGTH - 1 or t == 6)
                if row.size:  # of a truncated episode, and of one that goes on
                    followed = batch.modules[agent].bootstrap_obs[0, row[0], 1, 1]
                    assert followed.tolist() == stack(step + 1, episode, index)
        steps += 7


def test_frames_train():
    runner, learner = runner_and_learner(frames())
    before = parameters(learner)
    update(learner, runner.sample())
    assert largest_difference(before, parameters(learner)) > 0.0


def test_frames_that_the_learner_could_not_stack_are_an_early_error():
    with pytest.raises(ValueError, match=r"horizon=1 with stacks of 3 frames.*episode_lookback_horizon=2\) or more"):
        frames(horizon=1).validate()
    config = frames()
    config._learner_connector = None
    with pytest.raises(ValueError, match=r"learner_connector is not set.*FrameStackingLearner\(num_frames=3"):
        config.validate()
    with pytest.raises(ValueError, match="normalize_observations=True with frame stacking"):
        frames().env_runners(normalize_observations=True).validate()


class WritesIntoTheBatch(Wider):
    """Widens what the module sees, and not what the episodes keep."""

    def __call__(self, *, batch, episodes, **kwargs):
        for single in self.single_agent_episode_iterator(episodes):
            wide = np.append(single.get_observations(-1), single.t).astype(np.float32)
            self.add_batch_item(batch, Columns.OBS, wide, single)
        return batch


def test_a_piece_without_its_counterpart_is_told_by_the_learner():
    runner, learner = runner_and_learner(general_config(pieces=lambda env, spaces, device: WritesIntoTheBatch()))
    with pytest.raises(ValueError, match="wrote observations into the batch.*learner_connector"):
        update(learner, runner.sample())


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


class Decides(ConnectorV2):
    """Chooses action 2 for all, whatever the module said."""

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            outputs[Columns.ACTIONS] = torch.full((len(outputs[Columns.ACTION_DIST_INPUTS]),), 2)
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


# --- learner pieces ---------------------------------------------------------------------------------------------------


class PaysByStep(ConnectorV2):
    """Rewards become 10·t of the agent's own steps in this fragment."""

    def __call__(self, *, episodes, batch, **kwargs):
        for single in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            single.set_rewards(new_data=10.0 * np.arange(len(single)))
        return batch


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
    class Looks(ConnectorV2):
        def __call__(self, *, batch, **kwargs):
            return batch

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


# --- callbacks --------------------------------------------------------------------------------------------------------

EVENTS: list[tuple[str, dict]] = []
ON_EPISODE = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class Notes:
    """A callback that notes what it was given; a metric at the end of each episode."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *, episode, env_index, metrics_logger, env_runner, rl_module, prev_episode_chunks=(), **kwargs):
        event = {"id": episode.id_, "env": env_index, "steps": episode.env_steps(), "t": episode.env_t}
        assert isinstance(episode, JointEpisode) and env_runner.module is rl_module
        if self.name == "on_episode_created":
            episode.custom_data["born"] = len(EVENTS)
        if self.name == "on_episode_start":
            event["observations"] = episode.get_observations(-1)
        if self.name == "on_episode_step":
            event["actions"] = episode.get_actions(-1)
            event["rewards"] = episode.get_rewards(-1)
            event["born"] = episode.custom_data["born"]
            episode.custom_data["seen"] = episode.custom_data.get("seen", 0) + 1
        if self.name == "on_episode_end":
            event["chunks"] = [(chunk.id_, len(chunk), chunk.get_return()) for chunk in prev_episode_chunks]
            event["return"] = episode.get_return()
            event["custom"] = dict(episode.custom_data)
            metrics_logger.log_value(
                ("my", "last_return"), sum(c[2] for c in event["chunks"]) + event["return"], window=1
            )
        EVENTS.append((self.name, event))


def with_callbacks(config, kind):
    callbacks = {name: Notes(name) for name in ON_EPISODE}
    if kind == "functions":
        return config.callbacks(**callbacks)
    methods = {
        name: lambda self, *, callback=callback, **kwargs: callback(**kwargs) for name, callback in callbacks.items()
    }
    return config.callbacks(type("Watches", (RLlibCallback,), methods))


@pytest.mark.parametrize("kind", ["class", "functions"])
def test_callbacks_of_episodes_are_called(kind):
    EVENTS.clear()
    runner, _ = runner_and_learner(with_callbacks(general_config(num_envs=1), kind))
    for _ in range(4):
        runner.sample(num_timesteps=3)  # of episodes of 5
    names = [name for name, _ in EVENTS]
    created, start, step, end = (f"on_episode_{word}" for word in ("created", "start", "step", "end"))
    whole = [start, *[step] * LENGTH, end, created]
    assert names == [created, *whole, *whole, start, *[step] * 2]
    ends = [event for name, event in EVENTS if name == end]
    assert [len(event["chunks"]) for event in ends] == [1, 2]  # 3 + 2, 1 + 3 + 1
    for event in ends:
        assert {i for i, _, _ in event["chunks"]} == {event["id"]}
        assert sum(n for _, n, _ in event["chunks"]) + event["steps"] == event["t"] == LENGTH
        assert sum(r for _, _, r in event["chunks"]) + event["return"] == 2.0 * LENGTH
        assert event["custom"]["seen"] == LENGTH  # over all fragments
    steps = [event for name, event in EVENTS if name == step]
    assert all(event["rewards"] == {"left": 1.0, "right": 1.0} for event in steps)
    assert [event["actions"] for event in steps] == runner.env.envs[0].played
    (first, *_) = (event["observations"] for name, event in EVENTS if name == start)
    np.testing.assert_array_equal(first["left"], [1001.0] * 3)
    assert runner_metrics(runner)["my"]["last_return"] == 2.0 * LENGTH


def test_without_callbacks_of_episodes_arrays_are_sampled(caplog):
    def on_sample_end(*, samples, **kwargs):
        pass

    config = tiny_config(Counting).callbacks(on_sample_end=on_sample_end)
    with caplog.at_level("INFO", logger="thrust_rllib"):
        config.validate()
    assert config.env_runner_cls is JointEnvRunner
    assert "sampling by arrays (JointEnvRunner): nothing in the configuration" in caplog.text


class Ends(RLlibCallback):
    def on_episode_end(self, **kwargs):
        pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda c: c.callbacks(Ends), "Ends overrides on_episode_end"),
        (lambda c: c.callbacks([RLlibCallback, Ends]), "Ends overrides on_episode_end"),
        (lambda c: c.callbacks(on_episode_created=Notes("x")), "the callback on_episode_created is set"),
        (lambda c: c.env_runners(env_to_module_connector=lambda *args: Half()), "env_to_module_connector is set"),
        (lambda c: c.env_runners(module_to_env_connector=lambda *args: Decides()), "module_to_env_connector is set"),
        (lambda c: c.learners(learner_connector=lambda *args: PaysByStep()), "learner_connector is set"),
        (lambda c: c.env_runners(sampling="episodes"), "sampling='episodes'"),
        (lambda c: c.env_runners(batch_mode="complete_episodes"), "batch_mode='complete_episodes'"),
    ],
)
def test_the_log_says_which_door_was_taken_and_why(caplog, change, reason):
    config = tiny_config(Counting)
    change(config)
    with caplog.at_level("INFO", logger="thrust_rllib"):
        config.validate()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("sampling by")]
    assert lines == [f"sampling by episodes (JointEpisodeRunner): {reason}"]
    assert config.env_runner_cls is JointEpisodeRunner
    if reason != "sampling='episodes'":
        config = tiny_config(Counting, runners={"sampling": "arrays"})
        change(config)
        with pytest.raises(ValueError, match=f"sampling='arrays' cannot serve this: {reason}"):
            config.validate()


# --- whole algorithms -------------------------------------------------------------------------------------------------


@pytest.fixture
def build(ray_session):
    built = []

    def make(config):
        built.append(config.copy(copy_frozen=False).build_algo())
        return built[-1]

    yield make
    for algo in built:
        algo.stop()


class Team(RLlibCallback):
    """What a user would write: counts, and a metric at each moment."""

    def on_algorithm_init(self, *, algorithm, **kwargs):
        EVENTS.append(("init", {}))

    def on_environment_created(self, *, env_runner, env, env_context, **kwargs):
        EVENTS.append(("environment", {"envs": env.num_envs, "length": env_context["length"]}))

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("finished", 1, reduce="sum")
        metrics_logger.log_value(("by_agent", "left"), float(episode.agent_episodes["left"].t))

    def on_sample_end(self, *, metrics_logger, samples, **kwargs):
        metrics_logger.log_value("fragments", len(samples), reduce="sum")
        assert all(isinstance(episode, JointEpisode) and episode.is_numpy for episode in samples)

    def on_train_result(self, *, result, **kwargs):
        result["mine"] = 2 * result["env_runners"]["finished"]


@pytest.mark.parametrize("num_runners", [0, pytest.param(2, marks=pytest.mark.slow_general)])
def test_custom_metrics_arrive_in_the_result(build, num_runners):
    EVENTS.clear()
    config = general_config(env_config={"length": 4}, runners={"num_env_runners": num_runners}).callbacks(Team)
    result = build(config).train()
    runners = result["env_runners"]
    episodes = 64 // 4 if num_runners == 0 else 2 * 2 * 4
    assert runners["finished"] == runners["num_episodes"] == episodes and result["mine"] == 2 * episodes
    assert runners["by_agent"]["left"] == 4.0
    assert runners["fragments"] == episodes + (2 * max(num_runners, 1) if 64 // 2 % 4 else 0)
    if num_runners == 0:
        assert EVENTS == [("environment", {"envs": 2, "length": 4}), ("init", {})]


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
