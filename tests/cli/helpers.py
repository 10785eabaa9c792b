"""Running the command line in this process, and finding what a run wrote."""

import csv
import json
import struct

from tensorboardX.proto.event_pb2 import Event
from typer.testing import CliRunner

from thrust_rllib.cli import app

# Two agents, five steps per episode, some milliseconds per iteration.
TINY = ["--batch", "64", "--minibatch", "32", "--envs-per-runner", "4", "--eval-episodes", "4", "--seed", "1"]


def thrust_rllib(*arguments):
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="thrust-rllib")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def rows(folder):
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_json(path):
    return json.loads(path.read_text("utf-8"))


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def events(path):
    """The records of a TensorBoard file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + length])
        start += length + 16
