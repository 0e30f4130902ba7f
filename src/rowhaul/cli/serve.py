"""`rowhaul serve`: scores over HTTP from an exported folder."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import bytes_text, counted, say


def serve(
    folder: Path = typer.Argument(..., help="The --out of a `rowhaul export --dense`."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0: every interface."),
    port: int = typer.Option(8080, help="0: a free one."),
    workers: int = typer.Option(1, help="Processes; they share the memory of the rows."),
    threads: int = typer.Option(0, help="That score in each process; 0: processors / workers."),
    backend: str = typer.Option("auto", help="Of the dense part: auto, dots, onnx or pt2."),
    on_unknown: str | None = typer.Option(
        None, help="What keys never trained read as: init, default, error or tail; default: as the run says."
    ),
    max_candidates: int = typer.Option(10_000, help="Of a request."),
    max_body: str = typer.Option("16MiB", help="Bytes of a request."),
    max_waiting: int = typer.Option(128, help="Requests at once in a process; more get 503."),
    timeout: float = typer.Option(5.0, help="Seconds for a request to arrive, and to be scored."),
    refresh: float = typer.Option(
        1.0, help="Seconds between looks for what training has published; 0: never."
    ),
    shutdown: int = typer.Option(30, help="Seconds that running requests have after SIGTERM."),
    page: bool = typer.Option(False, "--page", help="Show freshness, AUC, requests and times at /page."),
    verify: bool = typer.Option(False, "--verify", help="Compare the checksum of all rows first."),
) -> None:
    """Serve scores over HTTP: POST /score; also /healthz, /metrics and /docs."""
    import os
    import tempfile
    from contextlib import ExitStack

    from rowhaul._quantities import parse_bytes
    from rowhaul.serve.settings import METRICS_FOLDER, ServeSettings

    check_installed()
    settings = ServeSettings(
        str(folder),
        host=host,
        port=port,
        workers=workers,
        threads=threads,
        backend=backend,
        on_unknown=on_unknown,
        max_candidates=max_candidates,
        max_body_bytes=parse_bytes(max_body, "--max-body"),
        max_waiting=max_waiting,
        timeout_seconds=timeout,
        refresh_seconds=refresh,
        shutdown_seconds=shutdown,
        page=page,
    )
    with ExitStack() as opened:
        if workers > 1:  # set before prometheus-client is imported, which looks once
            metrics = tempfile.TemporaryDirectory(prefix="rowhaul-metrics-")
            os.environ[METRICS_FOLDER] = opened.enter_context(metrics)
        from rowhaul.serve import Scorer
        from rowhaul.serve.server import bind, url_of
        from rowhaul.serve.server import serve as serve_port

        scorer = Scorer(folder, backend=backend, on_unknown=on_unknown, verify=verify)
        scorer.warm_up()  # compiled here, kernels are there for all processes
        with bind(settings) as bound:
            size = bytes_text(len(scorer.folder.rows.data))
            shown = f" {url_of(bound)}/page shows how fresh and fast it is." if page else ""
            say(
                f"{scorer.folder.model}, {scorer.step:,} steps, {size} of rows mapped, dense part by "
                f"{scorer.dense.kind}; {counted(workers, 'process', 'processes')} of "
                f"{counted(settings.num_threads, 'thread')}. {url_of(bound)}/docs explains requests.{shown}"
            )
            del scorer  # the server has its own, which lets go of a base that compaction has removed
            serve_port(settings, bound)
    say("served until told to stop; running requests were finished")


def check_installed() -> None:
    """Refuse to serve without what that needs."""
    from importlib.util import find_spec

    from rowhaul.errors import ConfigError

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {' and '.join(missing)}: pip install 'rowhaul[serve]'")
