"""Whatever is sent to any path: no 500, no traceback, and a refused request changes nothing."""

import base64
import json
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from proxreplay import Learner
from proxreplay.data import Transform
from proxreplay.models import small_cnn
from proxreplay.options import DurableOptions
from tests.serving.streams import batches
from tests.serving.test_api import Server, npy_header

EXAMPLES = int(os.environ.get("PROXREPLAY_FUZZ", "20"))  # per test
RELAXED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
POSTS = ("/predict", "/learn", "/forget", "/rollback", "/snapshot", "/resume")
GETS = ("/health", "/ready", "/metrics", "/versions", "/status", "/docs", "/openapi.json", "/")

text = st.text(max_size=12)
numbers = st.one_of(
    st.integers(-3, 9), st.integers(), st.floats(), st.just(10**400), st.just(2**63 - 1)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=3)),
    max_leaves=12,
)
rows = st.lists(
    st.lists(st.one_of(st.floats(-9, 9), st.integers(-9, 9)), min_size=8, max_size=8),
    min_size=1,
    max_size=3,
)


def npy_text(data: bytes) -> str:
    """Some bytes as an array of floats, or nearly."""
    return base64.b64encode(npy_header(f"({len(data) // 4},)", "<f4") + data).decode()


others = st.integers(0, 9).flatmap(  # of other shapes
    lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1, max_size=2)
)
inputs = st.one_of(
    rows,
    others,
    values,
    st.fixed_dictionaries({"npy": st.one_of(text, st.binary(max_size=40).map(npy_text))}),
    st.fixed_dictionaries({"named": st.dictionaries(text, st.one_of(rows, values), max_size=2)}),
    st.fixed_dictionaries({"images": st.lists(text, max_size=2)}),
)
words = st.one_of(st.sampled_from(["a", "b", "../x", "x" * 201, "", "\ud800", "\0"]), values)
labels = st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=3), values)
bodies = st.one_of(
    values,
    st.fixed_dictionaries({"inputs": inputs}, optional={"id": words}),
    st.fixed_dictionaries(
        {"labels": labels},
        optional={
            "inputs": inputs,
            "id": words,
            "keys": words,
            "idempotency_key": words,
            "train": st.one_of(st.booleans(), values),
            "weights": st.one_of(st.lists(numbers, max_size=3), values),
        },
    ),
    st.fixed_dictionaries({}, optional={"label": words, "ids": labels, "key": words}),
    st.fixed_dictionaries({"to": numbers}, optional={"reason": words}),
)
kinds = st.sampled_from(
    ["application/json", "application/x-npy", "image/png", "text/plain", "application/JSON; a=b"]
)
queries = st.one_of(st.just(""), st.sampled_from(["wait=applied", "wait=x", "id=a&label=1"]), text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz") / "d"
    with Server(folder, options=DurableOptions(snapshot_every=7)) as made:
        for x, y in batches(3):
            made.learn(x, y)
        yield made


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("fuzz") / "d") as made:
        yield made


def state(server: Server) -> Any:
    server.durable._worker.drain()
    kept = server.durable.log.database.query("SELECT number, id FROM kept ORDER BY number")
    return server.durable.log.last, server.durable.fingerprint(), kept


def check(server: Server, before: Any, answer: Any) -> None:
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    assert "Traceback" not in answer.text
    if answer.status_code >= 400:
        assert answer.json()["detail"]
        refused_later = answer.status_code == 422 and "sequence" in answer.json()
        if not refused_later:  # an event that the learner refused is in the history
            assert state(server) == before
    if server.durable.stopped:
        server.client.post("/resume")


@RELAXED
@given(path=st.sampled_from(POSTS), body=bodies, query=queries)
def test_any_json(server: Server, path: str, body: Any, query: str) -> None:
    before = state(server)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, params=query, content=data, headers=headers)
    check(server, before, answer)


@RELAXED
@given(asked=inputs, words=st.sampled_from([None, "a"]))
def test_any_prediction_before_the_first_batch(fresh: Server, asked: Any, words: Any) -> None:
    before = state(fresh)
    data = json.dumps({"inputs": asked, "id": words}).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    answer = fresh.client.post("/predict", content=data, headers=headers)
    assert answer.status_code == 422, answer.text
    check(fresh, before, answer)


@RELAXED
@given(path=st.sampled_from(POSTS), data=st.binary(max_size=300), kind=kinds, query=queries)
def test_any_bytes(server: Server, path: str, data: bytes, kind: str, query: str) -> None:
    before = state(server)
    answer = server.client.post(path, params=query, content=data, headers={"content-type": kind})
    check(server, before, answer)


def image(kind: str) -> bytes:
    file = BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    learner = Learner(small_cnn(3, widths=(4, 8)), transform=Transform(scale=255.0))
    with Server(tmp_path_factory.mktemp("fuzz") / "d", learner=learner) as made:
        made.learn(np.zeros((2, 3, 8, 8), np.uint8), np.array([0, 1]))
        yield made


@RELAXED
@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"]),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    end=st.one_of(st.none(), st.integers(0, 300)),
    path=st.sampled_from(["/predict", "/predict?id=a", "/learn?label=1"]),
)
def test_any_image(
    of_images: Server, kind: str, changes: list[tuple[int, int]], end: int | None, path: str
) -> None:
    before, data = state(of_images), bytearray(image(kind))
    for place, byte in changes:
        data[place % len(data)] = byte
    headers = {"content-type": f"image/{kind.lower()}"}
    answer = of_images.client.post(path, content=bytes(data[:end]), headers=headers)
    check(of_images, before, answer)
    if not changes and end is None:
        assert answer.status_code < 300, answer.text


@RELAXED
@given(
    path=st.one_of(st.sampled_from([*GETS, *POSTS]), st.text(max_size=20).map(lambda t: "/" + t)),
    method=st.sampled_from(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    headers=st.dictionaries(
        st.sampled_from(["origin", "host", "authorization", "content-length", "accept"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
        max_size=2,
    ),
)
def test_any_path_method_and_header(
    server: Server, path: str, method: str, headers: dict[str, str]
) -> None:
    before = state(server)
    path = quote(path.encode("utf-8", "surrogatepass"))  # clients send nothing else
    answer = server.client.request(method, path, headers=headers)
    assert answer.status_code < 500
    assert state(server) == before


@RELAXED
@given(sequence=st.one_of(text, st.integers().map(str)))
def test_any_event(server: Server, sequence: str) -> None:
    path = f"/events/{quote(sequence.encode('utf-8', 'surrogatepass'), safe='')}"
    assert server.client.get(path).status_code in (200, 404)


def test_the_folder_is_still_whole(server: Server, tmp_path: Path) -> None:
    """After all that, it is opened again and is the same learner."""
    import shutil

    from proxreplay.serving import DurableLearner
    from tests.serving.streams import make

    live = state(server)[1]
    server.durable.log.database.checkpoint()
    shutil.copytree(server.durable.folder, tmp_path / "copy")
    with DurableLearner(tmp_path / "copy", make()) as again:
        assert again.fingerprint() == live
