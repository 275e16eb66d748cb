"""The whole answer to "what fits?": the six numbers, the reason, every cache, and what was assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvtape.capacity.allocation import Allocation, CacheSettings, EngineRule
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerKind
from kvtape.capacity.layers import ModelKV
from kvtape.capacity.resolve import MemoryBudget, ResolvedContext, ServedTokens, resolve
from kvtape.capacity.sizes import size_text

__all__ = ["Answer", "Question", "answer"]

MIB = 2**20
_UNBOUNDED: Final = 2**40
"""Tokens that no memory holds, if the cache grows by as little as a byte a token."""


@dataclass(frozen=True, slots=True)
class Question:
    """`engine`: a spec of `capacity.engines`. `memory` None: sizes alone, nothing is clamped.

    `cold_bytes`: budget of the cold store, on the host.
    """

    model: ModelKV
    engine: str
    settings: CacheSettings
    type_k: str
    type_v: str
    memory: MemoryBudget | None = None
    request: int | ServedTokens | None = None
    hot_limit: int | None = None
    cold_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """`allocation` is None where not even the smallest context fits."""

    question: Question
    rule: EngineRule
    geometry: KVGeometry
    sizing: Sizing
    context: ResolvedContext
    allocation: Allocation | None
    notes: tuple[str, ...]

    @property
    def ideal_bytes(self) -> int:
        """Rows that attention can see: of every slot's own context, or of one that has the whole shared pool."""
        settings, n_ctx = self.question.settings, int(self.context.effective)
        if not n_ctx:
            return 0
        if settings.unified:
            return self.geometry.bytes(n_ctx) + (settings.slots - 1) * self.geometry.bytes(0)
        return self.geometry.bytes(-(-n_ctx // settings.slots), settings.slots)

    @property
    def least_memory_bytes(self) -> int | None:
        """Where nothing fits: the free memory from which on the smallest context does. None where something does."""
        memory = self.question.memory
        if memory is None or self.allocation is not None:
            return None
        return memory.least_free(self.sizing.peak_bytes(self.sizing.smallest))

    def body(self) -> dict[str, Any]:
        """As JSON, with stable keys; sizes in bytes or MiB, contexts in tokens.

        `context_limit` is the trained context of all slots together; `n_ctx` is what the engine makes of `effective`.
        """
        asked, context, found = self.question, self.context, self.allocation
        has_memory = asked.memory is not None
        return {
            "arch": asked.model.arch,
            "engine": asked.engine,
            "rule": f"{self.rule.name}: {self.rule.text}",
            "model_max": asked.model.model_max,
            "context_limit": context.model_max,
            "request": context.request,
            "memory_tokens": context.memory_tokens if has_memory else None,
            "effective": int(context.effective),
            "hot": context.hot,
            "planner": context.planner,
            "clamp_reason": None if context.clamp_reason is None else str(context.clamp_reason),
            "n_ctx": found.n_ctx if found else 0,
            "per_sequence": found.n_ctx_seq if found else 0,
            "slots": asked.settings.slots,
            "unified": asked.settings.unified,
            "kv_type_k": asked.type_k,
            "kv_type_v": asked.type_v,
            "ideal_bytes": self.ideal_bytes,
            "allocated_bytes": found.total_bytes if found else 0,
            "peak_bytes": self.sizing.peak_bytes(int(context.effective)) if found else 0,
            "marginal_bytes": self.geometry.marginal_bytes(),
            "weights_bytes": asked.memory.weights if asked.memory else asked.model.weights_bytes,
            "cache_budget_bytes": asked.memory.for_cache if asked.memory else None,
            "least_memory_bytes": self.least_memory_bytes,
            "caches": [
                {
                    "part": p.part,
                    "layers": p.layers,
                    "cells": p.cells,
                    "streams": p.streams,
                    "k_mib": p.k_bytes / MIB,
                    "v_mib": p.v_bytes / MIB,
                    "total_mib": p.total_bytes / MIB,
                }
                for p in (found.parts if found else ())
            ],
            "assumptions": [*self.notes, *self._nothing_fits()],
        }

    def _nothing_fits(self) -> list[str]:
        least, memory = self.least_memory_bytes, self.question.memory
        if least is None or memory is None:
            return []
        said = f"nothing fits: the smallest context, {self.sizing.smallest} tokens, takes {size_text(least)} of memory"
        granted = least - memory.reserve + memory.reserved
        if memory.limit is not None and memory.limit < granted:
            said += f" and a limit of {size_text(granted)}"
        return [f"{said} ({least} bytes, weights and headroom included)"]


def answer(question: Question) -> Answer:
    """Raises CapacityError for what the engine would refuse, and where no context is known to start from."""
    model, settings = question.model, question.settings
    geometry = model.geometry.stored_as(question.type_k, question.type_v)
    rule = engine_rule(question.engine)
    sizing = Sizing(geometry, rule, settings)
    limit = model.model_max * (1 if settings.unified else settings.slots)
    if not limit:
        if question.request is None:
            raise CapacityError("the model does not say its trained context (context_length); give one with --ctx")
        limit = int(question.request)
    memory = question.memory
    context = resolve(
        limit,
        (lambda _: limit) if memory is None else _fit(sizing, limit),
        MemoryBudget(free=0) if memory is None else memory,
        question.request,
        hot_limit=question.hot_limit,
        cold_tokens=_cold_tokens(geometry, question.cold_bytes),
    )
    served = int(context.effective)
    allocation = sizing.allocate(served) if served else None
    return Answer(question, rule, geometry, sizing, context, allocation, _notes(question, served, allocation))


def _fit(sizing: Sizing, limit: int) -> Callable[[int], int]:
    """What the memory holds, whatever the model was trained for; `limit` where nothing grows with the context."""
    unbounded = sizing.fit(_UNBOUNDED)

    def fit(budget: int) -> int:
        found = unbounded(budget)
        return limit if found == _UNBOUNDED else found

    return fit


def _cold_tokens(geometry: KVGeometry, cold_bytes: int) -> int:
    """A cold block holds the rows of every layer, windowed ones too."""
    per_token = geometry.marginal_bytes(0)
    return cold_bytes // per_token if per_token else 0


def _notes(question: Question, served: int, found: Allocation | None) -> tuple[str, ...]:
    notes = list(question.model.notes)
    settings = question.settings
    if question.memory is not None and not question.memory.weights:
        notes.append("assumed: no weights in this memory; give their size with --weights")
    latent = any(group.kind is LayerKind.LATENT for group in question.model.geometry.groups)
    if latent and question.engine.startswith("llama.cpp") and question.type_k != question.type_v:
        types = f"{question.type_k} and {question.type_v}"
        notes.append(f"llama.cpp refuses latent rows of {types} from July 2026 on (#25871); give one type")
    if found is None:
        return tuple(notes)
    if found.n_ctx != served:
        notes.append(f"the engine rounds {served} tokens up to {found.n_ctx}; the asked number is what may be used")
    if settings.slots > 1 and settings.unified:
        notes.append(f"{settings.slots} slots share one pool of {found.n_ctx} tokens: together they can overflow it")
    elif settings.slots > 1:
        notes.append(f"{settings.slots} slots have {found.n_ctx_seq} tokens each")
    return tuple(notes)
