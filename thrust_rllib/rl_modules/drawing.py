"""Random numbers out of a generator of one's own, from code that draws from torch's global one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Lets code that draws from torch's own generator of the device draw from `generator` instead."""
    device = generator.device
    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    outside = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_state())
        own.set_state(outside)


def generator_state(generator: torch.Generator) -> dict[str, Any]:
    """Where a generator is: {"device": kind of its device, "state": uint8 array}."""
    return {"device": generator.device.type, "state": generator.get_state().numpy().copy()}


def set_generator_state(generator: torch.Generator, state: Mapping[str, Any]) -> None:
    """Lets a generator go on from `generator_state`; one of another kind of device is seeded by it."""
    numbers: np.ndarray = state["state"]
    if generator.device.type == state["device"]:
        generator.set_state(torch.from_numpy(numbers.copy()))
    else:
        generator.manual_seed(int(np.random.SeedSequence(numbers.tolist()).generate_state(1, np.uint64)[0] >> 1))
