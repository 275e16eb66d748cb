"""What apollo finds and what its delta does: facts in the middle of the essay, asked for. JSON lines, one a setting.

    python benchmarks/bench_apollo.py [--context N] [--layer L ...] [--coef C ...] [--model F]

routed      share of questions that went to the window with the fact
retrieved   share of questions where the first token of the answer is among what was retrieved
rank        median rank of that token in the logits behind the question (0: the model says it), over all tokens
first       share of questions where it is the model's choice
alone       the same rank where the question is asked without any context, of `standard`
in_context  the same rank of `standard` with the whole context in its cache: what reading would give

Exit 1 when fewer than half of the questions find their window.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np

from kvtape.backends.reference.engines.apollo import ApolloEngine
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"
FACTS = (
    (" The secret code of the garden gate is", " 7391"),
    (" The captain of the red ship is", " Marlowe"),
    (" The instrument that Ottilie plays every evening is the", " bassoon"),
    (" The password of the old library is", " walnut"),
    (" The dog of the lighthouse keeper is called", " Brisket"),
    (" The village at the end of the railway is", " Thornwick"),
    (" The colour of the baker's new door is", " turquoise"),
    (" The professor of glaciers grows", " tulips"),
)


def rank(logits: np.ndarray, token: int) -> int:
    return int((logits > logits[token]).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--layer", type=int, nargs="*", default=[20, 25, 29])
    parser.add_argument("--coef", type=float, nargs="*", default=[0.0, 10.0, 50.0, 150.0])
    parser.add_argument("--model", type=Path, default=None)
    asked = parser.parse_args()
    path = asked.model or demo_model()
    tokenizer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def tokens(text: str) -> list[int]:
        return tokenizer.tokenize(text.encode(), add_bos=False)

    essay = tokens(ESSAY.read_text(encoding="utf-8"))[: asked.context]
    context, step = list(essay), len(essay) // len(FACTS)
    for i, (question, answer) in reversed(list(enumerate(FACTS))):
        context[i * step : i * step] = tokens(f"{question}{answer}.")
    cases = [(tokens(question), tokens(answer)[0]) for question, answer in FACTS]
    weights, worst = Weights(path), 1.0
    alone = [rank(Harness(parse_engine("standard"), weights).begin(question), want) for question, want in cases]
    reading = [rank(Harness(parse_engine("standard"), weights).begin(q, context), want) for q, want in cases[:3]]
    for layer in asked.layer:
        engine = Harness(parse_engine(f"apollo:layer={layer}"), weights)
        assert isinstance(engine.engine, ApolloEngine)
        engine.engine.ingest(weights, engine.router, context)
        for coef in asked.coef:
            engine.engine.coef = coef
            ranks, routed, retrieved = [], [], []
            for (question, want), (text, answer) in zip(cases, FACTS, strict=True):
                ranks.append(rank(engine.begin(question), want))
                found = engine.engine.retrieved
                assert found is not None
                window = engine.engine.store.windows[found.window].tokens.tolist()
                needle = tokens(f"{text}{answer}")
                routed.append(any(window[i : i + len(needle)] == needle for i in range(len(window))))
                retrieved.append(want in found.tokens.tolist())
            told = {
                "layer": layer,
                "coef": coef,
                "routed": float(np.mean(routed)),
                "retrieved": float(np.mean(retrieved)),
                "rank": median(ranks),
                "first": float(np.mean([r == 0 for r in ranks])),
                "alone": median(alone),
                "in_context": median(reading),
            }
            worst = min(worst, float(np.mean(routed)))
            print(json.dumps(told), flush=True)
    return int(worst < 0.5)


if __name__ == "__main__":
    raise SystemExit(main())
