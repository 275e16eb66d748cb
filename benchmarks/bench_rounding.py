"""What rounding does to logits, text by text: the figures of docs/reference.md. JSON lines, one a text and way.

    python benchmarks/bench_rounding.py [--model M.gguf] [--pieces N]

Every session computes a text piece by piece and evicts as much as it computes: N evicts, each with a shift where keys
are rebased. Replayed on llama.cpp:

kl, top1            of its logits and the reference
rounding, ...       of the reference and the reference with rows rounded to 8 bits, by four steps
times               the first over the second: what `replay.findings.Gate.rounding_times` bounds
plain_kl            as kl, on the same weights as f32: what is not rounding

Exit 1 when a session misses the gate, or plain weights are further than 1e-4 from the reference.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvtape.backends.registry import open_engine
from kvtape.capacity.model import read_model
from kvtape.cli.models import demo_model
from kvtape.planner.events import Way
from kvtape.replay.findings import Gate
from kvtape.replay.replayer import replay
from kvtape.replay.report import BackendReport

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.rewritten_gguf import rewrite_gguf
from support.script_log import ScriptLog
from support.scripted import Script

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"
TEXTS = {
    "one word": "word " * 700,
    "laughter": "ha " * 700,
    "zeros": "0" * 700,
    "one sentence": "the cat sat on the mat. " * 100,
    "lines": "a\n" * 400,
    "essay": ESSAY.read_text(encoding="utf-8")[:4000],
}
FIRST, PIECE, SINK = 96, 8, 4
ALWAYS = Gate(mean_kl=-1.0)
"""Nothing passes it, so that rounding is always measured."""
LIMIT_PLAIN = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--pieces", type=int, default=16)
    args = parser.parse_args()
    model = args.model or demo_model()
    missed = False
    with tempfile.TemporaryDirectory(prefix="kvtape-bench-") as folder:
        plain = rewrite_gguf(model, Path(folder) / "f32.gguf", storage="f32")
        for name, tokens in _tokenised(model, FIRST + PIECE * args.pieces).items():
            for way in (Way.GAP, Way.REBASED):
                script = _session(tokens, way)
                found, of_plain = _replayed(script, model), _replayed(script, plain)
                missed |= not _passes(found) or of_plain.agreement.mean_kl > LIMIT_PLAIN  # type: ignore[union-attr]
                print(json.dumps({"text": name, "way": way, "evicts": args.pieces} | _row(found, of_plain)), flush=True)
    return 1 if missed else 0


def _tokenised(model: Path, n: int) -> dict[str, list[int]]:
    engine = open_engine("llama", model, {})
    try:
        return {name: engine.tokenize(text)[:n] for name, text in TEXTS.items()}
    finally:
        engine.close()


def _session(tokens: list[int], way: Way) -> Script:
    script = Script()
    script.prefill(tokens[:FIRST])
    for at in range(FIRST, len(tokens), PIECE):
        gone = SINK + at - FIRST
        script.evict(gone, gone + PIECE, way=way)
        script.prefill(tokens[at : at + PIECE])
    script.close()
    return script


def _replayed(script: Script, path: Path) -> BackendReport:
    log = ScriptLog([script], read_model(path).fingerprint, kv_type_k="f16", kv_type_v="f16")
    report = replay(log, ["llama"], path, gate=ALWAYS)
    (backend,) = report.backends
    if not backend.residency_equal:
        raise SystemExit(f"{path.name}: {report.first_divergence}")
    return backend


def _passes(found: BackendReport) -> bool:
    return all(Gate().passes(*both) for both in zip(found.agreements, found.roundings, strict=True))


def _row(found: BackendReport, plain: BackendReport) -> dict[str, Any]:
    (agreement,), (rounding,) = found.agreements, found.roundings
    assert agreement is not None
    assert rounding is not None
    assert plain.agreement is not None
    return {
        "kl": agreement.mean_kl,
        "top1": agreement.top1,
        "rounding_kl": rounding.mean_kl,
        "rounding_top1": rounding.top1,
        "times": agreement.mean_kl / rounding.mean_kl,
        "plain_kl": plain.agreement.mean_kl,
        "passes": _passes(found),
    }


if __name__ == "__main__":
    raise SystemExit(main())
