"""Data sets, transforms and streams."""

from proxreplay.data.datasets import Dataset, Examples, digits
from proxreplay.data.streams import Stream, Task, class_incremental
from proxreplay.data.transforms import Transform

__all__ = ["Dataset", "Examples", "Stream", "Task", "Transform", "class_incremental", "digits"]
