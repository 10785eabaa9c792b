"""What a learner keeps of its team: modules, optimizers, schedules, moments, and how modules come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.learner import LR_KEY
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.utils.annotations import override
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.rllib.utils.typing import ModuleID

from thrust_rllib import functional as F
from thrust_rllib.connectors.carry_over import carry_over
from thrust_rllib.diversity_probe import DIVERSITY
from thrust_rllib.entropy_guard import EntropyGuard
from thrust_rllib.learner_checks import check_messages, check_modules, check_sequences, prepare_couplings
from thrust_rllib.learner_state import ACTOR_OPTIMIZER, StatefulLearner
from thrust_rllib.learners_alike import start_alike
from thrust_rllib.multipliers import Multipliers
from thrust_rllib.notices import Notices
from thrust_rllib.optimizer_pass import make_adam
from thrust_rllib.ranks import Ranks
from thrust_rllib.rl_modules.auxiliary_heads import feature_width
from thrust_rllib.rl_modules.heads import asks_per_head, module_head_names
from thrust_rllib.rl_modules.learner_modules import AUXILIARY_HEADS, LEARNER_MODULES, TEAM_CRITIC
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.team_credit import CriticPlan
from thrust_rllib.teams import AgentToModule

CRITIC_OPTIMIZER = "critic_optimizer"

VALUE_MOMENTS_DECAY = 0.95
"""Weight that one update leaves to the older value targets: about 20 updates are remembered."""


class TeamLearner(StatefulLearner):
    """Base of the learner: everything but the update."""

    # --- construction ---------------------------------------------------------------------------------------------

    @override(TorchLearner)
    def build(self) -> None:
        super().build()
        config = self.config
        self._plan: CriticPlan = config.critic_plan
        self.ranks = self.make_ranks()
        self._coupling_schedules = {
            name: self._schedule(config.cross_agent_coeffs.get(name, 1.0)) for name in sorted(config.cross_agent_losses)
        }
        # The only source of randomness of an update: the order of the joint rows.
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)
        self._notices = Notices(quiet=self.ranks.rank > 0)
        self._multipliers = Multipliers(config.constraints, quiet=self.ranks.rank > 0)
        self._auxiliary_schedules = {target.name: self._schedule(target.weight) for target in config.auxiliary_targets}
        self._diversity = {}
        self._coupling_gradients = {}
        self._entropy_schedules: dict[ModuleID, Scheduler] = {}
        self._value_normalizers: dict[ModuleID, F.RunningMoments] = {}
        self._entropy_guard = EntropyGuard({}, config.min_entropy_updates)
        self._take_in_modules()

    def make_ranks(self) -> Ranks:
        """The learners that train together."""
        return Ranks.of(self.config, self._device)

    def _take_in_modules(self) -> None:
        """Gives every module what the learner keeps for it, and all learners the same modules to begin with."""
        config, ids = self.config, self._module_ids()
        modules = self._all_modules()
        policies = {m: modules[m] for m in ids}
        check_modules(policies, config.cross_agent_losses, with_values=not self._plan.has_network)
        check_messages(policies, config.policy_mapping_fn)
        recurrent = RecurrentModules.of(modules)
        check_sequences(recurrent, config)
        self.head_names: dict[ModuleID, tuple[str, ...]] = {}
        if asks_per_head(config):
            self.head_names = {m: module_head_names(m, policies[m], config.head_names) for m in ids}
        self.memories = recurrent.layouts
        prepare_couplings(config.cross_agent_losses, policies, config.policy_mapping_fn)
        own = {m: config.get_config_for_module(m) for m in ids}
        self._entropy_schedules = {
            m: self._entropy_schedules.get(m) or self._schedule(own[m].entropy_coeff) for m in ids
        }
        self._value_normalizers = {
            m: self._value_normalizers.get(m) or F.RunningMoments(decay=VALUE_MOMENTS_DECAY)
            for m in self._plan.streams(dict.fromkeys(ids, 1))
            if config.get_config_for_module(m).value_normalization
        }
        self._entropy_guard = self._entropy_guard.for_modules({m: own[m].min_entropy for m in ids})
        if self.ranks.size > 1:
            self._notices.mixed_rows(modules)
        start_alike(modules, self._generator, self.ranks)
        self.ranks.take_traffic()  # what is counted is an update's

    def _module_ids(self) -> list[ModuleID]:
        """Of the policies."""
        return sorted(m for m in self.module.keys() if m not in LEARNER_MODULES)

    def _all_modules(self) -> dict[ModuleID, Any]:
        """The policies, and the modules that only a learner has."""
        return {m: self.module[m].unwrapped() for m in sorted(self.module.keys())}

    def _schedule(self, value: Any) -> Scheduler:
        return Scheduler(fixed_value_or_schedule=value, framework=self.framework, device=self._device)

    def _set_schedules(self, timestep: int) -> None:
        """Sets every scheduled number to its value at the step count with which this rollout began.

        RLlib moves its schedules after an update only, so that the first update after a restore runs with the numbers
        of the construction, or with the learning rate that lies in the restored optimizer.
        """
        timestep = max(int(timestep), 0)
        for optimizer, schedule in self._optimizer_lr_schedules.items():
            self._set_optimizer_lr(optimizer, lr=schedule.update(timestep=timestep))
        for schedule in (
            *self._entropy_schedules.values(),
            *self._coupling_schedules.values(),
            *self._auxiliary_schedules.values(),
        ):
            schedule.update(timestep=timestep)

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: ModuleID, config: AlgorithmConfig | None = None) -> None:
        """One Adam over the whole module; with `critic_lr` a second one with its own moments and rate.

        A critic of the team has its own parameters: one with this rate. Each policy's auxiliary head has one with the
        policy's rate.
        """
        assert config is not None
        if module_id == AUXILIARY_HEADS:
            for policy, head in self.module[module_id].unwrapped().by_policy():
                self._register_head(policy, head)
            return
        params = list(self.get_parameters(self.module[module_id]))
        rates = {ACTOR_OPTIMIZER: config.lr}
        if module_id == TEAM_CRITIC and config.critic_lr is not None:
            rates[ACTOR_OPTIMIZER] = config.critic_lr
        elif config.critic_lr is not None and not config.critic_plan.has_network:
            rates[CRITIC_OPTIMIZER] = config.critic_lr
        for name, rate in rates.items():
            self._register(module_id, name, params, rate)

    def _register_head(self, policy: ModuleID, head: torch.nn.Module) -> None:
        rate = self.config.get_config_for_module(policy).lr
        self._register(AUXILIARY_HEADS, policy, list(head.parameters()), rate)

    def _register(self, module_id: ModuleID, name: str, params: list[torch.Tensor], rate: Any) -> None:
        self.register_optimizer(
            module_id=module_id,
            optimizer_name=name,
            optimizer=make_adam(params, self.config.weight_decay),
            params=params,
            lr_or_lr_schedule=rate,
        )

    def optimizers_of(self, module_id: ModuleID, name: str) -> list[torch.optim.Optimizer]:
        """A module's optimizer of this name, if it has one; with the policy's that of its auxiliary head."""
        names = [f"{module_id}_{name}"]
        if name == ACTOR_OPTIMIZER:
            names.append(f"{AUXILIARY_HEADS}_{module_id}")
        return [self._named_optimizers[each] for each in names if each in self._named_optimizers]

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Nothing: torch's wrapper reduces each module's gradients alone, in the order in which a graph gives them."""

    @property
    @override(TorchLearner)
    def distributed(self) -> bool:
        """False: RLlib would wrap a module added later, too."""
        return False

    def ask(self, question: Callable[[TeamLearner], Any]) -> Any:
        """What `question(learner)` gives in this process; an error is the caller's, and ends no process."""
        return question(self)

    # --- changes of the team ------------------------------------------------------------------------------------------

    @override(TorchLearner)
    def add_module(self, **kwargs: Any) -> MultiRLModuleSpec:
        """Adds a module, as RLlib does; with several learners all start with the first one's parameters.

        With auxiliary targets it gets a head.

        Raises:
            ValueError: the module cannot be trained here; it is not there then.
        """
        module_id, trained = kwargs["module_id"], self.config.policies_to_train
        super().add_module(**kwargs)
        try:
            self._add_head(module_id)
            self._take_in_modules()
        except ValueError:
            self.config.policies_to_train = trained
            self.remove_module(module_id)
            raise
        return self.config.rl_module_spec

    def _add_head(self, module_id: ModuleID) -> None:
        if AUXILIARY_HEADS not in self.module:
            return
        width = feature_width(module_id, self.module[module_id].unwrapped())
        heads = self.module[AUXILIARY_HEADS].unwrapped()
        self._register_head(module_id, heads.add_policy(module_id, width).to(self._device))
        self._tell_of_heads()

    def _remove_head(self, module_id: ModuleID) -> None:
        name = f"{AUXILIARY_HEADS}_{module_id}"
        if name not in self._named_optimizers:
            return
        optimizer = self._named_optimizers.pop(name)
        self._module_optimizers[AUXILIARY_HEADS].remove(name)
        for ref in self._optimizer_parameters.pop(optimizer):
            del self._params[ref]
        self._optimizer_lr_schedules.pop(optimizer)
        self.module[AUXILIARY_HEADS].unwrapped().remove_policy(module_id)
        self.metrics.delete(AUXILIARY_HEADS, f"{module_id}_{LR_KEY}", key_error=False)
        self._tell_of_heads()

    def _tell_of_heads(self) -> None:
        """RLlib's copies of the heads' spec, which know the policies of before."""
        self.module.add_module(AUXILIARY_HEADS, self.module[AUXILIARY_HEADS], override=True)
        self.config.rl_module(rl_module_spec=MultiRLModuleSpec.from_module(self.module))
        self._module_spec = self.config.rl_module_spec

    @override(TorchLearner)
    def remove_module(self, module_id: ModuleID, **kwargs: Any) -> MultiRLModuleSpec:
        """Removes a module with everything that the learner keeps for it, as RLlib does."""
        self._remove_head(module_id)
        spec = super().remove_module(module_id, **kwargs)
        for modules in self._coupling_gradients.values():
            modules.pop(module_id, None)
        self.config._per_module_overrides.pop(module_id, None)  # where RLlib would find them for another of that name
        self._take_in_modules()
        return spec

    def set_agent_to_module(self, mapping: AgentToModule) -> None:
        """Takes over who plays whom: the next rollouts have these agents and modules."""
        if mapping.table != self.config.policy_mapping_fn.table:  # then groups of alike policies are others
            self._diversity = {}
            self.metrics.delete(ALL_MODULES, DIVERSITY, key_error=False)
        self.config.policy_mapping_fn = mapping
        pieces = self._learner_connector
        self._learner_connector = self.config.build_learner_connector(None, None, self._device)
        carry_over(pieces, self._learner_connector)
        self._take_in_modules()

    def copy_module(self, source: ModuleID, target: ModuleID) -> None:
        """Gives module `target` the weights, the moments of values and the entropy guard's count of `source`.

        With auxiliary targets also the weights of its head.

        Raises:
            ValueError: the networks have different shapes.
        """
        given, needed = (self.module[m].unwrapped().state_dict() for m in (source, target))
        shapes = [{name: tuple(x.shape) for name, x in state.items()} for state in (given, needed)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"modules {source!r} and {target!r} have different networks: {shapes[0]} and {shapes[1]}")
        self.module[target].unwrapped().load_state_dict(given)
        if AUXILIARY_HEADS in self.module:
            heads = dict(self.module[AUXILIARY_HEADS].unwrapped().by_policy())
            heads[target].load_state_dict(heads[source].state_dict())
        if source in self._value_normalizers and target in self._value_normalizers:
            self._value_normalizers[target].set_state(self._value_normalizers[source].get_state())
        self._entropy_guard.low_updates[target] = self._entropy_guard.low_updates[source]
