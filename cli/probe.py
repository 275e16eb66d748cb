"""One engine, one model, one small session: `python -m kvtape.cli.probe ENGINE MODEL` prints what it can do.

`kvtape doctor` runs this in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

__all__ = ["main", "probe"]

_CONTEXT_TOKENS = 256
_TEXT = "A cache is a promise about the future, made with the past as its only witness."


def probe(name: str, model: Path) -> dict[str, object]:
    """Load the model, prefill a sentence, decode one token. Raises what the engine raises."""
    import numpy as np

    from kvtape.backends.protocol import SessionConfig
    from kvtape.backends.registry import open_engine

    engine = open_engine(name, model, {})
    try:
        backend = engine.open(SessionConfig(n_ctx=_CONTEXT_TOKENS, cold_budget_tokens=_CONTEXT_TOKENS))
        tokens = engine.tokenize(_TEXT)
        computed = backend.prefill(tokens, 0)
        run = backend.decode_until(1, backend.n_ctx, len(tokens), computed.logits, lambda row: int(np.argmax(row)))
        flags = asdict(backend.capabilities)
        refusals = {flag: backend.refusal(flag) for flag, value in flags.items() if value is False}
        backend.close()
    finally:
        engine.close()
    return {
        "capabilities": flags,
        "refusals": {flag: why for flag, why in refusals.items() if why},
        "said": list(run.tokens),
        "version": engine.version,
    }


def main() -> int:
    """Print the facts as one JSON line; on failure one line on stderr and the exit code of the error."""
    from kvtape.cli.errors import describe

    try:
        print(json.dumps(probe(sys.argv[1], Path(sys.argv[2])), sort_keys=True))
    except Exception as err:
        code, line = describe(err)
        print(f"kvtape: {line}", file=sys.stderr)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
