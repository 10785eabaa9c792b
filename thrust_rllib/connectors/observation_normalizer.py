"""Running normalisation of observations, one set of moments per module, shared by all runners.

The moments stay fixed while a rollout is sampled and take in its rows afterwards. So every row of a rollout was
normalised alike, the learner sees exactly what the policy saw, and no time is spent on statistics inside a step.
RLlib's `MeanStdFilter` updates at each step and per agent; its merge also demands equal shapes of all agents.

This is a ConnectorV2 because RLlib merges, broadcasts, evaluates with and saves the state of its connectors. Its
state carries the totals and what is new since the last broadcast; merging adds the news of all runners to the totals
of one, so that no row counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.utils.annotations import override

from thrust_rllib.connectors.team_observations import ACTING
from thrust_rllib.functional import RunningMoments

CLIP = 10.0


class ObservationNormalizer(ConnectorV2):
    """x → clip((x − mean) / std, ±10) with the running moments of the module.

    Links, which stand in front of an observation, say whom the agent hears: they stay as they are, and have no moments.

    Args:
        input_observation_space: as of every ConnectorV2; not used.
        input_action_space: not used.
        shapes: {module id: shape of one encoded observation}.
        links: {module id: how many numbers of it are links}; modules without links may be left out.
        **kwargs: for RLlib.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        links: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self.shapes = {module_id: tuple(shapes[module_id]) for module_id in sorted(shapes)}
        self.links = {module_id: (links or {}).get(module_id, 0) for module_id in self.shapes}
        self.reset_state()

    @override(ConnectorV2)
    def __call__(self, *, batch: dict[str, Any], shared_data: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """In the general door, behind `TeamObservations`: normalises what the agents to act see.

        Called again on a batch that `TeamMemory` has given a time axis, it keeps that.
        """
        for module_id, acting in shared_data[ACTING].items():
            acting.obs = self.normalize((module_id,), acting.encoded[None])[0]
            columns = batch[module_id]
            before = columns[Columns.OBS]
            columns[Columns.OBS] = torch.from_numpy(acting.obs).to(before.device).view_as(before)
        return batch

    def normalize(self, module_ids: tuple[str, ...], obs: np.ndarray) -> np.ndarray:
        """Encoded observations [k, …, *shape] of modules with k / len(module_ids) agents each, normalised, float32."""
        if module_ids not in self._scales:
            self._scales[module_ids] = self._scale(module_ids)
        scale = self._scales[module_ids]
        if scale is None:
            return obs
        mean, std, limit = scale
        first = self.links[module_ids[0]]
        if not first:
            scaled = obs.reshape(len(module_ids), -1, *mean.shape[2:]) - mean
            scaled /= std
            return np.clip(scaled, -limit, limit, out=scaled).reshape(obs.shape)
        scaled = obs.reshape(len(module_ids), -1, obs.shape[-1]).copy()
        rest = scaled[..., first:]
        rest -= mean
        rest /= std
        np.clip(rest, -limit, limit, out=rest)
        return scaled.reshape(obs.shape)

    def _scale(self, module_ids: tuple[str, ...]) -> tuple[np.ndarray, ...] | None:
        """Mean and deviation [m, 1, *shape], clip limit; None where nothing is known: observations stay as they are."""
        moments = [self.moments[m] for m in module_ids]
        if not any(m.count for m in moments):
            return None
        mean, std = np.stack([m.mean for m in moments]), np.stack([m.std for m in moments])
        limit = np.array([CLIP if m.count else np.inf for m in moments], np.float32).reshape(-1, *[1] * mean.ndim)
        return mean[:, None].astype(np.float32), std[:, None].astype(np.float32), limit

    def update(self, module_id: str, obs: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Takes in the rows of a finished rollout: obs […, *shape], mask […] bool."""
        if first := self.links[module_id]:
            obs = obs[..., first:]
        self.moments[module_id].update(obs, mask)
        self._scales.clear()

    def copy_moments(self, source: str, target: str) -> None:
        """Module `target` goes on with the moments that `source` has now."""
        self.moments[target].set_state(self.moments[source].get_state())
        self._scales.clear()

    @override(ConnectorV2)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for module_id, moments in self.moments.items():
            new = moments.new if moments.new is not None else RunningMoments(moments.shape)
            state[module_id] = {"total": moments.get_state(), "new": new.get_state()}
        return state

    @override(ConnectorV2)
    def set_state(self, state: dict[str, Any]) -> None:
        for module_id, moments in self.moments.items():
            if module_id in state:
                moments.set_state(state[module_id]["total"])
                self._scales.clear()

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {"shapes": self.shapes, "links": self.links}

    @override(ConnectorV2)
    def reset_state(self) -> None:
        self.moments = {module_id: RunningMoments(self._beside_links(module_id)) for module_id in self.shapes}
        # {modules: (mean, std, limit)} in float32, made when first needed: the moments are fixed during a rollout.
        self._scales: dict[tuple[str, ...], tuple[np.ndarray, ...] | None] = {}

    def _beside_links(self, module_id: str) -> tuple[int, ...]:
        """The shape of an observation without its links, in front of which it is a vector."""
        first, shape = self.links[module_id], self.shapes[module_id]
        return (shape[0] - first,) if first else shape

    @override(ConnectorV2)
    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The totals held here (of the last broadcast) plus what each of `states` has new."""
        merged: dict[str, Any] = {}
        for module_id, moments in self.moments.items():
            total = RunningMoments(moments.shape)
            total.set_state(moments.get_state())
            for state in states:
                new = RunningMoments(moments.shape)
                new.set_state(state[module_id]["new"])
                total.merge(new)
            merged[module_id] = {
                "total": total.get_state(),
                "new": RunningMoments(moments.shape).get_state(),
            }
        return merged
