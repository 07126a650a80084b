"""See ronde.basics."""

from ronde.basics import *  # noqa: F403
