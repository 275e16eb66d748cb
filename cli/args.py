"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AnyModelPath",
    "AsJson",
    "BackendSpec",
    "BlockTokens",
    "Chunk",
    "Content",
    "LogOrTrace",
    "LogPath",
    "ModelPath",
    "NewLog",
    "PlotPath",
    "SessionId",
    "Threads",
    "TraceFormat",
    "log_place",
]


def log_place(text: str) -> Path:
    """The path of a log; of `parquet://` places one that is absolute, since a path keeps one slash of two."""
    where = text.removeprefix("parquet://")
    return Path(text) if where == text or "://" in where else Path(f"parquet:{Path(where).absolute()}")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys instead of tables.")]
LogPath = Annotated[
    Path,
    typer.Argument(
        metavar="LOG", help="A log file, a log folder, or parquet://FOLDER.", show_default=False, parser=log_place
    ),
]
ModelPath = Annotated[
    Path | None,
    typer.Option("--model", metavar="M.gguf|DIR", help="The model; default: the demo model when it is the log's."),
]
AnyModelPath = Annotated[
    Path | None,
    typer.Option("--model", metavar="M.gguf|DIR", help="A GGUF or OpenVINO folder; default: the demo model."),
]
BackendSpec = Annotated[
    str, typer.Option("--backend", metavar="SPEC", help="llama, openvino or reference[:key=value,...].")
]
Content = Annotated[bool, typer.Option("--content", help="Store token ids (default: keyed hashes only).")]
PlotPath = Annotated[
    Path | None,
    typer.Option("--plot", metavar="F.svg|png", help="Draw it too, as SVG or PNG (extra png).", show_default=False),
]
SessionId = Annotated[str | None, typer.Option("--session", metavar="S", help="Only this session.", show_default=False)]
NewLog = Annotated[Path, typer.Option("--out", metavar="NEW", help="The new log; must not exist.", show_default=False)]
Threads = Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Engine threads.")]
Chunk = Annotated[int, typer.Option("--chunk", metavar="N", min=1, help="Tokens in one prefill call.")]
BlockTokens = Annotated[
    int | None,
    typer.Option("--block-tokens", metavar="N", min=1, help="Tokens of a block, where they are not the format's."),
]
LogOrTrace = Annotated[
    str,
    typer.Argument(metavar="LOG|FILE", help="A log, or a trace that kvtape import reads; - for a trace on stdin."),
]
TraceFormat = Annotated[
    str, typer.Option("--format", metavar="NAME", help="Format of a trace: auto, or a name of docs/importing.md.")
]
