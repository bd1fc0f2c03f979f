"""python -m patchset.numerics"""

from .cli import main

raise SystemExit(main())
