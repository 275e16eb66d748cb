"""The command tree, and the frame every command runs in: usage errors, exit codes, interrupts, closed pipes."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

from kvtape.cli import (
    bench,
    calibrate,
    capacity,
    certify,
    curve,
    demo,
    diff,
    doctor,
    explain,
    export,
    ffn_server,
    fleet,
    gate,
    import_,
    merge,
    model_list,
    record,
    redact,
    repair,
    replay,
    report,
    run_engine,
    serve,
    show,
    simulate,
    sql,
    tune,
    verify,
    whatif,
)
from kvtape.cli.engine_list import EngineHelp
from kvtape.cli.errors import describe
from kvtape.cli.eval import evaluate

__all__ = ["app", "run"]

_COMPLETION_VARIABLE = "_KVTAPE_COMPLETE"

app = typer.Typer(
    name="kvtape",
    help="Record, replay and explain what stays in the KV cache of an LLM session.",
    epilog="Exit codes: 0 fine, 1 findings, 2 usage, 3 environment, 4 unreadable log, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _verb in (demo.demo, record.record, replay.replay, show.show, sql.sql, verify.verify, diff.diff, doctor.doctor):
    app.command()(_verb)
app.command()(capacity.capacity)
app.command()(certify.certify)
app.command()(calibrate.calibrate)
app.command()(simulate.simulate)
app.command()(whatif.whatif)
app.command()(tune.tune)
app.command()(curve.curve)
app.command()(fleet.fleet)
app.command("run")(run_engine.run_engine)
app.command(cls=EngineHelp)(bench.bench)
app.command()(ffn_server.ffn_server)
app.command()(serve.serve)
app.command()(explain.explain)
app.command()(report.report)
app.command("eval")(evaluate)
app.command()(gate.gate)
app.add_typer(model_list.models)
app.command()(repair.repair)
app.command()(merge.merge)
app.command()(redact.redact)
app.command("import")(import_.import_trace)
app.command()(export.export)


def _print_version(asked: bool) -> None:
    if asked:
        from kvtape.cli.output import kvtape_version

        print(f"kvtape {kvtape_version()}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; goes anywhere.")] = False,
) -> None:
    """Options of every command; `--debug` is read in `run`, since it may stand behind the verb."""


def run(argv: list[str] | None = None) -> int:
    """Parse and run `argv` (default: the process's arguments); the exit code."""
    args, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    _replace_closed_streams()
    for arg in args:
        if any("\ud800" <= c <= "\udfff" for c in arg):
            # A log's file cannot have such a name, nor a report speak of it.
            return _fail(2, f"argument {arg!a} is no UTF-8; rename the file")
    try:
        command = typer.main.get_command(app)
        if _COMPLETION_VARIABLE in os.environ:
            command.main(args, prog_name="kvtape")
        # Not `command.main`: it has an exit code of its own for an interrupt and for a closed pipe.
        with command.make_context("kvtape", args) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except Exit as end:
        sys.stdout.flush()
        return end.exit_code
    except TyperException as err:
        return _usage(err)
    except BrokenPipeError:
        # The reader of the pipe has seen enough. Point stdout elsewhere, or the exit would complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as err:
        if debug:
            traceback.print_exc()
        return _fail(*describe(err))


def _replace_closed_streams() -> None:
    """A process that was started with stdout or stderr closed (`>&-`) has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    return kept + args[end:], len(kept) < end


def _usage(err: TyperException) -> int:
    context = getattr(err, "ctx", None)
    message = " ".join(err.format_message().split())
    if type(err).__name__ == "NoArgsIsHelpError":
        print(err.format_message())
        return 0 if context is not None and context.parent is None else 2
    path = context.command_path if context is not None else "kvtape"
    return _fail(err.exit_code, f"{message.rstrip('.')} (see {path} --help)")


def _fail(code: int, line: str) -> int:
    sys.stdout.flush()
    print(f"kvtape: {line}", file=sys.stderr, flush=True)
    return code
