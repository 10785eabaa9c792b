"""One round of messages: what an agent says, and what another one makes of all that it hears.

Letters: n receivers, J senders, B joint rows, D numbers of a message. links [n, B, J]: 0 not heard, above 0 heard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrust_rllib.rl_modules.mlp import linear

MOST_NUMBERS = 2**21
"""Numbers [n, b, J, D] that are compared at once when the largest message is looked for (8 MiB of float32)."""


class Messages(nn.Module):
    """What agents say and make of what they hear, in one round.

    m_ij = W c_j + b  ("learned"),  w ℓ_ij + b'  ("distance"),  or their sum ("both")
    a_i = aggregate of m_ij over {j: ℓ_ij > 0}

    c_j is what agent j carries, ℓ_ij the link by which i hears j. "max" takes the largest of each number, "mean" the
    mean, "attention" Σ_j softmax_j(q(c_i)·k(c_j) / √D) m_ij. Who hears nobody gets 0.

    Where modules differ, W, b and k are the sender's, w, b' and q the receiver's.

    Args:
        size: D.
        aggregation: "max", "mean", "attention".
        content: "learned", "distance", "both".

    Attributes:
        sent_width: D', numbers that an agent sends: W c_j + b and k(c_j), as far as they are needed.

    Source: message passing over a graph, Gilmer et al. 2017; attention after Vaswani et al. 2017.
    """

    def __init__(self, size: int, aggregation: str, content: str) -> None:
        super().__init__()
        gain = math.sqrt(2.0)
        self.size, self.aggregation = size, aggregation
        self.say = linear(size, size, gain) if content != "distance" else None
        self.distance = linear(1, size, gain) if content != "learned" else None
        self.key = linear(size, size, gain) if aggregation == "attention" else None
        self.query = linear(size, size, gain) if aggregation == "attention" else None
        self.sent_width = size * sum(layer is not None for layer in (self.say, self.key))

    def send(self, carried: Tensor) -> Tensor:
        """What agents say: […, D] to […, D']."""
        parts = [layer(carried) for layer in (self.say, self.key) if layer is not None]
        return torch.cat(parts, dim=-1) if parts else carried.new_zeros(*carried.shape[:-1], 0)

    def forward(self, carried: Tensor, sent: Tensor, links: Tensor) -> Tensor:
        """Aggregates [n, B, D].

        Args:
            carried: [n, B, D] of the receivers.
            sent: [J, B, D'] of the senders.
            links: [n, B, J].
        """
        heard = Heard(
            links,
            sent[..., : self.size] if self.say is not None else None,
            (self.distance.weight.squeeze(-1), self.distance.bias) if self.distance is not None else None,
        )
        if self.aggregation == "max":
            return largest(heard)
        mask = (links > 0).to(carried.dtype)
        if self.aggregation == "mean":
            return weighted(mask / mask.sum(-1, keepdim=True).clamp(min=1.0), heard)
        assert self.query is not None
        return weighted(attention(self.query(carried), sent[..., -self.size :], mask), heard)


@dataclass(frozen=True)
class Heard:
    """The messages m_ij = said_j + w ℓ_ij + b' of one round, in parts, of which one may be missing.

    Args:
        links: ℓ [n, B, J].
        said: [J, B, D], or None.
        distance: w and b' [D], or None.
    """

    links: Tensor
    said: Tensor | None = None
    distance: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """D."""
        widths = [x.shape[-1] for x in (self.said, *(self.distance or ())) if x is not None]
        return widths[0]


def largest(heard: Heard) -> Tensor:
    """The largest message among those heard, number by number: [n, B, D], 0 for who hears nobody.

    Only the winners are found from all pairs, without gradient and in pieces; what they said is then gathered. Nothing
    of size [n, B, J, D] is kept for the backward pass.
    """
    winners, parts = _winners(heard), []
    if heard.said is not None:
        parts.append(heard.said.gather(0, winners))
    if heard.distance is not None:
        slope, offset = heard.distance
        parts.append(heard.links.gather(2, winners) * slope + offset)
    return _total(parts) * (heard.links > 0).any(-1, keepdim=True)


@torch.no_grad()
def _winners(heard: Heard) -> Tensor:
    """Who says the largest number: indices [n, B, D] among the senders; any for who hears nobody."""
    n, rows, senders = heard.links.shape
    at_once = max(1, MOST_NUMBERS // max(1, n * senders * heard.size))
    pieces = [_winners_of(heard, slice(start, start + at_once)) for start in range(0, max(rows, 1), at_once)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _winners_of(heard: Heard, rows: slice) -> Tensor:
    links = heard.links[:, rows].unsqueeze(2)  # [n, b, 1, J]: senders last, a search along memory takes two thirds
    parts = [torch.zeros_like(links).masked_fill_(links <= 0, -torch.inf)]
    if heard.said is not None:
        parts.append(heard.said[:, rows].permute(1, 2, 0).contiguous())
    if heard.distance is not None:
        parts.append(links * heard.distance[0][:, None])
    return _total(parts).max(dim=-1).indices


def attention(queries: Tensor, keys: Tensor, heard: Tensor) -> Tensor:
    """Weights [n, B, J] ≥ 0 that sum to 1 over who is heard: softmax_j(q_i·k_j / √D); all 0 for who hears nobody.

    Args:
        queries: [n, B, D] of the receivers.
        keys: [J, B, D] of the senders.
        heard: [n, B, J], 1 or 0.
    """
    scores = (queries.transpose(0, 1) @ keys.permute(1, 2, 0)).transpose(0, 1) / math.sqrt(queries.shape[-1])
    # Not −∞: a row of them has the softmax NaN, and its gradient reaches all parameters.
    scores = scores.masked_fill(heard == 0, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * heard


def weighted(weights: Tensor, heard: Heard) -> Tensor:
    """Σ_j w_ij m_ij [n, B, D] of weights [n, B, J] that sum to 1, or to 0 for who hears nobody."""
    parts = []
    if heard.said is not None:
        parts.append((weights.transpose(0, 1) @ heard.said.transpose(0, 1)).transpose(0, 1))
    if heard.distance is not None:
        slope, offset = heard.distance
        parts.append((weights * heard.links).sum(-1, keepdim=True) * slope + weights.sum(-1, keepdim=True) * offset)
    return _total(parts)


def _total(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])
