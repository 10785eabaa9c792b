"""The learner group: hands rollouts to the learner, by reference where runners are remote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.training_data import TrainingData

from thrust_rllib.joint_batch import JointBatch


class JointLearnerGroup(LearnerGroup):
    """One learner, in this process (`num_learners=0`) or in another (`num_learners=1`).

    RLlib's group splits episodes between learners by length, which would tear joint rows apart; this one sends whole
    rollouts.
    """

    def update_from_rollouts(
        self, rollouts: Sequence[list[JointBatch] | ray.ObjectRef], timesteps: dict[str, Any], **kwargs: Any
    ) -> list[dict[str, Any]]:
        """One update on all rollouts.

        Args:
            rollouts: of each runner a list of batches, or a Ray reference to one.
            timesteps: lifetime counts for the schedules.
            **kwargs: `num_epochs`, `minibatch_size`, `shuffle_batch_per_epoch`.

        Returns:
            Each learner's results, as `LearnerGroup.update` returns them.
        """
        references = [r for r in rollouts if isinstance(r, ray.ObjectRef)]
        if references and len(references) != len(rollouts):
            raise ValueError("rollouts are a mixture of batches and references; give all of one kind")
        if self.is_local:
            if references:
                data = TrainingData(episodes=[batch for part in ray.get(references) for batch in part])
            else:
                data = TrainingData(episodes=[batch for part in rollouts for batch in part])
            return [self._learner.update(training_data=data, timesteps=timesteps, **kwargs)]
        if not references:
            references = [ray.put(list(part)) for part in rollouts]
        results = self._worker_manager.foreach_actor(
            "update",
            kwargs=[
                {"training_data": TrainingData(episodes_refs=references), "timesteps": timesteps, **kwargs}
                for _ in self._workers
            ],
        )
        return self._get_results(results)
