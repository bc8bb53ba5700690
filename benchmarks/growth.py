"""How the cost of a refresh grows with examples, width of the network and size of the images.

``python -m benchmarks.growth --picture FILE`` draws it as well.
"""

from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, interleaved, parse, show
from proxreplay import LPR

START = (100, 20, 32)
CASES = {  # what grows: (n, channels of the first stage, size)
    "examples": [(25, 20, 32), (50, 20, 32), START, (200, 20, 32), (400, 20, 32)],
    "channels of the first stage": [(100, 5, 32), (100, 10, 32), START, (100, 40, 32)],
    "side of the images": [START, (100, 20, 64)],
}
Seconds = dict[tuple[int, int, int], tuple[float, float]]


def measure() -> Seconds:
    """Seconds of a forward pass and of a refresh, for every case."""
    seconds = {}
    for case in dict.fromkeys(case for cases in CASES.values() for case in cases):
        n, width, size = case
        model, x = network(width, size), images(n, size)
        lpr = LPR(model, omega_0=4.0, beta=2.0, tolerance=0)
        times = interleaved(
            {
                "forward": lambda model=model, x=x: forward(model, x),  # type: ignore[misc]
                "refresh": lambda lpr=lpr, x=x: lpr.refresh(x),  # type: ignore[misc]
            },
            rounds=1,
        )
        seconds[case] = (times.median("forward"), times.median("refresh"))
    return seconds


def claims_of(seconds: Seconds) -> list[Claim]:
    """Ratios and times of all cases."""
    claims = []
    for (n, width, size), (forward_pass, refresh) in seconds.items():
        name = f"n = {n}, {width} channels, {size}x{size}"
        claims.append(Claim(f"refresh / forward, {name}", refresh / forward_pass))
        claims.append(Claim(f"seconds of the refresh, {name}", refresh, ""))
    return claims


def draw(seconds: Seconds, path: str) -> None:
    """Both axes logarithmic, one panel for each thing that grows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
    for (name, cases), panel in zip(CASES.items(), panels, strict=True):
        which = list(CASES).index(name)
        x = [case[which] for case in cases]
        for i, label in enumerate(("forward pass", "exact refresh")):
            panel.loglog(x, [seconds[case][i] for case in cases], "o-", label=label)
        first = seconds[cases[0]][1]
        panel.loglog(
            x, [first * value / x[0] for value in x], ":", color="0.6", label="proportional"
        )
        panel.set_xticks(x)
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel(name)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def run() -> list[Claim]:
    return claims_of(measure())


if __name__ == "__main__":
    options = parse(("--picture", "draw the times to this file"))
    seconds = measure()
    show("Growth", claims_of(seconds))
    if options.picture:
        draw(seconds, options.picture)
