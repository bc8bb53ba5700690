"""Is the path that the cost model chooses the fastest? Times of every path on many convolutions."""

import torch

from benchmarks.timing import Claim, interleaved, main
from proxreplay.proximal.gram.cost import Path, Work, cost
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.scratch import reusing

CASES = [  # n, channels, size, kernel, stride, groups, padding
    (100, 3, 32, 3, 1, 1, 1),
    (100, 20, 32, 3, 1, 1, 1),
    (100, 20, 32, 3, 2, 1, 1),
    (100, 20, 32, 1, 2, 1, 0),
    (100, 40, 16, 3, 1, 1, 1),
    (100, 80, 8, 3, 1, 1, 1),
    (100, 80, 8, 3, 2, 1, 1),
    (100, 160, 4, 3, 1, 1, 1),
    (100, 160, 2, 3, 1, 1, 1),
    (100, 256, 1, 3, 1, 1, 1),
    (100, 16, 14, 5, 1, 1, 0),
    (100, 64, 16, 3, 1, 64, 1),
    (100, 32, 16, 3, 1, 4, 1),
    (20, 3, 64, 7, 2, 1, 3),
    (10, 64, 28, 3, 1, 1, 1),
    (100, 3, 32, 8, 8, 1, 0),
    (4, 160, 4, 3, 1, 1, 1),
    (10, 8, 96, 3, 1, 1, 1),
]


def run() -> list[Claim]:
    chosen = best = unfolded = 0.0
    print("\n  milliseconds (predicted, one core)")
    for n, channels, size, k, stride, groups, zeros in CASES:
        x = torch.randn(n, channels, size, size).contiguous(memory_format=torch.channels_last)
        rows = PatchRows(x, (k, k), (stride,) * 2, (1, 1), groups, ((zeros,) * 2,) * 2)
        work = Work(rows.plan, n, groups, channels // groups)
        paths: list[Path] = ["patches", "shifts"]
        paths += ["spectrum"] if rows.plan.moving else []
        with reusing():  # as in a refresh
            times = interleaved(
                {path: lambda path=path, rows=rows: rows.gram_by(path) for path in paths}, rounds=3
            )
        shown = [f"{p} {1e3 * times.median(p):.1f} ({cost(p, work) / 1e6:.1f})" for p in paths]
        what = f"[{n}, {channels}, {size}, {size}] {k}x{k} / {stride}, {groups} groups"
        print(f"  {what:<42}", *shown, "->", rows.path)
        chosen += times.median(rows.path)
        best += min(times.median(path) for path in paths)
        unfolded += times.median("patches")
    return [
        Claim("time of the chosen paths / of the fastest", chosen / best, target=1.1),
        Claim("time of unfolding / of the chosen paths", unfolded / chosen),
    ]


if __name__ == "__main__":
    main("Paths", run)
