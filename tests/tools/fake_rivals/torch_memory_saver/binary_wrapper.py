"""The original has a module of this name; torpor's replacement has none."""
