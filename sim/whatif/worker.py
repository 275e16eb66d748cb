"""A worker of the local pool: `python -m kvtape.sim.whatif.worker FD`, started by `processes`."""

from __future__ import annotations

import sys

from kvtape.sim.whatif.child import end_with_parent, link_to_parent
from kvtape.sim.whatif.executors import attempt

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Take the job and its subject, then one task after the other, until nobody sends any more."""
    end_with_parent()
    link = link_to_parent(arguments)
    try:
        job, subject = link.recv()
        while True:
            link.send(attempt(job, subject, link.recv()))
    except (EOFError, OSError):
        pass  # the parent has what it wanted, or is gone


if __name__ == "__main__":
    main(sys.argv[1:])
