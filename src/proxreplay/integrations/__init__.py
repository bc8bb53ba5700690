"""Frameworks of other people: one file for each, imported only beside its framework."""
