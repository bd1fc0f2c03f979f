"""What gets patched: trees on disk, their records, their git, and the pins."""
