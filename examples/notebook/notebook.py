"""A marimo notebook over a log, without kvtape: marimo edit examples/notebook/notebook.py -- LOG.duckdb"""

import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import sys

    import duckdb
    import marimo as mo

    return duckdb, mo, sys


@app.cell
def _(duckdb, mo, sys):
    path = sys.argv[1] if len(sys.argv) > 1 else "toy.duckdb"
    log = duckdb.connect(path, read_only=True)
    sessions = [row[0] for row in log.sql("SELECT DISTINCT session_id FROM sessions ORDER BY ALL").fetchall()]
    session = mo.ui.dropdown(options=sessions, value=sessions[0], label="session")
    session  # noqa: B018
    return log, session


@app.cell
def _(log, mo, session):
    turns = log.execute("SELECT * EXCLUDE (run_id) FROM turns WHERE session_id = ? ORDER BY turn", [session.value])
    names = [column[0] for column in turns.description]
    turns_rows = [dict(zip(names, row, strict=True)) for row in turns.fetchall()]
    mo.vstack([mo.md("## Turns: what was reused, and what it cost"), mo.ui.table(turns_rows)])
    return (turns_rows,)


@app.cell
def _(log, mo, session):
    points = log.execute(
        "SELECT seq, resident_tokens, cold_tokens FROM residency WHERE session_id = ? ORDER BY seq", [session.value]
    ).fetchall()
    most = max((max(resident, cold) for _, resident, cold in points), default=0) or 1
    last = max(len(points) - 1, 1)

    def line(values, colour):
        places = " ".join(f"{600 * i / last:.1f},{150 - 140 * v / most:.1f}" for i, v in enumerate(values))
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'

    resident_line = line([resident for _, resident, _ in points], "#0b6")
    cold_line = line([cold for _, _, cold in points], "#46c")
    picture = f'<svg viewBox="0 0 600 160" width="100%">{resident_line}{cold_line}</svg>'
    mo.vstack([mo.md(f"## Resident (green) and cold (blue) tokens, up to {most}"), mo.Html(picture)])
    return (picture,)


@app.cell
def _(log, mo):
    lengths = log.sql("SELECT * EXCLUDE (run_id) FROM context_lengths ORDER BY at_least_tokens").fetchall()
    rows = "\n".join(f"| {r[0]} | {r[1]} | {r[4] if r[4] is not None else '-'} |" for r in lengths)
    mo.md(f"## Context lengths\n\n| at least | turns | attention pairs |\n|---|---|---|\n{rows}")
    return (lengths,)


if __name__ == "__main__":
    app.run()
