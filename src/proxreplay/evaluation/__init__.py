"""Judging a learner: metrics as pure numbers, and the held-out sets they come from."""
