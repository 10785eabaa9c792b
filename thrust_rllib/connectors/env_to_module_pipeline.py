"""RLlib's env-to-module pipeline with states that are merged by the piece they belong to."""

from __future__ import annotations

from typing import Any

from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.utils.annotations import override


class TeamEnvToModulePipeline(EnvToModulePipeline):
    """As RLlib's, but the states of remote runners find their piece by its name.

    RLlib's `merge_states` takes the k-th state to the k-th piece, though pieces without a state have none in the list:
    behind such a piece another one merges, and what runners have learnt is lost without a word. What comes out is kept
    here, too: without a local runner nobody else has the totals to which the next news are added.
    """

    @override(ConnectorPipelineV2)
    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        pieces = {type(piece).__name__: piece for piece in self.connectors}
        names = states[0] if states else {}
        merged = {name: pieces[name].merge_states([state[name] for state in states]) for name in names}
        for name, state in merged.items():
            pieces[name].set_state(state)
        return merged
