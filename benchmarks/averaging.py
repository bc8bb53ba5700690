"""What the default average of the weights costs, against the same learner without it."""

from benchmarks.data import stretch
from benchmarks.network import CIFAR, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR, Learner
from proxreplay.replay import ClassBalancedMemory
from proxreplay.replay.averaging import DEFAULT_AVERAGING

BATCHES = 4


def run() -> list[Claim]:
    x, y, source = stretch(500 + 10 * BATCHES)
    batches = list(zip(x[500:].split(10), y[500:].split(10), strict=True))
    claims = []
    for method, rule in {"ER": lambda model: None, "LPR (ER)": lambda m: LPR(m, 4.0, 2.0)}.items():
        functions = {}
        for name, averaging in {"without": None, "averaged": DEFAULT_AVERAGING}.items():
            model = network()
            memory = ClassBalancedMemory(500)
            learner = Learner(
                model, memory, rule(model), lr=0.01, averaging=averaging, transform=CIFAR
            )
            learner.remember(x[:500], y[:500])
            functions[name] = lambda own=learner: [own.learn(*batch) for batch in batches]
        times = interleaved(functions, rounds=15)
        ratio = times.ratio("averaged", "without")
        claims.append(Claim(f"{method} averaged / {method} ({source})", ratio, "x", 1.02))
    return claims


if __name__ == "__main__":
    main("Averaging", run)
