"""The exchange of messages: all agents of a joint step at once, of one module or of several.

Letters: modules k with n_k agents each, J = Σ n_k agents that take part, B joint rows, Q sequences of L steps, N links
of an observation, D features. The axis of all agents that take part holds those of one module behind those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thrust_rllib.rl_modules.communicating import CommunicatingModule


def exchange(
    modules: Sequence[CommunicatingModule],
    obs: Sequence[Tensor],
    links_order: Tensor,
    present: Tensor | None,
    state: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """The features of all agents behind their messages, for each module.

    Args:
        modules: for which `check_alike` holds. Modules with other parameters understand each other: a message is made
            by its sender's module, and read by its receiver's.
        obs: for each module [n_k, B, N + O_k], the N links first. Finite, where an agent is absent, too.
        links_order: int64 [J], where each agent that takes part stands among the N links.
        present: bool [J, B], who is there; nobody hears the others. None: all are.
        state: for each module [n_k, B, D] the memories before the step, of modules that remember in the exchange; None:
            those before an episode's first step.

    Returns:
        For each module z [n_k, B, D], of absent agents any finite numbers; and for modules that remember in the
        exchange the memories behind the step [n_k, B, D], those of absent agents as they were. None for other modules.
    """
    encoded = [module.encode(x) for module, x in zip(modules, obs, strict=True)]
    links = _links(modules, obs, links_order, present)
    if not modules[0].remembers_in_exchange:
        return _step(modules, encoded, links, None), None
    before = [torch.zeros_like(z) for z in encoded] if state is None else list(state)
    carried = _step(modules, encoded, links, before)
    features = [module.behind_exchange(h) for module, h in zip(modules, carried, strict=True)]
    return features, _kept(before, carried, present)


def scan(
    modules: Sequence[CommunicatingModule],
    obs: Sequence[Tensor],
    links_order: Tensor,
    present: Tensor | None,
    state: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """`exchange` step by step, for modules that remember in the exchange.

    Args:
        modules: as for `exchange`.
        obs: for each module [n_k, Q, L, N + O_k].
        links_order: int64 [J].
        present: bool [J, Q, L], or None.
        state: for each module [n_k, Q, D], the memories before the first step.

    Returns:
        For each module z [n_k, Q, L, D], and its memories behind the last step [n_k, Q, D].
    """
    encoded = [module.encode(x) for module, x in zip(modules, obs, strict=True)]  # all steps at once: the larger part
    links = [
        mine.unflatten(1, x.shape[1:3])
        for x, mine in zip(
            obs,
            _links(
                modules,
                [x.flatten(1, 2) for x in obs],
                links_order,
                None if present is None else present.flatten(start_dim=1),
            ),
            strict=True,
        )
    ]
    memories, carried = list(state), []
    for t in range(encoded[0].shape[2]):
        there = None if present is None else present[:, :, t]
        behind = _step(modules, [z[:, :, t] for z in encoded], [x[:, :, t] for x in links], memories)
        carried.append(behind)
        memories = _kept(memories, behind, there)
    steps = [torch.stack(mine, dim=2) for mine in zip(*carried, strict=True)]
    return [module.behind_exchange(h) for module, h in zip(modules, steps, strict=True)], memories


def _step(
    modules: Sequence[CommunicatingModule],
    encoded: Sequence[Tensor],
    links: Sequence[Tensor],
    memories: Sequence[Tensor] | None,
) -> list[Tensor]:
    """All rounds of one step: what agents carry behind the last one, for each module [n_k, B, D]."""
    carried = list(encoded if memories is None else memories)
    for r in range(modules[0].rounds):
        sent = torch.cat([module.send(r, mine) for module, mine in zip(modules, carried, strict=True)])
        if memories is None:
            carried = [m.receive(r, z, sent, x) for m, z, x in zip(modules, carried, links, strict=True)]
        else:
            carried = [m.receive(r, z, sent, x, h) for m, z, x, h in zip(modules, encoded, links, carried, strict=True)]
    return carried


def _links(
    modules: Sequence[CommunicatingModule], obs: Sequence[Tensor], links_order: Tensor, present: Tensor | None
) -> list[Tensor]:
    """For each module the links [n_k, B, J] between its agents and all that take part."""
    found = [x[..., : m.num_links].index_select(-1, links_order) for m, x in zip(modules, obs, strict=True)]
    return found if present is None else [links * present.T for links in found]


def _kept(before: Sequence[Tensor], behind: Sequence[Tensor], present: Tensor | None) -> list[Tensor]:
    """The memories behind a step [n_k, B, D]: those of absent agents stay."""
    if present is None:
        return list(behind)
    there = present.split([len(h) for h in before])
    return [torch.where(p.unsqueeze(-1), new, old) for p, new, old in zip(there, behind, before, strict=True)]


def check_alike(modules: Mapping[str, CommunicatingModule]) -> None:
    """Whether the agents of these modules can speak to each other.

    Raises:
        ValueError: names the setting in which they differ.
    """
    asked = {
        "message_rounds": lambda module: module.settings.rounds,
        "message_size": lambda module: module.settings.size,
        "aggregation": lambda module: module.settings.aggregation,
        "message_content": lambda module: module.settings.content,
        "cell='message_gru'": lambda module: module.remembers_in_exchange,
        "num_links": lambda module: module.num_links,
    }
    for name, read in asked.items():
        found = {module_id: read(module) for module_id, module in modules.items()}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"{name} differs between modules whose agents speak to each other: {found}. Give all of them one "
                "value: for all modules in rl_module(model_config=…), or in each one's own model_config."
            )
