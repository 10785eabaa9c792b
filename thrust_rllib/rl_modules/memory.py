"""How the state of a recurrent module lies in one vector of numbers, and how long the team's sequences are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.typing import ModuleID
from torch import Tensor

from thrust_rllib.rl_modules.mlp import settings_of


class MemoryLayout:
    """How one stateful module's state lies in a vector of S float32 numbers: leaf after leaf, dict keys sorted.

    Letters: R rows. `MemoryLayout.of(module)` makes one.

    Args:
        initial: the initial state, a nested structure of arrays without a batch axis.

    Raises:
        ValueError: it needs a gradient.

    Attributes:
        size: S.
        initial: [S] float32, the initial state.
    """

    def __init__(self, initial: Any) -> None:
        leaves = [torch.as_tensor(leaf) for leaf in tree.flatten(initial)]
        if any(leaf.requires_grad for leaf in leaves):
            raise ValueError(
                f"an initial state of the leaves {_described(initial, 0)} needs a gradient; needed: constants. Runners "
                "and learner ask for it once, so that one that is learnt would not be the same everywhere"
            )
        leaves = [leaf.detach().cpu() for leaf in leaves]
        self._tree = tree.unflatten_as(initial, leaves)
        self._paths = [path for path, _ in tree.flatten_with_path(initial)]
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._sizes = [leaf.numel() for leaf in leaves]
        self.size = sum(self._sizes)
        self.initial: np.ndarray = torch.cat([leaf.reshape(-1).float() for leaf in leaves]).numpy()

    @classmethod
    def of(cls, module: RLModule) -> MemoryLayout | None:
        """The layout of `module`'s state; None where it has none."""
        return cls(module.get_initial_state()) if module.is_stateful() else None

    def flatten(self, state: Any) -> Tensor:
        """A state, leaves [R, …], as vectors [R, S].

        Raises:
            ValueError: other leaves, or leaves of other shapes, than the initial state's.
        """
        named = tree.flatten_with_path(state)
        leaves = [torch.as_tensor(leaf) for _, leaf in named]
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves]
        if shapes != self._shapes or [path for path, _ in named] != self._paths:
            raise ValueError(
                f"a state has the leaves {_described(state, 1)}; needed, behind the axis of rows: "
                f"{_described(self._tree, 0)}, as get_initial_state() returns. Let the module return states of one "
                "structure from get_initial_state() and as STATE_OUT of every forward pass."
            )
        parts = [leaf.reshape(leaf.shape[0], size).float() for leaf, size in zip(leaves, self._sizes, strict=True)]
        return torch.cat(parts, dim=1)

    def unflatten(self, vectors: Tensor) -> Any:
        """Vectors [R, S] as a state, leaves [R, …] of the initial state's types.

        Raises:
            ValueError: S is another number.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.size:
            raise ValueError(
                f"state vectors have shape {tuple(vectors.shape)}; needed: [rows, {self.size}], the numbers of the "
                f"leaves {_described(self._tree, 0)}"
            )
        rows = vectors.shape[0]
        parts = zip(vectors.split(self._sizes, dim=1), self._shapes, self._dtypes, strict=True)
        return tree.unflatten_as(self._tree, [part.reshape(rows, *shape).to(dtype) for part, shape, dtype in parts])

    def one_step(self, columns: Mapping[str, Any], states: Tensor) -> dict[str, Any]:
        """The input of a forward pass over sequences of one step each.

        Args:
            columns: {name: [R, …]}, the observations above all.
            states: [R, S], in which each row is met.

        Returns:
            {name: [R, 1, …]}, and the states as a module takes them.
        """
        return {name: x.unsqueeze(1) for name, x in columns.items()} | {Columns.STATE_IN: self.unflatten(states)}


@dataclass(frozen=True)
class RecurrentModules:
    """The modules of a team that remember.

    Args:
        layouts: {module: how its state lies in a vector}, without the feed-forward ones.
        sequence_length: steps of a training sequence, the same for all of them; None: the whole rollout.
    """

    layouts: dict[ModuleID, MemoryLayout]
    sequence_length: int | None = None

    @classmethod
    def of(cls, modules: Mapping[ModuleID, RLModule]) -> RecurrentModules:
        """Asks every module.

        Raises:
            ValueError: see `joint_sequence_length`.
        """
        plain = {module_id: modules[module_id].unwrapped() for module_id in sorted(modules.keys())}
        layouts = {module_id: MemoryLayout.of(module) for module_id, module in plain.items()}
        return cls(
            {module_id: layout for module_id, layout in layouts.items() if layout is not None},
            joint_sequence_length(plain),
        )


def in_first_state(module: RLModule, obs: Tensor) -> dict[str, Any]:
    """The input of a module's forward pass over rows [R, …] that are each the first step of an episode."""
    columns = {Columns.OBS: obs}
    if (memory := MemoryLayout.of(module)) is None:
        return columns
    return memory.one_step(columns, torch.from_numpy(memory.initial).to(obs.device).expand(len(obs), -1))


def joint_sequence_length(modules: Mapping[ModuleID, RLModule]) -> int | None:
    """`max_seq_len` that all stateful modules agree on; None for the whole rollout, or where no module has a state.

    Raises:
        ValueError: modules with other lengths, or a length that is no whole number ≥ 1.
    """
    lengths = {module_id: _sequence_length(module) for module_id, module in modules.items() if module.is_stateful()}
    for module_id, length in lengths.items():
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(
                f"max_seq_len of module {module_id!r} is {length!r}; needed: a whole number ≥ 1, or None for the whole "
                "rollout"
            )
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"max_seq_len differs between modules: {lengths}. Agents are trained on the same sequences of joint steps; "
            "give all recurrent modules one max_seq_len in their model_config (None: the whole rollout)."
        )
    return next(iter(lengths.values()), None)


def _sequence_length(module: RLModule) -> Any:
    if hasattr(module, "max_seq_len"):
        return module.max_seq_len
    return settings_of(module.model_config).get("max_seq_len")


def _described(state: Any, leading: int) -> dict[str, tuple[int, ...]]:
    """{path of a leaf: its shape without the first `leading` axes}."""
    return {
        "/".join(map(str, path)) or "state": tuple(np.shape(leaf))[leading:]
        for path, leaf in tree.flatten_with_path(state)
    }
