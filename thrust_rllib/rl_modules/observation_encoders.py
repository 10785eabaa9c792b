"""What stands in front of the messages: an observation, without its links, becomes D features."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thrust_rllib.rl_modules.communication_settings import CommunicationSettings
from thrust_rllib.rl_modules.mlp import ACTIVATIONS, make_trunk


class GridEncoder(nn.Module):
    """Convolutions over a grid of any size, pooled over its cells, then an MLP.

    f = conv(x) [C', H, W],  pooled = [max_c f, mean_c f, Σ_c x_0 f] over the cells c,  MLP(pooled) [D]

    x_0, the first plane, says where the agent stands: 1 in its cell and 0 elsewhere gives the features of that cell.
    Layers have stride 1 and zeros around the grid, so that it keeps its size; no parameter depends on that size.

    Args:
        input_shape: planes × height × width.
        filters: (channels, odd kernel) of each layer.
        widths: of the MLP, the last one is D.
        activation: behind each layer.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        filters: Sequence[tuple[int, int]],
        widths: Sequence[int],
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        self.input_shape = input_shape
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for outputs, kernel in filters:
            conv = nn.Conv2d(channels, outputs, kernel, padding=kernel // 2)
            nn.init.orthogonal_(conv.weight, math.sqrt(2.0))
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)
            layers += [conv, activation()]
            channels = outputs
        self.convolutions = nn.Sequential(*layers)
        self.mlp = make_trunk(3 * channels, list(widths), activation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Flat grids […, planes·height·width] to features […, D]."""
        planes = inputs.reshape(-1, *self.input_shape)
        found = self.convolutions(planes).flatten(start_dim=2)  # [R, C', cells]
        here = (found @ planes[:, 0].flatten(start_dim=1).unsqueeze(-1)).squeeze(-1)
        pooled = torch.cat([found.amax(-1), found.mean(-1), here], dim=-1)
        features: Tensor = self.mlp(pooled)
        return features.reshape(*inputs.shape[:-1], features.shape[-1])


def make_encoder(settings: CommunicationSettings) -> nn.Module:
    """The encoder that the settings ask for: […, O] to […, D], an activation behind each layer, the last one, too."""
    activation, widths = ACTIVATIONS[settings.activation], [*settings.encoder_hiddens, settings.size]
    if settings.encoder == "conv":
        return GridEncoder(settings.input_shape, settings.conv_filters, widths, activation)
    return make_trunk(math.prod(settings.input_shape), widths, activation)
