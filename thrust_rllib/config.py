"""The configuration of JointPPO: RLlib's `PPOConfig` with the joint trainer's options and defaults.

RLlib keeps options and what is built from them in one class, so this file has both; the checks are in `config_checks`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, LearnerConnectorPipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID
from ray.util import log_once
from typing_extensions import Self

from thrust_rllib.config_checks import check_door, check_settings, check_team, what_needs_episodes
from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.pipelines import TeamEnvToModulePipeline
from thrust_rllib.connectors.team_actions import TeamActions
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.connectors.team_observations import TeamObservations
from thrust_rllib.connectors.user_pieces import check_rllibs_pieces, check_spaces_behind_pieces, user_pieces
from thrust_rllib.cross_agent_losses import CrossAgentLoss
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.envs.adapt import takes_turns
from thrust_rllib.envs.joint_env import AgentID, VectorJointEnv
from thrust_rllib.envs.multi_agent_vector import MultiAgentVector, make_multi_agent_env
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.registry import EnvSpec, is_registered, make_vector_env, resolve_env
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.learner import JointPPOLearner
from thrust_rllib.learner_group import JointLearnerGroup
from thrust_rllib.options import checks_keywords
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.teams import AgentToModule, DeclaredTeam, Team, is_team, mapped_table, team_table
from thrust_rllib.unserved_options import refuse_swallowed

logger = logging.getLogger(__name__)

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
    | `audit`                     | False      | stop at the first joint row whose agents' steps differ (True where   |
    |                             |            | the environment variable THRUST_RLLIB_AUDIT is 1)                    |

    `.env_runners(…)`: `sampling` ("auto": arrays where they can serve, "arrays"), `normalize_observations` (False).
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
        self.audit = os.environ.get(AUDIT_VARIABLE, "") not in ("", "0")
        self.sampling = "auto"
        self.normalize_observations = False
        self.team: Team | None = "per_agent"
        self.env_spec: EnvSpec | None = None
        self.declared_team: DeclaredTeam | None = None

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
        """Checks all options; builds one environment to find its agents and spaces.

        Raises:
            ValueError: see `thrust_rllib.config_checks`.
        """
        check_settings(self)
        if self.env is None:
            raise ValueError('no environment is set; give one with .environment("bucket_brigade"), for example')
        # Resolved here: a name registered in this process is unknown in a remote runner's.
        self.env_spec = resolve_env(self.env)
        if not self.in_evaluation:
            self._resolve_team_and_door()
        check_door(self)
        # RLlib's advice on how to leave its new API stack, which is the only one that the joint trainer runs on.
        log_once(f"{self.algo_class.__name__}_on_new_api_stack")
        super().validate()

    def _resolve_team_and_door(self) -> None:
        """Gives every agent of the environment its module, and chooses how to sample it.

        One environment is made for it, and closed.
        """
        env = make_vector_env(self.env_spec, dict(self.env_config), 1)
        try:
            agents = list(env.possible_agents)
            if self.team is not None:
                table = team_table(self.team, agents)
                super().multi_agent(policies=sorted(set(table.values())), policy_mapping_fn=AgentToModule(table))
            else:
                table = mapped_table(self.policy_mapping_fn, agents, self.policies)
                # A set of ids has another order in each process, and with it every module another first weight. A
                # function is asked once: the table is the same in every process.
                self.policies = dict(sorted(self.policies.items()))
                self.policy_mapping_fn = AgentToModule(table)
            self._choose_door(env)
            declared = DeclaredTeam(agents, dict(env.observation_spaces), dict(env.action_spaces), env.stacked)
        finally:
            env.close()
        if self._env_to_module_connector is not None:
            declared = self._behind_connectors(declared)
        agent_groups(declared, table, self.normalize_actions, self.clip_actions)
        check_team(self, table)
        self.declared_team = declared

    def _choose_door(self, env: VectorJointEnv) -> None:
        """Sets the runners' class by what was set and by the environment; says once in the log which and why."""
        assert self.env_spec is not None
        reasons = what_needs_episodes(self)
        if self.sampling == "auto" and isinstance(env, SyncVectorJointEnv) and takes_turns(env.envs[0]):
            reasons.append(f"the agents of environment {self.env_spec.name!r} take turns, or some come late")
        if self.sampling == "arrays" and reasons:
            raise ValueError(
                f"sampling='arrays' cannot serve this: {'; '.join(reasons)}. Leave sampling at 'auto', or set "
                "'episodes'."
            )
        if self.sampling == "episodes":
            reasons = ["sampling='episodes'"]
        own = self.env_runner_cls not in (None, JointEnvRunner, JointEpisodeRunner)
        if own and reasons and issubclass(self.env_runner_cls, JointEnvRunner):
            raise ValueError(
                f"env_runner_cls={self.env_runner_cls.__name__} samples arrays, but this needs episodes: "
                f"{'; '.join(reasons)}. Derive the class from JointEpisodeRunner."
            )
        if not own:
            self.env_runner_cls = JointEpisodeRunner if reasons else JointEnvRunner
        logger.info(
            "sampling by %s (%s): %s",
            "episodes" if self.samples_episodes else "arrays",
            self.env_runner_cls.__name__,
            "; ".join(reasons) or "nothing in the configuration or the environment needs episodes",
        )

    def _behind_connectors(self, declared: DeclaredTeam) -> DeclaredTeam:
        """The spaces as the user's env-to-module pieces leave them."""
        spec = self.env_spec
        assert spec is not None
        env = MultiAgentVector(lambda: make_multi_agent_env(spec, self.env_config), 1, spec.name)
        try:
            spaces = {INPUT_ENV_SINGLE_SPACES: (env.single_observation_space, env.single_action_space)}
            pieces = user_pieces("env_to_module_connector", self._env_to_module_connector, env, spaces, None)
            check_rllibs_pieces(self, pieces)
            pipeline = EnvToModulePipeline(env.single_observation_space, env.single_action_space, connectors=pieces)
            check_spaces_behind_pieces(pipeline, declared.possible_agents)
            return DeclaredTeam(
                declared.possible_agents,
                dict(pipeline.observation_space.spaces),
                dict(pipeline.action_space.spaces),
            )
        finally:
            env.close()

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
        return RLModuleSpec(module_class=MLPModule)

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
        return JointLearnerGroup(config=self.copy(), module_spec=rl_module_spec, placement_group=placement_group)

    @override(PPOConfig)
    def build_env_to_module_connector(self, env: Any = None, spaces: Any = None, device: Any = None) -> Any:
        """From what the environment shows to what the modules see.

        Sampling by arrays: the observation normaliser, if any; it is called on arrays. By episodes, in this order:

        1. the user's pieces;
        2. `TeamObservations`: what the agents to act see, encoded, one array per module;
        3. the observation normaliser, if any.
        """
        pieces: list[Any] = []
        if self.samples_episodes:
            codec = self.team_codec()
            pieces += user_pieces("env_to_module_connector", self._env_to_module_connector, env, spaces, device)
            pieces.append(TeamObservations(codec=codec, device=device))
            shapes = {m: c.encoder.encoded_space.shape for m, c in codec.modules.items()}
        else:
            shapes = {m: spaces[m][0].shape for m in self.policies if m in (spaces or {})}
        if self.normalize_observations:
            pieces.append(ObservationNormalizer(shapes=shapes))
        return TeamEnvToModulePipeline(*_env_spaces(spaces, env), connectors=pieces)

    @override(PPOConfig)
    def build_module_to_env_connector(self, env: Any = None, spaces: Any = None) -> Any:
        """From the modules' outputs to actions: the user's pieces, then `TeamActions`; nothing by arrays."""
        pieces: list[Any] = []
        if self.samples_episodes:
            pieces += user_pieces("module_to_env_connector", self._module_to_env_connector, env, spaces)
            pieces.append(TeamActions(codec=self.team_codec(), store_inputs=self.normalize_observations))
        return ModuleToEnvPipeline(*_env_spaces(spaces, env), connectors=pieces)

    @override(PPOConfig)
    def build_learner_connector(self, input_observation_space: Any, input_action_space: Any, device: Any = None) -> Any:
        """From episodes to a `JointBatch`, in this order (nothing by arrays, which come as batches):

        1. where the user has pieces: `AddOneTsToEpisodesAndTruncate`, so that they see what follows the last step, too;
        2. the user's pieces;
        3. `EpisodesToJointBatch`.

        What comes after it is no pipeline but `JointPPOLearner.update`: values, advantages, joint minibatches, losses.
        """
        pieces: list[Any] = []
        if self.samples_episodes:
            spaces = input_observation_space, input_action_space
            own = user_pieces("learner_connector", self._learner_connector, *spaces)
            if any(isinstance(piece, AddOneTsToEpisodesAndTruncate) for piece in own):
                raise ValueError(
                    "learner_connector made an AddOneTsToEpisodesAndTruncate, which already stands in front of your "
                    "pieces; leave it out"
                )
            pieces += [AddOneTsToEpisodesAndTruncate(), *own] if own else []
            pieces.append(
                EpisodesToJointBatch(
                    codec=self.team_codec(),
                    check_bounds=not self.disable_env_checking,
                    audit=self.audit,
                    with_extra_step=bool(own),
                )
            )
        return LearnerConnectorPipeline(input_observation_space, input_action_space, connectors=pieces)


_SPECIAL_KEYS = {"multiagent", "_enable_new_api_stack", "class"}


def _env_spaces(spaces: Any, env: Any) -> tuple[Any, Any]:
    """Spaces of one environment; RLlib's own runner hands over none beside its environment."""
    if not spaces:
        return getattr(env, "single_observation_space", None), getattr(env, "single_action_space", None)
    return spaces.get(INPUT_ENV_SINGLE_SPACES, spaces.get(INPUT_ENV_SPACES, (None, None)))
