"""See ronde.exceptions."""

from ronde.exceptions import *  # noqa: F403
