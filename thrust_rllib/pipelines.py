"""RLlib's three connector pipelines, each listed in the order in which its pieces are called.

Sampling by arrays calls no pipeline: the one piece there, the observation normaliser, is called on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray.rllib.connectors.common.frame_stacking import FrameStacking
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline, MeanStdFilter
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, LearnerConnectorPipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES

from thrust_rllib.communicating_teams import speaking_modules
from thrust_rllib.connectors.env_to_module_pipeline import TeamEnvToModulePipeline
from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.team_actions import TeamActions
from thrust_rllib.connectors.team_exchange import TeamExchange
from thrust_rllib.connectors.team_memory import TeamMemory
from thrust_rllib.connectors.team_observations import TeamObservations
from thrust_rllib.connectors.user_pieces import check_spaces_behind_pieces, user_pieces
from thrust_rllib.envs.multi_agent_vector import MultiAgentVector, make_multi_agent_env
from thrust_rllib.rl_modules.heads import asks_per_head
from thrust_rllib.teams import DeclaredTeam

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig


def env_to_module(config: JointPPOConfig, env: Any, spaces: Any, device: Any) -> EnvToModulePipeline:
    """From what the environment shows to what the modules see.

    By arrays: the observation normaliser, if any. By episodes, in this order:

    1. the user's pieces;
    2. `TeamObservations`: what the agents to act see, encoded, one array per module;
    3. the observation normaliser, if any;
    4. `TeamExchange`: what agents of communicating modules tell each other, if there are any;
    5. `TeamMemory`: states and a time axis for recurrent modules.
    """
    pieces: list[Any] = []
    if config.samples_episodes:
        codec = config.team_codec()
        pieces += user_pieces("env_to_module_connector", config._env_to_module_connector, env, spaces, device)
        # Who writes observations into the batch has to do the same in the learner, and they cannot be normalised.
        written = config._learner_connector is not None and not config.normalize_observations
        pieces.append(TeamObservations(codec=codec, device=device, takes_written=written))
        shapes = {m: c.encoder.encoded_space.shape for m, c in codec.modules.items()}
    else:
        shapes = {m: spaces[m][0].shape for m in config.policies if m in (spaces or {})}
    if config.normalize_observations:
        # Moments also wait for a module that plays no agent yet: it may be given another one's.
        waiting = {m: spec.observation_space for m, spec in config.policies.items() if m not in shapes and spec}
        shapes |= {m: space.shape for m, space in waiting.items() if space is not None}
        pieces.append(ObservationNormalizer(shapes=shapes, links={m: config.num_links(m) for m in shapes}))
    if config.samples_episodes:
        if speaking_modules(config):
            pieces.append(TeamExchange(codec=codec))
        pieces.append(TeamMemory())
    return TeamEnvToModulePipeline(*_env_spaces(spaces, env), connectors=pieces)


def module_to_env(config: JointPPOConfig, env: Any, spaces: Any) -> ModuleToEnvPipeline:
    """From the modules' outputs to actions: the user's pieces, then `TeamActions`; nothing by arrays."""
    pieces: list[Any] = []
    if config.samples_episodes:
        pieces += user_pieces("module_to_env_connector", config._module_to_env_connector, env, spaces)
        pieces.append(
            TeamActions(
                codec=config.team_codec(),
                store_inputs=config.normalize_observations,
                store_outputs=bool(pieces),
                audit=config.audit,
                per_head=asks_per_head(config),
            )
        )
    return ModuleToEnvPipeline(*_env_spaces(spaces, env), connectors=pieces)


def learner(config: JointPPOConfig, observation_space: Any, action_space: Any) -> LearnerConnectorPipeline:
    """From episodes to a `JointBatch`; nothing by arrays, which come as batches.

    In this order:

    1. where the user has pieces: `AddOneTsToEpisodesAndTruncate`, so that they see what follows the last step, too;
    2. the user's pieces;
    3. `EpisodesToJointBatch`.

    What comes after it is no pipeline but `JointPPOLearner.update`: values, advantages, joint minibatches, losses.

    Raises:
        ValueError: the user's pieces begin with what is put in front of them.
    """
    pieces: list[Any] = []
    if config.samples_episodes:
        own = user_pieces("learner_connector", config._learner_connector, observation_space, action_space)
        if any(isinstance(piece, AddOneTsToEpisodesAndTruncate) for piece in own):
            raise ValueError(
                "learner_connector made an AddOneTsToEpisodesAndTruncate, which already stands in front of your "
                "pieces; leave it out"
            )
        pieces += [AddOneTsToEpisodesAndTruncate(), *own] if own else []
        pieces.append(
            EpisodesToJointBatch(
                codec=config.team_codec(),
                check_bounds=not config.disable_env_checking,
                audit=config.audit,
                with_extra_step=bool(own),
                whole_episodes=config.batch_mode == "complete_episodes",
                per_head=asks_per_head(config),
            )
        )
    return LearnerConnectorPipeline(observation_space, action_space, connectors=pieces)


def behind_connectors(config: JointPPOConfig, declared: DeclaredTeam) -> DeclaredTeam:
    """What the modules will see of an environment: its spaces as the user's env-to-module pieces leave them."""
    spec = config.env_spec
    assert spec is not None
    env = MultiAgentVector(lambda: make_multi_agent_env(spec, config.env_config), 1, spec.name)
    try:
        spaces = env.single_observation_space, env.single_action_space
        given = {INPUT_ENV_SINGLE_SPACES: spaces}
        pieces = user_pieces("env_to_module_connector", config._env_to_module_connector, env, given, None)
        check_rllibs_pieces(config, pieces)
        pipeline = EnvToModulePipeline(*spaces, connectors=pieces)
        check_spaces_behind_pieces(pipeline, declared.possible_agents)
        return DeclaredTeam(
            declared.possible_agents, dict(pipeline.observation_space.spaces), dict(pipeline.action_space.spaces)
        )
    finally:
        env.close()


def check_rllibs_pieces(config: JointPPOConfig, pieces: Sequence[ConnectorV2]) -> None:
    """Checks what RLlib's own pieces would do silently wrong.

    Raises:
        ValueError: `MeanStdFilter` in remote runners. Frame stacking: fragments do not look back far enough for the
            learner to make the same stacks, no piece of the learner stacks, or the stacks are normalised.
    """
    if config.num_env_runners > 0 and any(isinstance(piece, MeanStdFilter) for piece in pieces):
        raise ValueError(
            f"env_to_module_connector made a MeanStdFilter, and num_env_runners={config.num_env_runners}: RLlib 2.60 "
            "merges its moments wrongly (the mean halves at the second merge). Set "
            ".env_runners(normalize_observations=True) in its place, or num_env_runners=0."
        )
    frames = max((piece.num_frames for piece in pieces if isinstance(piece, FrameStacking)), default=1)
    if frames == 1:
        return
    if config.episode_lookback_horizon < frames - 1:
        raise ValueError(
            f"episode_lookback_horizon={config.episode_lookback_horizon} with stacks of {frames} frames: behind a cut "
            "the learner would see other stacks than the module saw. Set "
            f".env_runners(episode_lookback_horizon={frames - 1}) or more."
        )
    if config._learner_connector is None:
        raise ValueError(
            f"env_to_module_connector stacks {frames} frames, and learner_connector is not set: the learner would see "
            f"single ones. Set it to make FrameStackingLearner(num_frames={frames}, multi_agent=True)."
        )
    if config.normalize_observations:
        raise ValueError(
            "normalize_observations=True with frame stacking: single frames are in the episodes, and stacks cannot be "
            "normalised. Put RLlib's MeanStdFilter(multi_agent=True) in front of the stacking piece."
        )


def _env_spaces(spaces: Any, env: Any) -> tuple[Any, Any]:
    """Spaces of one environment; RLlib's own runner hands over none beside its environment."""
    if not spaces:
        return getattr(env, "single_observation_space", None), getattr(env, "single_action_space", None)
    return spaces.get(INPUT_ENV_SINGLE_SPACES, spaces.get(INPUT_ENV_SPACES, (None, None)))
