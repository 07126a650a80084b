"""Starts the ranks of a job: the command ``ronderun`` and the function :func:`run`."""

from ronde.launcher.api import run

__all__ = ["run"]
