"""Several learners begin alike and stay alike, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thrust_rllib.joint_batch import AlignmentError, ModuleID
from thrust_rllib.ranks import Ranks


def start_alike(modules: Mapping[ModuleID, Any], generator: torch.Generator, ranks: Ranks) -> None:
    """Gives all learners the first one's parameters, buffers and generator; without a seed each has its own before.

    Args:
        modules: {module: RLModule}, in the same order for every learner.
        generator: of the minibatches.
        ranks: the learners.

    Raises:
        ValueError: they do not have the same parameters in the same order. All learners raise.
    """
    if ranks.size == 1:
        return
    names = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in _tensors(modules)]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    found = ranks.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64))
    if len(different := _unlike_first(found)):
        raise ValueError(
            f"learners {different} have other parameters than learner 0, or the same ones in another order. Learner "
            f"{ranks.rank} has {len(names)}: {', '.join(names[:10])}, … Needed: modules that are built alike in every "
            "process; name the layers of a module in an order that does not come from a set, and run the same code on "
            "all machines."
        )
    state = generator.get_state()
    ranks.broadcast_([*(x for _, x in _tensors(modules)), state])
    generator.set_state(state)


def check_same_update(numbers: Sequence[int], ranks: Ranks) -> None:
    """Checks that all learners were asked for the same update: else one would wait for messages that never come.

    Args:
        numbers: what the number of messages depends on.
        ranks: the learners.

    Raises:
        ValueError: another learner has other numbers. All learners raise.
    """
    if ranks.size == 1:
        return
    found = ranks.gather(torch.tensor(numbers))
    if _unlike_first(found):
        raise ValueError(
            f"the learners were given different updates: {found.tolist()}. All learners need all rollouts; call "
            "JointLearnerGroup.update_from_rollouts, not the learners one by one."
        )


def finish_alike(modules: Mapping[ModuleID, Any], ranks: Ranks, audit: bool) -> None:
    """After an update: gives all learners the first one's buffers, in which each has counted rows of its own.

    Args:
        modules: {module: RLModule}.
        ranks: the learners.
        audit: also compare the parameters.

    Raises:
        AlignmentError: the learners' parameters differ. All learners raise.
    """
    if ranks.size == 1:
        return
    ranks.broadcast_([buffer for module in modules.values() for buffer in module.buffers()])
    if not audit:
        return
    parameters = {f"{m}.{name}": p.detach() for m, module in modules.items() for name, p in module.named_parameters()}
    found = ranks.gather(torch.stack([_fingerprint(p) for p in parameters.values()])).nan_to_num()
    if len(different := _unlike_first(found)):
        where = [name for name, unlike in zip(parameters, (found != found[0]).any(0).tolist(), strict=True) if unlike]
        raise AlignmentError(
            f"after an update learners {different} have other parameters than learner 0 ({', '.join(where[:5])}). All "
            "must run the same code on alike machines, and nothing but the update may change a parameter."
        )


def _tensors(modules: Mapping[ModuleID, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of all modules by name."""
    for module_id, module in modules.items():
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            yield f"{module_id}.{name}", x


def _fingerprint(x: Tensor) -> Tensor:
    """One number that tells tensors apart, also those with the same numbers in other places."""
    return x.double().flatten() @ torch.arange(1.0, x.numel() + 1, dtype=torch.float64, device=x.device)


def _unlike_first(found: Tensor) -> list[int]:
    """Of [L, …] the learners whose row is not the first one's."""
    return (found != found[0]).flatten(1).any(1).nonzero().flatten().tolist()
