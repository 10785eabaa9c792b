"""What a learner writes into a checkpoint beside modules and optimizers, and how it goes on from one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core import COMPONENT_OPTIMIZER
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.typing import ModuleID, StateDict

from thrust_rllib.entropy_guard import EntropyGuard
from thrust_rllib.functional import RunningMoments
from thrust_rllib.multipliers import Multipliers
from thrust_rllib.notices import Notices
from thrust_rllib.optimizer_pass import laid_out_as
from thrust_rllib.rl_modules.learner_modules import LEARNER_MODULES, TEAM_CRITIC
from thrust_rllib.team_credit import CriticPlan, on_another_scale

ACTOR_OPTIMIZER = "default_optimizer"
JOINT_STATE = "joint"
"""Name of this learner's own part of its state."""


class StatefulLearner(TorchLearner):
    """Base of the learner: its state, and what it takes over from other runs."""

    _weights_seq_no: int
    _learner_connector: Any
    _plan: CriticPlan
    _generator: torch.Generator
    _notices: Notices
    _multipliers: Multipliers
    _entropy_guard: EntropyGuard
    _value_normalizers: dict[ModuleID, RunningMoments]
    _coupling_gradients: dict[str, dict[ModuleID, dict[str, float]]]
    """{coupling: {module: {norm, norm_ratio, cosine}}} of the last update that looked at them."""
    _diversity: dict[str, dict[str, float]]
    """{group of modules: {statistic: number}} of the last update that asked for it."""
    memories: dict[ModuleID, Any]

    @override(TorchLearner)
    def _set_optimizer_state(self, state: StateDict) -> None:
        # RLlib would configure the module's optimizers once more for one that this configuration does not have.
        mine = {name: own for name, own in state.items() if name in self._named_optimizers}
        # Arrays out of Ray's object store would stay there, for all learners of a machine to step in the same memory.
        super()._set_optimizer_state(copy.deepcopy(mine))
        for optimizer in self._named_optimizers.values():
            for param, own in optimizer.state.items():
                own.update({name: laid_out_as(x, param) for name, x in own.items() if x.shape == param.shape})

    @override(Learner)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, inference_only: bool = False, **kwargs: Any
    ) -> StateDict:
        # A critic with a memory of its own is run while sampling, though RLlib's LSTM module counts it as not needed.
        inference_only = inference_only and not self.memories.keys() - {TEAM_CRITIC}
        state = super().get_state(components, not_components=not_components, inference_only=inference_only, **kwargs)
        if self._check_component(JOINT_STATE, components, not_components):
            state[JOINT_STATE] = {
                "generator": self._generator.get_state().numpy(),
                "value_normalizers": {m: moments.get_state() for m, moments in self._value_normalizers.items()},
                "coupling_gradients": self._coupling_gradients,
                "low_entropy_updates": dict(self._entropy_guard.low_updates),
                "learner_connector": copy.deepcopy(self._learner_connector.get_state()),
                "multipliers": self._multipliers.get_state(),
                "diversity": self._diversity,
            }
        return state

    @override(Learner)
    def set_state(self, state: StateDict) -> None:
        # RLlib would bring back the `policies_to_train` of the checkpoint over those of this configuration.
        # RLlib takes newer weights only: going back would leave the newer ones, with the older optimizers.
        number = self._weights_seq_no
        self._weights_seq_no = -1
        try:
            super().set_state({key: value for key, value in state.items() if key != "should_module_be_updated"})
            number = int(state.get(WEIGHTS_SEQ_NO, number))  # 0, too, which RLlib takes for none
        finally:
            self._weights_seq_no = number
        if (joint := state.get(JOINT_STATE)) is not None:
            self._generator.set_state(torch.from_numpy(joint["generator"].copy()))
            self._coupling_gradients = joint.get("coupling_gradients", {})
            self._entropy_guard.restore(joint.get("low_entropy_updates", {}))
            self._learner_connector.set_state(copy.deepcopy(joint.get("learner_connector", {})))
            self._multipliers.set_state(joint.get("multipliers", {}))
            self._diversity = joint.get("diversity", {})
            moments = joint["value_normalizers"]
            for module_id, own in self._value_normalizers.items():
                if (given := moments.get(module_id, moments.get(TEAM_CRITIC))) is not None:
                    own.set_state(given)
            saved = state.get(COMPONENT_OPTIMIZER, {})
            self.tell_other_scale(moments, {m: m for m in self.module.keys() if f"{m}_{ACTOR_OPTIMIZER}" in saved})

    def take_value_moments(self, module_id: ModuleID, moments: Mapping[ModuleID, StateDict], source: ModuleID) -> None:
        """Gives a module the moments of value targets that another one, or its team, had in another run."""
        owner = TEAM_CRITIC if self._plan.critic == "mean" else module_id
        of_team = moments.get(TEAM_CRITIC)
        state = of_team if owner == TEAM_CRITIC else moments.get(source, of_team)
        if state is not None and owner in self._value_normalizers:
            self._value_normalizers[owner].set_state(state)

    def tell_other_scale(self, moments: Mapping[ModuleID, StateDict], taken: Mapping[ModuleID, ModuleID]) -> None:
        """Warns where values that come from another run are on another scale.

        Args:
            moments: of value targets there.
            taken: {module: what it was called there}.
        """
        asked = [TEAM_CRITIC] if self._plan.has_network else [m for m in self.module.keys() if m not in LEARNER_MODULES]
        here = self._value_normalizers
        self._notices.other_scale([m for m in asked if m in taken and on_another_scale(here, moments, m, taken[m])])
