"""Write the answers of `docs/sql.md` anew: each question is asked of the log it names (`make docs`)."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path

from kvtape.cli.output import kvtape_version
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import open_log

PAGE = Path(__file__).parent / "sql.md"
EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTION = re.compile(r"```sql (\w+)\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


def make_logs(folder: Path) -> dict[str, Path]:
    """The logs that the page asks, by the name it has for them."""
    logs = {"toy": folder / "toy.duckdb"}
    runpy.run_path(str(EXAMPLES / "record_toy.py"))["record"](str(logs["toy"]))
    for source in ("requests.jsonl", "server.log", "kv_events.jsonl"):
        name = source.partition(".")[0]
        logs[name] = folder / f"{name}.duckdb"
        import_trace([EXAMPLES / "traces" / source], logs[name], kvtape_version=kvtape_version())
    return logs


def answered(text: str, logs: dict[str, Path]) -> str:
    """The page with every answer as it comes out now."""

    def fresh(found: re.Match[str]) -> str:
        name, query, _ = found.groups()
        with open_log(logs[name]) as log:
            columns, rows = log.sql(query)
        lines = ["\t".join(columns), *("\t".join("-" if v is None else str(v) for v in row) for row in rows)]
        return f"```sql {name}\n{query}```\n\n```text\n" + "\n".join(lines) + "\n```\n"

    return QUESTION.sub(fresh, text)


def main() -> None:
    """Rewrite docs/sql.md."""
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(answered(PAGE.read_text(encoding="utf-8"), make_logs(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main()
