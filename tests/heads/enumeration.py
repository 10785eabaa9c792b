"""Conditional heads by enumeration in float64: no line of the package."""

from __future__ import annotations

import itertools

import numpy as np


def tables(logits, sizes, parents, mask=None):
    """p_j(· | category of the parent) of every head: {(head, category or None): probabilities}.

    Args:
        logits: [A] float64.
        sizes: categories of each head.
        parents: index of the head it depends on, or None.
        mask: bool [sum(sizes)], what is allowed.
    """
    mask = np.ones(sum(sizes), bool) if mask is None else mask
    allowed = np.split(mask, np.cumsum(sizes)[:-1])
    found, start = {}, 0
    for head, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
        for category in [None] if parent is None else range(sizes[parent]):
            weights = np.exp(logits[start : start + size]) * allowed[head]
            found[head, category] = weights / weights.sum()
            start += size
    assert start == len(logits)
    return found


def given(action, parents, head):
    """The category that head `head` depends on."""
    return None if parents[head] is None else action[parents[head]]


def joint(logits, sizes, parents, mask=None):
    """{action: (probability, [log-probability of each head])} over all actions of probability > 0."""
    of = tables(logits, sizes, parents, mask)
    found = {}
    for action in itertools.product(*map(range, sizes)):
        parts = [of[h, given(action, parents, h)][a] for h, a in enumerate(action)]
        if min(parts) > 0:
            found[action] = float(np.prod(parts)), np.log(parts)
    return found


def entropy(probabilities):
    """In nats; 0 · log 0 is 0."""
    p = probabilities[probabilities > 0]
    return float(-(p * np.log(p)).sum())
