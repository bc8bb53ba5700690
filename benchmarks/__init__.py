"""Speed: each fast path against its naive twin, as ratios within one run."""
