"""Numbers about a server as Prometheus reads them."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Requests:
    """How many requests there were, and how long they took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def note(self, path: str, status: int, seconds: float) -> None:
        """One request to a known path."""
        with self._lock:
            self._counts[path, status] += 1
            counts = self._buckets.setdefault(path, [0] * (len(BUCKETS) + 1))
            counts[bisect_left(BUCKETS, seconds)] += 1
            self._seconds[path] += seconds  # type: ignore[assignment]

    def lines(self) -> Iterable[str]:
        """As Prometheus text."""
        with self._lock:
            yield "# TYPE proxreplay_requests_total counter"
            for (path, status), count in sorted(self._counts.items()):
                yield sample("requests_total", count, path=path, status=status)
            yield "# TYPE proxreplay_request_seconds histogram"
            for path, counts in sorted(self._buckets.items()):
                total = 0
                for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
                    total += count
                    yield sample("request_seconds_bucket", total, path=path, le=bound)
                yield sample("request_seconds_sum", self._seconds[path], path=path)
                yield sample("request_seconds_count", total, path=path)


def gauge(name: str, about: str, value: float | None) -> Iterable[str]:
    """One number with a word about it; nothing for None."""
    if value is not None:
        yield f"# HELP proxreplay_{name} {about}"
        yield f"# TYPE proxreplay_{name} gauge"
        yield sample(name, value)


def sample(name: str, value: float, **labels: object) -> str:
    r"""One line of Prometheus text.

    >>> sample("memory_examples", 3, label='a "b"')
    'proxreplay_memory_examples{label="a \\"b\\""} 3'
    """
    inside = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
    return f"proxreplay_{name}{f'{{{inside}}}' if inside else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
