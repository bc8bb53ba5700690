"""Lets tests say ``from tests.reference import ...`` under plain ``pytest`` as well."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
