"""What a runner of the general door looks at in a finished rollout, and what it leaves in the episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrust_rllib.connectors.agent_steps import ModuleSteps
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_episode import JointEpisode


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
