"""Holds verl's Megatron engine, run on a CPU, against references that share no code with it.

`python -m patchset.numerics --help`; the tree under test is the verl on PYTHONPATH.
"""
