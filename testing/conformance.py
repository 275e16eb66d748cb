"""The conformance suite: one table of scenarios that every backend runs, with or without pytest.

`pytest --kvtape-backend module:factory` runs it through `kvtape.testing.plugin`; `Laboratory(factory).run(scenario)`
runs one scenario by hand. `factory(config)` opens a session of the backend for a `SessionConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.planner.capabilities import Capabilities
from kvtape.testing import drafting, refusals, scenarios, scoring, sessions
from kvtape.testing.bench import Bench, Factory, KeyReference, NotApplicable, NotConforming
from kvtape.testing.lacking import LACKING

__all__ = [
    "CONFORMANCE_CONFIG",
    "SCENARIOS",
    "Laboratory",
    "NotApplicable",
    "NotConforming",
    "Scenario",
    "load_factory",
]

CONFORMANCE_CONFIG = SessionConfig(
    n_ctx=64, chunk=8, kv_type_k="f32", kv_type_v="f32", threads=1, cold_budget_tokens=64
)
"""What is asked when a scenario opens its session. Scoring scenarios add the option `scores=on`."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` on a fresh session; `needs` are the capabilities without which there is nothing to ask."""

    name: str
    run: Callable[[Bench], None] = field(repr=False)
    needs: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def what(self) -> str:
        """One sentence: what must hold."""
        return (self.run.__doc__ or "").strip()


_SCORES = (("scores", "on"),)
_REORDERED = ("attention_scores", "remove_middle", "cold_store", "position_shift")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("open_empty", scenarios.open_empty),
    Scenario("capabilities_and_reasons", scenarios.capabilities_and_reasons),
    Scenario("prefill", scenarios.prefill),
    Scenario("prefill_in_pieces", scenarios.prefill_in_pieces),
    Scenario("decode", scenarios.decode),
    Scenario("truncate", scenarios.truncate, ("remove_tail",)),
    Scenario("evict", scenarios.evict, ("remove_middle",)),
    Scenario("shift", scenarios.shift, ("position_shift",)),
    Scenario("admit_in_place", scenarios.admit_in_place, ("cold_store", "remove_middle")),
    Scenario("admit_append", scenarios.admit_append, ("cold_store", "remove_middle", "position_shift")),
    Scenario(
        "admit_in_a_closed_place",
        scenarios.admit_in_a_closed_place,
        ("cold_store", "remove_middle", "position_shift"),
    ),
    Scenario("refill", scenarios.refill, ("recompute_range",)),
    Scenario("rebuild", scenarios.rebuild),
    Scenario("snapshot_and_restore", scenarios.snapshot_and_restore, ("snapshot_state",)),
    Scenario("score_probe", scoring.score_probe, ("attention_scores",), _SCORES),
    Scenario("score_window", scoring.score_window, ("attention_scores",), _SCORES),
    Scenario("take_mass", scoring.take_mass, ("attention_scores",), _SCORES),
    Scenario("score_by_tape", scoring.score_by_tape, _REORDERED, _SCORES),
    Scenario("mass_by_tape", scoring.mass_by_tape, _REORDERED, _SCORES),
    Scenario("verify", drafting.verify),
    Scenario("verify_undone", drafting.verify_undone),
    Scenario("verify_with_scores", drafting.refused_with_scores, ("attention_scores",), _SCORES),
    Scenario("bad_tokens", refusals.bad_tokens),
    Scenario("bad_positions", refusals.bad_positions),
    Scenario("bad_blocks", refusals.bad_blocks, ("cold_store", "remove_middle")),
    Scenario("bad_snapshots", refusals.bad_snapshots, ("snapshot_state",)),
    Scenario("context_overflow", refusals.context_overflow),
    Scenario("cancel", scenarios.cancel),
    Scenario("fault", scenarios.fault),
    Scenario("close", scenarios.close),
    Scenario("witness_changes_nothing", scenarios.witness_changes_nothing),
    Scenario("two_sessions", scenarios.two_sessions),
    *(Scenario(f"without_{flag}", run) for flag, run in LACKING.items()),
    Scenario("session_turns", sessions.turns),
    Scenario("session_deferred", sessions.deferred_session),
    Scenario("session_streaming", sessions.streaming_session),
    Scenario("session_class", sessions.class_session),
    Scenario("session_scored", sessions.scored_session, ("attention_scores",), _SCORES),
    Scenario("session_without_scores", sessions.session_without_scores),
    Scenario("session_surgery", sessions.surgery_session),
    Scenario("session_fatal", sessions.fatal_session),
)
"""In the order in which they make sense: what fails first explains what fails later."""


class Laboratory:
    """Runs scenarios on one backend, and remembers the keys that identify its rows."""

    def __init__(self, factory: Factory, config: SessionConfig = CONFORMANCE_CONFIG) -> None:
        self._factory, self._config = _checked(factory), config
        self._reference = KeyReference(self._factory)

    def run(self, scenario: Scenario) -> None:
        """Raises NotConforming with what is wrong, NotApplicable where the backend does not claim the ability."""
        config = replace(self._config, options={**self._config.options, **dict(scenario.options)})
        try:
            bench = Bench(self._factory, self._reference, config)
        except UsageError as err:
            if not scenario.options:
                raise NotConforming(f"the factory refuses {config}: {err}") from err
            raise NotApplicable(f"options {config.options} are refused: {err}") from None
        try:
            for flag in scenario.needs:
                if not getattr(bench.backend.capabilities, flag):
                    raise NotApplicable(f"{flag} is false: {bench.backend.refusal(flag)}")
            scenario.run(bench)
        finally:
            bench.close()


def _checked(factory: Factory) -> Factory:
    """Says so when what comes back is no backend, before a scenario stumbles over it."""

    def opened(config: SessionConfig) -> Backend:
        backend = factory(config)
        if not isinstance(getattr(backend, "capabilities", None), Capabilities):
            raise NotConforming(f"the factory returned {backend!r}: an open protocol.Backend has `capabilities`")
        return backend

    return opened


def load_factory(text: str) -> Factory:
    """The factory that `module:name` names. Raises UsageError that says what is missing."""
    module, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"--kvtape-backend {text!r}: write it as module:factory")
    try:
        factory = getattr(import_module(module), name)
    except ModuleNotFoundError as err:
        raise UsageError(f"--kvtape-backend {text!r}: {err}; is it on the Python path?") from None
    except AttributeError:
        raise UsageError(f"--kvtape-backend {text!r}: module {module} has no {name}") from None
    except Exception as err:
        why = f"{type(err).__name__}: {err}"
        raise UsageError(
            f"--kvtape-backend {text!r}: importing {module} failed: {why}"
            f'; mend it; python -c "import {module}" shows where'
        ) from err
    if not callable(factory):
        raise UsageError(f"--kvtape-backend {text!r}: {name} is not callable; name a function that makes a backend")
    loaded: Factory = factory
    return loaded
