"""Runs and studies: configuration, methods, records on disk."""
