"""Where the heads of a categorical policy lie in one vector of logits, and which heads depend on which."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

MASKED_LOGIT = -1e30  # finite: 0 · MASKED_LOGIT is 0, where 0 · −inf would be NaN


class HeadLayout:
    """Heads side by side in a vector of A logits, cut into K *blocks* of categories.

    A head that depends on none is one block. A conditional head has a block for each category of its *parent*, behind
    each other, and the parent's category says which of them counts: a skill of S categories in front of a goal of G
    that depends on it are 1 + S blocks, A = S + S·G.

    Args:
        sizes: number of categories of each of the H heads.
        parents: for each head the index of its parent, which depends on none itself, or None; None for all: no head
            depends on another.
    """

    def __init__(self, sizes: Sequence[int], parents: Sequence[int | None] | None = None) -> None:
        self.num_heads = len(sizes)
        self.conditional = parents is not None
        parents = [None] * len(sizes) if parents is None else parents
        copies = [1 if parent is None else int(sizes[parent]) for parent in parents]
        self.sizes = tuple(int(k) for k, count in zip(sizes, copies, strict=True) for _ in range(count))
        self.width = max(self.sizes)
        self.equal = all(k == self.width for k in self.sizes)
        self.total = sum(self.sizes)
        columns, start = [], 0
        for k in self.sizes:
            columns += [start + i if i < k else self.total for i in range(self.width)]  # column A is the padding
            start += k
        self.columns = tuple(columns)

        # Of each head: its first block, the first block of its parent (or its own), and 1 where it has a parent.
        self.first = tuple(np.cumsum([0, *copies[:-1]]).tolist())
        self.parents = tuple(j if parent is None else parent for j, parent in enumerate(parents))
        self.depends = tuple(int(parent is not None) for parent in parents)
        # Of each block: 1 where it depends on a category, and where that stands among K·width padded ones.
        heads = [j for j, count in enumerate(copies) for _ in range(count)]
        self.block_depends = tuple(self.depends[j] for j in heads)
        self.block_given = tuple(
            self.first[self.parents[j]] * self.width + (k - self.first[j]) * self.depends[j]
            for k, j in enumerate(heads)
        )
        starts = np.cumsum([0, *sizes])
        self.mask_columns = tuple(int(i) for j in heads for i in range(starts[j], starts[j + 1]))

    @property
    def blocks(self) -> list[slice]:
        """Where each block lies among the A logits."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def pad(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits […, A] to […, K, widest block], the padding masked."""
        shape = (*logits.shape[:-1], len(self.sizes), self.width)
        if self.equal:
            return logits.reshape(shape)
        padding = logits.new_full((*logits.shape[:-1], 1), MASKED_LOGIT)
        columns = on_device(self.columns, logits.device)
        return torch.cat([logits, padding], dim=-1).index_select(-1, columns).reshape(shape)

    def counting(self, actions: torch.Tensor) -> torch.Tensor:
        """The blocks […, H] that count where the heads took the categories `actions` […, H]."""
        given = actions.index_select(-1, on_device(self.parents, actions.device))
        return on_device(self.first, actions.device) + given * on_device(self.depends, actions.device)

    def pick(self, categories: torch.Tensor) -> torch.Tensor:
        """The action […, H] out of a category for each block […, K]."""
        roots = categories.index_select(-1, on_device(self.first, categories.device))
        return categories.gather(-1, self.counting(roots))

    def pick_numpy(self, categories: np.ndarray) -> np.ndarray:
        """As `pick`."""
        if not self.conditional:
            return categories
        given = categories[..., np.array(self.first)[list(self.parents)]]
        return np.take_along_axis(categories, np.array(self.first) + given * np.array(self.depends), axis=-1)


@functools.cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`numbers` as a tensor of int64, copied to the device once, however often it is asked for."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training
        return torch.tensor(numbers, device=device)
