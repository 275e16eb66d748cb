"""Requests from somebody's trace file, by the readers of the importers and without a log."""

from __future__ import annotations

from pathlib import Path

from kvtape.sim.blocks.block_trace import BlockTrace, Requests
from kvtape.sim.blocks.errors import CurveError, NoBlocks
from kvtape.sim.blocks.gathering import Gathering
from kvtape.sim.blocks.token_blocks import TokenBlocks
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Request
from kvtape.traces.importers.registry import AUTO, reader_for
from kvtape.traces.importers.source import Source

__all__ = ["read_requests_file", "read_trace_file"]


def read_trace_file(
    file: str | Path, *, format_name: str = AUTO, asked: Asked | None = None, notes: Notes | None = None
) -> BlockTrace:
    """The requests of one file (`-` is stdin), in the order in which an import would write them.

    Raises SourceRejected for a file or line that cannot be read, NoBlocks for a format without block ids, CurveError.
    """
    found, digest, ordered = _gathered(file, format_name, asked or Asked(), notes or Notes())
    return found.trace(digest, ordered=ordered)


def read_requests_file(
    file: str | Path, *, format_name: str = AUTO, asked: Asked | None = None, notes: Notes | None = None
) -> Requests:
    """The same with the time and the answer of each, in the order of time. Raises as `read_trace_file`."""
    found, digest, _ = _gathered(file, format_name, asked or Asked(), notes or Notes())
    return found.requests(digest)


def _gathered(file: str | Path, format_name: str, asked: Asked, notes: Notes) -> tuple[Gathering, str, bool]:
    """The requests, the digest of their file, and whether its own order counts."""
    with Source(file) as source:
        reader = reader_for(format_name, source)
        found = Gathering(source.name)
        from_tokens = TokenBlocks(asked.block_tokens)
        for record in reader.read(source, notes, asked):
            if not isinstance(record, Request):
                raise NoBlocks(
                    f"{source.name}: {reader.name} says what an engine did, not what was asked of it; "
                    f"a curve needs the requests"
                )
            ids, size = record.hashes or (), record.block_tokens
            if record.hashes is None and record.prompt_ids is not None:
                ids, size = from_tokens.ids(record.prompt_ids), from_tokens.size
            found.add(record.at_ns, record.input_tokens, ids, size, record.output_tokens or 0)
        if not len(found):
            raise CurveError(f"{source.name}: no request in it; give a trace with at least one")
        return found, source.digest(), reader.rules.ordered
