"""`python -m patchset`."""

import sys

from .commands.cli import main

sys.exit(main())
