"""The patches: what they say, and what they do to the files of a tree."""
