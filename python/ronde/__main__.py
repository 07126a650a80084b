"""``python -m ronde`` is the command ``ronde``."""

import sys

from ronde._command import main

sys.exit(main())
