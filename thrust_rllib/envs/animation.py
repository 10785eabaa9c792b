"""Pictures into an animated GIF; needs Pillow, which comes with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE = 480
SHORTEST_FRAME_MS = 20  # viewers show shorter ones slowly


def small_image(picture: np.ndarray) -> Image.Image:
    """A picture with at most `MAX_SIDE` pixels a side, in 256 colours.

    Args:
        picture: uint8 [height, width, 3].

    Raises:
        ValueError: something else.
    """
    from PIL import Image

    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ValueError(
            f"a picture is an array {picture.dtype} {list(picture.shape)}; needed: uint8 [height, width, 3], such as "
            "what render() of an environment returns"
        )
    image = Image.fromarray(picture)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image.quantize(dither=Image.Dither.NONE)


def save_gif(path: str | PathLike[str], frames: Iterable[np.ndarray | Image.Image], fps: float) -> None:
    """Writes an animation that repeats; equal pictures in a row become one that lasts longer, as Pillow does it.

    Args:
        path: of the file; one that is there is written over.
        frames: pictures uint8 [height, width, 3], or images from `small_image`, which need less memory while an episode
            runs.
        fps: pictures per second, above 0; more than 50 are shown as 50.

    Raises:
        ValueError: there is no picture, something is not a picture, or `fps` is not above 0.
    """
    if not fps > 0:
        raise ValueError(f"fps is {fps}; needed: pictures per second, above 0")
    images = [small_image(frame) if isinstance(frame, np.ndarray) else frame for frame in frames]
    if not images:
        raise ValueError("there are no frames; give at least one picture, uint8 [height, width, 3]")
    duration = max(SHORTEST_FRAME_MS, round(1000 / fps))
    images[0].save(path, format="GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
