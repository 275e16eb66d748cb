"""What the tape costs a server, and a chat longer than its context: ours, and `python -m llama_cpp.server`.

    python benchmarks/bench_serve.py [--rounds N] [--bare DIR] [--out F] [--only overhead|long]

Prints JSON lines. The demo model on llama.cpp, one thread.

overhead  the same chats with two servers that differ in one thing: one records, the other drops every event. Both run
          all the time; each turn goes to one and to the other, two turns in the order ABBA. Ratios of these pairs:
          median, and the 95 % interval of the median from the binomial distribution; promised: processor time at most
          3 % more
long      one chat, turn by turn, far past the context. Ours streams; theirs gets the whole chat, until it refuses, and
          then the same chat from a client that drops the oldest turns so that it fits
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import openai

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.cli.models import demo_model
from kvtape.cli.recording import live_run, recording
from kvtape.cli.serve import WRITE_LATENCY_S
from kvtape.planner.specs import parse_policy
from kvtape.serve.engines import SharedEngine
from kvtape.serve.http.access import Access
from kvtape.serve.http.server import serve_forever
from kvtape.serve.opening import Serving, local_service
from support.server_process import ServerProcess, free_port, start_bare, start_kvtape, started, why_not_bare

LIMIT = 1.03
TURN_TOKENS = 32
LONG_CTX = 512
LONG_POLICY = "stream:sink=4,recent=252"
LONG_TURNS = 16
LAST = 4
"""Turns at the end that the last figures are medians of."""
COMPUTED = re.compile(r"remaining (\d+) prompt tokens to eval")
SAID = "Tell me one more thing about rivers, gardens and stone bridges, and say why it matters to the reader of it."


class Dropped:
    """An event sink that keeps nothing."""

    def open_session(self, row: object) -> None:
        pass

    def record(self, event: object, **more: object) -> None:
        pass

    def record_scores(self, *more: object, **named: object) -> None:
        pass

    def flush(self) -> int:
        return 0


def serve_here(port: int, log: Path | None) -> None:
    """A server in this process; `log` None: it drops what it would record."""
    model, clock = demo_model(), MonotonicClock()
    engine = SharedEngine(lambda: open_engine("llama", model), outlives=False)
    run = live_run({"verb": "serve"}, engine, clock)
    with recording(log, run, clock, max_latency_s=WRITE_LATENCY_S) if log else nullcontext(Dropped()) as sink:
        serving = Serving(str(model), "served", SessionConfig(n_ctx=2048), parse_policy("none"))
        with local_service(engine, sink, clock, serving, run.run_id) as service:
            serve_forever(service, Access("127.0.0.1", port), version="0")
    engine.close()


def start_here(log: Path | None, errors: Path) -> ServerProcess:
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port), *(["--log", str(log)] if log else [])]
    return started(command, port, errors)


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


def chat(servers: Sequence[ServerProcess], n: int, turns: int = 4) -> list[list[dict[str, float]]]:
    """The same chat with both servers, turn by turn in the order AB, BA, AB, ...; of each turn, of each server, its
    seconds and processor seconds."""
    messages = [[{"role": "system", "content": f"This is chat {n}."}] for _ in servers]
    rows = []
    for turn in range(turns):
        found = [{"wall": 0.0, "cpu": 0.0} for _ in servers]
        for i in (0, 1) if (turn + n) % 2 == 0 else (1, 0):
            messages[i].append({"role": "user", "content": f"{SAID} ({turn} of {n})"})
            with client(servers[i]) as to:
                began, cpu = time.perf_counter(), servers[i].cpu_s()
                said = to.chat.completions.create(
                    model="served", messages=messages[i], max_tokens=TURN_TOKENS, temperature=0
                )
                found[i] = {"wall": time.perf_counter() - began, "cpu": servers[i].cpu_s() - cpu}
            messages[i].append({"role": "assistant", "content": said.choices[0].message.content or ""})
        rows.append(found)
    assert messages[0] == messages[1], "both answer alike, or they cannot be compared"
    return rows


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The order statistics that hold the median with 95 %; with fewer than six values the least and the greatest."""
    ordered, n = sorted(ratios), len(ratios)
    below, k = 0.0, 0
    weight = 0.5**n
    while below + weight <= 0.025:
        below += weight
        k += 1
        weight *= (n - k + 1) / k
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def overhead(folder: Path, rounds: int) -> dict[str, Any]:
    servers = start_here(folder / "log.duckdb", folder / "tape.err"), start_here(None, folder / "drop.err")
    try:
        chat(servers, -1)  # warms both up
        turns = [turn for n in range(rounds) for turn in chat(servers, n)]
    finally:
        for server in servers:
            server.stop()
    told: dict[str, Any] = {"benchmark": "serve overhead", "turns": len(turns), "limit": LIMIT}
    for what in ("cpu", "wall"):
        pairs = [[a[i][what] + b[i][what] for i in (0, 1)] for a, b in zip(turns[::2], turns[1::2], strict=True)]
        ratios = [taped / dropped for taped, dropped in pairs]
        low, high = interval(ratios)
        told[what] = round(statistics.median(ratios), 4)
        told[f"{what}_low"], told[f"{what}_high"] = round(low, 4), round(high, 4)
        told[f"{what}_ms_per_turn"] = round(statistics.median(dropped for _, dropped in pairs) / 2 * 1e3)
        told[f"{what}_ms_more"] = round(statistics.median(t - d for t, d in pairs) / 2 * 1e3, 1)
    return told


def long_chat(server: ServerProcess, *, trimming: bool = False) -> dict[str, Any]:
    """Turn after turn, until the end or a refusal. `trimming`: a client that then drops its oldest turns instead."""
    messages = [{"role": "system", "content": "You are a patient guide."}]
    rows: list[dict[str, Any]] = []
    refusals: list[str] = []
    with client(server) as to:
        while len(rows) < LONG_TURNS:
            messages.append({"role": "user", "content": f"{SAID} ({len(rows)})"})
            began = time.perf_counter()
            while (said := answered(to, messages, refusals)) is None and trimming:
                del messages[1:3]
            if said is None:
                break
            details = said.usage.prompt_tokens_details
            rows.append(
                {
                    "prompt": said.usage.prompt_tokens,
                    "cached": details and details.cached_tokens,
                    "turn_s": time.perf_counter() - began,
                    "rss": server.rss_bytes(),
                }
            )
            messages.append({"role": "assistant", "content": said.choices[0].message.content or ""})
    told: dict[str, Any] = {"turns": len(rows), "prompt_tokens_last": rows[-1]["prompt"], "refused": len(refusals)}
    if refusals:
        told["refusal"] = refusals[0]
    if rows[-1]["cached"] is not None:
        told["computed_last"] = statistics.median(r["prompt"] - r["cached"] for r in rows[-LAST:])
    told["turn_s_last"] = round(statistics.median(r["turn_s"] for r in rows[-LAST:]), 2)
    told["rss_mib"] = [round(rows[i]["rss"] / (1 << 20)) for i in (0, len(rows) // 2, -1)]
    return told


def answered(to: openai.OpenAI, messages: list[dict[str, str]], refusals: list[str]) -> Any:
    body: dict[str, Any] = {"model": "served", "messages": messages, "max_tokens": TURN_TOKENS, "temperature": 0}
    try:
        return to.chat.completions.create(**body)
    except openai.APIStatusError as err:
        refusals.append(f"HTTP {err.status_code}: {str(err.message)[:160]}")
        return None


def long(folder: Path, bare: Path | None) -> dict[str, Any]:
    model = demo_model()
    told: dict[str, Any] = {"benchmark": "serve long chat", "n_ctx": LONG_CTX, "policy": LONG_POLICY}
    ours = start_kvtape(model, folder / "tapes", "--n-ctx", str(LONG_CTX), "--policy", LONG_POLICY)
    try:
        told["kvtape"] = long_chat(ours)
    finally:
        ours.stop()
    if why_not := why_not_bare(bare):
        return told | {"llama_cpp_server": {"skipped": why_not}}
    for name, trimming in (("llama_cpp_server", False), ("llama_cpp_server_trimmed", True)):
        errors = folder / f"{name}.err"
        theirs = start_bare(model, bare, errors, n_ctx=LONG_CTX, verbose=True)
        try:
            told[name] = long_chat(theirs, trimming=trimming)
        finally:
            theirs.stop()
        computed = [int(n) for n in COMPUTED.findall(errors.read_text(errors="replace"))]
        told[name]["computed_last"] = statistics.median(computed[-LAST:])
    return told


def main() -> int:
    """Exit 1 when the tape's processor time is over the limit, or our server refuses a turn of the long chat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="chats of four turns")
    parser.add_argument("--only", choices=("overhead", "long"))
    parser.add_argument("--bare", type=Path, metavar="DIR", help="a folder with what python -m llama_cpp.server needs")
    parser.add_argument("--out", type=Path, metavar="F", help="the figures as one JSON file too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve_here(asked.serve, asked.log)
        return 0
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        if asked.only != "long":
            figures.append(overhead(Path(name), asked.rounds))
            print(json.dumps(figures[-1], sort_keys=True), flush=True)
        if asked.only != "overhead":
            figures.append(long(Path(name), asked.bare))
            print(json.dumps(figures[-1], sort_keys=True), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    slow = any(f.get("cpu", 0) > LIMIT for f in figures)
    refused = any(f["kvtape"]["refused"] for f in figures if "kvtape" in f)
    return int(slow or refused)


if __name__ == "__main__":
    sys.exit(main())
