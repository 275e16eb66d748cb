"""What a reader of a format is, and the two small records that readers make of files.

A reader knows one format: it recognises it, states its units and its block rule, and turns a file into records. It
writes nothing and knows nothing of the log; `rows` makes events of the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from kvtape.planner.events import Op
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.source import Source

__all__ = ["U64_MAX", "Asked", "Reader", "Record", "Request", "Rules", "Step"]

U64_MAX = 2**64 - 1

BlockRule = Literal["ceil", "floor"]
IdScope = Literal["global", "file"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a format declares about itself.

    `time_unit`: of its stamps, in words. `block_tokens`: tokens that one block id stands for; None where the format
    has no block ids or each file states its own. `block_rule`: `ceil` lists a partial last block, `floor` leaves it
    out. `id_scope`: whether an id means one thing everywhere, or only inside its file. `ordered`: the file's own order
    counts; else records are put in order of (time, line).
    """

    time_unit: str
    block_tokens: int | None = None
    block_rule: BlockRule | None = None
    id_scope: IdScope | None = None
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked of an import: another block size than the format's, repeated rows left out."""

    block_tokens: int | None = None
    drop_duplicates: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a source tells it. What the source does not say is None.

    `at_ns`: its arrival on the source's own clock. `session`: None makes it a session of its own. `hashes`: ids of
    the blocks of the whole prompt, first to last, each for `block_tokens` tokens. `prompt_ids`, `output_ids`: token
    ids. `reused`: prompt tokens that the source found in its cache. `first_token_ns`, `elapsed_ns`: from arrival to
    the first token and to the end. `stop`: why generation ended. `detail`: what else the source says.
    """

    line: int
    at_ns: int
    input_tokens: int
    output_tokens: int | None = None
    session: str | None = None
    hashes: Sequence[int] | None = None
    block_tokens: int | None = None
    prompt_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = None
    reused: int | None = None
    first_token_ns: int | None = None
    elapsed_ns: int | None = None
    stop: str | None = None
    model: str | None = None
    detail: Mapping[str, Any] = {}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One event of an engine, in the order in which the engine did it: `op` with the columns it fills.

    `hashes`, `tokens`: of the tokens it brought, as in `Request`. `block`: (id, start, stop) of a block that it made.
    """

    line: int
    at_ns: int
    session: str
    op: Op
    columns: Mapping[str, Any] = {}
    hashes: Sequence[int] | None = None
    block_tokens: int | None = None
    tokens: Sequence[int] | None = None
    blocks: Sequence[tuple[int, int, int]] = ()
    detail: Mapping[str, Any] = {}


Record = Request | Step


class Reader(Protocol):
    """A format. Instances hold no state between files."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for people: what the format is and where it comes from."""

    @property
    def rules(self) -> Rules: ...

    def recognises(self, head: bytes, name: str) -> bool:
        """Whether a file that begins with `head` and is called `name` is certainly of this format."""

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        """The records of a file. Raises SourceRejected."""
