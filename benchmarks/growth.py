"""How the cost of a refresh grows with examples, width of the network and size of the images."""

from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR

CASES = {  # name: (n, width, size)
    "n = 100": (100, 20, 32),
    "n = 200": (200, 20, 32),
    "n = 400": (400, 20, 32),
    "n = 100, twice the channels": (100, 40, 32),
    "n = 100, images of 64x64": (100, 20, 64),
}


def run() -> list[Claim]:
    claims = []
    for name, (n, width, size) in CASES.items():
        model, x = network(width, size), images(n, size)
        lpr = LPR(model, omega_0=4.0, beta=2.0)
        times = interleaved(
            {
                "forward": lambda model=model, x=x: forward(model, x),
                "refresh": lambda lpr=lpr, x=x: lpr.refresh(x),
            },
            rounds=2,
        )
        claims.append(Claim(f"refresh / forward, {name}", times.ratio("refresh", "forward")))
        claims.append(Claim(f"seconds of the refresh, {name}", times.median("refresh"), ""))
    return claims


if __name__ == "__main__":
    main("Growth", run)
