"""The NumPy reference beside llama.cpp on the demo model: how near, how fast, how large. JSON lines.

    python benchmarks/bench_reference.py [--positions N] [--model M.gguf]

agree       KL and top-1 of every position of a real text (the shipped essay): the file as it is, and its weights as
            f32 and as f16, which the gguf library converts into a temporary folder. nll: of the text, both
speed       CPU time of llama.cpp on the f32 file over that of the reference on the same: prefill, and decode behind it;
            one thread each, taken in turns, the median of the pairs
memory      the largest resident size of a process that prefills `--context` tokens (8,192) on the reference, in MiB
tiles       what the plain and the packed path of the file itself cost; that their hidden rows are equal to the bit

Exit 1 when a promise is missed: the mean KL of each file, 6 times llama.cpp, 3 GiB.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from kvtape.backends.logits import log_softmax
from kvtape.backends.reference.model.dispatch import advance, logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import forward
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.rewritten_gguf import rewrite_gguf

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"
LIMIT_MEAN_KL = {"as it is": 1e-2, "f16": 1e-5, "f32": 1e-8}
LIMIT_TIMES, LIMIT_MIB = 6.0, 3072
CHUNK = 128
PROMPT, STEPS, PAIRS = 512, 16, 5


def main() -> int:
    args = _arguments()
    if args.only_prefill:
        return _only_prefill(args.model, args.only_prefill)
    missed = False
    with tempfile.TemporaryDirectory(prefix="kvtape-bench-") as folder:
        f32, f16 = (rewrite_gguf(args.model, Path(folder) / f"{kind}.gguf", storage=kind) for kind in ("f32", "f16"))
        files = {"as it is": args.model, "f32": f32, "f16": f16}
        tokens = _tokens(args.model, args.positions)
        hidden = {name: forward(Weights(path), tokens) for name, path in files.items()}
        for name, path in files.items():
            agreed = _agreement(path, hidden[name], tokens)
            missed |= agreed["mean_kl"] > LIMIT_MEAN_KL[name]
            _say(what="agree", weights=name, limit_mean_kl=LIMIT_MEAN_KL[name], **agreed)
        # The f32 file has the very numbers that the packed one is dequantised to.
        _say(what="converted", f32_is_the_file_to_the_bit=bool(np.array_equal(hidden["f32"], hidden["as it is"])))
        times = _speed(f32, tokens)
        missed |= max(times["prefill_times"], times["decode_times"]) > LIMIT_TIMES
        _say(what="speed", limit_times=LIMIT_TIMES, **times)
        _say(what="tiles", **_tiles(args.model, tokens))
        mib, seconds = _memory(f32, args.context)
        missed |= mib > LIMIT_MIB
        _say(what="memory", context=args.context, mib=mib, cpu_s=seconds, limit_mib=LIMIT_MIB)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--positions", type=int, default=2304)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--only-prefill", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or demo_model()
    return args


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _llama(path: Path, n_ctx: int, *, every: bool) -> llama_cpp.Llama:
    """llama.cpp with f32 rows and one thread; `every`: logits of every position are kept."""
    return llama_cpp.Llama(
        str(path), n_ctx=n_ctx, n_batch=512, n_threads=1, n_threads_batch=1, logits_all=every,
        type_k=0, type_v=0, flash_attn=False, verbose=False,
    )  # fmt: skip


def _tokens(model: Path, n: int) -> list[int]:
    llama = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    tokens = list(llama.tokenize(ESSAY.read_bytes(), add_bos=False))
    if len(tokens) < n:
        raise SystemExit(f"the text has {len(tokens)} tokens, {n} are asked for")
    return tokens[:n]


def _agreement(path: Path, hidden: Any, tokens: list[int]) -> dict[str, Any]:
    """KL(reference || llama.cpp) in nats, top-1 agreement, the largest logit difference, both mean NLLs."""
    llama = _llama(path, len(tokens), every=True)
    llama.eval(tokens)
    weights = Weights(path)
    kl, same, furthest, nll = [], 0, 0.0, np.zeros(2)
    for start in range(0, len(tokens), CHUNK):
        ours = logits_of(weights, hidden[start : start + CHUNK])
        theirs = llama.scores[start : start + len(ours)]
        furthest = max(furthest, float(np.abs(ours - theirs).max()))
        same += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        p, q = log_softmax(ours), log_softmax(theirs)
        kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        after = np.asarray(tokens[start + 1 : start + 1 + len(ours)])
        rows = np.arange(len(after))
        nll -= [p[rows, after].sum(), q[rows, after].sum()]
    llama.close()
    ours_nll, theirs_nll = (nll / (len(tokens) - 1)).tolist()
    return {
        "positions": len(tokens),
        "mean_kl": float(np.mean(kl)),
        "max_kl": float(np.max(kl)),
        "top1": same / len(tokens),
        "max_logit_difference": furthest,
        "nll": ours_nll,
        "nll_llama": theirs_nll,
    }


def _speed(path: Path, tokens: list[int]) -> dict[str, float]:
    """Seconds of CPU, and how many times those of llama.cpp, for a prefill and for a token behind it."""
    weights, llama = Weights(path), _llama(path, PROMPT + STEPS, every=False)
    local, prompt, more = LocalFfn(weights), tokens[:PROMPT], tokens[PROMPT : PROMPT + STEPS]
    rows = KvRows(weights)

    def ours(part: list[int], start: int) -> None:
        positions = np.arange(start, start + len(part))
        logits_of(weights, advance(weights, local, embed(weights, part), positions, rows)[-1:])

    def theirs(part: list[int], start: int) -> None:
        llama.eval(part)

    taken: dict[str, list[float]] = {}
    for _ in range(PAIRS):
        llama.reset()
        rows.truncate(0)
        for name, run in (("reference", ours), ("llama", theirs)):
            taken.setdefault(f"prefill_{name}", []).append(_cpu(lambda run=run: run(prompt, 0)))
            steps = [_cpu(lambda i=i, t=t, run=run: run([t], PROMPT + i)) for i, t in enumerate(more)]
            taken.setdefault(f"decode_{name}", []).append(statistics.median(steps))
    llama.close()
    out = {f"{name}_s": statistics.median(values) for name, values in taken.items()}
    for kind in ("prefill", "decode"):
        pairs = zip(taken[f"{kind}_reference"], taken[f"{kind}_llama"], strict=True)
        out[f"{kind}_times"] = statistics.median(a / b for a, b in pairs)
    return out


def _tiles(path: Path, tokens: list[int]) -> dict[str, Any]:
    """Plain and packed on the same prompt and one token behind it."""
    out: dict[str, Any] = {}
    hidden = []
    for packed in (False, True):
        weights = Weights(path, packed=packed)
        local, rows = LocalFfn(weights), KvRows(weights)
        advance(weights, local, embed(weights, tokens[:1]), np.arange(1), KvRows(weights))
        name = weights.report().path
        prompt, step = np.arange(PROMPT), np.arange(PROMPT, PROMPT + 1)
        x = [embed(weights, tokens[:PROMPT]), embed(weights, tokens[PROMPT : PROMPT + 1])]
        got: list[Any] = []
        for what, part, at in (("prefill", x[0], prompt), ("decode", x[1], step)):
            start = time.process_time()
            got.append(advance(weights, local, part, at, rows))
            out[f"{name}_{what}_s"] = time.process_time() - start
        out[f"{name}_mib"] = round(weights.report().resident_bytes / 2**20, 1)
        hidden.append(np.concatenate(got))
    return {**out, "equal_to_the_bit": bool(np.array_equal(*hidden))}


def _cpu(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _memory(path: Path, context: int) -> tuple[float, float]:
    """MiB at the peak and seconds of CPU of a process that only prefills, its engine's rows kept."""
    command = [sys.executable, __file__, "--model", str(path), "--only-prefill", str(context)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return said["mib"], said["cpu_s"]


def _only_prefill(path: Path, n: int) -> int:
    weights = Weights(path)
    tokens = np.random.default_rng(1).integers(0, weights.n_vocab, n)
    rows = KvRows(weights)
    x = advance(weights, LocalFfn(weights), embed(weights, tokens), np.arange(n), rows)
    logits_of(weights, x[-1:])
    # Not ru_maxrss: that begins with the size of the parent.
    status = Path("/proc/self/status").read_text(encoding="ascii").split()
    kib = int(status[status.index("VmHWM:") + 1])
    _say(mib=round(kib / 1024, 1), cpu_s=round(time.process_time(), 1), rows=rows.n_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
