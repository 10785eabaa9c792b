"""What a runner of the general door does with a finished rollout: checks, and the moments of observations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from ray.util import log_once

from thrust_rllib.connectors.agent_steps import ModuleSteps
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_episode import JointEpisode

logger = logging.getLogger(__name__)


def checked_steps(
    codec: TeamCodec, episodes: Sequence[JointEpisode], check_bounds: bool, check_observations: bool
) -> dict[ModuleID, tuple[ModuleSteps, np.ndarray | None]]:
    """{module: its steps, and their encoded observations} of all modules that have steps.

    Args:
        codec: the team.
        episodes: of a rollout.
        check_bounds: see `ModuleSteps`.
        check_observations: False where a user's piece has shown the modules something else than the episodes hold:
            nothing is encoded then.

    Raises:
        ValueError: an observation, mask or reward that must not reach a weight.
    """
    found = {}
    for module_id, module in codec.modules.items():
        steps = ModuleSteps(module, module_id, check_bounds=check_bounds)
        for episode in episodes:
            for index, agent in enumerate(module.agents):
                steps.add(episode, index, agent)
        if steps.pieces:
            steps.rewards()
            found[module_id] = steps, steps.encode()[0] if check_observations else None
    return found


def write_bootstrap_inputs(
    normalizer: ObservationNormalizer, steps_of: dict[ModuleID, tuple[ModuleSteps, np.ndarray | None]]
) -> None:
    """Lets every episode keep what its agents' modules would see next: the learner does not know these moments."""
    for module_id, (steps, encoded) in steps_of.items():
        if encoded is not None:
            inputs = normalizer.normalize((module_id,), encoded[steps.following][None])[0]
            for piece, row in zip(steps.pieces, inputs, strict=True):
                if isinstance(piece.episode, JointEpisode):
                    piece.episode.bootstrap_inputs[piece.agent] = row


def update_moments(
    normalizer: ObservationNormalizer,
    steps_of: dict[ModuleID, tuple[ModuleSteps, np.ndarray | None]],
    is_trained: Callable[[ModuleID], bool],
) -> None:
    """Lets the observations of a finished rollout into the moments; what a frozen module sees must not change."""
    for module_id, (steps, encoded) in steps_of.items():
        if is_trained(module_id):
            if encoded is not None:
                normalizer.update(module_id, encoded[steps.own])
        elif not normalizer.moments[module_id].count and log_once(f"thrust_rllib_raw_{module_id}"):
            logger.warning(
                "module %r is not trained and has no moments of observations: with normalize_observations it sees them "
                "as they are. Restore it together with its moments (a checkpoint has both).",
                module_id,
            )
