"""Proves the patch-set on upstream trees."""
