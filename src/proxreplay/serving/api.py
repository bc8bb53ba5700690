"""The HTTP interface: from requests to the service, and from errors to answers."""

import asyncio
import functools
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from proxreplay import __version__
from proxreplay.errors import (
    BusyError,
    CheckpointError,
    ConflictError,
    InputError,
    ProxreplayError,
    StoppedError,
    StorageError,
)
from proxreplay.serving import bodies, page
from proxreplay.serving.access import READ, WRITE, Access
from proxreplay.serving.bodies import (
    ForgetRequest,
    LearnRequest,
    PredictRequest,
    RollbackRequest,
)
from proxreplay.serving.durable import DurableLearner
from proxreplay.serving.events import Outcome
from proxreplay.serving.kept import UnknownIdError
from proxreplay.serving.service import Service

BODY_SECONDS = 30  # to send a body
WRITERS = 32  # requests that may wait for the same write to the disk
STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (UnknownIdError, 404),
    (ConflictError, 409),
    (InputError, 422),
    (BusyError, 429),
    (StoppedError, 503),
    (CheckpointError, 503),
    (StorageError, 507),
    (ProxreplayError, 422),
)
_Model = TypeVar("_Model", bound=BaseModel)
_Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)


def make_app(service: Service, access: Access) -> FastAPI:
    """The application; `service` is closed when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="proxreplay",
        version=__version__,
        description="A learner that predicts at every moment while it learns.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own fetch scripts from elsewhere
        redoc_url=None,
    )
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(HTTPException, _http_error)
    Endpoints(service, access, app)
    return app


class Endpoints:
    """One method per path, which ``app`` gets; what is common to all is in `_answer`."""

    def __init__(self, service: Service, access: Access, app: FastAPI) -> None:
        self.service = service
        self.access = access
        self.app = app
        threads = torch.get_num_threads()
        set_threads = functools.partial(torch.set_num_threads, threads)
        self._predicting = ThreadPoolExecutor(1, "proxreplay-predict", set_threads)
        self._writing = ThreadPoolExecutor(WRITERS, "proxreplay-write", set_threads)
        self._post("/predict", self.predict, PredictRequest, READ, raw=True)
        self._post("/learn", self.learn, LearnRequest, WRITE, raw=True)
        self._post("/forget", self.forget, ForgetRequest, WRITE)
        self._post("/rollback", self.rollback, RollbackRequest, WRITE)
        self._post("/snapshot", self.snapshot, None, WRITE)
        self._post("/resume", self.resume, None, WRITE)
        for path, method in (
            ("/health", self.health),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/versions", self.versions),
            ("/status", self.status),
            ("/events/{sequence}", self.event),
        ):
            app.get(path, summary=method.__doc__)(self._answer(path, method, READ))
        for path, method in (("/", self.page), ("/docs", self.docs)):  # these hold no data
            app.get(path, summary=method.__doc__)(self._answer(path, method, None))

    # --- changing ---------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Predict inputs; with an id, keep them on disk until their labels arrive."""
        asked = await self._body(request, PredictRequest)
        predictor = self.service.current.predictor
        keep = None
        if asked.id is not None:  # that is a change; a server that only reads refuses it
            refusal = self.access.refusal(WRITE, request.headers)
            if refusal:
                raise HTTPException(*refusal)
            keep = functools.partial(self.service.durable.keep, asked.id)

        decoded = None
        if bodies.are_images(asked.inputs):  # other predictions do not wait for this
            decoded = await self._in(self._writing, self._inputs, asked, predictor)

        def work() -> tuple[Any, dict[str, Any]]:
            inputs = self._inputs(asked, predictor) if decoded is None else decoded
            return inputs, asdict(self.service.predict(inputs))

        inputs, answer = await self._in(self._predicting, work)
        if keep is not None:
            await self._in(self._writing, keep, inputs)
        return _json(answer)

    async def learn(self, request: Request) -> Response:
        """Learn a batch: answers when it is on disk, with ?wait=applied when it is learned."""
        wait = request.query_params.get("wait")
        if wait not in (None, "applied"):
            raise InputError(f"wait={wait!r:.40}; give applied, or nothing.")
        asked = await self._body(request, LearnRequest)
        if (asked.inputs is None) == (asked.id is None):
            raise InputError("learn: give inputs, or the id of a prediction.")
        durable, predictor = self.service.durable, self.service.current.predictor

        def work() -> Any:
            inputs = None if asked.inputs is None else self._inputs(asked, predictor)
            return durable.submit(
                inputs,
                asked.labels,
                sample_weight=asked.weights,
                keys=asked.id if asked.keys is None else asked.keys,
                idempotency_key=asked.idempotency_key,
                train=asked.train,
                kept=asked.id,
                request=request.state.digest,
            )

        ticket = await self._in(self._writing, work)
        applied = ticket.applied.done() and ticket.applied.exception() is None
        answer = {"sequence": ticket.sequence, "repeated": ticket.repeated, "applied": applied}
        if wait is None:
            return _json(answer, 202)
        try:
            applying = asyncio.shield(asyncio.wrap_future(ticket.applied))
            outcome = await asyncio.wait_for(applying, self.service.options.wait_seconds)
        except TimeoutError:
            return _json(answer, 202)
        status = 200 if outcome.refused is None else 422
        return _json(answer | {"applied": True} | outcome_of(outcome), status)

    async def forget(self, request: Request) -> Response:
        """Delete examples from memory, snapshots and events."""
        asked = await self._body(request, ForgetRequest)
        return await self._change(self.service.durable.forget, **dict(asked))

    async def rollback(self, request: Request) -> Response:
        """Go back to a snapshot or event."""
        asked = await self._body(request, RollbackRequest)
        return await self._change(self.service.durable.rollback, **dict(asked))

    async def snapshot(self, request: Request) -> Response:
        """Write a snapshot now."""
        await self._body(request, None)
        made = await self._in(self._writing, self.service.durable.snapshot)
        return _json({"sequence": made.sequence, "bytes": made.nbytes, "time": made.time})

    async def resume(self, request: Request) -> Response:
        """Learn again after a guard has stopped learning."""
        await self._body(request, None)
        return await self._change(self.service.durable.resume)

    async def _change(self, change: Callable[..., Outcome], **asked: Any) -> Response:
        work = functools.partial(change, **asked)
        return _json(outcome_of(await self._in(self._writing, work)))

    # --- looking ----------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Whether the process answers."""
        return _json({"status": "ok", "version": __version__})

    async def ready(self, request: Request) -> Response:
        """Whether it can learn and predict; 503 and the reason if not."""
        source = self.service.source
        problem = None
        if isinstance(source, DurableLearner):
            problem = source.failure or source.stopped or source.log.database.broken
        return _json({"ready": problem is None, "problem": problem}, 503 if problem else 200)

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        lines = await self._in(self._writing, lambda: list(self.service.metrics()))
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse("\n".join(lines) + "\n", media_type=kind)

    async def versions(self, request: Request) -> Response:
        """The snapshots that one can go back to, and what happened."""
        look = self.service
        return _json(
            await self._in(
                self._writing, lambda: {"versions": look.versions(), "history": look.history()}
            )
        )

    async def status(self, request: Request) -> Response:
        """What the page shows."""
        return _json(await self._in(self._writing, self.service.status))

    async def event(self, request: Request) -> Response:
        """What became of an event."""
        text = request.path_params["sequence"]
        durable = self.service.durable
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise HTTPException(404, "there is no such event")
        if not 0 < int(text) <= durable.log.last:
            raise HTTPException(404, f"there is no event {text}; the newest is {durable.log.last}")
        if int(text) > durable.applied:
            return _json({"sequence": int(text), "applied": False})
        outcome = await self._in(self._writing, durable.outcome, int(text))
        return _json({"applied": True} | outcome_of(outcome))

    async def docs(self, request: Request) -> Response:
        """This list, for people."""
        return HTMLResponse(page.docs(self.app.openapi()), headers=page.HEADERS)

    async def page(self, request: Request) -> Response:
        """The page to look at; it holds no data, and asks for a token if one is needed."""
        return HTMLResponse(page.page(), headers=page.HEADERS)

    # --- common -----------------------------------------------------------------------------------

    def _post(
        self,
        path: str,
        method: _Handler,
        model: type[BaseModel] | None,
        need: str,
        raw: bool = False,
    ) -> None:
        content: dict[str, Any] = {}
        if model is not None:
            content[bodies.JSON] = {"schema": _inline(model.model_json_schema())}
        if raw:
            content |= {bodies.NPY: {}, "image/*": {}}
        extra: dict[str, Any] = {"requestBody": {"content": content}} if content else {}
        self.app.post(path, summary=method.__doc__, openapi_extra=extra)(
            self._answer(path, method, need)
        )

    def _answer(self, path: str, method: _Handler, need: str | None) -> _Handler:
        """A method with access, errors and numbers around it."""

        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            try:
                refusal = need and self.access.refusal(need, request.headers)
                response = _error(*refusal) if refusal else await method(request)
            except HTTPException as error:
                response = _error(error.status_code, error.detail)
            except ProxreplayError as error:
                status = next(status for kind, status in STATUSES if isinstance(error, kind))
                response = _error(status, str(error))
            except Exception:
                log.exception("%s failed", path)
                response = _error(500, "internal error; the log of the server says more")
            self.service.requests.note(path, response.status_code, time.perf_counter() - start)
            return response

        return answer

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    async def _body(self, request: Request, model: type[_Model] | None) -> _Model:
        """The body of a request, checked; raises what the client is told."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        data = await self._read(request)
        query = request.query_params
        asked = sorted(item for item in query.multi_items() if item[0] != "wait")
        request.state.digest = bodies.digest(kind, data, asked)
        if model is None:
            if data and data != b"{}":
                raise InputError("this takes no body.")
            return None  # type: ignore[return-value]
        try:
            if kind == bodies.JSON:
                return model.model_validate_json(data)
            raw = kind == bodies.NPY or kind.startswith("image/")
            if raw and "inputs" in model.model_fields:
                return model.model_validate(self._from_query(kind, data, query))
        except ValidationError as error:
            places = [(".".join(map(str, e["loc"])) or "body", e["msg"]) for e in error.errors()]
            told = [f"{place}: {message}" for place, message in places[:5]]
            raise InputError("; ".join(told)[:2000]) from None
        raise HTTPException(415, f"content-type {kind!r:.60}; give {bodies.JSON}, or for inputs "
                            f"{bodies.NPY} or an image")  # fmt: skip

    def _from_query(self, kind: str, data: bytes, query: Any) -> dict[str, Any]:
        """The fields of a request whose body is the inputs; ``label`` may be there many times."""
        fields: dict[str, Any] = {"inputs": [bodies.Raw(kind, data)]}
        for name in ("id", "keys", "idempotency_key"):
            if name in query:
                fields[name] = query[name]
        if "label" in query:
            numbers = self.service.current.predictor.intake.labels.kind != "names"
            fields["labels"] = [
                int(v) if numbers and v.isascii() and v.isdecimal() and len(v) < 19 else v
                for v in query.getlist("label")
            ]
        return fields

    async def _read(self, request: Request) -> bytes:
        most, data = self.service.options.body_bytes, bytearray()
        too_large = HTTPException(413, f"more than {most} bytes; send smaller batches")
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise too_large
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {BODY_SECONDS} s") from None
        return bytes(data)

    def _inputs(self, asked: Any, predictor: Any) -> Any:
        """The inputs of a request as an array, of which there may be so many."""
        array = bodies.array_of(asked.inputs, predictor)
        for part in array.values() if isinstance(array, dict) else (array,):
            if part.ndim and len(part) > self.service.options.batch:
                raise InputError(
                    f"{len(part)} inputs; give at most {self.service.options.batch} per request."
                )
        return array


def outcome_of(outcome: Outcome) -> dict[str, Any]:
    """What a client is told about an event."""
    told: dict[str, Any] = {"sequence": outcome.sequence, "kind": outcome.kind}
    if outcome.kind in ("learn", "remember"):
        told |= {"loss": outcome.loss, "ids": list(outcome.ids), "hits": list(outcome.hits)}
    if outcome.kind == "forget":
        told["removed"] = outcome.removed
    return told | ({} if outcome.refused is None else {"detail": outcome.refused})


def _json(value: Any, status: int = 200) -> Response:
    return JSONResponse(_finite(value), status)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _error(status: int, detail: str) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    text = detail.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"detail": text}, status, headers=headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _error(500, "internal error; the log of the server says more")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema whose definitions are where they are used."""
    definitions = schema.pop("$defs", {})
    text = json.dumps(schema)
    for name, definition in definitions.items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(definition))
    found: dict[str, Any] = json.loads(text)
    return found
