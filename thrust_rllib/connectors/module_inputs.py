"""Normalised observations in the general door: what follows a fragment, and moments that take in a finished rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ray.util import log_once

from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_episode import JointEpisode

logger = logging.getLogger(__name__)


def write_bootstrap_inputs(
    codec: TeamCodec, normalizer: ObservationNormalizer, episodes: Sequence[JointEpisode]
) -> None:
    """Lets every episode keep what its agents' modules would see next: the learner does not know these moments."""
    for module_id, module in codec.modules.items():
        found = [
            (episode, agent)
            for episode in episodes
            for agent in module.agents
            if agent in episode.agent_episodes and not episode.agent_episodes[agent].is_terminated
        ]
        if found:
            last = [
                module.slice(single.observations, len(single), 1)
                for single in (episode.agent_episodes[agent] for episode, agent in found)
            ]
            encoded, _ = module.encode_stacked(module.join(last))
            inputs = normalizer.normalize((module_id,), encoded[None])[0]
            for (episode, agent), row in zip(found, inputs, strict=True):
                episode.bootstrap_inputs[agent] = row


def update_moments(
    codec: TeamCodec,
    normalizer: ObservationNormalizer,
    episodes: Sequence[JointEpisode],
    is_trained: Callable[[ModuleID], bool],
) -> None:
    """Lets the observations of a finished rollout into the moments; what a frozen module sees must not change."""
    for module_id, module in codec.modules.items():
        if is_trained(module_id):
            parts = [
                module.slice(single.observations, 0, len(single))
                for episode in episodes
                for agent in module.agents
                if (single := episode.agent_episodes.get(agent)) is not None and len(single)
            ]
            if parts:
                normalizer.update(module_id, module.encode_stacked(module.join(parts))[0])
        elif not normalizer.moments[module_id].count and log_once(f"thrust_rllib_raw_{module_id}"):
            logger.warning(
                "module %r is not trained and has no moments of observations: with normalize_observations it sees them "
                "as they are. Restore it together with its moments (a checkpoint has both).",
                module_id,
            )
