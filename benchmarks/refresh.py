"""The exact refresh (Grams and factors) against a bare forward pass and against its naive twin."""

from benchmarks.naive import NaiveLPR
from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR

N, FEW = 2000, 200


def run() -> list[Claim]:
    model, x = network(), images(N)
    lpr, naive = LPR(model, omega_0=4.0, beta=2.0, tolerance=0), NaiveLPR(model)
    times = interleaved(
        {"forward": lambda: forward(model, x), "refresh": lambda: lpr.refresh(x)}, rounds=3
    )
    against = interleaved(
        {"refresh": lambda: lpr.refresh(x), "naive": lambda: naive.refresh(x)}, 1, warm=False
    )
    few = interleaved(
        {"refresh": lambda: lpr.refresh(x[:FEW]), "naive": lambda: naive.refresh(x[:FEW])}, rounds=3
    )
    return [
        Claim(f"exact refresh / forward, n = {N}", times.ratio("refresh", "forward"), target=3.0),
        Claim(
            f"naive refresh / exact refresh, n = {N}",
            against.ratio("naive", "refresh"),
            target=6.0,
            at_least=True,
        ),
        Claim(f"naive refresh / exact refresh, n = {FEW}", few.ratio("naive", "refresh")),
        Claim("milliseconds of a forward pass of 100", 1e5 / N * times.median("forward"), ""),
        Claim("milliseconds of a refresh from 100", 1e5 / N * times.median("refresh"), ""),
    ]


if __name__ == "__main__":
    main("Refresh", run)
