"""Module paths that scripts import from. The code lives elsewhere in ronde."""
