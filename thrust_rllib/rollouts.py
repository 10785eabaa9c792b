"""The rollouts of an update, fetched out of Ray's object store; several learners agree on those that are lost.

Ray forgets what a process has put into the store when the process ends. A runner that dies behind its `sample` takes
its rollout with it, perhaps after one learner has fetched it and before another has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

Part = list[Any]
"""What one runner has sampled at a time: batches, or episodes."""

KINDS = JointBatch, MultiAgentEpisode
LOST = -1


class RolloutsLostError(RuntimeError):
    """All rollouts of an update are lost, with the runners that sampled them."""


def fetch_parts(training_data: TrainingData) -> list[Part | None]:
    """What lies in RLlib's envelope, of each runner; None for what is lost."""
    if training_data.episodes_refs is None:
        return [list(training_data.episodes or [])]
    references = list(training_data.episodes_refs)
    try:
        return [list(part) for part in ray.get(references)]
    except ObjectLostError:
        return [_fetch(reference) for reference in references]


def _fetch(reference: ray.ObjectRef) -> Part | None:
    try:
        return list(ray.get(reference))
    except ObjectLostError:
        return None


def rollouts_of(parts: Sequence[Part | None], ranks: Ranks = ALONE) -> list[Any]:
    """The rollouts that all learners have, in the order of the parts; a warning tells of those that are lost.

    Args:
        parts: as many for each learner; None where this one could not fetch it.
        ranks: the learners.

    Raises:
        RolloutsLostError: every part is lost.
        ValueError: there is no rollout, something else is in the parts, or both kinds; or another learner has other
            parts.
    """
    steps = ranks.gather(torch.tensor([LOST if part is None else _env_steps(part) for part in parts]))
    fetched = (steps != LOST).all(0).tolist()
    kept = [part for part, is_fetched in zip(parts, fetched, strict=True) if is_fetched and part is not None]
    if parts and not kept:
        raise RolloutsLostError(
            f"all {len(parts)} rollouts are lost: their runners ended before every learner had fetched them"
        )
    if len(kept) < len(parts) and ranks.rank == 0:
        logger.warning(
            "%d of %d rollouts are lost: their runners ended before every learner had fetched them; the update goes on "
            "with the others",
            len(parts) - len(kept),
            len(parts),
        )
    if (steps[:, fetched] != steps[:1, fetched]).any():
        raise ValueError(
            f"the learners were given different rollouts, of {steps.tolist()} steps. All learners need all rollouts; "
            "call JointLearnerGroup.update_from_rollouts, not the learners one by one."
        )
    found = [rollout for part in kept for rollout in part]
    if not found or not any(all(isinstance(x, kind) for x in found) for kind in KINDS):
        kinds = sorted({type(rollout).__name__ for rollout in found})
        raise ValueError(
            f"JointPPOLearner got {kinds or 'no rollout'}; needed: JointBatch objects, as JointEnvRunner samples them, "
            "or episodes, as JointEpisodeRunner does"
        )
    return found


def _env_steps(part: Part) -> int:
    return sum(len(rollout) for rollout in part if isinstance(rollout, KINDS))
