"""The demo's last step: what would other policies and budgets have cost on the log that was just recorded?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvtape.backends.sinks import WatchingSink
from kvtape.planner.residency import RESIDENCY_OPS

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.planner.events import Event
    from kvtape.sim.costs.model import CostTable
    from kvtape.sim.world.script import Script
    from kvtape.traces.reader import Log

__all__ = ["BUDGETS", "NOTES_BUDGETS", "NOTES_POLICIES", "POLICIES", "demo_whatif", "demo_whatif_sections"]

POLICIES: Final = ("none", "stream", "class")
BUDGETS: Final = (512, 1024)

NOTES_POLICIES: Final = ("stream:sink=4", "h2o:sink=4,recent=32", "opt:sink=4,recent=32")
NOTES_BUDGETS: Final = (128, 192)
"""For the small session, whose attention was recorded."""


def demo_whatif(tape: Log, trained: int, digest: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cost model learnt from the log, and the what-if of its six policy-budget pairs, both as JSON.

    `trained`: the model's context in tokens; `digest`: the log's logical one. Of the what-if, `recorded`: whether the
    recorded policies, simulated, hold at every event what the engine held; `notes`: what-ifs of the small session
    alone, with the attention that each policy retains and the most that any could.
    """
    from kvtape.cli.demo_script import NOTES
    from kvtape.cli.output import kvtape_version
    from kvtape.cli.whatif import whatif_body
    from kvtape.sim.costs.calibrate import calibrate
    from kvtape.sim.quality.attaching import with_attention
    from kvtape.sim.whatif.grid import points_of
    from kvtape.sim.whatif.rows import Draws
    from kvtape.sim.whatif.sweep import sweep
    from kvtape.sim.world.reading import read_scripts
    from kvtape.sim.world.settings import Settings

    costs = calibrate([tape], machine=None, kvtape_version=kvtape_version())
    scripts = read_scripts(tape)
    base = Settings(arrivals="closed")

    def tried(some: Sequence[Script], policies: Sequence[str], budgets: Sequence[int]) -> dict[str, Any]:
        points = points_of({"policy": policies, "budget": budgets}, base)
        found = sweep(some, costs, points, n_ctx_train=trained)
        return whatif_body(found, points, base, costs, digest, Draws())

    notes = with_attention([s for s in scripts if s.row.session_id == NOTES.session_id], tape)
    body = tried(scripts, POLICIES, BUDGETS) | {
        "notes": tried(notes, NOTES_POLICIES, NOTES_BUDGETS),
        "recorded": _recorded_again(tape, scripts, costs, trained),
    }
    return costs.to_json(), body


def _recorded_again(tape: Log, scripts: Sequence[Script], costs: CostTable, trained: int) -> dict[str, Any]:
    from kvtape.sim.fidelity import first_difference
    from kvtape.sim.world.running import simulate
    from kvtape.sim.world.settings import Settings

    sink = _EventsBySession()
    simulate(scripts, Settings(), costs, sinks=[sink], n_ctx_train=trained)
    run, events, difference = tape.default_run().run_id, 0, None
    for script in scripts:
        session = script.row.session_id
        recorded = tape.events(run, session)
        events += sum(e.op in RESIDENCY_OPS for e in recorded)
        difference = difference or first_difference(recorded, sink.events[session])
    return {"residency_events": events, "equal": difference is None, "difference": difference}


class _EventsBySession(WatchingSink):
    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)

    def see(self, event: Event) -> None:
        self.events[event.session_id].append(event)


def demo_whatif_sections(body: dict[str, Any]) -> list[Section]:
    """The table, and whether the simulation of what was recorded agrees with it."""
    from kvtape.cli.output import Section
    from kvtape.cli.whatif import whatif_sections

    recorded = body["recorded"]
    verdict = (
        f"as recorded, simulated: the same tokens resident at all {recorded['residency_events']} events"
        if recorded["equal"]
        else f"as recorded, simulated: NOT what the engine held, {recorded['difference']}"
    )
    notes = whatif_sections(body["notes"])[0]
    title = "the small session: what is retained of the attention of all its tokens, and the most that could be (opt)"
    return [whatif_sections(body)[0], replace(notes, title=title), Section(verdict, (), ())]
