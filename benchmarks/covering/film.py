"""One greedy episode of a checkpoint's team, as an animated GIF."""

from __future__ import annotations

from pathlib import Path

from common.rounds import console, start_quietly
from common.tasks import EVALUATION_SEED

from covering.team import SCRIPT
from thrust_rllib import JointPPO
from thrust_rllib.command_line.rendering import film_episode, write_gif

SEED = EVALUATION_SEED


def film(checkpoint: Path, seed: int, output: Path | None, folder: Path) -> Path:
    """Plays one episode and draws it; without `output` into the folder, named by the terrain."""
    start_quietly()
    algo = JointPPO.from_checkpoint(str(checkpoint.resolve()))
    try:
        frames, played = film_episode(algo, seed=seed)
        path = output or folder / f"{SCRIPT}_{algo.config.env_config['terrain']}.gif"
    finally:
        algo.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gif(path, frames)
    coverage, connected = float(played.final_extras["coverage"][0]), float(played.mean_extras["connected"][0])
    told = f"{path}: coverage {coverage:.3f}, λ₂ > 0.001 in {connected:.0%} of the steps"
    console.print(told, soft_wrap=True, highlight=False)
    return path
