"""Applies, proves and takes back the verl THD patch-set."""

from pathlib import Path

__version__ = "0.1.0"

#: The repository that this package runs from: patches, overlay and pins lie beside it.
REPOSITORY = Path(__file__).resolve().parent.parent
