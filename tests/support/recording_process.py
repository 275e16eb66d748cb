"""A recorder in a process of its own, for tests that kill it, starve it or look over its shoulder.

python -m support.recording_process LOG MODE [N]

forever   record, flush and print each acknowledged seq, until killed
count     record N events and close
full      record until the disk is full; print "acked SEQ", the error, and exit with its code
resume    go on with LOG; print the error that this raises
segment   record a session into a log folder, say "half" and wait for a line on stdin in its middle, then seal
hold      record three events, print "ready", wait for a line on stdin, then close
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from kvtape.planner.events import Op
from kvtape.traces.errors import TraceError
from kvtape.traces.recorder import Recorder
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row

__all__ = ["main"]


def main(path: Path, mode: str, n: int) -> int:
    if mode == "full" and n:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))
    if mode == "segment":
        return segment(path, n)
    try:
        recorder = Recorder(
            path, run_row(), clock=TickClock(), key=KEY, batch_events=16, max_latency_s=0, resume=mode == "resume"
        )
        if mode == "script":
            record_script(recorder, script())
            recorder.seal()
            return 0
        recorder.open_session(session_row())
        if mode == "hold":
            for seq in range(3):
                recorder.record(event(seq))
            recorder.flush()
            say("ready")
            sys.stdin.readline()
        else:
            record(recorder, n if mode == "count" else 1 << 40)
        recorder.close()
    except TraceError as err:
        say(f"error {type(err).__name__}: {err}")
        return err.exit_code
    return 0


def segment(folder: Path, n: int) -> int:
    """Session `s<n>` of the run that all recorders share, under the folder's own key."""
    made = script(f"s{n}")
    recorder = Recorder(folder, run_row(), clock=TickClock(), batch_events=3, max_latency_s=0)
    recorder.open_session(session_row(made.session_id))
    for e in made.events:
        row = made.tokens.get(e.seq)
        recorder.record(e, tokens=None if row is None else row.tokens)
        if e.seq == len(made.events) // 2:
            recorder.flush()
            say("half")
            sys.stdin.readline()
    recorder.seal()
    return 0


def record(recorder: Recorder, n: int) -> None:
    for seq in range(n):
        recorder.record(event(seq, Op.DECODE, start=seq, stop=seq + 1, reason="x" * 64), tokens=[seq % 97])
        if seq % 7 == 6:
            recorder.flush()
            say(f"acked {seq}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
