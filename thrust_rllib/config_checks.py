"""Early errors for options that contradict each other; what is not served at all stands in `unserved_options`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.rllib.utils.typing import ModuleID

from thrust_rllib.constraints import check_couplings
from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.names import nearest
from thrust_rllib.learner import JointPPOLearner
from thrust_rllib.rl_modules.heads import PER_HEAD, check_head_names, num_heads
from thrust_rllib.rl_modules.learner_modules import LEARNER_MODULES
from thrust_rllib.team_critics import CREDITS, CRITICS, KEYS, check_critic
from thrust_rllib.unserved_options import check_served

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

CHOICES: dict[str, tuple[Any, ...]] = {
    "gae_bootstrap": ("value", "zero"),
    "standardize_advantages": ("rollout", "minibatch", "team", False),
    "sampling": ("auto", "arrays", "episodes"),
    "target_kl_scope": ("epoch", "update"),
    "grad_clip_by": ("global_norm", "norm", "value"),
    "iterate_all_minibatches": (True, False),
    "value_normalization": (True, False),
    "normalize_observations": (True, False),
    "shuffle_batch_per_epoch": (True, False),
    "explore": (True, False),
    "critic": CRITICS,
    "credit": CREDITS,
    "ratio": ("joint", PER_HEAD),
    "clip_jointly": (True, False),
    "audit": (True, False),
    "count_steps_by": ("env_steps", "agent_steps"),
    "merge_env_runner_states": ("training_only", True, False),
    "evaluation_duration_unit": ("episodes", "timesteps"),
}

NOT_CALLED = (
    "compute_losses", "compute_loss_for_module", "compute_gradients", "postprocess_gradients", "apply_gradients",
)  # fmt: skip
"""RLlib's steps of an update that has one loss per module."""

PER_MODULE = (
    "lr", "critic_lr", "gamma", "lambda_", "entropy_coeff", "clip_param", "value_clip_range", "vf_clip_param",
    "vf_loss_coeff", "grad_clip", "value_normalization", "target_kl", "min_entropy",
)  # fmt: skip
"""What `algorithm_config_overrides_per_module` may set; the rest is read once for the whole team."""


def check_settings(config: JointPPOConfig) -> None:
    """Checks every option that needs no environment.

    Raises:
        ValueError: what was given, what is needed, and how to mend it.
    """
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if not any(value is choice or value == choice and type(value) is type(choice) for choice in choices):
            listed = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{name}={value!r}; needed: one of {listed}{nearest(str(value), map(str, choices))}")
    check_served(config)
    if not issubclass(config.learner_class, JointPPOLearner):
        raise ValueError(
            f"learner_class={config.learner_class.__name__} cannot train on joint rows; derive yours from "
            "JointPPOLearner"
        )
    for name in NOT_CALLED:
        if getattr(config.learner_class, name) is not getattr(JointPPOLearner, name):
            raise ValueError(
                f"{config.learner_class.__name__} overrides {name}, which the joint update does not call: the losses "
                "of all modules are computed together (thrust_rllib.joint_losses). Add a term by a CrossAgentLoss."
            )
    if config.num_learners > 1 and config.torch_compile_learner:
        raise ValueError(
            f"torch_compile_learner=True with num_learners={config.num_learners}: the learners speak to each other "
            "between the networks and the losses, which are compiled as one. Set torch_compile_learner=False."
        )
    if config.torch_compile_learner and (driven := [own.name for own in config.constraints if own.of == "coupling"]):
        raise ValueError(
            f"torch_compile_learner=True with constraints that drive the weights of the couplings {driven}: a weight "
            "that is another number in each update would be compiled anew each time. Set torch_compile_learner=False."
        )
    _check_numbers(config)
    _check_couplings(config)
    check_critic(config)
    check_couplings(config.constraints, config.cross_agent_losses, config.cross_agent_coeffs)
    _check_steps(config)
    if not config.in_evaluation:
        _check_runners(config)
        _check_evaluation(config)
    trained = config.policies_to_train
    if trained is not None and not callable(trained) and len(trained) == 0:
        raise ValueError(
            "policies_to_train is empty: nothing would be trained. Name at least one module, or leave it None for all."
        )


def _check_runners(config: JointPPOConfig) -> None:
    if config.count_steps_by == "agent_steps" and config.min_train_timesteps_per_iteration:
        raise ValueError(
            f"min_train_timesteps_per_iteration={config.min_train_timesteps_per_iteration} with "
            "count_steps_by='agent_steps': RLlib would wait forever for a count of trained agent steps. Set "
            "min_sample_timesteps_per_iteration, or count_steps_by='env_steps'."
        )
    if config.num_consecutive_env_runner_failures_tolerance < 1:
        raise ValueError(
            f"num_consecutive_env_runner_failures_tolerance={config.num_consecutive_env_runner_failures_tolerance}; "
            "needed: 1 or more. To end a run at the first failure set restart_failed_env_runners=False."
        )
    synced = config.merge_env_runner_states == "training_only" and config.broadcast_env_runner_states
    if config.normalize_observations and config.num_env_runners > 0 and not synced:
        raise ValueError(
            f"merge_env_runner_states={config.merge_env_runner_states!r} and broadcast_env_runner_states="
            f"{config.broadcast_env_runner_states!r} with normalize_observations=True: runners, evaluation and "
            "checkpoints would have other moments of the observations. Set 'training_only' and True."
        )


def _check_evaluation(config: JointPPOConfig) -> None:
    own = config.evaluation_config
    if own and not config.evaluation_interval and not config.evaluation_num_env_runners:
        raise ValueError(
            "evaluation_config is set, but no evaluation runner would read it: set evaluation_interval (a large one "
            "where you call evaluate() yourself) or evaluation_num_env_runners"
        )
    if isinstance(own, Mapping) and "num_env_runners" in own:
        raise ValueError(
            f"evaluation_config has num_env_runners={own['num_env_runners']!r}, which RLlib replaces by "
            f"evaluation_num_env_runners={config.evaluation_num_env_runners}; set that one"
        )


def _check_numbers(config: JointPPOConfig) -> None:
    size, batch = config.minibatch_size, config.train_batch_size_per_learner
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"minibatch_size={size!r}; needed: a positive number of joint rows, or None for all")
    if size is not None and size > batch and not config.in_evaluation:
        raise ValueError(
            f"minibatch_size={size} is larger than the batch of train_batch_size_per_learner={batch} joint rows; lower "
            "the first or raise the second"
        )
    limit = config.max_minibatches_per_epoch
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ValueError(f"max_minibatches_per_epoch={limit!r}; needed: None, or a whole number ≥ 0 (0 counts as 1)")
    for name in ("coupling_gradient_interval", "diversity_interval"):
        interval = getattr(config, name)
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise ValueError(f"{name}={interval!r}; needed: a whole number of updates ≥ 1, or 0 for no such metrics")
    for name in ("value_clip_range", "vf_clip_param", "clip_param"):
        value = getattr(config, name)
        if not _is_number(value) or not value > 0:
            raise ValueError(f"{name}={value!r}; needed: a number > 0" + ("" if name == "clip_param" else ", or inf"))
    for name in ("gamma", "lambda_"):
        value = getattr(config, name)
        if not _is_number(value) or not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value!r}; needed: a number in [0, 1]")
    if isinstance(config.num_epochs, bool) or not isinstance(config.num_epochs, int) or config.num_epochs < 1:
        raise ValueError(f"num_epochs={config.num_epochs!r}; needed: a whole number ≥ 1")
    if not _is_number(config.vf_loss_coeff) or not 0.0 <= config.vf_loss_coeff < math.inf:
        raise ValueError(f"vf_loss_coeff={config.vf_loss_coeff!r}; needed: a number ≥ 0")
    if config.grad_clip is not None and not _is_number(config.grad_clip):
        raise ValueError(f"grad_clip={config.grad_clip!r}; needed: a number, or None for no clip")
    _check_stops(config)
    _check_schedule("lr", config.lr)
    _check_schedule("entropy_coeff", config.entropy_coeff)
    if config.critic_lr is not None:
        _check_schedule("critic_lr", config.critic_lr)


def _check_steps(config: JointPPOConfig) -> None:
    decay = config.weight_decay
    if not _is_number(decay) or not 0.0 <= decay < math.inf:
        raise ValueError(f"weight_decay={decay!r}; needed: a number ≥ 0")
    if not config.clip_jointly:
        return
    if config.grad_clip is None:
        raise ValueError("clip_jointly=True with grad_clip=None would clip nothing; set grad_clip=0.5, for example")
    if config.grad_clip_by != "global_norm":
        raise ValueError(f"clip_jointly=True with grad_clip_by={config.grad_clip_by!r}; set grad_clip_by='global_norm'")
    if config.critic_lr is not None and config.critic not in KEYS:
        raise ValueError(
            f"clip_jointly=True with critic_lr={config.critic_lr!r} and critic={config.critic!r}: actors and critics "
            "have the same parameters, and two gradients of them. Leave critic_lr out, or take a critic of the team's "
            "own: critic='central' or 'set'."
        )


def _check_stops(config: JointPPOConfig) -> None:
    target = config.target_kl
    if target is not None and (not _is_number(target) or not target > 0):
        raise ValueError(f"target_kl={target!r}; needed: a number > 0 (nats), or None for no such stop")
    if target is not None and config.target_kl_scope == "epoch" and not config.iterate_all_minibatches:
        raise ValueError(
            f"target_kl={target!r} would change nothing: it stops for the rest of an epoch (target_kl_scope='epoch'), "
            "and an epoch is one minibatch (iterate_all_minibatches=False). Set iterate_all_minibatches=True, or "
            "target_kl_scope='update'."
        )
    limit = config.min_entropy
    if limit is not None and (not _is_number(limit) or not math.isfinite(limit)):
        raise ValueError(f"min_entropy={limit!r}; needed: a finite number (nats), or None for no entropy guard")
    updates = config.min_entropy_updates
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
        raise ValueError(f"min_entropy_updates={updates!r}; needed: a whole number of updates ≥ 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _check_schedule(name: str, value: Any) -> None:
    pairs = value if isinstance(value, (list, tuple)) and value else [(0, value)]
    if not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_number(pair[1]) and math.isfinite(pair[1])
        for pair in pairs
    ):
        raise ValueError(f"{name}={value!r}; needed: finite numbers, one or a schedule [[0, value], [step, value], …]")
    Scheduler.validate(fixed_value_or_schedule=value, setting_name=name, description=name)


def _check_couplings(config: JointPPOConfig) -> None:
    for name, loss in config.cross_agent_losses.items():
        if not callable(loss):
            raise ValueError(
                f"cross_agent_losses[{name!r}] is {loss!r}; needed: a CrossAgentLoss, or a function of (features, "
                "logits, actions, present) that returns a scalar tensor"
            )
        if isinstance(loss, type):
            raise ValueError(
                f"cross_agent_losses[{name!r}] is the class {loss.__name__}; give an object: {loss.__name__}()"
            )
        if "/" in name or name == "total":
            raise ValueError(f"a cross-agent loss cannot be called {name!r}: the name is part of a metric's name")
    for name, value in config.cross_agent_coeffs.items():
        if name not in config.cross_agent_losses:
            raise ValueError(
                f"cross_agent_coeffs has {name!r}, cross_agent_losses has {sorted(config.cross_agent_losses)}"
                f"{nearest(name, config.cross_agent_losses)}"
            )
        _check_schedule(f"cross_agent_coeffs[{name!r}]", value)


def check_team(config: JointPPOConfig, table: Mapping[AgentID, ModuleID]) -> None:
    """Checks what depends on the agents.

    Args:
        config: the configuration, its team resolved.
        table: {agent: module}.

    Raises:
        ValueError: a coupling with too few agents, an option for an unknown module, or a cell that is none.
    """
    for name, loss in config.cross_agent_losses.items():
        needed = getattr(loss, "min_agents", 2)
        if len(table) < needed:
            raise ValueError(
                f"cross-agent loss {name!r} couples {needed} or more agents, the environment has {len(table)}: "
                f"{list(table)}. Leave the loss out or use another environment."
            )
    _check_overrides(config)
    _check_same_discount(config)
    modules = sorted(config.policies)
    if reserved := [module_id for module_id in modules if module_id in LEARNER_MODULES]:
        raise ValueError(
            f"a policy is called {reserved[0]!r}, as the learner's own module is; name it otherwise: "
            ".multi_agent(policies={name: [agents]})"
        )
    for module_id in modules:
        config.module_class(module_id)
    named: list[tuple[str, Any]] = [
        ("algorithm_config_overrides_per_module", config.algorithm_config_overrides_per_module)
    ]
    if config.policies_to_train is not None and not callable(config.policies_to_train):
        named.append(("policies_to_train", config.policies_to_train))
    for option, names in named:
        for name in names:
            if name not in modules:
                raise ValueError(
                    f"{option} names module {name!r}; the modules are {modules}{nearest(str(name), modules)}"
                )


def check_heads(config: JointPPOConfig, action_spaces: Mapping[ModuleID, gym.Space]) -> None:
    """Checks `ratio` and `head_names` against the actions.

    Args:
        config: the configuration.
        action_spaces: {module: space}.

    Raises:
        ValueError: names that fit no actions or that nothing reads, or ratios of heads where there is one head.
    """
    names = config.head_names
    if config.ratio != PER_HEAD:
        if names is not None:
            raise ValueError(
                f"head_names={names!r} would be ignored: they name metrics of heads with ratios of their own. Set "
                "ratio='per_head' (conditional heads take head_names of their own, in the model_config)."
            )
        return
    if max(map(num_heads, action_spaces.values())) == 1:
        raise ValueError(
            f"ratio='per_head' would change nothing: the actions {list(map(str, action_spaces.values()))} have one "
            "head each. Set ratio='joint', or let the environment take MultiDiscrete actions."
        )
    for module_id, space in action_spaces.items() if names is not None else ():
        try:
            check_head_names(space, names)
        except ValueError as error:
            raise ValueError(f"module {module_id!r}: {error}") from error


def _check_same_discount(config: JointPPOConfig) -> None:
    """One value of the team has one discount, one critic its own numbers; one clip for all one limit."""
    of_team = config.critic == "mean" or (config.critic in KEYS and config.credit != "own")
    why = dict.fromkeys(
        ("gamma", "lambda_") if of_team else (),
        f"critic={config.critic!r} with credit={config.credit!r} has one value of the whole team",
    )
    if config.critic != "independent":
        names = ["vf_loss_coeff", "value_clip_range", "vf_clip_param", "value_normalization"]
        names += ["critic_lr"] if config.critic in KEYS else []
        why |= dict.fromkeys(names, f"critic={config.critic!r} is one critic for all")
    if config.clip_jointly:
        why["grad_clip"] = "clip_jointly=True clips all modules together"
    for module_id, overrides in config.algorithm_config_overrides_per_module.items():
        for key, value in overrides.items():
            name = config._translate_special_keys(key, warn_deprecated=False)
            if name in why and value != getattr(config, name):
                raise ValueError(
                    f"algorithm_config_overrides_per_module of {module_id!r} sets {name}={value!r}, but {why[name]}; "
                    f"set it once: .training({name}=…)"
                )


def _check_overrides(config: JointPPOConfig) -> None:
    """Checks `algorithm_config_overrides_per_module`."""
    for module_id, overrides in config.algorithm_config_overrides_per_module.items():
        where = f"algorithm_config_overrides_per_module of {module_id!r}"
        for key in overrides:
            name = config._translate_special_keys(key, warn_deprecated=False)
            if hasattr(config, name) and name not in PER_MODULE:
                raise ValueError(
                    f"{where} sets {name!r}, which holds for the whole team; a module may have its own "
                    f"{', '.join(PER_MODULE)}"
                )
        try:
            own = config.copy(copy_frozen=False).update_from_dict(overrides)
            _check_numbers(own)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if (own.critic_lr is None) != (config.critic_lr is None):
            raise ValueError(
                f"{where}: critic_lr={own.critic_lr!r}, and for the others {config.critic_lr!r}; a critic optimizer is "
                f"for every module or for none. Set .training(critic_lr=…), too."
            )
