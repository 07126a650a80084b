"""See ronde.process_sets."""

from ronde.process_sets import (  # noqa: F401
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_ids_and_ranks,
    remove_process_set,
)
