"""The HTTP interface: what it answers, whom it refuses, and that refusals change nothing."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from proxreplay import Learner
from proxreplay.data import Transform
from proxreplay.errors import InputError
from proxreplay.models import slim_resnet18, small_cnn
from proxreplay.options import DurableOptions, GuardOptions, ServeOptions
from proxreplay.serving import DurableLearner, Follower, bodies
from proxreplay.serving.access import Access, token_from
from proxreplay.serving.api import make_app
from proxreplay.serving.service import Service
from tests.serving.streams import batches, make, poison

OPTIONS = ServeOptions(body_bytes=50_000, batch=50)
HOST = "http://127.0.0.1"


class Server:
    """An application with its durable learner, without a socket."""

    def __init__(self, folder: Path, access: Access | None = None, **further: Any) -> None:
        learner = further.pop("learner", None) or make()
        self.durable = DurableLearner(folder, learner, **further)
        self.service = Service(self.durable, OPTIONS)
        self.client = TestClient(make_app(self.service, access or Access()), base_url=HOST)

    def __enter__(self) -> "Server":
        self.client.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.__exit__(*error)

    def learn(self, x: Any, y: Any, **fields: Any) -> Any:
        body = {"inputs": x.tolist(), "labels": y.tolist(), **fields}
        return self.client.post("/learn?wait=applied", json=body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "d", options=DurableOptions(snapshot_every=4)) as made:
        yield made


def test_a_stream_is_learned_as_without_a_server(server: Server) -> None:
    twin = make()
    for count, (x, y) in enumerate(batches(9), start=1):
        answer = server.learn(x, y)
        assert answer.status_code == 200
        assert answer.json()["sequence"] == count
        assert answer.json()["loss"] == pytest.approx(twin.learn(x, y).loss)
        told = server.client.post("/predict", json={"inputs": x.tolist()}).json()
        assert told["labels"] == twin.predict(x).tolist()
        assert told["sequence"] == count
        assert told["version"] == count // 4 * 4
        expected = twin.predict_proba(x).numpy()
        np.testing.assert_allclose(told["probabilities"], expected, atol=1e-6)
    assert told["classes"] == twin.labels


def test_a_server_that_starts_again_shows_what_was_before(tmp_path: Path) -> None:
    durable = DurableLearner(tmp_path / "d", make())
    for x, y in batches(5):
        durable.learn(x, y)
    durable._held.close()  # as a killed process: nothing but events is on disk
    with Server(tmp_path / "d") as server:
        status = server.client.get("/status").json()
        assert [point["sequence"] for point in status["curve"]] == [2, 3, 4, 5]
        assert status["window"] == 16
        assert sum(row["memory"] for row in status["classes"]) == status["memory"]


def test_a_label_that_arrives_later(server: Server) -> None:
    (x, y), (a, b) = batches(2)
    server.learn(x, y)
    asked = {"inputs": a.tolist(), "id": "visit 7"}
    assert server.client.post("/predict", json=asked).status_code == 200
    labels = {"id": "visit 7", "labels": b.tolist(), "idempotency_key": "k"}
    first = server.client.post("/learn?wait=applied", json=labels).json()
    again = server.client.post("/learn?wait=applied", json=labels).json()
    assert (first["sequence"], first["repeated"], again["repeated"]) == (2, False, True)
    assert again["ids"] == first["ids"]
    later = server.client.post("/learn", json=labels)  # whoever does not wait asks for the same
    assert later.status_code == 202
    assert later.json() == {"sequence": 2, "repeated": True, "applied": True}
    gone = server.client.post("/learn", json={"id": "visit 7", "labels": b.tolist()})
    assert gone.status_code == 404
    assert "no input is kept under the id 'visit 7'" in gone.json()["detail"]
    assert server.durable.audit("visit 7")  # the id is the key of the examples
    assert server.client.post("/forget", json={"key": "visit 7"}).json()["removed"] == 4
    assert server.durable.audit("visit 7") == []


def test_an_id_is_known_after_a_restart(tmp_path: Path) -> None:
    (x, y), (a, b) = batches(2)
    with Server(tmp_path / "d") as server:
        server.learn(x, y)
        for identity in ("visit 7", "visit 8"):
            asked = {"inputs": a.tolist(), "id": identity}
            assert server.client.post("/predict", json=asked).status_code == 200
    with Server(tmp_path / "d") as server:
        assert "proxreplay_kept_inputs 2" in server.client.get("/metrics").text
        body = {"id": "visit 7", "labels": b.tolist()}
        assert server.client.post("/learn?wait=applied", json=body).json()["sequence"] == 2
        assert server.client.post("/learn", json=body).status_code == 404
        assert server.client.post("/forget", json={"key": "visit 8"}).json()["removed"] == 4
        assert server.client.post("/learn", json=body | {"id": "visit 8"}).status_code == 404
        assert server.client.post("/forget", json={"key": "visit 8"}).status_code == 422
    twin = make()
    for batch in ((x, y), (a, b)):
        twin.learn(*batch)
    expected = twin.predict_proba(x).numpy()
    with Server(tmp_path / "d") as server:
        told = server.client.post("/predict", json={"inputs": x.tolist()}).json()
        np.testing.assert_allclose(told["probabilities"], expected, atol=1e-6)


def test_arrays_of_numpy(server: Server) -> None:
    x, y = batches(1)[0]
    file = BytesIO()
    np.save(file, x.numpy())
    inside = {"inputs": {"npy": base64.b64encode(file.getvalue()).decode()}}
    answer = server.client.post("/learn?wait=applied", json={**inside, "labels": y.tolist()})
    assert answer.status_code == 200
    raw = {"content-type": "application/x-npy"}
    told = server.client.post("/predict?id=a", content=file.getvalue(), headers=raw).json()
    assert told == server.client.post("/predict", json=inside).json()
    labels = "&".join(f"label={label}" for label in y.tolist())
    answer = server.client.post(
        f"/learn?wait=applied&{labels}&idempotency_key=z", content=file.getvalue(), headers=raw
    )
    assert answer.json()["sequence"] == 2
    for hostile in (
        b"",
        b"\x93NUMPY",
        file.getvalue()[:-1],
        file.getvalue() + b"\0",
        npy_header("(9999999999, 9999999999)", "<f4"),
        npy_header("(-1,)", "<f4"),
        npy_header("(1,)", "|O") + b"cos\nsystem\n(S'true'\ntR.",
        npy_header("(1,)", "|S4") + b"abcd",
        npy_header("(" * 3000, "<f4"),
    ):
        before = server.durable.fingerprint()
        answer = server.client.post("/predict", content=hostile, headers=raw)
        assert answer.status_code == 422
        assert ".npy" in answer.json()["detail"]
        assert server.durable.fingerprint() == before


def npy_header(shape: str, dtype: str) -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_images_where_the_learner_was_made_for_images(tmp_path: Path, server: Server) -> None:
    model = slim_resnet18(None, in_channels=3, image_size=32)
    learner = Learner(model, transform=Transform(scale=255.0), steps_per_batch=1)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    files = []
    for image in pixels:
        file = BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
        files.append(file.getvalue())
    images = {"images": [base64.b64encode(file).decode() for file in files]}
    with Server(tmp_path / "images", learner=learner) as other:
        answer = other.client.post(
            "/learn?wait=applied", json={"inputs": images, "labels": ["cat", "dog"]}
        )
        assert answer.status_code == 200
        kept = other.durable.learner.memory.inputs().numpy()
        np.testing.assert_array_equal(kept, pixels)
        as_array = {"inputs": pixels.tolist()}
        told = other.client.post("/predict", json=as_array).json()
        assert told == other.client.post("/predict", json={"inputs": images}).json()
        one = other.client.post(
            "/predict", content=files[0], headers={"content-type": "image/png"}
        ).json()
        assert one["labels"] == told["labels"][:1]
        for wrong in (b"", b"GIF89a", files[0][:50]):
            answer = other.client.post(
                "/predict", content=wrong, headers={"content-type": "image/png"}
            )
            assert answer.status_code == 422
        answer = other.client.post("/predict", json={"inputs": [[[[999] * 32] * 32] * 3]})
        assert "uint8 holds 0 to 255" in answer.json()["detail"]
    refused = server.client.post("/predict", json={"inputs": images})
    assert refused.status_code == 422
    assert "not made for images" in refused.json()["detail"]


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "json"])
def test_nobody_waits_while_an_image_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bool
) -> None:
    """A small file may hold millions of pixels."""
    learner = Learner(small_cnn(3, widths=(4, 8)), transform=Transform(scale=255.0))
    x, file = np.zeros((2, 3, 8, 8), np.uint8), BytesIO()
    Image.fromarray(x[0].transpose(1, 2, 0)).save(file, "PNG")
    body = {"inputs": {"images": [base64.b64encode(file.getvalue()).decode()]}}
    further = {"content": file.getvalue(), "headers": {"content-type": "image/png"}}
    decode, entered, may_end = bodies.decode, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        entered.set()
        may_end.wait()
        return decode(*given)

    with Server(tmp_path / "d", learner=learner) as server, ThreadPoolExecutor(1) as other:
        server.learn(x, np.array([0, 1]))
        monkeypatch.setattr(bodies, "decode", slow)
        sent: Any = further if raw else {"json": body}
        waiting = other.submit(server.client.post, "/predict", **sent)
        entered.wait()
        timer = threading.Timer(30, may_end.set)
        timer.start()
        told = server.client.post("/predict", json={"inputs": x.tolist()})
        assert (told.status_code, may_end.is_set()) == (200, False)
        timer.cancel()
        may_end.set()
        assert waiting.result().status_code == 200


def test_limits_and_wrong_inputs(server: Server) -> None:
    x, y = batches(1)[0]
    server.learn(x, y)
    before, last = server.durable.fingerprint(), server.durable.log.last
    post = server.client.post
    good = {"inputs": x.tolist(), "labels": y.tolist()}
    for status, answer in (
        (422, post("/learn", json=good | {"inputs": x[:, :3].tolist()})),
        (422, post("/learn", json=good | {"labels": [0]})),
        (422, post("/learn", json=good | {"labels": [2**70] * 4})),
        (422, post("/learn", json=good | {"labels": [True] * 4})),
        (422, post("/learn", json=good | {"labels": [1.0] * 4})),
        (422, post("/learn", json=good | {"labels": ["a"] * 4})),
        (422, post("/learn", json=good | {"keys": ["a"]})),
        (422, post("/learn", json=good | {"path": "/etc/passwd"})),
        (422, post("/learn", json=good | {"inputs": [["a"] * 8] * 4})),
        (422, post("/learn", json={"labels": y.tolist()})),
        (422, post("/learn", json=good | {"id": "a"})),
        (422, post("/learn?wait=forever", json=good)),
        (422, post("/learn", content=b"{", headers={"content-type": "application/json"})),
        (422, post("/learn", content=b"[" * 9000, headers={"content-type": "application/json"})),
        (422, post("/predict", json={"inputs": [[float(i) for i in range(8)]] * 51})),
        (422, post("/predict", content=b'{"inputs": [[1e999,0,0,0,0,0,0,0]]}',
                   headers={"content-type": "application/json"})),
        (413, post("/predict", json={"inputs": [[0.123456789] * 8] * 5000})),
        (413, post("/predict", content=(b"x" * 1000 for _ in range(100)),
                   headers={"content-type": "application/json"})),
        (415, post("/learn", content=b"a=b", headers={"content-type": "text/plain"})),
        (422, post("/rollback", json={"to": 99})),
        (422, post("/rollback", json={"to": "../../etc"})),
        (422, post("/forget", json={})),
        (422, post("/forget", json={"label": 0, "key": "a"})),
        (422, post("/forget", json={"ids": [99999]})),
        (422, post("/snapshot", json={"path": "/tmp/x"})),
        (404, server.client.get("/events/99")),
        (404, server.client.get("/events/..%2f..%2fetc")),
        (404, server.client.get("/nothing")),
        (405, server.client.get("/learn")),
    ):  # fmt: skip
        assert answer.status_code == status, answer.text
        assert "detail" in answer.json()
        assert "Traceback" not in answer.text
    broken = post("/learn", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["detail"].startswith("body: Invalid JSON")
    assert (
        "earlier ones were [8] float32"
        in post("/learn", json=good | {"inputs": x[:, :3].tolist()}).text
    )
    assert server.durable.fingerprint() == before
    assert server.durable.log.last == last


def test_a_full_queue_answers_429_and_predictions_do_not_wait(tmp_path: Path) -> None:
    x, y = batches(1)[0]
    with Server(tmp_path / "d", options=DurableOptions(queue_events=2)) as server:
        server.learn(x, y)
        inside, go = threading.Event(), threading.Event()
        learn = server.durable.learner.learn

        def slow(*args: Any, **further: Any) -> Any:
            inside.set()
            go.wait(30)
            return learn(*args, **further)

        server.durable.learner.learn = slow  # type: ignore[method-assign]
        body = {"inputs": x.tolist(), "labels": y.tolist()}
        assert server.client.post("/learn", json=body).status_code == 202
        assert inside.wait(30)
        assert server.client.post("/learn", json=body).status_code == 202
        full = server.client.post("/learn", json=body)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert server.client.post("/predict", json={"inputs": x.tolist()}).json()["sequence"] == 1
        assert server.client.get("/events/3").json() == {"sequence": 3, "applied": False}
        status = server.client.get("/status").json()
        assert (status["logged"], status["queue"]) == (3, 2)
        go.set()
        server.durable._worker.drain()
        assert server.client.get("/events/3").json()["applied"]


def test_going_back_and_a_guard(tmp_path: Path) -> None:
    options = DurableOptions(snapshot_every=4)
    with Server(tmp_path / "d", options=options, guard=GuardOptions()) as server:
        for x, y in batches(6):
            server.learn(x, y)
        assert server.client.post("/snapshot", json={}).json()["sequence"] == 6
        told = server.client.post("/rollback", json={"to": 4, "reason": "a test"}).json()
        assert told == {"sequence": 7, "kind": "rollback"}
        predicted = server.client.post("/predict", json={"inputs": x.tolist()}).json()
        assert (predicted["sequence"], predicted["version"]) == (7, 7)
        assert server.client.get("/versions").json()["history"][0]["note"] == "to 4: a test"
        assert server.client.get("/ready").status_code == 200
        diverged = server.learn(*poison())
        assert diverged.status_code == 422
        assert "not finite" in diverged.json()["detail"]
        server.durable._worker.drain()
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        assert server.learn(x, y).status_code == 503
        assert server.client.post("/predict", json={"inputs": x.tolist()}).status_code == 200
        assert server.client.post("/resume").status_code == 200
        assert server.learn(x, y).status_code == 200


def test_metrics_page_and_docs(server: Server) -> None:
    for x, y in batches(5):
        server.learn(x, y)
    text = server.client.get("/metrics").text
    samples = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    assert float(samples["proxreplay_sequence"]) == 5
    assert 0 <= float(samples["proxreplay_prequential_accuracy"]) <= 1
    assert samples['proxreplay_requests_total{path="/learn",status="200"}'] == "5"
    assert samples['proxreplay_request_seconds_count{path="/learn"}'] == "5"
    assert samples['proxreplay_request_seconds_bucket{path="/learn",le="+Inf"}'] == "5"
    assert samples["proxreplay_last_refresh_sequence"] == "3"
    memory = [v for k, v in samples.items() if k.startswith("proxreplay_memory_examples{")]
    assert sum(map(float, memory)) == len(server.durable.learner.memory)
    page = server.client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/predict", "/learn", "/forget", "/rollback", "/snapshot", "/metrics"} <= paths.keys()
    properties = paths["/learn"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "idempotency_key" in properties["properties"]
    assert "/rollback" in server.client.get("/docs").text


def test_tokens_hosts_and_origins(tmp_path: Path) -> None:
    read, write = "r" * 16, "w" * 16
    x, y = batches(1)[0]
    body = {"inputs": x.tolist(), "labels": y.tolist()}
    with Server(tmp_path / "d", Access(read, write, "0.0.0.0")) as server:

        def code(token: str | None, method: str, path: str, **further: Any) -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return server.client.request(method, path, headers=headers, **further).status_code

        assert code(None, "GET", "/status") == 401
        assert code("x" * 16, "GET", "/status") == 401
        assert code(read, "GET", "/status") == 200
        assert code(write, "GET", "/status") == 200
        for path in ("/", "/docs", "/openapi.json"):  # they hold no data
            assert code(None, "GET", path) == 200
        assert code(read, "POST", "/learn", json=body) == 401
        assert server.durable.log.last == 0
        assert code(write, "POST", "/learn?wait=applied", json=body) == 200
        lower = {"authorization": f"bearer {read}"}
        assert server.client.get("/status", headers=lower).status_code == 200
        asked = {"inputs": x.tolist()}
        assert code(read, "POST", "/predict", json=asked) == 200
        assert code(read, "POST", "/predict", json=asked | {"id": "a"}) == 401  # that keeps them
        assert len(server.durable.kept) == 0
        assert code(write, "POST", "/predict", json=asked | {"id": "a"}) == 200
    with Server(tmp_path / "e") as server:
        post = server.client.post
        assert (
            post("/learn", json=body, headers={"origin": "http://evil.example"}).status_code == 403
        )
        assert post("/learn", json=body, headers={"origin": "null"}).status_code == 403
        assert post("/learn", json=body, headers={"host": "evil.example"}).status_code == 403
        assert server.durable.log.last == 0
        assert post("/learn", json=body, headers={"origin": HOST}).status_code == 202


def test_tokens_that_cannot_do_their_work_are_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff" * 20)
    with pytest.raises(InputError, match="ASCII"):
        Access(token_from("read", tmp_path / "key"), "w" * 16)
    read, write = "r" * 16, "w" * 16
    for wrong, told in (
        ((read, read), "the same"),
        ((read, write[:-1] + "é"), "ASCII"),
        ((read, write[:-1] + " "), "ASCII"),
        ((read[:-1], write), "16 or more"),
        ((read, None), "give both"),
    ):
        with pytest.raises(InputError, match=told):
            Access(*wrong)


def test_a_reader_serves_the_snapshots_of_a_writer(tmp_path: Path) -> None:
    stream = batches(9)
    with DurableLearner(
        tmp_path / "d", make(), options=DurableOptions(snapshot_every=4)
    ) as durable:
        for x, y in stream[:4]:
            durable.learn(x, y)
        service = Service(Follower.open(tmp_path / "d"))
        with TestClient(make_app(service, Access()), base_url=HOST) as client:
            asked = {"inputs": x.tolist()}
            assert client.post("/predict", json=asked).json()["sequence"] == 4
            for x, y in stream[4:]:
                durable.learn(x, y)
            status = client.get("/status").json()  # whether or not anybody predicts
            assert status["sequence"] == 8
            assert status["versions"] == [
                {"sequence": v.sequence, "bytes": v.nbytes, "time": 0.0, "good": True}
                for v in durable.versions()
            ]
            assert client.post("/predict", json=asked).json()["sequence"] == 8
            body = {"inputs": x.tolist(), "labels": y.tolist()}
            assert "only reads" in client.post("/learn", json=body).json()["detail"]
            assert client.post("/predict", json=asked | {"id": "a"}).status_code == 422
            for path in ("/status", "/metrics", "/versions", "/ready", "/docs"):
                assert client.get(path).status_code == 200
        assert durable.log.last == 9
