"""What the command line prints besides progress: environments, errors, and where everything is at the end."""

from __future__ import annotations

import shlex
import traceback

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.result_log import PROGRESS_FILE
from thrust_rllib.command_line.run_folder import CONFIG_FILE, LOG_FILE, RunFolder
from thrust_rllib.command_line.training_progress import duration, number
from thrust_rllib.command_line.training_run import ERROR_FILE, Outcome

OTHER_NAMES = {
    "pettingzoo:<module>": "a PettingZoo environment, e.g. pettingzoo:mpe2.simple_spread_v3 (all act together) or "
    "pettingzoo:connect_four_v3 (turns)",
    "gymnasium:<id>": "a Gymnasium environment: a team of one, e.g. gymnasium:CartPole-v1, or tuple-style, e.g. "
    "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3",
    "<module>:<callable>": "a class or function of your own, e.g. my_package.my_env:MyEnv",
}
MAX_AGENTS_LISTED = 16
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def exit_with(error: Exception, show_traceback: bool) -> int:
    """Tells an error; returns the exit code."""
    if show_traceback:
        traceback.print_exception(error)
    print_error(error)
    return EXIT_USAGE if isinstance(error, (ValueError, TypeError)) else EXIT_FAILED


def print_envs(console: Console) -> None:
    """Built-in environments, and how to name others."""
    from thrust_rllib.envs import list_envs

    for title, entries in (("Built-in environments", list_envs()), ("Other environments", OTHER_NAMES)):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False
        )
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in entries.items():
            table.add_row(Text(name, style="cyan"), Text(text))
        console.print(table)
        console.print()
    console.print(
        Text(
            "Settings of an environment: thrust-rllib train bucket_brigade --env-config scenario=minimal_specialization"
        ),
        soft_wrap=True,
    )


def print_error(error: BaseException | str, prefix: str = "error") -> None:
    """One message on stderr, red on a terminal."""
    text = Text()
    text.append(f"{prefix}: ", style="bold red")
    text.append(error if isinstance(error, str) else error_text(error))
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def error_text(error: BaseException) -> str:
    """The message, with the kind of error where it is not one that this package raises for a user's mistake."""
    text = str(error).strip() or repr(error)
    if type(error).__name__ == "RayActorError" or type(error).__name__ == "ActorDiedError":
        if "in its creation task" in text:  # where it says what it died of, and RLlib has not told that before
            return f"a process could not start: {text.splitlines()[-1]}. Try again with --runners 0 --learners 0"
        return "a process that samples died; what it said stands above. Try again with --runners 0 for its own message"
    return text if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {text}"


def print_end(console: Console, outcome: Outcome, folder: RunFolder) -> None:
    """Final numbers and where everything is; paths stand outside the frame, so that they can be copied."""
    state, style = _state(outcome)
    progress = outcome.progress
    if progress is not None:
        text = (
            f"{progress.iteration:,} iteration{'' if progress.iteration == 1 else 's'}, "
            f"{progress.env_steps:,} environment steps, {duration(progress.seconds)}"
        )
        table = _returns(outcome)
        if console.is_terminal:
            body = Group(Text(text), Text(), table)
            console.print(Panel.fit(body, title=state, border_style=style, title_align="left", padding=(0, 1)))
        else:
            console.print(f"{state}: {text}", soft_wrap=True, highlight=False)
            console.print(table)
    else:
        where = f"iteration {outcome.began_at + 1:,}" if outcome.began_at else "the first iteration"
        console.print(f"{state} in {where}", style=style)
    for name, place in _places(outcome, folder).items():
        line = Text(f"{name:<16} ", style="dim")
        line.append(place, style="not dim")
        console.print(line, soft_wrap=True, highlight=False)


def unsaved_text(outcome: Outcome, folder: RunFolder) -> str:
    """That the last checkpoint could not be written, and what there is."""
    newest = "there is no other" if outcome.checkpoint is None else f"the newest is {outcome.checkpoint.name}"
    return (
        f"the last checkpoint could not be written ({outcome.save_error}); {newest}. Make room on the disk of "
        f"{folder.shown} before the run goes on"
    )


def _is_unfinished(outcome: Outcome) -> bool:
    return outcome.interrupted or outcome.error is not None or outcome.save_error is not None


def _iteration(outcome: Outcome) -> int:
    return outcome.began_at if outcome.progress is None else outcome.progress.iteration


def _state(outcome: Outcome) -> tuple[str, str]:
    """How the run ended, in a word or two, and their colour."""
    if outcome.error is not None:
        return "failed", "red"
    if outcome.stop_reason is not None:
        return "ended early", "yellow"
    return ("stopped", "yellow") if outcome.interrupted else ("finished", "green")


def _returns(outcome: Outcome) -> Table:
    assert outcome.progress is not None
    trained, evaluated = outcome.progress.agent_returns, outcome.evaluation or {}
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("return per episode")
    table.add_column("last of training", justify="right")
    if outcome.evaluation is not None:
        how = "sampled" if evaluated.get("sampled") else "greedy"
        episodes = evaluated.get("num_episodes", 0)
        counted = f"{episodes:,.0f} episode{'' if episodes == 1 else 's'}"
        table.add_column(f"evaluation ({counted}, {how})", justify="right")
    rows = {"all agents": (outcome.progress.return_mean, evaluated.get("episode_return_mean"))}
    of_agents = evaluated.get("agent_episode_returns_mean", {})
    rows |= {agent: (trained.get(agent), of_agents.get(agent)) for agent in list(trained or of_agents)}
    for index, (name, values) in enumerate(rows.items()):
        if index > MAX_AGENTS_LISTED:
            table.add_row(f"… {len(rows) - index} more in report/summary.json")
            break
        table.add_row(*_row(name, values, outcome.evaluation is not None), style="bold" if index == 0 else "")
    return table


def _row(name: str, values: tuple[float | None, float | None], evaluated: bool) -> list[str]:
    return [name, *(number(value) for value in values[: 1 + evaluated])]


def _places(outcome: Outcome, folder: RunFolder) -> dict[str, str]:
    shown = folder.shown
    places = {"run folder": shown}
    if outcome.plot is not None:
        places["learning curves"] = f"{shown}/{outcome.plot.relative_to(folder.path)}"
    places["checkpoint"] = "none was written"
    if outcome.checkpoint is not None:
        places["checkpoint"] = f"{shown}/{outcome.checkpoint.relative_to(folder.path)}"
        command = f"thrust-rllib train --resume {shlex.quote(shown)}"
        further = "" if _is_unfinished(outcome) else f" --iterations {2 * _iteration(outcome)}"
        places["go on"] = command + further
    if (folder.path / PROGRESS_FILE).exists():
        places["numbers"] = f"{shown}/{PROGRESS_FILE}"
    places["options, log"] = f"{shown}/{CONFIG_FILE}, {shown}/{LOG_FILE}"
    if outcome.error is not None:
        places["traceback"] = f"{shown}/{ERROR_FILE}"
    places["TensorBoard"] = f"tensorboard --logdir {shlex.quote(shown)}"
    return places
