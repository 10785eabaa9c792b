"""`python -m thrust_rllib` is `thrust-rllib`."""

from thrust_rllib.cli import app

app(prog_name="thrust-rllib")
