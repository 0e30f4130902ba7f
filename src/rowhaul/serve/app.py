"""The HTTP application: requests are read in the event loop and scored in threads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from rowhaul import __version__
from rowhaul.errors import RowhaulError
from rowhaul.serve import bodies
from rowhaul.serve.live import LiveStats
from rowhaul.serve.live_page import live_page
from rowhaul.serve.metrics import CONTENT_TYPE, ServeMetrics
from rowhaul.serve.model import ServedModel
from rowhaul.serve.page import docs_page, openapi_request
from rowhaul.serve.refreshing import Refresher
from rowhaul.serve.requests import RequestError
from rowhaul.serve.scorer import Refreshed, Scored, Scorer
from rowhaul.serve.settings import ServeSettings

_RETRY_SECONDS = "1"
SCORE_PATH = "/score"
_GONE = 499  # the client has closed the connection; nginx's number for it


class RefusedError(Exception):
    """A request that is answered by an error: its status, what is wrong, and with which field."""

    def __init__(self, status: int, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.field = status, reason, field

    def response(self) -> Response:
        """Return the answer."""
        headers = {"Retry-After": _RETRY_SECONDS} if self.status == 503 else None
        content = {"error": self.reason} | ({"field": self.field} if self.field is not None else {})
        # Escaped: a name in JSON may have half of a surrogate pair, which UTF-8 cannot write.
        return Response(json.dumps(content), self.status, headers, media_type=bodies.JSON)


class ScoreService:
    """Scores requests in threads of this process."""

    def __init__(self, scorer: Scorer, settings: ServeSettings, metrics: ServeMetrics) -> None:
        self.scorer, self._settings, self._metrics = scorer, settings, metrics
        self._pool = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="rowhaul-score")
        self._num_running = 0  # requests that have arrived
        self._num_arriving = 0  # bytes of the others
        metrics.model(scorer.model)

    def close(self) -> None:
        """End the threads, once what they do is done."""
        self._pool.shutdown()

    async def answer(self, request: Request) -> Response:
        """Answer one request, and count it."""
        began, response = time.perf_counter(), Response(status_code=500)
        self._metrics.began()
        try:
            response = await self._answer(request)
        except RefusedError as refusal:
            response = refusal.response()
        except ClientDisconnect:
            response = Response(status_code=_GONE)  # nobody reads it; it is counted
        finally:
            self._metrics.ended(response.status_code, time.perf_counter() - began)
        return response

    async def _answer(self, request: Request) -> Response:
        self._check_room()  # before the body is read
        body = await self._in_time(self._body(request), 408, "the body did not arrive")
        self._check_room()
        self._num_running += 1
        try:
            headers = request.headers.get("content-type", ""), request.headers.get("accept", "")
            loop = asyncio.get_running_loop()
            scoring = loop.run_in_executor(self._pool, self._score, body, *headers)
            content, kind = await self._in_time(scoring, 503, "it was not scored")
        finally:
            self._num_running -= 1
        return Response(content, media_type=kind)

    def _check_room(self) -> None:
        """Turn a request away where as many have arrived as may wait.

        Those that are still arriving do not count: anyone can begin any number of them and send nothing.
        """
        if self._num_running >= self._settings.max_waiting:
            raise RefusedError(503, f"{self._num_running} requests are running or waiting; try again later")

    async def _in_time(self, work: Awaitable[Any], status: int, what: str) -> Any:
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                return await work
        except TimeoutError:
            raise RefusedError(status, f"{what} within {self._settings.timeout_seconds:g} seconds") from None

    async def _body(self, request: Request) -> bytes:
        most = self._settings.max_body_bytes
        too_large = RefusedError(
            413, f"the body has more than {most:,} bytes; send fewer candidates at a time"
        )
        if int(request.headers.get("content-length", "0")) > most:
            raise too_large
        pieces, size = [], 0
        try:
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                self._num_arriving += len(piece)
                if size > most:
                    raise too_large
                if self._num_arriving > most * self._settings.max_waiting:
                    raise RefusedError(503, f"{self._num_arriving:,} bytes are arriving; try again later")
            return b"".join(pieces)
        finally:
            self._num_arriving -= size

    def _score(self, body: bytes, content_type: str, accept: str) -> tuple[bytes, str]:
        """Read, score and answer a request, in a thread."""
        try:
            shared, candidates = bodies.parse(body, content_type, self._settings)
            scored: Scored = self.scorer.score_request(shared, candidates)
        except bodies.BodyError as error:
            raise RefusedError(400, str(error)) from None
        except bodies.TooLargeError as error:
            raise RefusedError(413, error.reason, error.field) from None
        except RequestError as error:
            raise RefusedError(422, str(error), error.field) from None
        except RowhaulError as error:  # an unknown id, where that is one
            raise RefusedError(422, str(error)) from None
        self._metrics.scored(len(scored.scores), scored.num_ids, scored.num_unknown)
        return bodies.answer(scored, accept)


class _ScoreFirst:
    """Answers requests for scores before FastAPI routes the others.

    What FastAPI would do for one of them, none of which is needed, takes as long as looking up its ids.
    """

    def __init__(self, app: ASGIApp, service: ScoreService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http" and scope["path"] == SCORE_PATH and scope["method"] == "POST":
            response = await self._service.answer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refused(request: Request, error: Exception) -> Response:
    """Answer what has no place here, in the form of all errors."""
    path = request.url.path
    if isinstance(error, RequestValidationError):
        found = error.errors()[0]
        return JSONResponse({"error": str(found["msg"]), "field": str(found["loc"][-1])}, 422)
    assert isinstance(error, HTTPException)
    reasons = {
        404: f"there is nothing at {path}; /docs says what there is",
        405: f"{path} does not take {request.method}; /docs says what it takes",
    }
    reason = reasons.get(error.status_code, str(error.detail))
    return JSONResponse({"error": reason}, error.status_code, error.headers)


def make_app(scorer: Scorer, settings: ServeSettings) -> FastAPI:
    """Return the application that serves a scorer."""
    counted = ServeMetrics()
    service = ScoreService(scorer, settings, counted)
    stats = LiveStats(scorer, counted)

    def refreshed(found: Refreshed) -> None:
        counted.refreshed(found)
        stats.refreshed(found)
        counted.model(scorer.model)

    refresher = Refresher(scorer, settings.refresh_seconds, refreshed, counted.failed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        refresher.start()
        counted.serves()
        sampling = asyncio.create_task(stats.sample_on()) if settings.page else None
        yield
        if sampling is not None:
            sampling.cancel()
        refresher.close()
        service.close()

    # FastAPI's own pages load their scripts from the internet; /docs here needs none.
    app = FastAPI(title="Rowhaul", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    page, shown = docs_page(scorer.folder, settings), live_page(scorer.folder.model)

    async def score(request: Request) -> Response:
        """Score the candidates of one request."""
        return await service.answer(request)

    async def healthz() -> dict[str, Any]:
        """Say what is served."""
        trouble = {"trouble": refresher.trouble} if refresher.trouble else {}
        return {"status": "ok", **_about(scorer.model), **trouble}

    async def exposed_metrics() -> Response:
        """Return the metrics of all processes."""
        return Response(counted.text(), media_type=CONTENT_TYPE)

    async def docs() -> Response:
        """Explain requests."""
        return HTMLResponse(page)

    async def live() -> Response:
        """Show how fresh, good and fast it is."""
        return HTMLResponse(shown)

    async def numbers(since: int = 0) -> dict[str, Any]:
        """Return what the page shows."""
        return stats.answer(since)

    app.add_middleware(_ScoreFirst, service=service)
    app.post(SCORE_PATH, openapi_extra=openapi_request(scorer.folder), response_class=Response)(score)
    app.get("/healthz")(healthz)
    app.get("/metrics", include_in_schema=False)(exposed_metrics)
    app.get("/docs", include_in_schema=False)(docs)
    app.get("/", include_in_schema=False)(live if settings.page else docs)
    if settings.page:
        app.get("/page", include_in_schema=False)(live)
        app.get("/stats", include_in_schema=False)(numbers)
    return app


def _about(model: ServedModel) -> dict[str, Any]:
    """Say which version of a model is served; of a published one also how old it is."""
    about: dict[str, Any] = {"model": model.folder.model, "step": model.step, "dense": model.dense.kind}
    if (moment := model.moment) is None:
        return about
    newest = moment.published_at if moment.event_time is None else moment.event_time
    return {
        **about,
        "version": model.version,
        "deltas": model.num_deltas,
        "changed_rows": model.rows.overlay.num_rows,
        "samples": moment.samples,
        "published_at": moment.published_at,
        "event_time": moment.event_time,
        "age_seconds": max(0.0, time.time() - newest),
    }
