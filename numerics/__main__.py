"""python -m numerics"""

from .cli import main

raise SystemExit(main())
