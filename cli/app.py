"""The command tree, and the frame every command runs in: usage errors, exit codes, interrupts, closed pipes."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Annotated, Any

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
    top,
    tune,
    verify,
    whatif,
)
from kvtape.cli.configured import configured
from kvtape.cli.engine_list import EngineHelp
from kvtape.cli.errors import describe
from kvtape.cli.eval import evaluate

__all__ = ["app", "run"]

app = typer.Typer(
    name="kvtape",
    help="Record, replay and explain what stays in the KV cache of an LLM session.",
    epilog="Exit codes: 0 fine, 1 findings, 2 usage, 3 environment, 4 unreadable log, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(demo.demo)
app.command()(configured(record.record))
app.command()(configured(replay.replay))
app.command()(show.show)
app.command()(top.top)
app.command()(sql.sql)
app.command()(verify.verify)
app.command()(diff.diff)
app.command()(doctor.doctor)
app.command()(configured(capacity.capacity))
app.command()(configured(certify.certify))
app.command()(configured(calibrate.calibrate))
app.command()(configured(simulate.simulate))
app.command()(configured(whatif.whatif))
app.command()(configured(tune.tune))
app.command()(configured(curve.curve))
app.command()(configured(fleet.fleet))
app.command("run")(configured(run_engine.run_engine))
app.command(cls=EngineHelp)(configured(bench.bench))
app.command()(configured(ffn_server.ffn_server))
app.command()(configured(serve.serve))
app.command()(explain.explain)
app.command()(report.report)
app.command("eval")(configured(evaluate))
app.command()(configured(gate.gate))
app.add_typer(model_list.models)
app.command()(repair.repair)
app.command()(merge.merge)
app.command()(redact.redact)
app.command("import")(configured(import_.import_trace))
app.command()(configured(export.export))


def _print_version(asked: bool) -> None:
    if asked:
        from kvtape.cli.versions import version_lines

        print("\n".join(version_lines()))
        raise Exit


def _show_completion(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from kvtape.cli.completion_scripts import SCRIPTS, chosen_shell

        print(SCRIPTS[chosen_shell(context.params.get("shell"))], end="")
        raise Exit


def _install_completion(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from kvtape.cli.completion_scripts import chosen_shell, install

        place, left = install(chosen_shell(context.params.get("shell")), os.environ)
        print(f"{place} is written; it holds for shells that start from now on" + (f"\n{left}" if left else ""))
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; goes anywhere.")] = False,
    shell: Annotated[
        str | None,
        typer.Option("--shell", metavar="bash|zsh|fish", is_eager=True, help="Whose completion; default: this one's."),
    ] = None,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion", callback=_install_completion, help="Let the shell complete kvtape's lines."
        ),
    ] = False,
    show_completion: Annotated[
        bool, typer.Option("--show-completion", callback=_show_completion, help="Print what would be installed.")
    ] = False,
) -> None:
    """Options of every command; `--debug` is read in `run`, since it may stand behind the verb, the others where they
    stand.
    """


def run(argv: list[str] | None = None) -> int:
    """Parse and run `argv` (default: the process's arguments); the exit code."""
    args, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    _replace_closed_streams()
    for arg in args:
        if any("\ud800" <= c <= "\udfff" for c in arg):
            # A log's file cannot have such a name, nor a report speak of it.
            return _fail(2, f"argument {arg!a} is no UTF-8; rename the file")
    try:
        command = _tree()
        if (asking := os.environ.get("KVTAPE_COMPLETE")) is not None:
            return _complete(asking, command, args)
        # Not `command.main`: it has an exit code of its own for an interrupt and for a closed pipe.
        with command.make_context("kvtape", args) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except Exit as end:
        sys.stdout.flush()
        return end.exit_code
    except TyperException as err:
        return _usage(err, args)
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


@cache
def _tree() -> Any:
    """The commands as they are parsed. Made once: a process may run many, and making it takes as long as one."""
    return typer.main.get_command(app)


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    return kept + args[end:], len(kept) < end


def _complete(shell: str, command: Any, words: list[str]) -> int:
    from kvtape.cli.completion import SHELLS, answer

    if shell not in SHELLS:
        return _fail(
            2, f"KVTAPE_COMPLETE={shell} is no shell that is known; set it to {', '.join(SHELLS)}, or unset it"
        )
    print(answer(shell, command, words), end="", flush=True)
    return 0


def _usage(err: TyperException, args: list[str]) -> int:
    if type(err).__name__ == "NoArgsIsHelpError":
        context = getattr(err, "ctx", None)
        print(err.format_message())
        return 0 if context is not None and context.parent is None else 2
    from kvtape.cli.usage_errors import usage_line

    return _fail(err.exit_code, usage_line(err, _tree(), args))


def _fail(code: int, line: str) -> int:
    sys.stdout.flush()
    print(f"kvtape: {line}", file=sys.stderr, flush=True)
    return code
