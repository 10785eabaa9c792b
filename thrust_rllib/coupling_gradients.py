"""How strongly, and in which direction, each coupling pulls at each module, beside what PPO asks of it.

With auxiliary targets their losses are part of PPO's objective here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.ranks import ALONE, Ranks


class CouplingGradients(NamedTuple):
    """Tensors [c couplings, m modules] on the parameters' device, in the order of what was given.

    | field      | meaning                                                                                        |
    |------------|------------------------------------------------------------------------------------------------|
    | norm       | ‖g‖ of the weighted coupling's gradient g                                                      |
    | norm_ratio | ‖g‖ / ‖p‖ with p the PPO objective's gradient; 0 where ‖p‖ is 0: there is nothing to compare    |
    | cosine     | ⟨g, p⟩ / (‖g‖ ‖p‖): 1 pulls where PPO pulls, −1 against it; 0 where either norm is 0            |

    Metrics of each module: `coupling_gradient/<coupling>/norm`, `/norm_ratio` and `/cosine`.
    """

    norm: Tensor
    norm_ratio: Tensor
    cosine: Tensor

    def by_name(
        self, couplings: Sequence[str], modules: Sequence[ModuleID]
    ) -> dict[str, dict[ModuleID, dict[str, float]]]:
        """{coupling: {module: {"norm": …, "norm_ratio": …, "cosine": …}}}; waits for the device."""
        numbers = torch.stack(self, dim=-1).tolist()
        return {
            name: {m: dict(zip(self._fields, three, strict=True)) for m, three in zip(modules, row, strict=True)}
            for name, row in zip(couplings, numbers, strict=True)
        }


def coupling_gradients(
    objective: Tensor,
    terms: Sequence[Tensor],
    params: Mapping[ModuleID, Sequence[Tensor]],
    ranks: Ranks = ALONE,
) -> CouplingGradients:
    """Compares the gradient of each weighted coupling with that of the PPO objective, module by module.

    One backward pass for the objective and one for each term; the graph is kept, no `.grad` is touched, nothing waits
    for the device.

    Args:
        objective: scalar, what the actors minimise without couplings, summed over modules.
        terms: scalars, coefficient · coupling; one without a graph has gradient 0.
        params: {module: its parameters}; none for a frozen module, whose numbers are 0.
        ranks: the learners of whose gradients the sum is meant.

    Returns:
        Norms, ratios and cosines; a gradient that is not finite gives numbers that are not finite.
    """
    flat = [p for own in params.values() for p in own]
    sizes = [sum(p.numel() for p in own) for own in params.values()]
    gradients = ranks.sum_(torch.stack([_gradient(scalar, flat, objective) for scalar in (objective, *terms)]))
    parts = gradients.split(sizes, dim=1)  # [1 + c, P] of each module
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], dim=1)
    products = torch.stack([part[1:] @ part[0] for part in parts], dim=1)
    norm, reference = norms[1:], norms[:1]
    return CouplingGradients(norm, _quotient(norm, reference), _quotient(products, norm * reference))


def _gradient(scalar: Tensor, params: Sequence[Tensor], like: Tensor) -> Tensor:
    """[P], the gradient of `scalar` for all parameters behind each other; 0 where it does not depend on one."""
    if not params or not scalar.requires_grad:
        return like.new_zeros(sum(p.numel() for p in params))
    grads = torch.autograd.grad(scalar, params, retain_graph=True, allow_unused=True)
    return torch.cat([p.new_zeros(p.numel()) if g is None else g.flatten() for g, p in zip(grads, params, strict=True)])


def _quotient(x: Tensor, divisor: Tensor) -> Tensor:
    """The quotient, 0 where the divisor is 0."""
    return (x / divisor).where(divisor != 0, 0.0)
