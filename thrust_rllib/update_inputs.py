"""From rollouts and schedules to what the gradient steps of one update read: rows, settings, optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ray.rllib.utils.typing import ModuleID
from torch import Tensor

from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH
from thrust_rllib.exchanged_rows import exchanged_rollouts
from thrust_rllib.functional import has_head
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_rows import JointRows, joint_rows
from thrust_rllib.learner_state import ACTOR_OPTIMIZER
from thrust_rllib.loss_settings import AuxiliarySettings, LossSettings
from thrust_rllib.module_axis import Coefficients, ModuleAxis
from thrust_rllib.module_forward import module_values
from thrust_rllib.optimizer_pass import OptimizerPass
from thrust_rllib.rl_modules.joint_input import Speakers, places_of
from thrust_rllib.rl_modules.learner_modules import TEAM_CRITIC
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.sequences import ModuleSequences
from thrust_rllib.team_learner import CRITIC_OPTIMIZER, TeamLearner


class UpdateInputs(TeamLearner):
    """What an update makes of its rollouts, its schedules and its optimizers before the first gradient step."""

    def _batches(self, rollouts: Sequence[Any]) -> list[JointBatch]:
        """Episodes through the learner pipeline (`JointPPOConfig.build_learner_connector`); batches as they are."""
        if isinstance(rollouts[0], JointBatch):
            return list(rollouts)
        shared_data: dict[str, Any] = {}
        columns = self._learner_connector(
            rl_module=self.module, batch={}, episodes=list(rollouts), shared_data=shared_data, metrics=self.metrics
        )
        return [columns[JOINT_BATCH]]

    def _joint_rows(self, batches: Sequence[JointBatch]) -> JointRows:
        self.memories = RecurrentModules.of(self.module).layouts  # initial states may have come with other weights
        configs = {m: self.config.get_config_for_module(m) for m in batches[0].modules}
        speakers = self._speakers(batches[0])
        heard = None
        if speakers is not None and not self._plan.has_network:
            heard = exchanged_rollouts(batches, speakers, self.module, self.memories)
        return joint_rows(
            batches,
            values_of=self._values,
            memories={m: layout for m, layout in self.memories.items() if m in (*configs, TEAM_CRITIC)},
            normalizers=self._value_normalizers,
            gamma={m: config.gamma for m, config in configs.items()},
            lambda_={m: config.lambda_ for m, config in configs.items()},
            bootstrap=self.config.gae_bootstrap == "value",
            standardize_rollout=self.config.standardize_advantages == "rollout",
            device=self._device,
            ranks=self.ranks,
            plan=self._plan,
            auxiliary=tuple(self._auxiliary_schedules),
            per_head=bool(self.head_names),
            speakers=speakers,
            heard=heard,
        )

    def _speakers(self, batch: JointBatch) -> Speakers | None:
        """Who exchanges messages; the environment's order of agents is that of its links."""
        declared = self.config.declared_team
        agents = {module_id: streams.agents for module_id, streams in batch.modules.items()}
        team = batch.agents if declared is None else declared.possible_agents
        speakers = Speakers.of(self.module, places_of(agents, team), self._device)
        assert speakers is None or declared is not None, "validate() finds the environment's order of agents"
        return speakers

    @torch.no_grad()
    def _values(self, module_id: ModuleID, obs: Tensor, sequences: ModuleSequences | None) -> Tensor:
        """Values [R] of observations [R, …], or [R, N] where the team's critic has one for each agent."""
        values = module_values(self.module[module_id].unwrapped(), obs.to(self._device), sequences)
        return values.squeeze(-1) if module_id == TEAM_CRITIC and self._plan.of_team else values

    def _loss_settings(self, rows: JointRows, critics: Mapping[ModuleID, int]) -> LossSettings:
        """With the numbers that the schedules have now.

        Args:
            rows: of the update.
            critics: {who answers for values: how many of them}.
        """
        config_of = self.config.get_config_for_module
        sizes = {m: len(module.agents) for m, module in rows.modules.items()}
        axis = ModuleAxis(list(sizes.values()), self._device)
        critic_axis = axis if critics == sizes else ModuleAxis(list(critics.values()), self._device)
        scheduled = {name: s.get_current_value() for name, s in self._coupling_schedules.items()}
        heads = None
        if self.head_names:
            heads = has_head([len(self.head_names[m]) for m in sizes], list(sizes.values()), self._device)
        return LossSettings(
            axis=axis,
            critic_axis=critic_axis,
            coefficients=Coefficients.of(
                axis,
                [config_of(m) for m in sizes],
                [float(self._entropy_schedules[m].get_current_value()) for m in sizes],
                critic_axis,
                [config_of(m) for m in critics],
            ),
            standardize_advantages=self.config.standardize_advantages,
            all_present=rows.everybody,
            cross_agent_losses={name: self.config.cross_agent_losses[name] for name in scheduled},
            cross_agent_coeffs=self._multipliers.coupling_coeffs(scheduled),
            critic=self._plan.critic,
            heads=heads,
            auxiliary=AuxiliarySettings(
                tuple(self._auxiliary_schedules),
                tuple(target.loss for target in self.config.auxiliary_targets),
                torch.tensor(
                    [float(s.get_current_value()) for s in self._auxiliary_schedules.values()], device=self._device
                ),
            ),
        )

    def _is_due(self, interval: int) -> bool:
        """Whether this update looks at what is looked at once in so many updates, 0 for never."""
        return interval > 0 and (self._weights_seq_no - 1) % interval == 0

    def _passes(self, trained: Mapping[ModuleID, bool]) -> list[OptimizerPass]:
        """The optimizers that step in each minibatch: one pass, or actors then their critics with `critic_lr`."""
        passes = []
        for name in (ACTOR_OPTIMIZER, CRITIC_OPTIMIZER):
            registered = {m: self.optimizers_of(m, name) for m in trained}
            if any(registered.values()):
                passes.append(
                    OptimizerPass(
                        optimizers=registered,
                        trained=trained,
                        grad_clip={m: self.config.get_config_for_module(m).grad_clip for m in registered},
                        grad_clip_by=self.config.grad_clip_by,
                        device=self._device,
                        joint_clip=self.config.grad_clip if self.config.clip_jointly else None,
                    )
                )
        return passes
