"""`kvtape serve`: an OpenAI-compatible server whose every cache operation is on tape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, BackendSpec, Chunk, Content, Threads
from kvtape.cli.isolation import Deadline, Isolate
from kvtape.cli.precision import Flash, KvType, Uncertified

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from kvtape.backends.protocol import Engine, SessionConfig
    from kvtape.planner.specs import PolicySpec
    from kvtape.replay.targets import Target
    from kvtape.serve.engines import SharedEngine
    from kvtape.serve.http.server import Access
    from kvtape.serve.opening import Serving

__all__ = ["WRITE_LATENCY_S", "serve"]

_CONTEXT = 4096
"""Tokens of a slot where neither --n-ctx nor --memory says."""

_CHUNK = 128
"""Tokens of a prompt between which others have their turn: as fast as larger pieces are, and a short wait."""

WRITE_LATENCY_S = 3.0
"""Seconds that events of a turn wait to be written together, in one transaction mostly; its end writes at once."""


def serve(
    log: Annotated[
        Path, typer.Option("--log", metavar="DIR", help="Log folder, made when it is not there; a segment a start.")
    ],
    model: AnyModelPath = None,
    backend: BackendSpec = "llama",
    policy: Annotated[
        str, typer.Option("--policy", metavar="SPEC", help="What to keep: none, stream:sink=N,recent=N, ...")
    ] = "none",
    n_ctx: Annotated[
        int | None,
        typer.Option("--n-ctx", metavar="N", min=2, help="Context of a slot, tokens; default 4096, or what fits."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE|auto", help="Weights and the caches of all slots must fit in."),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="N", min=1, help="Conversations kept at once.")] = 1,
    host: Annotated[str, typer.Option("--host", metavar="H", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any free one.")] = 8080,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="What clients call the model; default: the file's name."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="F", help="Keys of 8 characters or more, one a line; or one in KVTAPE_API_KEY."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", metavar="F", help="A jinja template instead of the model's.")
    ] = None,
    content: Content = False,
    cold_tokens: Annotated[
        int, typer.Option("--cold-tokens", metavar="N", min=0, help="Budget of each slot's cold store, tokens.")
    ] = 0,
    queue: Annotated[
        int, typer.Option("--queue", metavar="N", min=1, help="Requests that may wait; more get 429.")
    ] = 64,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="Seconds a request may take, waiting included.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option("--grace", metavar="S", min=0.0, help="Seconds that running requests have at the end.")
    ] = 10.0,
    idle: Annotated[
        float,
        typer.Option("--idle", metavar="S", min=0.0, help="Close a conversation that waited S seconds; 0: never."),
    ] = 0.0,
    threads: Threads = 1,
    chunk: Chunk = _CHUNK,
    kv_type: KvType = None,
    flash: Flash = None,
    uncertified: Uncertified = False,
    isolate: Isolate = False,
    deadline: Deadline = None,
) -> int:
    """Serve a model over the OpenAI HTTP API, and write every cache operation to a log.

    Ctrl-C or SIGTERM finishes what runs and seals the log.

    \b
    Example:
      kvtape serve --policy stream:sink=4,recent=1020 --slots 2 --log tapes
    """
    from kvtape.backends.errors import EnvironmentProblem, UsageError
    from kvtape.cli.isolation import engine_opener
    from kvtape.cli.models import demo_model
    from kvtape.cli.precision import as_asked, with_precision
    from kvtape.planner.specs import parse_policy
    from kvtape.replay.targets import parse_target

    try:
        from kvtape.serve.http.server import Access, signals_given_back
        from kvtape.serve.local import Limits
        from kvtape.serve.opening import Serving
    except ImportError as err:
        raise EnvironmentProblem(f"the server is not installed ({err}); pip install 'kvtape[serve]'") from None

    if name is not None and not name.strip():
        raise UsageError("--name is empty; say what clients call the model, or leave it for the file's name")
    # Everything that can be wrong is looked at before the log exists.
    spec = parse_policy(policy)
    target = parse_target(backend)
    open_engine = engine_opener(isolate=isolate, deadline=deadline)
    path = model if model is not None else demo_model()
    access = Access.read(host, port, api_key_file)
    template = None if chat_template is None else _template(chat_template)
    config = _config(path, target, n_ctx, memory, slots, chunk=chunk, threads=threads, cold_tokens=cold_tokens)
    config = with_precision(target.engine, config, kv_type, flash, uncertified=uncertified)
    _check_fits(target, path, config, memory, slots)
    if log.exists() and not log.is_dir():
        raise UsageError(f"{log}: a file; give a folder, which gets a segment for each start of the server")
    asked: dict[str, Any] = {
        "verb": "serve",
        "backend": backend,
        "policy": spec.canonical,
        "n_ctx": config.n_ctx,
        "chunk": chunk,
        "threads": config.threads,
        "cold_tokens": cold_tokens,
        "slots": slots,
    } | as_asked(kv_type, flash, uncertified=uncertified)
    serving = Serving(
        model=str(path),
        model_name=name or path.stem,
        config=config,
        policy=spec,
        slots=slots,
        content=content,
        evict_by=target.way,
        idle_s=idle,
        limits=Limits(queue, timeout, grace),
        template=template,
    )
    with signals_given_back(), access.listen() as listener:
        return _run(
            log,
            lambda: open_engine(target.engine, path, target.options),
            serving,
            asked,
            access=access,
            listener=listener,
            isolate=isolate,
        )


def _run(
    log: Path,
    open_engine: Callable[[], Engine],
    serving: Serving,
    asked: dict[str, Any],
    *,
    access: Access,
    listener: socket,
    isolate: bool,
) -> int:
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.errors import UsageError
    from kvtape.cli.output import kvtape_version, note
    from kvtape.cli.recording import live_run, new_log, recording
    from kvtape.serve.engines import SharedEngine
    from kvtape.serve.http.server import serve_forever
    from kvtape.serve.opening import local_service

    clock = MonotonicClock()
    engine = SharedEngine(open_engine, outlives=isolate)

    def listening(url: str) -> None:
        note(f"kvtape: {serving.model_name} on {url}, log {segment}")
        if (trained := engine.facts.n_ctx_train) < (n_ctx := serving.config.n_ctx):
            note(f"kvtape: the model was trained for {trained} tokens; of --n-ctx {n_ctx} no more are used")

    try:
        _check(engine, serving.config, serving.policy, serving.evict_by)
        try:
            log.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            raise UsageError(f"{log.parent}: no such folder; create it first") from None
        if log.stat().st_mode & 0o077:
            note(f"kvtape: others may look into {log}; chmod 700 it")
        segment = new_log(log)
        run = live_run(
            asked | {"model": engine.facts.fingerprint, "started_at_ns": clock.now_ns()}, engine, clock, log=segment
        )
        with (
            recording(segment, run, clock, max_latency_s=WRITE_LATENCY_S) as recorder,
            local_service(engine, recorder, clock, serving, run.run_id) as service,
        ):
            serve_forever(service, access, version=kvtape_version(), listener=listener, listening=listening)
            broken = service.broken
    finally:
        engine.close()
    note(f"kvtape: {segment} is sealed" if broken is None else f"kvtape: stopped: {broken}")
    return 0 if broken is None else 3


def _check_fits(target: Target, path: Path, config: SessionConfig, memory: str | None, slots: int) -> None:
    """As the registry's `check_fits`, with a remedy for the memory of all slots where --memory is that."""
    from kvtape.backends.fit import DoesNotFit, read_shape
    from kvtape.backends.registry import check_fits
    from kvtape.capacity.sizes import size_text
    from kvtape.serve.opening import memory_of_slots

    try:
        check_fits(target.engine, path, config)
    except DoesNotFit as err:
        if err.least is None or slots == 1 or memory in (None, "auto"):
            raise
        least = memory_of_slots(err.least, read_shape(path).weights_bytes, slots)
        raise DoesNotFit(
            f"--memory {memory} does not hold the weights and the smallest context of {slots} slots; give at least "
            f"{size_text(least, up=True)}, or fewer --slots"
        ) from None


def _check(engine: SharedEngine, config: SessionConfig, policy: PolicySpec, way: str) -> None:
    """Whether a slot can be opened like this. Raises what opening raises, and what the policy lacks there."""
    from kvtape.backends.feasible import check_policy, check_precision

    kv = engine.open(config)
    try:
        check_policy(policy, kv, evict_by=way, precision=check_precision(kv))
    finally:
        kv.close()


def _config(
    path: Path,
    target: Target,
    n_ctx: int | None,
    memory: str | None,
    slots: int,
    *,
    chunk: int,
    threads: int,
    cold_tokens: int,
) -> SessionConfig:
    """What a slot's session is opened with; `memory` is that of all slots. Raises UsageError."""
    from kvtape.backends.errors import UsageError
    from kvtape.backends.fit import read_shape
    from kvtape.backends.protocol import SessionConfig
    from kvtape.capacity.errors import CapacityError
    from kvtape.cli.models import trained_context
    from kvtape.serve.opening import memory_of_a_slot

    options = dict(target.options)
    if memory is not None:
        try:
            options["memory"] = memory_of_a_slot(memory, read_shape(path).weights_bytes, slots)
        except CapacityError as err:
            raise UsageError(f"--memory {memory}: {err}; or auto, or off") from None
    fits = options.get("memory", "off") != "off"
    return SessionConfig(
        n_ctx=n_ctx or (trained_context(path) if fits else _CONTEXT),
        chunk=chunk,
        threads=target.threads or threads,
        cold_budget_tokens=cold_tokens,
        options=options,
    )


def _template(path: Path) -> str:
    from kvtape.backends.errors import UsageError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{path}: cannot be read ({err}); give a chat template in jinja") from None
