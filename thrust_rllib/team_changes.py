"""Modules that come and go while training: the configuration after a change, checked before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.core.learner.learner import LR_KEY
from ray.rllib.core.rl_module import validate_module_id
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.policy.policy import PolicySpec
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS, LEARNER_RESULTS

from thrust_rllib import communicating_teams
from thrust_rllib.config import JointPPOConfig
from thrust_rllib.config_checks import check_team
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.spaces import equal_spaces
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.learner_checks import check_messages, check_modules, check_sequences
from thrust_rllib.rl_modules.auxiliary_heads import feature_width
from thrust_rllib.rl_modules.learner_modules import AUXILIARY_HEADS, LEARNER_MODULES
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.rl_modules.module_choice import module_class_for
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.sampling.team_runner import PER_MODULE_METRICS, TeamRunner
from thrust_rllib.teams import AgentToModule, who_plays

Specs = Mapping[ModuleID, RLModuleSpec]


@dataclass(frozen=True)
class TeamChange:
    """What of the configuration a change of the team changes; runners and learners take it into their own.

    | field             | meaning                                                                        |
    |-------------------|--------------------------------------------------------------------------------|
    | policies          | {module: PolicySpec}, sorted; those that play no agent with the spaces they see |
    | mapping           | who plays whom                                                                 |
    | overrides         | `algorithm_config_overrides_per_module`                                        |
    | policies_to_train | as in the configuration                                                        |
    | rl_module_spec    | of all modules, as the learner has them; None before it was asked              |
    | number            | of the changes of this algorithm's team, from 1                                |
    """

    policies: dict[ModuleID, PolicySpec]
    mapping: AgentToModule
    overrides: dict[ModuleID, dict[str, Any]]
    policies_to_train: Any
    rl_module_spec: MultiRLModuleSpec | None = None
    number: int = 0

    @property
    def spaces(self) -> dict[ModuleID, tuple[gym.Space, gym.Space]]:
        """{module: (observation space, action space)}, as the modules have them."""
        assert self.rl_module_spec is not None
        specs = self.rl_module_spec.rl_module_specs
        return {m: (specs[m].observation_space, specs[m].action_space) for m in sorted(specs)}

    def applied_to(self, config: JointPPOConfig) -> JointPPOConfig:
        """A frozen copy of a configuration with the change in it."""
        changed: JointPPOConfig = config.copy(copy_frozen=False)
        changed.team = None
        changed.policies = dict(self.policies)
        changed.policy_mapping_fn = self.mapping
        changed.policies_to_train = self.policies_to_train
        changed.algorithm_config_overrides_per_module = copy.deepcopy(self.overrides)
        changed._per_module_overrides = {}
        if self.rl_module_spec is not None:
            changed.rl_module(rl_module_spec=self.rl_module_spec)
        changed.freeze()
        return changed


def with_module(
    config: JointPPOConfig,
    specs: Specs,
    module_id: ModuleID,
    module_spec: RLModuleSpec | None,
    overrides: Mapping[str, Any] | None,
    mapping: Callable[..., Any] | None,
    policies_to_train: Any,
) -> tuple[TeamChange, RLModuleSpec]:
    """The team with one module more, and that module's spec with nothing missing.

    Args:
        config: of the algorithm.
        specs: {module: spec}, as the learner has them.
        module_id: a new name.
        module_spec: what it leaves out is filled as for the others: spaces, class, `model_config`.
        overrides: of `config`, for this module.
        mapping: a new `policy_mapping_fn`; None keeps who plays whom.
        policies_to_train: new ones; None keeps what is trained.

    Raises:
        ValueError: see `JointPPO.add_module`.
    """
    _check_name(module_id)
    if module_id in LEARNER_MODULES:
        raise ValueError(
            f"a policy cannot be called {module_id!r}: a module of the learner's own is; name it otherwise"
        )
    if module_id in config.policies:
        raise ValueError(f"there is a module {module_id!r} already; choose another name than {sorted(config.policies)}")
    spec = _plain_spec(module_id, module_spec)
    table = _table(config, [*config.policies, module_id], mapping)
    spec.observation_space, spec.action_space = _spaces(config, table, module_id, spec, specs)
    spec.model_config = config.model_config | (spec._get_model_config() if spec.model_config is not None else {})
    spec.module_class = spec.module_class or _named_class(specs) or module_class_for(spec.model_config)
    communicating_teams.fill_in(config, module_id, spec, _codec(config, table).modules)
    spec.inference_only = False
    own = {module_id: dict(overrides)} if overrides else {}
    change = TeamChange(
        _policies({**specs, module_id: spec}, table),
        AgentToModule(table),
        {**config.algorithm_config_overrides_per_module, **own},
        _trained(config.policies_to_train if policies_to_train is None else policies_to_train),
    )
    _check(config, change, {**specs, module_id: spec})
    return change, spec


def without_module(
    config: JointPPOConfig,
    specs: Specs,
    module_id: ModuleID,
    mapping: Callable[..., Any] | None,
    policies_to_train: Any,
) -> TeamChange:
    """The team with one module less; for the arguments see `with_module`.

    Raises:
        ValueError: see `JointPPO.remove_module`.
    """
    if module_id not in config.policies:
        raise ValueError(
            f"there is no module {module_id!r}; the modules are {sorted(config.policies)}"
            f"{nearest(str(module_id), config.policies)}"
        )
    left = {m: spec for m, spec in specs.items() if m != module_id}
    players = [agent for agent, m in config.policy_mapping_fn.table.items() if m == module_id]
    if mapping is None and players:
        raise ValueError(
            f"module {module_id!r} plays {players}; give a new_agent_to_module_mapping_fn by which other modules "
            f"({sorted(left)}) play them"
        )
    table = _table(config, list(left), mapping)
    trained = config.policies_to_train if policies_to_train is None else policies_to_train
    if policies_to_train is None and _is_collection(trained):
        trained = [m for m in trained if m != module_id]
    overrides = {m: own for m, own in config.algorithm_config_overrides_per_module.items() if m != module_id}
    change = TeamChange(_policies(left, table), AgentToModule(table), overrides, _trained(trained))
    _check(config, change, left)
    return change


def specs_in(learner: Any) -> dict[ModuleID, RLModuleSpec]:
    """{module: spec} of a learner's policies."""
    return {m: RLModuleSpec.from_module(learner.module[m].unwrapped()) for m in learner._module_ids()}


def policies_in(specs: MultiRLModuleSpec) -> MultiRLModuleSpec:
    """A copy without the modules that only learners have: those come anew out of the configuration."""
    found = copy.deepcopy(specs)
    found.remove_modules([m for m in LEARNER_MODULES if m in found.rl_module_specs])
    return found


def metrics_of(module_id: ModuleID) -> list[tuple[str, ...]]:
    """Where the algorithm keeps a module's numbers."""
    runners = (ENV_RUNNER_RESULTS,), (EVALUATION_RESULTS, ENV_RUNNER_RESULTS)
    return [
        (LEARNER_RESULTS, module_id),
        (LEARNER_RESULTS, AUXILIARY_HEADS, f"{module_id}_{LR_KEY}"),
        *((*path, name, module_id) for path in runners for name in PER_MODULE_METRICS),
    ]


def check_trainable(
    learner: Any, change: TeamChange, module_id: ModuleID = "", spec: RLModuleSpec | None = None
) -> None:
    """Checks that a learner could train the changed team; nothing of it is changed.

    Args:
        learner: one of them, in its own process.
        change: the new team.
        module_id: of an added module.
        spec: of the added module, complete; it is built on trial.

    Raises:
        ValueError: why it could not.
    """
    staying = [*change.policies, *LEARNER_MODULES]
    modules = {m: own for m, own in learner._all_modules().items() if m in staying}
    if spec is not None:
        with torch.random.fork_rng(devices=[]):  # weights of a trial are nobody's
            added = {module_id: _built(module_id, spec).to(learner._device)}
            needs_values = not learner.config.critic_plan.has_network
            check_modules(added, learner.config.cross_agent_losses, with_values=needs_values)
            if learner.config.auxiliary_targets:
                feature_width(module_id, added[module_id])
        modules |= added
    check_messages(modules, change.mapping)
    check_sequences(RecurrentModules.of(modules), learner.config)


def check_buildable(config: JointPPOConfig) -> None:
    """Builds all modules on trial; of one that fails in a runner's process RLlib tells in the log only.

    Raises:
        ValueError: a module's own error, with its name.
    """
    specs = config.get_multi_rl_module_spec(spaces=config.module_spaces()).rl_module_specs
    with torch.random.fork_rng(devices=[]):
        for module_id in sorted(specs):
            _built(module_id, specs[module_id])


def _built(module_id: ModuleID, spec: RLModuleSpec) -> Any:
    try:
        module = spec.build()
    except Exception as error:
        raise ValueError(
            f"module {module_id!r} cannot be built from its spec: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"module {module_id!r} ({type(module).__name__}) is no torch module; derive it from TorchRLModule"
        )
    return module


def _check_name(module_id: Any) -> None:
    try:
        validate_module_id(module_id, error=True)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"a module cannot be called {module_id!r}; needed: a text that may name a folder of a checkpoint, without "
            'any of < > : " / \\ | ? and without a dot or a blank at its end'
        ) from error


def _plain_spec(module_id: ModuleID, given: RLModuleSpec | None) -> RLModuleSpec:
    """A copy of what was given, to be filled."""
    if given is None:
        return RLModuleSpec()
    if not isinstance(given, RLModuleSpec):
        raise ValueError(f"module {module_id!r} got {given!r} for its spec; needed: an RLModuleSpec")
    if given.load_state_path is not None:
        raise ValueError(
            f"module {module_id!r}: load_state_path={given.load_state_path!r} is read where an algorithm is built; "
            f"leave it out, then call algo.restore_from_path(path, component='learner_group/learner/rl_module/"
            f"{module_id}'), or algo.copy_module(source, {module_id!r})."
        )
    if given.learner_only:
        raise ValueError(
            f"module {module_id!r}: learner_only=True, and learners and runners have the same modules here; leave it "
            "out. A module that plays no agent costs nothing."
        )
    return copy.deepcopy(given)


def _table(
    config: JointPPOConfig, module_ids: Collection[ModuleID], mapping: Callable[..., Any] | None
) -> dict[Any, ModuleID]:
    if mapping is None:
        return dict(config.policy_mapping_fn.table)
    assert config.declared_team is not None
    agents = config.declared_team.possible_agents
    if isinstance(mapping, AgentToModule) and (unknown := [a for a in mapping.table if a not in agents]):
        raise ValueError(
            f"new_agent_to_module_mapping_fn names agents {unknown}, which the environment does not have"
            f"{nearest(str(unknown[0]), map(str, agents))} Its agents: {list(agents)}"
        )
    return who_plays(mapping, agents, module_ids)


def _policies(specs: Specs, table: Mapping[Any, ModuleID]) -> dict[ModuleID, PolicySpec]:
    playing = set(table.values())
    return {
        m: PolicySpec()
        if m in playing
        else PolicySpec(observation_space=specs[m].observation_space, action_space=specs[m].action_space)
        for m in sorted(specs)
    }


def _trained(policies_to_train: Any) -> Any:
    """A collection in an order that is the same in every process."""
    return sorted(set(policies_to_train), key=str) if _is_collection(policies_to_train) else policies_to_train


def _is_collection(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def _named_class(specs: Specs) -> type | None:
    """The class of all modules where it is not the one that their `model_config` asks for: the user named it."""
    classes = {spec.module_class for spec in specs.values()}
    found = next(iter(classes))
    asked = {module_class_for(spec._get_model_config()) for spec in specs.values()}
    return found if len(classes) == 1 and found not in asked else None


def _spaces(
    config: JointPPOConfig, table: Mapping[Any, ModuleID], module_id: ModuleID, spec: RLModuleSpec, specs: Specs
) -> tuple[gym.Space, gym.Space]:
    """Of a new module: the spec's; what it leaves out as its agents have it, or without agents all other modules."""
    given = spec.observation_space, spec.action_space
    codec = _codec(config, table).modules.get(module_id)
    if codec is not None:
        needed = codec.encoder.encoded_space, codec.action_space
        return given[0] or needed[0], given[1] or needed[1]
    if given[0] is not None and given[1] is not None:
        return given
    first, *others = [(s.observation_space, s.action_space) for s in specs.values()]
    if not all(equal_spaces(a, b) for spaces in others for a, b in zip(spaces, first, strict=True)):
        raise ValueError(
            f"module {module_id!r} plays no agent, and the modules differ in their spaces, so that it is unknown what "
            "it will see. Give observation_space and action_space in the RLModuleSpec (as the modules have them), or "
            "a new_agent_to_module_mapping_fn by which it plays an agent."
        )
    return first[0] if given[0] is None else given[0], first[1] if given[1] is None else given[1]


def _codec(config: JointPPOConfig, table: Mapping[Any, ModuleID]) -> TeamCodec:
    """How the agents of each module are encoded; raises where agents of one module differ in their spaces."""
    team = config.declared_team
    assert team is not None
    agent_groups(team, table, config.normalize_actions, config.clip_actions)
    return TeamCodec.of(
        table, team.observation_spaces, team.action_spaces, config.normalize_actions, config.clip_actions
    )


def _check(config: JointPPOConfig, change: TeamChange, specs: Specs) -> None:
    """Raises where the changed team could not be sampled or trained."""
    changed = change.applied_to(config)
    if not issubclass(config.env_runner_cls, TeamRunner):
        raise ValueError(
            f"env_runner_cls={config.env_runner_cls.__name__} cannot change its team; derive it from JointEnvRunner "
            "(arrays) or JointEpisodeRunner (RLlib's loop)"
        )
    for module_id, codec in _codec(config, change.mapping.table).modules.items():
        spec, encoded = specs[module_id], codec.encoder.encoded_space
        for name, has, needed in (
            ("observation", spec.observation_space, encoded),
            ("action", spec.action_space, codec.action_space),
        ):
            if not equal_spaces(has, needed):
                raise ValueError(
                    f"module {module_id!r} has the {name} space {has}, but agent {codec.agents[0]!r}, which it would "
                    f"play, has {needed} (observations encoded, as modules see them). Let another module play the "
                    "agent; leave the spaces of a new module out of its RLModuleSpec."
                )
    check_team(changed, change.mapping.table)
    playing = sorted(set(change.mapping.table.values()))
    if not any(changed.is_trained(m) for m in playing):
        raise ValueError(
            f"nothing would be trained: policies_to_train={change.policies_to_train!r} names none of {playing}, which "
            "play the agents. Give new_should_module_be_updated, a list of modules to train."
        )
