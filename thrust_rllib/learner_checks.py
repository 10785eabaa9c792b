"""What the learner can train on: its modules, checked when it is built, and the team of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.rllib.core.rl_module.apis import ValueFunctionAPI

from thrust_rllib.cross_agent_losses import CrossAgentLoss
from thrust_rllib.joint_batch import JointBatch, ModuleID
from thrust_rllib.rl_modules.exchange import check_alike
from thrust_rllib.rl_modules.heads import has_conditional_heads
from thrust_rllib.rl_modules.joint_input import communicates
from thrust_rllib.rl_modules.memory import MemoryLayout, RecurrentModules
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES
from thrust_rllib.rl_modules.trial_pass import trial_outputs
from thrust_rllib.teams import AgentToModule


def check_modules(
    modules: Mapping[ModuleID, Any],
    losses: Mapping[str, CrossAgentLoss],
    with_values: bool = True,
) -> None:
    """Checks that every policy has values, if it needs them, and what the couplings read.

    Features are asked for by `trial_outputs`.

    Raises:
        ValueError: a module without `ValueFunctionAPI`, one without `encoder_features` for a coupling, one with
            conditional heads for a coupling that knows none, or one whose initial state is not always the same.
    """
    plain = [name for name, loss in losses.items() if getattr(loss, "plain_heads", False)]
    readers = [name for name, loss in losses.items() if getattr(loss, "needs_features", False)]
    for module_id, module in modules.items():
        _check_initial_state(module_id, module)
        if with_values and not isinstance(module, ValueFunctionAPI):
            raise ValueError(
                f"module {module_id!r} ({type(module).__name__}) has no value function; derive it from RLlib's "
                "ValueFunctionAPI, too, and implement compute_values(batch, embeddings=None), which returns values "
                "[B]; or use MLPModule."
            )
        if plain and has_conditional_heads(module):
            raise ValueError(
                f"cross-agent loss {plain[0]!r} ({type(losses[plain[0]]).__name__}) compares the agents' actions head "
                f"by head, but module {module_id!r} has conditional heads, whose logits are as many distributions as "
                "their parents have categories. Leave conditional_heads out of its model_config, or leave the loss "
                "out; FeatureSimilarity and RedundancyPenalty couple any policies."
            )
        if not readers:
            continue
        outputs = trial_outputs(module)
        if ENCODER_FEATURES not in outputs:
            raise ValueError(
                f"cross-agent loss {readers[0]!r} reads the agents' features, but module {module_id!r} "
                f"({type(module).__name__}) gives none: its forward_train returns {sorted(outputs)}. Let it return "
                f"the actor's features [B, D] ([B, T, D] where it is recurrent) under '{ENCODER_FEATURES}', use one of "
                "this package's modules, or set needs_features = False on a loss that does not read them."
            )


def _check_initial_state(module_id: ModuleID, module: Any) -> None:
    first, second = (MemoryLayout.of(module) for _ in range(2))
    if first is not None and second is not None and (first.initial != second.initial).any():
        raise ValueError(
            f"module {module_id!r} ({type(module).__name__}): get_initial_state() returns another state each time; "
            "needed: the same one, since runners and learner ask for it"
        )


def check_sequences(recurrent: RecurrentModules, config: Any) -> None:
    """Checks that training sequences of the recurrent modules fit into rollouts and minibatches.

    Raises:
        ValueError: sequences that are longer than what a runner samples at a time, or than a minibatch; or the learner
            is to be compiled.
    """
    if not recurrent.layouts:
        return
    length, source = recurrent.sequence_length, "max_seq_len"
    if config.torch_compile_learner:
        raise ValueError(
            "torch_compile_learner=True with recurrent modules: the shapes of their sequences differ from minibatch to "
            "minibatch, and each would be compiled anew. Set torch_compile_learner=False."
        )
    if config.batch_mode != "truncate_episodes":
        return  # as long as the episodes are
    rollout = config.get_rollout_fragment_length(1)
    advice = (
        f"(train_batch_size_per_learner={config.train_batch_size_per_learner}, num_env_runners="
        f"{config.num_env_runners}, num_envs_per_env_runner={config.num_envs_per_env_runner}, rollout_fragment_length="
        f"{config.rollout_fragment_length!r})"
    )
    if length is not None and length > rollout:
        raise ValueError(
            f"max_seq_len={length} is longer than what is sampled at a time, {rollout} steps of each environment "
            f"{advice}. Lower max_seq_len in the model_config (None takes the whole rollout), or sample longer: raise "
            "train_batch_size_per_learner, or take fewer environments."
        )
    if length is None:
        length, source = rollout, "a whole rollout of each environment, since max_seq_len is None"
    learners = max(config.num_learners, 1)
    if config.minibatch_size is not None and config.minibatch_size * learners < length:
        needed, most = -(-length // learners), config.minibatch_size * learners
        together = "" if learners == 1 else f" (times num_learners={learners})"
        raise ValueError(
            f"minibatch_size={config.minibatch_size}{together} is smaller than one training sequence of {length} steps "
            f"({source}) {advice}. Raise minibatch_size to {needed} or more, set max_seq_len to at most {most} in the "
            "model_config, or take more environments."
        )


def check_messages(modules: Mapping[ModuleID, Any], mapping: Callable[..., Any]) -> None:
    """Checks that the agents that exchange messages understand each other; modules that play nobody may differ.

    Args:
        modules: {module: RLModule}.
        mapping: the configuration's `policy_mapping_fn`; without the table that validation makes of it all count.

    Raises:
        ValueError: modules that differ in a setting of their messages.
    """
    playing = set(mapping.table.values()) if isinstance(mapping, AgentToModule) else set(modules)
    check_alike({m: own for m, own in modules.items() if m in playing and communicates(own)})


def prepare_couplings(
    losses: Mapping[str, CrossAgentLoss], modules: Mapping[ModuleID, Any], mapping: Callable[..., Any]
) -> None:
    """Shows every coupling that has a `prepare` the action spaces of the team.

    Args:
        losses: {name: coupling}.
        modules: {module: RLModule}.
        mapping: the configuration's `policy_mapping_fn`; the table that validation makes of it knows the agents.

    Raises:
        ValueError: a coupling cannot couple these agents.
    """
    hooks = {name: loss.prepare for name, loss in losses.items() if hasattr(loss, "prepare")}
    if not hooks or not isinstance(mapping, AgentToModule):
        return
    spaces = {agent: modules[module_id].action_space for agent, module_id in mapping.table.items()}
    for name, prepare in hooks.items():
        try:
            prepare(spaces)
        except ValueError as error:
            raise ValueError(f"cross-agent loss {name!r}: {error}") from error


def check_team(rollouts: Sequence[JointBatch], module_ids: Sequence[ModuleID], mapping: Callable[..., Any]) -> None:
    """Checks that the agents of every rollout are those of the configuration.

    Raises:
        ValueError: a rollout of other modules or other agents.
    """
    needed = mapping.table if isinstance(mapping, AgentToModule) else None
    for rollout in rollouts:
        given = {agent: m for m, streams in rollout.modules.items() for agent in streams.agents}
        if unknown := sorted(set(given.values()) - set(module_ids)):
            raise ValueError(f"the rollout has modules {unknown}; the learner's are {list(module_ids)}")
        if needed is not None and given != needed:
            raise ValueError(f"the rollout has the agents and modules {given}; those of the configuration are {needed}")
