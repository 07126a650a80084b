"""What goes wrong before a job runs."""


class LaunchError(RuntimeError):
    """The job cannot be started; the message says which part of it, and why."""
