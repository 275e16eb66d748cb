"""What both demos make of their log: answers, costs, what-ifs, a curve, a picture, the report, what to try next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.traces.reader import Log

__all__ = ["QUESTIONS", "DemoResults", "demo_results", "fresh", "write_result"]

QUESTIONS: Final[dict[str, str]] = {
    "Why was each prompt prefilled?": (
        "SELECT session_id AS session, turn, reason, count(*) AS prefills, sum(tokens) AS tokens FROM why_prefilled "
        "GROUP BY ALL ORDER BY session, turn, min(seq)"
    ),
    "What did each operation cost?": (
        "SELECT op, way, events, tokens, round(ns_per_token / 1e6, 3) AS ms_per_token FROM costs "
        "WHERE op <> 'plan' ORDER BY op, way"
    ),
    "What did each plan keep, and what did it cost to carry out?": (
        "SELECT session_id AS session, seq, turn, total_tokens AS before, hot_tokens AS kept, evicts, "
        "round(evict_ns / 1e6, 1) AS evict_ms FROM decisions ORDER BY session_id, seq"
    ),
}
"""The three questions whose answers the demo prints."""

_RESULTS: Final = ("replay", "answers", "costs", "whatif", "curve")
_MAP, _REPORT = "map.svg", "report.html"


@dataclass(frozen=True, slots=True)
class DemoResults:
    """Of the log `out`/demo.duckdb. `digest`: its logical one; `answers`, `whatif`, `curve`: as --json has
    them; `rates`: the curve for people."""

    out: Path
    digest: str
    events: int
    answers: dict[str, Any]
    whatif: dict[str, Any]
    curve: dict[str, Any]
    rates: Section

    @property
    def log(self) -> Path:
        return self.out / "demo.duckdb"

    def draw(self, tape: Log) -> None:
        """The residency map of the first session as a picture, and the report with every result beside the log."""
        from kvtape.cli.demo_script import ESSAY
        from kvtape.cli.plots.residency import residency_picture
        from kvtape.cli.plots.writing import write_picture
        from kvtape.report.write import write_report

        session = tape.session(tape.default_run().run_id, ESSAY.session_id)
        write_picture(self.out / _MAP, residency_picture(tape, session))
        shown = [path for name in _RESULTS if name != "answers" and (path := self.out / f"{name}.json").exists()]
        write_report(tape, self.out / _REPORT, results=shown)

    def body(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        found = {"log": str(self.log), "events": self.events, "answers": self.answers, "whatif": self.whatif}
        return found | {"curve": self.curve, "report": str(self.out / _REPORT), "next": self.next_commands()}

    def sections(self) -> list[Section]:
        from kvtape.cli.demo_whatif import demo_whatif_sections
        from kvtape.cli.output import Section

        answers = [Section(q, tuple(a["columns"]), [tuple(row) for row in a["rows"]]) for q, a in self.answers.items()]
        return [*answers, *demo_whatif_sections(self.whatif), self.rates]

    def closing(self) -> list[Section]:
        """Where the report is, and three things to try next, as they can be typed."""
        from kvtape.cli.output import Section

        log = f"{self.events} events are in {self.log}, what was resident in {self.out / _MAP}"
        commands = [(f"  {command}",) for command in self.next_commands()]
        return [
            Section(f"the report: {self.out / _REPORT} (open it in a browser); {log}", (), ()),
            Section("three things to try next, the last one on a request trace of your own:", (), commands),
        ]

    def next_commands(self) -> list[str]:
        from shlex import quote

        kvtape, log, out = quote(_invoked()), quote(str(self.log)), quote(str(self.out))
        return [
            f"{kvtape} show {log} --session essay --at 40",
            f'{kvtape} sql {log} "SELECT * FROM why_prefilled ORDER BY seq"',
            f"{kvtape} whatif trace.jsonl --costs {out}/costs.json --policy none --policy stream --budget 4096",
        ]


def demo_results(tape: Log, out: Path, trained: int) -> DemoResults:
    """Ask, calibrate, simulate and sweep, and write each result to `out`. `trained`: the model's context in tokens."""
    from kvtape.cli.curve import curve_body, curve_sections
    from kvtape.cli.demo_whatif import demo_whatif
    from kvtape.cli.files import write_whole
    from kvtape.cli.output import canonical_json
    from kvtape.sim.blocks.from_log import read_log
    from kvtape.sim.blocks.policies.registry import choose_policy
    from kvtape.sim.blocks.rules import rules_named
    from kvtape.sim.blocks.sweep import sweep

    digest = tape.logical_digest()
    answers = {question: _ask(tape, query) for question, query in QUESTIONS.items()}
    costs, tried = demo_whatif(tape, trained, digest)
    trace, names = read_log(tape), ["fifo", "lru", "opt"]
    swept = sweep(trace, rules_named("kvtape").varied(warmup=0.0), [choose_policy(name) for name in names])
    curve = curve_body(trace, swept, names, None)
    write_result(out, "answers", answers, digest)
    write_result(out, "whatif", tried)
    write_result(out, "curve", curve)
    write_whole(out / "costs.json", canonical_json(costs) + "\n")  # as kvtape calibrate --out writes it
    events = tape.sql("SELECT count(*) FROM events")[1][0][0]
    rates = curve_sections(trace, swept)[0]
    rates = replace(rates, title=f"{rates.title}, every request counted (--warmup 0)")
    return DemoResults(out, digest, events, answers, tried, curve, rates)


def fresh(out: Path) -> Path:
    """The path of the log in an existing folder, with what an earlier demo left there removed."""
    from kvtape.backends.errors import UsageError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{out}: is a file; name a folder with --out") from None
    made = (*(f"{name}.json" for name in _RESULTS), _MAP, _REPORT)
    for old in (*out.glob("demo.duckdb*"), *(out / name for name in made)):
        old.unlink(missing_ok=True)
    return out / "demo.duckdb"


def write_result(out: Path, verb: str, body: dict[str, Any], digest: str | None = None) -> None:
    """As the command prints it with --json, to `out`/VERB.json. `digest`: the log's logical one; none: the body's."""
    import json

    from kvtape.cli.files import write_whole
    from kvtape.cli.output import enveloped

    said = enveloped(verb, body, digest, "report" if digest is None else "logical")
    write_whole(out / f"{verb}.json", json.dumps(said, sort_keys=True, indent=1, ensure_ascii=False) + "\n")


def _ask(tape: Log, query: str) -> dict[str, Any]:
    from kvtape.cli.sql import jsonable

    columns, rows = tape.sql(query)
    return {"query": query, "columns": list(columns), "rows": [[jsonable(v) for v in row] for row in rows]}


def _invoked() -> str:
    """The command as it was typed, `.venv/bin/kvtape` say; under another name, as a module say, just `kvtape`."""
    import sys

    return sys.argv[0] if Path(sys.argv[0]).name == "kvtape" else "kvtape"
