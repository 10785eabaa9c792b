"""The configuration of JointPPO: RLlib's `PPOConfig` with the joint trainer's options and defaults.

RLlib keeps options and what is built from them in one class, so this file has both; the checks are in `config_checks`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID
from ray.util import log_once
from typing_extensions import Self

from thrust_rllib import communicating_teams, doors, pipelines, team_critics
from thrust_rllib.auxiliary_targets import AuxiliaryTarget, as_auxiliary_targets
from thrust_rllib.config_checks import check_heads, check_settings, check_team
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.constraints import Constraint, as_constraints
from thrust_rllib.cross_agent_losses import CrossAgentLoss
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.envs.global_state import state_size
from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.registry import EnvSpec, is_registered, make_vector_env, resolve_env
from thrust_rllib.learner import JointPPOLearner
from thrust_rllib.learner_group import JointLearnerGroup
from thrust_rllib.options import checks_keywords
from thrust_rllib.resources import warn_of_too_few
from thrust_rllib.rl_modules.auxiliary_heads import auxiliary_heads_spec
from thrust_rllib.rl_modules.learner_modules import AUXILIARY_HEADS, LEARNER_MODULES, TEAM_CRITIC
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.rl_modules.module_choice import module_class_for
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.team_credit import INDEPENDENT
from thrust_rllib.teams import AgentToModule, DeclaredTeam, Team, is_team, mapped_table, policy_specs, team_table
from thrust_rllib.unserved_options import refuse_swallowed

AUDIT_VARIABLE = "THRUST_RLLIB_AUDIT"

SECTIONS = (
    "environment", "env_runners", "learners", "training", "multi_agent", "rl_module", "evaluation", "callbacks",
    "checkpointing", "debugging", "fault_tolerance", "framework", "reporting", "resources", "offline_data",
    "python_environment", "api_stack", "experimental",
)  # fmt: skip


@checks_keywords(SECTIONS)
class JointPPOConfig(PPOConfig):
    """Configures `JointPPO`.

    RLlib's options keep their names and meaning; these are new:

    | `.training(…)`              | default    | meaning                                                              |
    |-----------------------------|------------|----------------------------------------------------------------------|
    | `critic_lr`                 | None       | number or schedule: a second optimizer steps the value loss          |
    | `iterate_all_minibatches`   | False      | an epoch reads every chunk of the rollout, not one draw              |
    | `max_minibatches_per_epoch` | None       | at most so many chunks per epoch (0 counts as 1)                     |
    | `cross_agent_losses`        | {}         | {name: `CrossAgentLoss`}                                             |
    | `cross_agent_coeffs`        | {}         | {name: number or schedule}; 1.0 where a loss has none                |
    | `coupling_gradient_interval`| 10         | couplings' gradients beside PPO's every so many updates; 0 for never |
    | `standardize_advantages`    | "rollout"  | per agent; "minibatch" per agent, "team" over all agents, False      |
    | `gae_bootstrap`             | "value"    | what follows a truncated or last row; "zero" as the seed             |
    | `value_normalization`       | True       | train the critic on targets of running mean 0 and deviation 1        |
    | `value_clip_range`          | 0.2        | clip of the value's change, in the critic's units; inf for none      |
    | `target_kl`                 | None       | number: a module whose approx_kl of a minibatch is larger rests ...  |
    | `target_kl_scope`           | "epoch"    | ... for the rest of the epoch; "update" for that of the update       |
    | `min_entropy`               | None       | number: training ends when a module's mean entropy of an update ...  |
    | `min_entropy_updates`       | 3          | ... was lower so many updates running                                |
    | `critic`                    | "independent" | whose values: "mean", "central", "set": see `CriticPlan`          |
    | `critic_config`             | {}         | the network of a central or set critic: `TeamCritic`, `SetCritic`;   |
    |                             |            | `input`: "state", "observations" or "auto"; `scalars` of a set       |
    | `credit`                    | "own"      | whose reward: "shared", "agent", "difference": see `CriticPlan`      |
    | `ratio`                     | "joint"    | "per_head": each head of an action has its own ratio and clip        |
    | `head_names`                | None       | names of the heads, for the metrics                                  |
    | `auxiliary_targets`         | ()         | `AuxiliaryTarget`s: scalars predicted from the features              |
    | `constraints`               | ()         | `Constraint`s: costs and couplings with multipliers                  |
    | `diversity_interval`        | 10         | how differently alike modules act, every so many updates; 0: never   |
    | `clip_jointly`              | False      | one gradient norm over all modules, the team's critic included       |
    | `weight_decay`              | 0.0        | of AdamW                                                             |
    | `audit`                     | False      | stop at the first joint row whose agents' steps differ (True where   |
    |                             |            | the environment variable THRUST_RLLIB_AUDIT is 1)                    |

    `.env_runners(…)`: `sampling` ("auto": arrays where they can serve, "arrays", "episodes"), `normalize_observations`
    (False).
    `.multi_agent(policies=…)`: also "per_agent" (default), "shared", {group: [agents]}.
    `.environment(env=…)`: whatever `thrust_rllib.envs.make_vector_env` takes.

    Defaults that differ from RLlib's PPO: lr 3e-4, num_epochs 4, minibatch_size 256, train_batch_size_per_learner
    2048, lambda_ .95, clip_param .2, vf_clip_param inf, vf_loss_coeff .5, entropy_coeff .01, grad_clip .5, use_kl_loss
    False, num_env_runners 0, networks of 2 × 64 with a shared trunk (the seed's joint trainer).
    """

    policies: dict[ModuleID, Any]
    env_runner_cls: Any
    policy_mapping_fn: Any

    def __init__(self, algo_class: type | None = None) -> None:
        from thrust_rllib.algorithm import JointPPO  # the algorithm's module imports this one

        super().__init__(algo_class=algo_class or JointPPO)
        self._set_seed_recipe()
        self.vf_clip_param = math.inf
        self.use_kl_loss = False
        self.num_env_runners = 0
        # Our own.
        self.gae_bootstrap = "value"
        self.value_normalization = True
        self.cross_agent_losses: dict[str, CrossAgentLoss] = {}
        self.cross_agent_coeffs: dict[str, Any] = {}
        self.coupling_gradient_interval = 10
        self.target_kl: float | None = None
        self.target_kl_scope = "epoch"
        self.min_entropy: float | None = None
        self.min_entropy_updates = 3
        self.critic = "independent"
        self.critic_config: dict[str, Any] = {}
        self.credit = "own"
        self.ratio = "joint"
        self.head_names: tuple[str, ...] | None = None
        self.auxiliary_targets: tuple[AuxiliaryTarget, ...] = ()
        self.constraints: tuple[Constraint, ...] = ()
        self.diversity_interval = 10
        self.clip_jointly = False
        self.weight_decay = 0.0
        self.critic_plan = INDEPENDENT
        self.audit = os.environ.get(AUDIT_VARIABLE, "") not in ("", "0")
        self.sampling = "auto"
        self.normalize_observations = False
        self.team: Team | None = "per_agent"
        self.env_spec: EnvSpec | None = None
        self.declared_team: DeclaredTeam | None = None
        self.chosen_runner_cls: type | None = None
        self.door = ""  # which way environments are sampled, and why

    def _set_seed_recipe(self) -> None:
        self.lr = 3e-4
        self.critic_lr: Any = None
        self.gamma = 0.99
        self.lambda_ = 0.95
        self.clip_param = 0.2
        self.value_clip_range = 0.2
        self.vf_loss_coeff = 0.5
        self.entropy_coeff: Any = 0.01
        self.grad_clip = 0.5
        self.grad_clip_by = "global_norm"
        self.num_epochs = 4
        self.minibatch_size = 256
        self.train_batch_size_per_learner = 2048
        self.shuffle_batch_per_epoch = True
        self.iterate_all_minibatches = False
        self.max_minibatches_per_epoch: int | None = None
        self.standardize_advantages: str | bool = "rollout"

    def seed_defaults(self) -> Self:
        """Sets exactly what the seed's joint trainer computes: no value after the last row, raw value targets.

        For tests and comparisons: with this recipe a critic whose targets are large does not learn.
        """
        self._set_seed_recipe()
        self.gae_bootstrap = "zero"
        self.value_normalization = False
        return self

    # --- sections -------------------------------------------------------------------------------------------------

    @override(PPOConfig)
    def training(
        self,
        *,
        critic_lr: Any = NotProvided,
        iterate_all_minibatches: bool = NotProvided,
        max_minibatches_per_epoch: int | None = NotProvided,
        cross_agent_losses: Mapping[str, CrossAgentLoss] = NotProvided,
        cross_agent_coeffs: Mapping[str, Any] = NotProvided,
        coupling_gradient_interval: int = NotProvided,
        standardize_advantages: str | bool = NotProvided,
        gae_bootstrap: str = NotProvided,
        value_normalization: bool = NotProvided,
        value_clip_range: float = NotProvided,
        target_kl: float | None = NotProvided,
        target_kl_scope: str = NotProvided,
        min_entropy: float | None = NotProvided,
        min_entropy_updates: int = NotProvided,
        critic: str = NotProvided,
        critic_config: Mapping[str, Any] = NotProvided,
        credit: str = NotProvided,
        ratio: str = NotProvided,
        head_names: tuple[str, ...] | None = NotProvided,
        auxiliary_targets: Sequence[AuxiliaryTarget | Mapping[str, Any]] = NotProvided,
        constraints: Sequence[Constraint | Mapping[str, Any]] = NotProvided,
        diversity_interval: int = NotProvided,
        clip_jointly: bool = NotProvided,
        weight_decay: float = NotProvided,
        audit: bool = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets training options; the new ones are in the class's table, the others are RLlib's."""
        refuse_swallowed("training", kwargs)
        super().training(**kwargs)
        if cross_agent_losses is not NotProvided:
            cross_agent_losses = dict(cross_agent_losses)
        if cross_agent_coeffs is not NotProvided:
            cross_agent_coeffs = dict(cross_agent_coeffs)
        return self._set(
            critic_lr=critic_lr,
            iterate_all_minibatches=iterate_all_minibatches,
            max_minibatches_per_epoch=max_minibatches_per_epoch,
            cross_agent_losses=cross_agent_losses,
            cross_agent_coeffs=cross_agent_coeffs,
            coupling_gradient_interval=coupling_gradient_interval,
            standardize_advantages=standardize_advantages,
            gae_bootstrap=gae_bootstrap,
            value_normalization=value_normalization,
            value_clip_range=value_clip_range,
            target_kl=target_kl,
            target_kl_scope=target_kl_scope,
            min_entropy=min_entropy,
            min_entropy_updates=min_entropy_updates,
            critic=critic,
            critic_config=dict(critic_config) if isinstance(critic_config, Mapping) else critic_config,
            credit=credit,
            ratio=ratio,
            head_names=head_names,
            auxiliary_targets=auxiliary_targets,
            constraints=constraints,
            diversity_interval=diversity_interval,
            clip_jointly=clip_jointly,
            weight_decay=weight_decay,
            audit=audit,
        )

    @override(PPOConfig)
    def environment(self, env: Any = NotProvided, **kwargs: Any) -> Self:
        """Sets the environment: whatever `thrust_rllib.envs.make_vector_env` takes."""
        if isinstance(env, str) and is_registered(env):
            env = resolve_env(env)  # other processes do not know the name
        return super().environment(env, **kwargs)

    @override(PPOConfig)
    def env_runners(
        self, *, sampling: str = NotProvided, normalize_observations: bool = NotProvided, **kwargs: Any
    ) -> Self:
        """Sets options of the runners; see the class's table."""
        refuse_swallowed("env_runners", kwargs)
        super().env_runners(**kwargs)
        return self._set(sampling=sampling, normalize_observations=normalize_observations)

    @override(PPOConfig)
    def multi_agent(self, *, policies: Any = NotProvided, policy_mapping_fn: Any = NotProvided, **kwargs: Any) -> Self:
        """Sets who plays whom; `policies` may be "per_agent", "shared", {group: [agents]} or RLlib's own."""
        if policies is not NotProvided and is_team(policies):
            if policy_mapping_fn is not NotProvided:
                raise ValueError(
                    f"policies={policies!r} already says which module plays which agent; leave policy_mapping_fn out"
                )
            self.team = policies
            return super().multi_agent(**kwargs)
        if policies is not NotProvided or policy_mapping_fn is not NotProvided:
            self.team = None
        return super().multi_agent(policies=policies, policy_mapping_fn=policy_mapping_fn, **kwargs)

    def _set(self, **options: Any) -> Self:
        for name, value in options.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    @override(PPOConfig)
    def update_from_dict(self, config_dict: Mapping[str, Any]) -> Self:
        """Sets options from a dict (Tune's route, too).

        Raises:
            ValueError: a key that is no option, with the nearest one. RLlib sets such keys silently.
        """
        known = {key for key in (*vars(self), *vars(type(self))) if not key.startswith("__")}
        known |= {key for base in type(self).__mro__ for key, v in vars(base).items() if isinstance(v, property)}
        for key in config_dict:
            name = self._translate_special_keys(key, warn_deprecated=False)
            # Keys like __trial_info__ and __stdout_file__ are Tune's own.
            if name not in known and key not in _SPECIAL_KEYS and not key.startswith("__"):
                options = [key for key in vars(self) if not key.startswith("_")]
                raise ValueError(f"{key!r} is not an option of {type(self).__name__}{nearest(key, options)}")
        config_dict = dict(config_dict)
        if "team" not in config_dict:  # not the dict of a whole configuration, where `policies` is what came of it
            who = {key: config_dict.pop(key) for key in ("policies", "policy_mapping_fn") if key in config_dict}
            if who:
                self.multi_agent(**who)
        return super().update_from_dict(config_dict)

    # --- what RLlib builds from it --------------------------------------------------------------------------------

    @override(PPOConfig)
    def validate(self) -> None:
        """Checks all options; makes an environment to find its agents and spaces.

        Raises:
            ValueError: see `thrust_rllib.config_checks`.
        """
        self.constraints = as_constraints(self.constraints)
        self.auxiliary_targets = as_auxiliary_targets(self.auxiliary_targets)
        check_settings(self)
        if self.env is None:
            raise ValueError('no environment is set; give one with .environment("bucket_brigade"), for example')
        # Resolved here: a name registered in this process is unknown in a remote runner's.
        self.env_spec = resolve_env(self.env)
        if not self.in_evaluation:
            self._resolve_team_and_door()
        doors.check_door(self)
        # RLlib's advice on how to leave its new API stack, which is the only one that the joint trainer runs on.
        log_once(f"{self.algo_class.__name__}_on_new_api_stack")
        super().validate()

    def _resolve_team_and_door(self) -> None:
        """Gives every agent of the environment its module, and chooses how to sample it.

        An environment is made for it, and closed; another one where the user's connectors change its spaces.
        """
        env = make_vector_env(self.env_spec, dict(self.env_config), 1)
        try:
            agents = list(env.possible_agents)
            if self.team is not None:
                table = team_table(self.team, agents)
                super().multi_agent(policies=sorted(set(table.values())), policy_mapping_fn=AgentToModule(table))
            else:
                # A set of ids has another order in each process, and with it every module another first weight. A
                # function is asked once: the table is the same in every process.
                self.policies = policy_specs(self.policies)
                table = mapped_table(self.policy_mapping_fn, agents, self.policies)
                self.policy_mapping_fn = AgentToModule(table)
            # What an earlier validation chose is not the user's choice.
            given = None if self.env_runner_cls is self.chosen_runner_cls else self.env_runner_cls
            chosen, self.door = doors.runner_class(self, given, env)
            self.env_runner_cls, self.chosen_runner_cls = chosen, chosen if given is None else None
            declared = DeclaredTeam(agents, dict(env.observation_spaces), dict(env.action_spaces), env.stacked)
            size = state_size(env) if team_critics.may_read_state(self) else None
            state = None if size is None else team_critics.DeclaredState(size, env.state_parts)
        finally:
            env.close()
        if self._env_to_module_connector is not None:
            declared = pipelines.behind_connectors(self, declared)
        agent_groups(declared, table, self.normalize_actions, self.clip_actions)
        check_team(self, table)
        self.declared_team = declared
        spaces = self.module_spaces()
        check_heads(self, {module_id: actions for module_id, (_, actions) in spaces.items()})
        communicating_teams.check_communication(self)
        observed = {module_id: seen for module_id, (seen, _) in spaces.items()}
        self.critic_plan = team_critics.critic_plan(self, table, observed, state)

    @property
    def learner_modules(self) -> list[ModuleID]:
        """Modules that only learners have: the team's critic, heads of auxiliary targets."""
        asked = {TEAM_CRITIC: self.critic_plan.has_network, AUXILIARY_HEADS: bool(self.auxiliary_targets)}
        return [module_id for module_id, is_there in asked.items() if is_there]

    @property
    def records_state(self) -> bool:
        """Whether runners record the environment's state: only for a critic that reads it."""
        return self.critic_plan.view is not None and bool(self.critic_plan.view.state)

    @property
    def samples_episodes(self) -> bool:
        """Whether runners sample by RLlib's episodes (the general door), not by arrays; known once validated."""
        return not issubclass(self.env_runner_cls or JointEnvRunner, JointEnvRunner)

    def team_codec(self) -> TeamCodec:
        """How the agents' observations and actions are encoded; known once validated."""
        assert self.declared_team is not None, "validate() finds the agents"
        return TeamCodec.of(
            self.policy_mapping_fn.table,
            self.declared_team.observation_spaces,
            self.declared_team.action_spaces,
            self.normalize_actions,
            self.clip_actions,
        )

    def module_spaces(self) -> dict[ModuleID, tuple[gym.Space, gym.Space]]:
        """{module: (observation space, action space)} of the modules that play agents; known once validated."""
        codecs = self.team_codec().modules
        return {module_id: (codec.encoder.encoded_space, codec.action_space) for module_id, codec in codecs.items()}

    def num_links(self, module_id: ModuleID) -> int:
        """How many numbers in front of a module's observations say whom its agents hear; known once validated."""
        return communicating_teams.num_links(self, module_id)

    def is_trained(self, module_id: ModuleID) -> bool:
        """Whether `policies_to_train` lets this module learn."""
        trained = self.policies_to_train
        if callable(trained):
            return bool(trained(module_id, None))
        return trained is None or module_id in trained

    def module_for_agent(self, agent_id: AgentID) -> ModuleID:
        """The module that plays `agent_id`."""
        return self.policy_mapping_fn(agent_id, None)

    @override(PPOConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        if isinstance(self._rl_module_spec, MultiRLModuleSpec):
            return RLModuleSpec(module_class=MLPModule)  # get_multi_rl_module_spec goes module by module
        return RLModuleSpec(module_class=self.module_class(DEFAULT_MODULE_ID))

    @override(PPOConfig)
    def get_multi_rl_module_spec(
        self,
        *,
        env: Any = None,
        spaces: Any = None,
        inference_only: bool = False,
        policy_dict: Any = None,
        single_agent_rl_module_spec: RLModuleSpec | None = None,
    ) -> MultiRLModuleSpec:
        """As RLlib's; where no class is named, each module's own `model_config` decides (`module_class`)."""
        spec = super().get_multi_rl_module_spec(
            env=env,
            spaces=spaces,
            inference_only=inference_only,
            policy_dict=policy_dict,
            single_agent_rl_module_spec=single_agent_rl_module_spec,
        )
        if single_agent_rl_module_spec is None:
            for module_id, module_spec in spec.rl_module_specs.items():
                module_spec.module_class = self.module_class(module_id)
        for module_id, module_spec in spec.rl_module_specs.items():
            communicating_teams.fill_in(self, module_id, module_spec)
        if self.critic_plan.has_network and not inference_only and TEAM_CRITIC not in spec.rl_module_specs:
            table = self.policy_mapping_fn.table
            spec.rl_module_specs[TEAM_CRITIC] = team_critics.critic_spec(self, self.critic_plan, table)
        if self.auxiliary_targets and not inference_only and AUXILIARY_HEADS not in spec.rl_module_specs:
            policies = {m: own for m, own in spec.rl_module_specs.items() if m not in LEARNER_MODULES}
            names = [target.name for target in self.auxiliary_targets]
            spec.rl_module_specs[AUXILIARY_HEADS] = auxiliary_heads_spec(policies, names)
        return spec

    def module_class(self, module_id: ModuleID) -> type[RLModule]:
        """The class that a module's spec names, else the one that its `model_config` asks for.

        Raises:
            ValueError: an unknown cell.
        """
        spec = self._rl_module_spec
        if isinstance(spec, MultiRLModuleSpec):
            spec = spec.rl_module_specs.get(module_id)
        if spec is None:
            return module_class_for(self.model_config)
        return spec.module_class or module_class_for(self.model_config | spec._get_model_config())

    @override(PPOConfig)
    def get_default_learner_class(self) -> type[Learner]:
        return JointPPOLearner

    @property
    @override(PPOConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {"vf_share_layers": True}

    @override(PPOConfig)
    def build_learner_group(
        self, *, env: Any = None, spaces: Any = None, rl_module_spec: Any = None, placement_group: Any = None
    ) -> JointLearnerGroup:
        """Our group in place of RLlib's, which cannot be named in the configuration."""
        if rl_module_spec is None:
            rl_module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        warn_of_too_few(self)
        return JointLearnerGroup(config=self.copy(), module_spec=rl_module_spec, placement_group=placement_group)

    @override(PPOConfig)
    def build_env_to_module_connector(self, env: Any = None, spaces: Any = None, device: Any = None) -> Any:
        """See `pipelines.env_to_module`."""
        return pipelines.env_to_module(self, env, spaces, device)

    @override(PPOConfig)
    def build_module_to_env_connector(self, env: Any = None, spaces: Any = None) -> Any:
        """See `pipelines.module_to_env`."""
        return pipelines.module_to_env(self, env, spaces)

    @override(PPOConfig)
    def build_learner_connector(self, input_observation_space: Any, input_action_space: Any, device: Any = None) -> Any:
        """See `pipelines.learner`."""
        return pipelines.learner(self, input_observation_space, input_action_space)


_SPECIAL_KEYS = {"multiagent", "_enable_new_api_stack", "class"}
