"""Last piece of the general door's module-to-env pipeline: actions for every environment, by agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override

from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.connectors.team_observations import ACTING, Acting
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.rl_modules.acting_outputs import check_acting_outputs
from thrust_rllib.rl_modules.distributions import mask_logits
from thrust_rllib.rl_modules.drawing import drawing_from, generator_state, set_generator_state

MODULE_INPUT = "module_input"
"""Extra model output of a step: what the module saw, where that is not the encoded observation itself."""
MEMORY_IN = "memory_in"
"""Extra model output of a step of a recurrent module: the state [S] in which it entered the step (`MemoryLayout`)."""
HEAD_LOGP = "head_logp"
"""Extra model output of a step with ratio="per_head": the log-probabilities [H] of the action's parts."""
ACTED_AT = "acted_at"
"""Extra model output of a step, for the audit: the environment step of the action."""


class TeamActions(ConnectorV2):
    """Turns what the modules said into {agent: action} for each environment.

    In place of RLlib's default pieces (get actions, to numpy, unbatch, unmap, normalise and clip, listify). A module,
    or a user's piece in front of this one, that has chosen "actions" (and "action_logp") keeps its choice. What a
    recurrent module will remember goes into the episodes; its other columns lose their time axis.

    Args:
        input_observation_space: as of every ConnectorV2; not used.
        input_action_space: not used.
        codec: the team.
        store_inputs: episodes keep what the modules saw (normalised observations cannot be made again later).
        store_outputs: episodes keep all other columns, too, that the modules and the user's pieces have put out.
        audit: episodes keep the environment step of each action.
        per_head: episodes keep the log-probability of each head, too.
        **kwargs: for RLlib.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        codec: TeamCodec,
        store_inputs: bool = False,
        store_outputs: bool = False,
        audit: bool = False,
        per_head: bool = False,
        **kwargs: Any,
    ) -> None:
        self.codec = codec
        self._per_head = per_head
        self._store_inputs = store_inputs
        self._store_outputs = store_outputs
        self._audit = audit
        self._seed = torch.initial_seed() % 2**63  # which RLlib sets per runner
        self._generator: torch.Generator | None = None  # made when the modules' device is known
        self._restored: Mapping[str, Any] | None = None  # where it is to begin, in place of the seed
        super().__init__(input_observation_space, input_action_space, **kwargs)

    def seed(self, seed: int) -> None:
        """Restarts the generator that actions are drawn from."""
        self._seed, self._generator, self._restored = seed, None, None

    def get_drawing_state(self) -> dict[str, Any]:
        """Where the random numbers of actions are."""
        generator = self._restored if self._generator is None else generator_state(self._generator)
        return {"seed": self._seed, "generator": generator}

    def set_drawing_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the same random numbers."""
        self.seed(state["seed"])
        self._restored = state["generator"]

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {
            "codec": self.codec,
            "store_inputs": self._store_inputs,
            "store_outputs": self._store_outputs,
            "audit": self._audit,
            "per_head": self._per_head,
        }

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[ModuleID, dict[str, torch.Tensor]],
        episodes: Sequence[MultiAgentEpisode],
        explore: bool,
        shared_data: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, list[dict[AgentID, Any]]]:
        """{column: [per environment {agent: value}]}; RLlib plays "actions_for_env" and stores the other columns."""
        result: dict[str, list[dict[AgentID, Any]]] = {}
        acting: dict[ModuleID, Acting] = shared_data[ACTING]
        for module_id, mine in acting.items():
            check_acting_outputs(module_id, rl_module[module_id], batch[module_id], mine.layout is not None)
        batch = {m: _one_step(batch[m], mine) for m, mine in acting.items()}
        with torch.no_grad(), drawing_from(self._drawing(batch)):
            chosen = {m: self._choose(rl_module[m], batch[m], acting[m], explore) for m in acting}
        for module_id, (actions, logp, head_logp) in chosen.items():
            mine, outputs = acting[module_id], batch[module_id]
            stored = actions.cpu().numpy()
            columns: dict[str, Any] = {
                Columns.ACTIONS: stored,
                Columns.ACTIONS_FOR_ENV: self._played(module_id, stored, outputs),
                Columns.ACTION_LOGP: logp.cpu().numpy(),
            }
            if head_logp is not None:
                columns[HEAD_LOGP] = head_logp.cpu().numpy()
            if self._store_inputs:
                columns[MODULE_INPUT] = mine.obs
            if mine.layout is not None:
                columns[MEMORY_IN] = mine.memory
                self._remember(outputs, mine, episodes)
            if self._audit:
                columns[ACTED_AT] = [episodes[env_index].env_t for env_index, _ in mine.rows]
            if self._store_outputs:
                columns = {
                    name: _numpy(x)
                    for name, x in outputs.items()
                    if name != Columns.STATE_OUT and np.shape(x)[:1] == (len(mine.rows),)
                } | columns
            for name, rows in columns.items():
                by_env = result.setdefault(name, [{} for _ in episodes])
                for (env_index, agent), value in zip(mine.rows, rows, strict=True):
                    by_env[env_index][agent] = value
        return result

    @staticmethod
    def _remember(outputs: dict[str, Any], acting: Acting, episodes: Sequence[MultiAgentEpisode]) -> None:
        """Lets every episode keep the states in which its agents leave the step."""
        assert acting.layout is not None
        states = _numpy(acting.layout.flatten(outputs[Columns.STATE_OUT]))
        for (env_index, agent), state in zip(acting.rows, states, strict=True):
            episodes[env_index].memory[agent] = state

    def _played(self, module_id: ModuleID, stored: np.ndarray, outputs: dict[str, torch.Tensor]) -> np.ndarray:
        """What the environment gets, [R, …]; it may write into it."""
        if Columns.ACTIONS_FOR_ENV in outputs:
            return _numpy(outputs[Columns.ACTIONS_FOR_ENV])
        played = self.codec.modules[module_id].decoder.decode(stored)
        return played.copy() if played is stored else played

    def _drawing(self, batch: dict[ModuleID, dict[str, torch.Tensor]]) -> torch.Generator:
        """The generator of the device that the modules are on."""
        tensors = (x for outputs in batch.values() for x in outputs.values() if isinstance(x, torch.Tensor))
        device = next((x.device for x in tensors), torch.device("cpu"))
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device)
            if self._restored is None:
                self._generator.manual_seed(self._seed)
            else:
                set_generator_state(self._generator, self._restored)
        return self._generator

    def _choose(
        self, module: Any, outputs: dict[str, torch.Tensor], acting: Acting, explore: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Actions [R, …], their log-probabilities [R], and those of their parts [R, H] where they are asked for.

        Raises:
            ValueError: a piece put out "action_logp", which "head_logp" is needed beside.
        """
        logits = outputs[Columns.ACTION_DIST_INPUTS]
        classes = module.get_exploration_action_dist_cls()
        if acting.action_mask is not None:
            logits = mask_logits(logits, torch.from_numpy(acting.action_mask).to(logits.device), classes)
        distribution = classes.from_logits(logits)
        if Columns.ACTIONS in outputs:
            actions = outputs[Columns.ACTIONS]
        elif explore:
            actions = distribution.sample()
        else:
            actions = module.get_inference_action_dist_cls().from_logits(logits).to_deterministic().sample()
        logp = outputs[Columns.ACTION_LOGP] if Columns.ACTION_LOGP in outputs else distribution.logp(actions)
        if not self._per_head:
            return actions, logp, None
        if HEAD_LOGP in outputs:
            return actions, logp, outputs[HEAD_LOGP]
        if Columns.ACTION_LOGP in outputs:
            raise ValueError(
                f"{Columns.ACTION_LOGP!r} was put out by a module or a module-to-env piece, but not {HEAD_LOGP!r}: "
                "with ratio='per_head' put out both, the log-probabilities of the heads [rows, heads] and their sum; "
                "or leave both out"
            )
        return actions, logp, distribution.head_logp(actions)


def _one_step(outputs: dict[str, Any], acting: Acting) -> dict[str, Any]:
    """A recurrent module's outputs [R, 1, …] as [R, …], its state left out of it; others' as they are."""
    if acting.layout is None:
        return outputs

    def has_time_axis(name: str, x: Any) -> bool:
        return name != Columns.STATE_OUT and isinstance(x, (torch.Tensor, np.ndarray)) and x.shape[1:2] == (1,)

    return {name: x[:, 0] if has_time_axis(name, x) else x for name, x in outputs.items()}


def _numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
