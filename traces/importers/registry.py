"""The formats, and which of them a file is."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.planner.grammar import nearest
from kvtape.traces.importers.aiperf import AIPERF
from kvtape.traces.importers.azure import AZURE
from kvtape.traces.importers.bailian import BAILIAN
from kvtape.traces.importers.burstgpt import BURSTGPT
from kvtape.traces.importers.dynamo import DYNAMO
from kvtape.traces.importers.kv_events import KV_EVENTS
from kvtape.traces.importers.llama_server import LLAMA_SERVER
from kvtape.traces.importers.mooncake import MOONCAKE
from kvtape.traces.importers.otel import OTEL
from kvtape.traces.importers.protocol import Reader
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.token_ids import LLMSERVINGSIM, TAIR
from kvtape.traces.importers.tracelab import TRACELAB, TRACELAB_REPLAY
from kvtape.traces.importers.vidur import VIDUR
from kvtape.traces.importers.weka import WEKA

__all__ = ["AUTO", "LOG_LINES", "READERS", "format_names", "reader_for"]

AUTO = "auto"
LOG_LINES = "kvtape-jsonl"
"""kvtape's own lines are no trace but a log: `log_lines` restores it, and no reader needs a database for that."""

READERS: tuple[Reader, ...] = (
    MOONCAKE,
    BAILIAN,
    AZURE,
    BURSTGPT,
    VIDUR,
    AIPERF,
    WEKA,
    TRACELAB,
    TRACELAB_REPLAY,
    LLMSERVINGSIM,
    DYNAMO,
    TAIR,
    OTEL,
    KV_EVENTS,
    LLAMA_SERVER,
)


def format_names(readers: Sequence[Reader] = READERS) -> list[str]:
    """What `--format` takes beside `auto`: the readers, and kvtape's own lines, which are no trace but a whole log."""
    return [*(reader.name for reader in readers), LOG_LINES]


def reader_for(name: str, source: Source, readers: Sequence[Reader] = READERS) -> Reader:
    """The reader called `name`; with `auto` the one that recognises the source. Raises SourceRejected."""
    if name != AUTO:
        for reader in readers:
            if reader.name == name:
                return reader
        names = [AUTO, *format_names(readers)]
        what = f"there is no format {name!r}{nearest(name, names).removesuffix(';')}"
        raise source.rejected(None, what, f"choose one of {', '.join(names)}", whole=True)
    if not source.head.strip():
        raise source.rejected(None, "empty", "give a file with at least one request", whole=True)
    found = [r for r in readers if r.recognises(source.head, source.stem)]
    if len(found) == 1:
        return found[0]
    what = f"looks like {' and '.join(r.name for r in found)}" if found else "of no format that kvtape knows by sight"
    known = ", ".join([r.name for r in found] or format_names(readers))
    raise source.rejected(None, what, f"name its format with --format: {known}", whole=True)
