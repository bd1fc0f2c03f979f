"""Compares the speed of a pristine and a patched tree."""
