"""A tape on openvino_genai's pipelines: requests as the engine counts them, and no word of what it does not reveal."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import UsageError
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import fold
from kvtape.replay.replayer import replay
from kvtape.serve import capture
from kvtape.serve.taping.errors import CaptureRefused
from kvtape.traces.reader import open_log
from kvtape.traces.verify import verify
from support.batching import batching_model

PROMPTS = ["the cache holds", "another prompt"]


@functools.cache
def genai() -> Any:
    import openvino_genai

    return openvino_genai


def config(n: int = 5) -> Any:
    made = genai().GenerationConfig()
    made.max_new_tokens = n
    made.ignore_eos = True
    return made


@pytest.fixture(scope="module")
def llm() -> Any:
    return genai().LLMPipeline(str(batching_model()), "CPU")


def scheduler(**options: Any) -> Any:
    made = genai().SchedulerConfig()
    made.num_kv_blocks = 64
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.fixture(scope="module")
def batching() -> Any:
    return genai().ContinuousBatchingPipeline(str(batching_model()), scheduler(), "CPU")


@pytest.fixture(autouse=True)
def _chats_are_deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def tensor(ids: list[int]) -> Any:
    import openvino

    return openvino.Tensor(np.array([ids], np.int64))


def sessions(path: Path) -> dict[str, list[Event]]:
    """Events by session, of a log that verifies; no event claims anything of residency."""
    assert not verify(path).findings
    with open_log(path) as log:
        run = log.default_run()
        found = {row.session_id: log.events(run.run_id, row.session_id) for row in log.sessions()}
        assert {row.backend for row in log.sessions()} == {"openvino-genai"}
    for events in found.values():
        assert fold(events).resident_tokens == 0
        assert all(e.resident_tokens is None and e.reused is None and e.kv_bytes is None for e in events)
        assert {e.op for e in events} <= {Op.OPEN, Op.PROMPT, Op.GENERATE, Op.REFUSE, Op.CLOSE}
        assert all("unknown" in (e.detail or "") for e in events if e.op is Op.PROMPT)
    return found


def talk(llm: Any) -> list[object]:
    said: list[object] = [llm.generate(PROMPTS[0], config()), llm(PROMPTS[1], config())]
    said.append(llm.generate(tensor([5, 6, 7]), config()).tokens)
    said.append(llm.generate(PROMPTS, config()).texts)
    llm.start_chat("be brief")
    said += [llm.generate("one", config()), llm.generate("two", config(3))]
    llm.finish_chat()
    with pytest.raises(RuntimeError):
        llm.generate(tensor([]), config())
    return said


def test_what_an_llm_pipeline_says_stays_and_its_requests_are_told(llm: Any, tmp_path: Path) -> None:
    bare, methods = talk(llm), dict(vars(type(llm)))
    with capture(llm, log=tmp_path / "L", model=batching_model()) as tape:
        assert talk(llm) == bare
    assert tape.error is None
    assert dict(vars(type(llm))) == methods
    found = sessions(tmp_path / "L")
    assert list(found) == ["request-1", "request-2", "request-3", "request-4", "request-5", "chat-1", "request-6"]
    (prompt,) = [e for e in found["request-3"] if e.op is Op.PROMPT]
    (answer,) = [e for e in found["request-3"] if e.op is Op.GENERATE]
    assert (prompt.prompt_tokens, prompt.token_count_source) == (3, "engine")
    assert (answer.completion_tokens, answer.token_count_source, answer.reason) == (5, "engine", "length")
    assert [str(e.op) for e in found["chat-1"]] == ["open", *["prompt", "generate"] * 2, "close"]
    assert [str(e.op) for e in found["request-6"]] == ["open", "refuse", "close"]


def test_our_own_counts_are_those_of_the_engine_where_it_tells_them(llm: Any, tmp_path: Path) -> None:
    history = [{"role": "user", "content": PROMPTS[0]}]
    told = llm.generate(genai().ChatHistory(history), config()).perf_metrics.get_num_input_tokens()
    with capture(llm, log=tmp_path / "L"):
        llm.generate(PROMPTS[0], config())
    (prompt,) = [e for e in sessions(tmp_path / "L")["request-1"] if e.op is Op.PROMPT]
    assert (prompt.prompt_tokens, prompt.token_count_source) == (told, "fallback")


def test_requests_of_a_batching_pipeline_are_followed_step_by_step(batching: Any, tmp_path: Path) -> None:
    with capture(batching, log=tmp_path / "L"):
        one = batching.add_request(7, tensor(list(range(5, 75))), config())
        two = batching.add_request(8, PROMPTS[1], config(3))
        while batching.has_non_finished_requests():
            batching.step()
        said = [output.generated_ids for output in one.read_all()]
        gone = batching.add_request(9, PROMPTS[0], config(50))
        batching.step()
        del gone
        while batching.has_non_finished_requests():
            batching.step()
        batching.generate([tensor([5, 6, 7]), tensor([8, 9])], [config(4), config(2)])
    assert len(said[0]) == 5
    assert str(two.get_status().name) == "FINISHED"
    found = sessions(tmp_path / "L")
    told = {
        name: (p.prompt_tokens, g.completion_tokens, g.reason, json.loads(g.detail or "{}").get("request_id"))
        for name, events in found.items()
        for p, g in [[e for e in events if e.op in (Op.PROMPT, Op.GENERATE)]]
    }
    assert told["request-1"] == (70, 5, "finished", 7)
    assert told["request-2"][1:] == (3, "finished", 8)
    assert told["request-3"][1:] == (None, "dropped", 9)
    # Counted from the ids: the engine figures of such a call are of both prompts together.
    assert [told[f"request-{i}"][:3] for i in (4, 5)] == [(3, 4, "length"), (2, 2, "length")]
    (answer,) = [e for e in found["request-1"] if e.op is Op.GENERATE]
    cache = json.loads(answer.detail or "{}")["cache"]
    assert cache["usage_percent"] > 0
    assert cache["size_bytes"] > 0


def test_the_scheduler_is_told_where_it_is_given_and_unknown_else(batching: Any, tmp_path: Path) -> None:
    given = scheduler(use_cache_eviction=True, enable_prefix_caching=True)
    for name, options in (("with", {"scheduler": given}), ("without", {})):
        with capture(batching, log=tmp_path / name, **options):
            batching.generate([PROMPTS[0]], [config(2)])
        (events,) = sessions(tmp_path / name).values()
        said = json.loads(events[0].detail or "{}")["scheduler"]
        if name == "without":
            assert said == "unknown"
        else:
            assert said["enable_prefix_caching"] is True
            assert said["num_kv_blocks"] == 64
            assert said["eviction"]["most"] == given.cache_eviction_config.get_max_cache_size()


def test_such_a_log_is_not_replayed_and_says_why(llm: Any, tmp_path: Path) -> None:
    with capture(llm, log=tmp_path / "L"):
        llm.generate(PROMPTS[0], config(2))
    with open_log(tmp_path / "L") as log, pytest.raises(UsageError, match="requests only"):
        replay(log, ["llama"], batching_model())


def test_of_two_pipelines_only_the_captured_one_is_heard(llm: Any, tmp_path: Path) -> None:
    other = genai().LLMPipeline(str(batching_model()), "CPU")
    methods = dict(vars(type(llm)))
    with capture(llm, log=tmp_path / "A"):
        with capture(other, log=tmp_path / "B"):
            llm.generate(PROMPTS[0], config(1))
        other.generate(PROMPTS[0], config(1))
        llm.generate(PROMPTS[0], config(1))
    assert dict(vars(type(llm))) == methods
    assert len(sessions(tmp_path / "A")) == 2
    with open_log(tmp_path / "B") as log:
        assert log.sessions() == []


def test_what_a_pipeline_cannot_give_is_refused(llm: Any, tmp_path: Path) -> None:
    for options in ({"check": True}, {"content": True}):
        with (
            pytest.raises(CaptureRefused, match="reveals neither"),
            capture(llm, log=tmp_path / "L", **options),
        ):
            pass
    assert not (tmp_path / "L").exists()
