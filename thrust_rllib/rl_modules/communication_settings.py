"""The keys of a `model_config` that say how agents speak to each other: read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from thrust_rllib.envs.names import nearest
from thrust_rllib.rl_modules.mlp import ACTIVATIONS, layer_widths
from thrust_rllib.rl_modules.recurrent import whole_number

AGGREGATIONS = ("max", "mean", "attention")
CONTENTS = ("learned", "distance", "both")
ENCODERS = ("mlp", "conv")
MESSAGE_GRU = "message_gru"
CELLS = ("gru", "lstm", MESSAGE_GRU)
"""Memories of a communicating module; the last one is inside the messages."""


@dataclass(frozen=True)
class CommunicationSettings:
    """What a communicating module is made of.

    Args:
        rounds: R, of messages.
        size: D, numbers of a message and of the features.
        aggregation: what an agent makes of the messages that it hears.
        content: what a message says.
        encoder: "mlp" or "conv".
        encoder_hiddens: widths of the MLP in front of the messages; behind the pooling of a "conv".
        conv_filters: (channels, kernel) of each layer.
        hiddens: widths of the MLP between the messages and the heads.
        activation: of both MLPs and the convolutions.
        num_links: N, numbers at the front of an observation, one for each agent of the environment.
        input_shape: of the rest.
    """

    rounds: int
    size: int
    aggregation: str
    content: str
    encoder: str
    encoder_hiddens: tuple[int, ...]
    conv_filters: tuple[tuple[int, int], ...]
    hiddens: tuple[int, ...]
    activation: str
    num_links: int
    input_shape: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], space: gym.Space) -> CommunicationSettings:
        """Reads a `model_config`.

        Args:
            config: the keys that `CommunicatingModule` lists.
            space: of the encoded observations, [N + O].

        Raises:
            ValueError: names the key, what it is, and what is needed.
        """
        if not config.get("vf_share_layers", True):
            raise ValueError(
                "vf_share_layers is False, but agents that exchange messages have one exchange for policy and value; "
                "leave vf_share_layers out. For a value with layers of its own, use a team critic."
            )
        num_links, input_shape = _inputs(config, space)
        return cls(
            rounds=whole_number("message_rounds", config.get("message_rounds", 2), least=0),
            size=whole_number("message_size", config.get("message_size", 64)),
            aggregation=one_of("aggregation", config.get("aggregation", "max"), AGGREGATIONS),
            content=one_of("message_content", config.get("message_content", "learned"), CONTENTS),
            encoder=_encoder(config.get("encoder", "auto"), input_shape),
            encoder_hiddens=tuple(layer_widths("encoder_hiddens", config.get("encoder_hiddens", (64,)))),
            conv_filters=_filters(config.get("conv_filters")),
            hiddens=tuple(layer_widths("fcnet_hiddens", config.get("fcnet_hiddens", ()))),
            activation=one_of("fcnet_activation", config.get("fcnet_activation", "relu"), tuple(ACTIVATIONS)),
            num_links=num_links,
            input_shape=input_shape,
        )


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """`value`, where it is one of the known names.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; needed: one of {', '.join(known)}{nearest(str(value), known)}")
    return value


def _inputs(config: Mapping[str, Any], space: gym.Space) -> tuple[int, tuple[int, ...]]:
    """N, and the shape of what stands behind the N links in an observation."""
    shape = tuple(space.shape or ())
    if "num_links" not in config:
        raise ValueError(
            "num_links is missing in the model_config of a module that exchanges messages. The configuration fills it "
            'in where the observations are Dicts with the key "links" (one number for each agent of the environment, '
            "0: not heard). For a module that you build yourself, give num_links and, for observations that are more "
            "than one row of numbers, input_shape."
        )
    num_links = whole_number("num_links", config["num_links"])
    if len(shape) != 1 or shape[0] <= num_links:
        raise ValueError(
            f"observations have shape {list(shape)}; needed: one row, the {num_links} links (num_links) first, then at "
            "least one number that is no link"
        )
    given = config.get("input_shape")
    if given is None:
        return num_links, (shape[0] - num_links,)
    input_shape = tuple(layer_widths("input_shape", given))
    if not input_shape or math.prod(input_shape) != shape[0] - num_links:
        raise ValueError(
            f"input_shape is {list(input_shape)}, which is {math.prod(input_shape)} numbers, but observations have "
            f"{shape[0] - num_links} behind their {num_links} links (num_links); needed: the shape of these"
        )
    return num_links, input_shape


def _encoder(value: Any, input_shape: tuple[int, ...]) -> str:
    encoder = one_of("encoder", value, ("auto", *ENCODERS))
    if encoder == "auto":
        return "conv" if len(input_shape) == 3 else "mlp"
    if encoder == "conv" and len(input_shape) != 3:
        raise ValueError(
            f"encoder is 'conv', but observations behind the links have shape {list(input_shape)}; needed: three axes, "
            "planes × height × width. Use encoder='mlp' for anything else"
        )
    return encoder


def _filters(value: Any) -> tuple[tuple[int, int], ...]:
    if value is None:
        value = ((16, 3), (32, 3))
    wanted = "a list of [channels, kernel], such as [[16, 3], [32, 3]]"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"conv_filters is {value!r}; needed: {wanted}")
    filters = []
    for layer in value:
        if isinstance(layer, str) or not isinstance(layer, Sequence) or len(layer) != 2:
            raise ValueError(f"conv_filters has a layer {layer!r}; needed: {wanted}. The stride is always 1")
        channels = whole_number("a layer's number of channels in conv_filters", layer[0])
        kernel = whole_number("a layer's kernel in conv_filters", layer[1])
        if kernel % 2 == 0:
            raise ValueError(f"conv_filters has a kernel of {kernel}; needed: an odd one, which keeps the grid's size")
        filters.append((channels, kernel))
    return tuple(filters)
