"""LPR (ER) against ER over a stretch of a stream: a full memory of 2,000 and a refresh every 10."""

from benchmarks.data import stretch
from benchmarks.network import CIFAR, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR, Learner
from proxreplay.options import LearnerOptions, LPROptions
from proxreplay.replay import ClassBalancedMemory

MEMORY, EVERY = 2000, 10


def run() -> list[Claim]:
    x, y, source = stretch(MEMORY + 10 * EVERY)
    batches = list(zip(x[MEMORY:].split(10), y[MEMORY:].split(10), strict=True))

    def learner(samples: int | None = LearnerOptions.refresh_samples, **options: float) -> Learner:
        model = network()
        made = Learner(
            model,
            ClassBalancedMemory(MEMORY),
            LPR(model, 4.0, 2.0, **options) if options else None,
            lr=0.01,
            transform=CIFAR,
            refresh_every=EVERY,
            refresh_samples=samples,
        )
        made.remember(x[:MEMORY], y[:MEMORY])
        return made

    learners = {
        "ER": learner(),
        "exact": learner(None, tolerance=0.0),
        "default": learner(tolerance=LPROptions().tolerance),
        "rolling": learner(tolerance=LPROptions().tolerance, rolling=0.8),
        "tolerance 0": learner(tolerance=0.0),
        "tolerance 0.02": learner(tolerance=0.02),
        "tolerance 0.1": learner(tolerance=0.1),
    }

    def cycle(one: Learner) -> None:
        for inputs, labels in batches:
            one.learn(inputs, labels)

    times = interleaved(
        {name: lambda one=one: cycle(one) for name, one in learners.items()},  # type: ignore[misc]
        rounds=5,  # a cycle is 30 steps and a refresh
    )
    n = LearnerOptions.refresh_samples
    return [
        Claim(
            f"LPR (ER) / ER, exact, memory 2,000, T = 10 ({source})",
            times.ratio("exact", "ER"),
            "x",
            3.5,
        ),
        Claim(
            f"the same, default: refresh of {n}, tolerance {LPROptions().tolerance}",
            times.ratio("default", "ER"),
            "x",
            1.25,
        ),
        Claim("the same, default and rolling 0.8", times.ratio("rolling", "ER"), "x"),
        *(
            Claim(f"the same, refresh of {n}, {name}", times.ratio(name, "ER"), "x")
            for name in learners
            if name.startswith("tolerance")
        ),
        Claim("seconds of 10 stream batches with ER", times.median("ER"), ""),
    ]


if __name__ == "__main__":
    main("Stream", run)
