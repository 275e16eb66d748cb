"""Hooks stand beside the engines: what they see is what engines compute, and no engine knows of them."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from kvtape.backends.reference.engines.engine import StateMask
from kvtape.backends.reference.engines.standard import StandardEngine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import LayerHooks, forward
from kvtape.backends.reference.remote.ffn_remote import RemoteFfn
from support.ffn_host import served
from support.reference import kv_engine, text, weights
from support.repository import ROOT


def _imported(name: str) -> set[str]:
    """Modules that a module of the package, `folder.name`, imports, anywhere in it."""
    path = ROOT.joinpath("backends", "reference", *name.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return froms | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_nothing_that_an_engine_is_made_of_knows_of_hooks() -> None:
    """Whatever module of the package has an ENTRY, and all that these import from the package, down to the ground."""
    folder = ROOT / "backends" / "reference" / "engines"
    todo = [f"engines.{p.stem}" for p in folder.glob("*.py") if "\nENTRY = " in p.read_text(encoding="utf-8")]
    assert len(todo) >= 8
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            prefix = "kvtape.backends.reference."
            todo += [module.removeprefix(prefix) for module in _imported(name) if module.startswith(prefix)]
    assert {"model.dispatch", "engines.session_engine", "model.steps"} <= reached
    assert "model.forward" not in reached


@pytest.mark.parametrize("shape", ["llama", "qwen2moe"])
@pytest.mark.parametrize("place", ["local", "remote"])
def test_hooks_see_what_an_engine_computes(shape: str, place: str) -> None:
    """Inputs of the layers, keys and values, to the bit, wherever the feed-forward is computed."""
    model, tokens = weights(shape), text(20)
    engine = kv_engine("standard")
    assert isinstance(engine, StandardEngine)
    engine.mask = StateMask.FULL
    hidden = engine.prefill(model, LocalFfn(model), tokens)
    state = engine.last_state
    assert state is not None
    inputs: list[Floats] = []
    rows: list[tuple[Floats, Floats]] = []
    hooks = LayerHooks(
        before=lambda _, x: inputs.append(x),
        rows=lambda _, new: rows.append((new.keys, new.values)),
    )
    with served(model) as server:
        router = RemoteFfn(server.url, model) if place == "remote" else None
        last = forward(model, tokens, router=router, hooks=hooks)[-1:]
        if router:
            router.close()
    np.testing.assert_array_equal(last, hidden)
    np.testing.assert_array_equal(np.stack(inputs), state.h)
    np.testing.assert_array_equal(np.stack([keys for keys, _ in rows]), state.keys)
    np.testing.assert_array_equal(np.stack([values for _, values in rows]), state.values)
