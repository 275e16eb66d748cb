"""What the log raises. `exit_code` is what the command line returns.

TraceError                     message = file, what, what to do
|-- LogMissing          (2)    no file there
|-- NotALog             (2)    another kind of file, or a database that kvtape did not write
|-- LogTooNew           (2)    written by a newer kvtape
|-- LogExists           (2)    something is there that recording must not touch
|-- LogLocked           (2)    held by the process that records into it; readers take a snapshot instead
|-- KeyMismatch         (2)    the key file is not the one the log was written with
|-- NoSuchRow           (2)    no such run or session in the log
|-- SqlRejected         (2)    a query that fails, or that would write
|-- RecorderClosed      (2)    recorded into after close or seal
|-- SequenceError       (2)    events of a session must arrive with seq 0, 1, 2, ...
|   |-- SequenceGap            a seq was left out
|   `-- SequenceConflict       a seq came again with other content
|-- LogWriteFailed      (3)    disk full and the like; acknowledged events are safe
`-- LogUnreadable       (4)    torn, cut or damaged
"""

from __future__ import annotations

__all__ = [
    "KeyMismatch",
    "LogExists",
    "LogLocked",
    "LogMissing",
    "LogTooNew",
    "LogUnreadable",
    "LogWriteFailed",
    "NoSuchRow",
    "NotALog",
    "RecorderClosed",
    "SequenceConflict",
    "SequenceError",
    "SequenceGap",
    "SqlRejected",
    "TraceError",
]


class TraceError(Exception):
    exit_code = 2


class LogMissing(TraceError):
    pass


class NotALog(TraceError):
    pass


class LogTooNew(TraceError):
    pass


class LogExists(TraceError):
    pass


class LogLocked(TraceError):
    pass


class KeyMismatch(TraceError):
    pass


class NoSuchRow(TraceError):
    pass


class SqlRejected(TraceError):
    pass


class RecorderClosed(TraceError):
    pass


class SequenceError(TraceError):
    pass


class SequenceGap(SequenceError):
    pass


class SequenceConflict(SequenceError):
    pass


class LogWriteFailed(TraceError):
    exit_code = 3


class LogUnreadable(TraceError):
    exit_code = 4
