import sys

from ronde.launcher.cli import main

sys.exit(main())
