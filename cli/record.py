"""`kvtape record`: run a text or a chat on a real engine and keep every cache operation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson, BackendSpec, Chunk, Content, Threads
from kvtape.cli.deferral import DeferPrefill
from kvtape.cli.isolation import Deadline, Isolate
from kvtape.cli.precision import Flash, KvType, Uncertified
from kvtape.cli.speculating import Speculate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtape.backends.clock import StoppableClock
    from kvtape.backends.protocol import Backend, Engine, SessionConfig
    from kvtape.backends.shadow import Shadow
    from kvtape.backends.speculation.spec import Speculation
    from kvtape.cli.prompts import Script
    from kvtape.planner.specs import PolicySpec

__all__ = ["record"]

SESSION_ID = "main"


def record(
    log: Annotated[Path, typer.Option("--log", metavar="L", help="The log to write, not there yet; or a log folder.")],
    model: AnyModelPath = None,
    backend: BackendSpec = "llama",
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="SPEC", help="What to keep: none, stream:sink=N,recent=N, class:budget=N."),
    ] = "stream:sink=4,recent=508",
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx", metavar="N", min=2, help="Context, tokens; default 1024, with --memory the trained one."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE|auto", help="Weights and cache must fit: the context that does."),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="F", help="A text file; - for stdin.")] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", metavar="F", help="JSON lines {role, content}; - for stdin.")
    ] = None,
    decode: Annotated[int, typer.Option("--decode", metavar="N", min=0, help="Tokens to generate each turn.")] = 64,
    content: Content = False,
    cold_tokens: Annotated[
        int, typer.Option("--cold-tokens", metavar="N", min=0, help="Budget of the cold store, tokens.")
    ] = 0,
    cold_bytes: Annotated[
        int, typer.Option("--cold-bytes", metavar="N", min=0, help="Bound its bytes too; 0 for no such bound.")
    ] = 0,
    score_all: Annotated[
        bool, typer.Option("--score-all", help="Also measure dense attention over the whole tape, beside the session.")
    ] = False,
    score_every: Annotated[
        int | None,
        typer.Option(
            "--score-every", metavar="N", min=1, help="With --score-all: queries measured together; default 32."
        ),
    ] = None,
    threads: Threads = 1,
    chunk: Chunk = 512,
    kv_type: KvType = None,
    flash: Flash = None,
    uncertified: Uncertified = False,
    defer_prefill: DeferPrefill = "off",
    speculate: Speculate = None,
    isolate: Isolate = False,
    deadline: Deadline = None,
    as_json: AsJson = False,
) -> int:
    """Run a text or a chat and write every cache operation to a log.

    Ctrl-C stops where the state is whole; the log is sealed then too.

    \b
    Example:
      kvtape record --text book.txt --policy stream:sink=4,recent=508 \\
        --n-ctx 1024 --log book.duckdb --content
    """
    from functools import partial

    from kvtape.backends.errors import UsageError
    from kvtape.backends.protocol import SessionConfig
    from kvtape.backends.registry import check_fits
    from kvtape.backends.shadow import DEFAULT_EVERY
    from kvtape.backends.speculation.spec import parse_speculation
    from kvtape.cli.deferral import check_choice
    from kvtape.cli.isolation import engine_opener
    from kvtape.cli.models import demo_model, trained_context
    from kvtape.cli.precision import as_asked, with_precision
    from kvtape.cli.prompts import chat_script, read_chat, read_text, text_script
    from kvtape.cli.recording import new_log
    from kvtape.planner.specs import parse_policy
    from kvtape.replay.targets import parse_target

    # Everything that can be wrong is looked at before the log exists.
    if (text is None) == (chat is None):
        raise UsageError("give one of --text and --chat")
    if score_every is not None and not score_all:
        raise UsageError("--score-every says how finely --score-all measures; give both")
    check_choice(defer_prefill)
    open_engine = engine_opener(isolate=isolate, deadline=deadline)
    speculation = None if speculate is None else parse_speculation(speculate, open_engine)
    spec = parse_policy(policy)
    target = parse_target(backend)
    make: Callable[[Engine], Script]
    if chat is not None:
        make = partial(chat_script, messages=read_chat(chat), decode=decode)
    else:
        make = partial(text_script, text=read_text(text or "-"), decode=decode)
    path = model if model is not None else demo_model()
    options = dict(target.options) | ({} if memory is None else {"memory": memory})
    config = SessionConfig(
        n_ctx=n_ctx or (1024 if "memory" not in options else trained_context(path)),
        chunk=chunk,
        threads=target.threads or threads,
        cold_budget_tokens=cold_tokens,
        cold_budget_bytes=cold_bytes,
        options=options,
    )
    config = with_precision(target.engine, config, kv_type, flash, uncertified=uncertified)
    check_fits(target.engine, path, config)
    log = new_log(log)
    engine = open_engine(target.engine, path, target.options)
    try:
        asked: dict[str, Any] = {"verb": "record", "backend": backend} | ({"isolate": True} if isolate else {})
        asked |= {} if memory is None else {"memory": memory}
        asked |= as_asked(kv_type, flash, uncertified=uncertified)
        every = (score_every or DEFAULT_EVERY) if score_all else None
        asked |= {} if every is None else {"score_every": every}
        return _run(
            log,
            engine,
            make(engine),
            config,
            spec,
            asked=asked,
            way=target.way,
            content=content,
            score_every=every,
            defer_prefill=defer_prefill,
            speculation=speculation,
            chat=chat is not None,
            as_json=as_json,
        )
    finally:
        engine.close()


def _run(
    log: Path,
    engine: Engine,
    script: Script,
    config: SessionConfig,
    policy: PolicySpec,
    *,
    asked: dict[str, Any],
    way: str,
    content: bool,
    score_every: int | None,
    defer_prefill: str,
    speculation: Speculation | None,
    chat: bool,
    as_json: bool,
) -> int:
    from kvtape.backends.clock import MonotonicClock, StoppableClock
    from kvtape.backends.errors import Cancelled
    from kvtape.backends.session import Session
    from kvtape.cli.deferral import defers
    from kvtape.cli.errors import INTERRUPTED
    from kvtape.cli.output import note
    from kvtape.cli.progress import WatchedSink, progress
    from kvtape.cli.recording import interruptible, live_run, recording
    from kvtape.cli.speculating import tell_gate

    clock = StoppableClock(MonotonicClock())
    kv = _open(engine, config, policy, script, way, speculation)
    if speculation is not None:
        speculation = _loaded(speculation, kv)
        tell_gate(speculation.spec, kv)
    deferring = defers(defer_prefill, kv, chat=chat)
    shadow = None if score_every is None else _shadow(engine, kv, config, clock, script, score_every)
    asked = asked | {
        "policy": policy.canonical,
        "n_ctx": config.n_ctx,
        "chunk": config.chunk,
        "threads": config.threads,
        "cold_tokens": config.cold_budget_tokens,
        "cold_bytes": config.cold_budget_bytes,
        "decode": script.decode_tokens,
        "model": engine.facts.fingerprint,
    }
    asked |= {"defer_prefill": True} if deferring else {}
    asked |= {} if speculation is None else {"speculation": speculation.spec}
    run = live_run(asked, engine, clock, log=log, prompt=script.prompt)
    said: list[int] = []
    begun = interrupted = False
    try:
        with progress("recording") as shown, recording(log, run, clock) as recorder:
            sink = WatchedSink(recorder, shown, script.n_tokens)
            with Session(
                kv,
                policy,
                sink,
                clock,
                run_id=run.run_id,
                session_id=SESSION_ID,
                content=content,
                evict_by=way,
                shadow=shadow,
                defer_prefill=deferring,
                speculation=speculation,
            ) as session:
                begun = True
                try:
                    with interruptible(session):
                        said = script.play(session)
                except (Cancelled, KeyboardInterrupt):
                    interrupted = True
    except KeyboardInterrupt:  # while the log was made or sealed
        if not log.exists():
            raise
        interrupted = True
    if begun:
        _report(log, engine.detokenize(said), as_json=as_json)
    if interrupted or (shadow is not None and shadow.behind):
        note(f"kvtape: interrupted; {log} holds all that happened until then, and is sealed")
        return INTERRUPTED
    if shadow is not None and shadow.given_up is not None:
        note(f"kvtape: {log} is whole but for the dense attention, which was given up: {shadow.given_up}")
        return 1
    return 0


def _loaded(speculation: Speculation, kv: Backend) -> Speculation:
    """The same with its drafter opened now: a draft model that cannot be opened is refused before the log exists."""
    from dataclasses import replace

    try:
        drafter = speculation.open(kv)
    except Exception:
        kv.close()
        raise
    return replace(speculation, open=lambda _: drafter)


def _open(
    engine: Engine,
    config: SessionConfig,
    policy: PolicySpec,
    script: Script,
    way: str,
    speculation: Speculation | None = None,
) -> Backend:
    """The native context, once it is certain that policy and prompt fit it."""
    from kvtape.backends.errors import ContextOverflow, UnsupportedOperation
    from kvtape.backends.feasible import check_policy, check_precision
    from kvtape.backends.verifying import as_verifier

    kv = engine.open(config)
    try:
        check_policy(policy, kv, evict_by=way, precision=check_precision(kv))
        if speculation is not None:
            if isinstance(why := as_verifier(kv), str):
                raise UnsupportedOperation("--speculate", why)
            speculation.check(kv)
        if not policy.evicts and script.n_tokens > kv.n_ctx:
            raise ContextOverflow(
                script.n_tokens, kv.n_ctx, "policy none never evicts; raise --n-ctx or choose a stream policy"
            )
    except Exception:
        kv.close()
        raise
    return kv


def _shadow(
    engine: Engine, kv: Backend, config: SessionConfig, clock: StoppableClock, script: Script, every: int
) -> Shadow:
    """A dense context for the longest tape that the script may make; `kv` is closed when there can be none."""
    from kvtape.backends.shadow import open_shadow

    try:
        return open_shadow(engine, config, clock, tokens=script.n_tokens, every=every)
    except BaseException:
        kv.close()
        raise


def _report(log: Path, said: str, *, as_json: bool) -> None:
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, emit
    from kvtape.planner.scores import DENSE

    with opened(log) as tape:
        run_id = tape.default_run().run_id
        events = tape.events(run_id, SESSION_ID)
        state = tape.state_at(run_id, SESSION_ID, None)
        body: dict[str, Any] = {
            "log": str(log),
            "run_id": run_id,
            "session_id": SESSION_ID,
            "events": len(events),
            "tape_tokens": state.tape_length,
            "resident_tokens": state.resident_tokens,
            "evicted_tokens": sum(e.n_tokens or 0 for e in events if e.op == "evict"),
            "said": said,
        }
        folded = [e for e in events if e.deferred_prefill_tokens]
        if folded:
            body |= {
                "deferred_prefill_calls": sum(e.deferred_prefill_calls or 0 for e in folded),
                "deferred_prefill_tokens": sum(e.deferred_prefill_tokens or 0 for e in folded),
            }
        drafted = [e for e in events if e.drafted_tokens is not None]
        if drafted:
            body |= {
                "drafted_tokens": sum(e.drafted_tokens or 0 for e in drafted),
                "accepted_tokens": sum(e.accepted_tokens or 0 for e in drafted),
            }
        scored = [e for e in events if e.op == "score" and e.reason == DENSE]
        if scored:
            body |= {"dense_pieces": len(scored)}
        rows = [(key, value) for key, value in body.items() if key != "run_id"]
        emit(
            "record",
            body,
            [Section(f"recorded {log}", ("what", "value"), rows)],
            as_json=as_json,
            digest=tape.logical_digest(run_id),
            digest_kind="logical",
        )
