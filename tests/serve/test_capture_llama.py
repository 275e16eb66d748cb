"""A tape on a `llama_cpp.Llama`: what it says stays what it says, and the log is what its memory was."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Op, Way
from kvtape.replay.replayer import replay
from kvtape.serve import capture
from kvtape.traces.reader import open_log
from support.captured import llama, read_back, said
from support.llama_tiny import model_file

TEXT = "the cache holds the keys and the values of the tokens"


def drafter() -> Any:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(num_pred_tokens=5)


def converse(engine: Any) -> list[object]:
    """What a process may do with one, from the chat to the cache itself; what it was told."""
    told: list[object] = [
        said(engine, TEXT, max_tokens=40, temperature=0.0),
        said(engine, "the cache holds the planner", max_tokens=8, seed=3, stream=True),
        said(engine, "the cache holds the planner", max_tokens=8, seed=4),
        engine("another", max_tokens=5, seed=7, stop=["e"])["choices"][0],
        engine.create_chat_completion([{"role": "user", "content": "hello"}], max_tokens=5, seed=5)["choices"][0],
    ]
    engine.reset()
    engine.eval(engine.tokenize(b"by hand"))
    for _ in range(3):
        token = engine.sample(temp=0.0)
        told.append(token)
        engine.eval([token])
    saved = engine.save_state()
    engine.eval([70, 71, 72])
    engine.load_state(saved)
    told.append(said(engine, "by hand, and more", max_tokens=4, seed=9))
    with pytest.raises(ValueError, match="exceed context window"):
        engine("x" * 600, max_tokens=4)
    # As StreamingLLM has it: a hole, the rest moved over it, and on.
    engine._ctx.kv_cache_seq_rm(0, 2, 5)
    n = engine.n_tokens
    engine._ctx.kv_cache_seq_shift(0, 5, n, -3)
    engine.input_ids[2 : n - 3] = engine.input_ids[5:n].copy()
    engine.n_tokens = n - 3
    engine.eval([100, 101])
    told.append(engine.sample(temp=0.0))
    return told


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_nothing_that_is_said_changes_and_the_log_replays_equal_on_both_engines(tmp_path: Path, drafts: bool) -> None:
    options = {"draft_model": drafter(), "n_batch": 256} if drafts else {}  # its scores have room for one batch
    with llama(**options) as engine:
        bare = converse(engine)
    with llama(**options) as engine, capture(engine, log=tmp_path / "L", content=True, check=True) as tape:
        assert converse(engine) == bare
    assert tape.error is None
    log = read_back(tmp_path / "L")
    assert {str(op) for op in (Op.EVICT, Op.SHIFT, Op.SNAPSHOT, Op.RESTORE, Op.REFUSE, Op.TRUNCATE)} <= set(log.ops)
    drafted = [(e.drafted_tokens, e.accepted_tokens) for e in log.events if e.drafted_tokens]
    assert bool(drafted) is drafts
    with open_log(tmp_path / "L") as opened:
        report = replay(opened, ["llama", "openvino"], model_file())
    assert report.equal, report.first_divergence
    assert all(b.witness_positions == b.residency_events for b in report.backends)


def test_a_turn_is_told_as_a_session_tells_it(tmp_path: Path) -> None:
    with llama() as engine, capture(engine, log=tmp_path / "L", check=True):
        first = [5 + i for i in range(40)]
        assert engine.create_completion(first, max_tokens=3, temperature=0.0)
        said_tokens = engine.input_ids[40 : engine.n_tokens].tolist()
        second = [*first, *said_tokens, 9, 10]
        list(zip(range(2), engine.generate(second, temp=0.0), strict=False))
        list(zip(range(1), engine.generate(second[:20], temp=0.0), strict=False))
    log = read_back(tmp_path / "L")
    n = 40 + len(said_tokens)
    assert log.told("start", "stop", "reused", "prefilled", "dropped", "reason") == [
        ("open", None, None, None, None, None, "none"),
        ("prompt", 0, None, None, None, None, None),
        ("prefill", 0, 32, 0, 40, 0, None),
        ("prefill", 32, 40, None, None, None, None),
        ("generate", None, None, None, None, None, "given:caller"),
        ("decode", 40, n, None, None, None, None),
        ("prompt", n, None, None, None, None, None),
        ("prefill", n, n + 2, n, 2, 0, None),
        ("generate", None, None, None, None, None, "given:caller"),
        ("decode", n + 2, n + 3, None, None, None, None),
        ("prompt", 19, None, None, None, None, None),
        ("truncate", 19, n + 3, None, None, None, "logits"),
        ("prefill", 19, 20, 19, 1, n + 3 - 19, None),
        ("generate", None, None, None, None, None, "given:caller"),
        ("close", None, None, None, None, None, None),
    ]
    assert log.row.backend == "llama"
    assert (log.row.n_ctx, log.row.chunk, log.row.kv_type_k, log.row.flash_attention) == (256, 32, "f32", False)
    assert log.row.capabilities is None


def test_a_prompt_that_is_there_whole_computes_nothing(tmp_path: Path) -> None:
    with llama() as engine, capture(engine, log=tmp_path / "L", check=True):
        engine.eval([5, 6, 7, 8])
        assert next(engine.generate([5, 6, 7, 8], temp=0.0)) >= 0
    log = read_back(tmp_path / "L")
    assert log.ops == ["open", "prompt", "prefill", "prompt", "generate", "close"]
    assert (log.events[3].reused, log.events[3].prefilled, log.events[3].prompt_tokens) == (4, 0, 4)


@settings(max_examples=4)
@given(
    st.lists(
        st.tuples(
            st.text("abc \n", min_size=1, max_size=60),
            st.integers(0, 2**31 - 1),
            st.sampled_from([0.0, 0.8, 1.5]),
            st.integers(1, 12),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_conversation_is_to_the_byte_what_it_is_without(
    turns: list[tuple[str, int, float, int, bool, bool]],
) -> None:
    def talk(engine: Any) -> list[str]:
        answers = []
        for prompt, seed, temperature, most, stream, reset in turns:
            if reset:
                engine.reset()
            answers.append(said(engine, prompt, seed=seed, temperature=temperature, max_tokens=most, stream=stream))
        return answers

    options = {"draft_model": drafter(), "n_batch": 256}

    with llama(**options) as one, llama(**options) as other, tempfile.TemporaryDirectory() as at:
        with capture(one, log=Path(at) / "L", check=True) as tape:
            assert talk(one) == talk(other)
        assert tape.error is None
        read_back(Path(at) / "L")


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba", "qwen2vl"])
def test_other_memories_are_followed_as_they_behave(tmp_path: Path, arch: str) -> None:
    """Windowed, hybrid, recurrent, and positions of three parts."""

    def talk(engine: Any) -> list[str]:
        return [said(engine, TEXT[:n], max_tokens=6, temperature=0.0) for n in (30, 40, 20, 20)]

    with llama(arch) as engine:
        bare = talk(engine)
    with llama(arch) as engine, capture(engine, log=tmp_path / "L", check=True) as tape:
        assert talk(engine) == bare
    assert tape.error is None
    log = read_back(tmp_path / "L")
    refused = [e.error_class for e in log.events if e.op is Op.REFUSE]
    assert set(refused) <= {"UnsupportedOperation"}
    assert bool(refused) == (arch in ("lfm2", "mamba"))


def test_states_that_were_saved_come_back_also_through_a_cache(tmp_path: Path) -> None:
    from llama_cpp import LlamaRAMCache

    with llama() as engine, capture(engine, log=tmp_path / "L", check=True):
        engine.set_cache(LlamaRAMCache())
        said(engine, TEXT, max_tokens=4, temperature=0.0)
        said(engine, "some other thing", max_tokens=4, temperature=0.0)
        said(engine, TEXT + " and more", max_tokens=4, temperature=0.0)
    log = read_back(tmp_path / "L")
    assert log.ops.count("snapshot") == 3
    (restored,) = [e for e in log.events if e.op is Op.RESTORE]
    assert (restored.snapshot_id, restored.n_tokens) == (0, restored.resident_tokens)
    after = next(e for e in log.events[restored.seq :] if e.reused is not None)
    assert after.reused is not None
    assert after.reused > 10


def test_a_state_from_elsewhere_is_found_not_computed(tmp_path: Path) -> None:
    with llama() as engine:
        engine.eval([5, 6, 7, 8])
        state = pickle.loads(pickle.dumps(engine.save_state()))
    with llama() as engine:
        engine.eval([50, 51])
        with capture(engine, log=tmp_path / "L", content=True, check=True):
            engine.load_state(state)
            engine.load_state(copy.copy(state))
            engine.eval([9])
    log = read_back(tmp_path / "L")
    found = [e for e in log.events if e.way is Way.IMPORT]
    assert [(e.reason, e.n_tokens, e.physical_prefill_tokens) for e in found] == [
        ("found", 2, None),
        ("load_state", 4, None),
        ("load_state", 4, None),
    ]
    assert [log.tokens[e.seq].tokens for e in found] == [(50, 51), (5, 6, 7, 8), (5, 6, 7, 8)]
    assert log.state.tape_length == 5


def test_rows_that_a_reset_left_behind_are_not_on_the_tape(tmp_path: Path) -> None:
    with llama() as engine:
        engine.eval([50, 51])
        engine.reset()
        with capture(engine, log=tmp_path / "L", check=True) as tape:
            engine.eval([5, 6, 7])
        assert tape.error is None
    assert read_back(tmp_path / "L").ops == ["open", "prompt", "prefill", "close"]


def test_a_call_that_the_engine_refuses_is_told_with_what_it_did(tmp_path: Path) -> None:
    with llama(n_ctx=256, n_batch=128) as engine, capture(engine, log=tmp_path / "L", check=True) as tape:
        with pytest.raises(RuntimeError, match="llama_decode returned 1"):
            engine.eval([5 + i % 200 for i in range(300)])
        assert tape.error is None
        engine.reset()
        engine.eval([5, 6])
    log = read_back(tmp_path / "L")
    (refused,) = [e for e in log.events if e.op is Op.REFUSE]
    assert (refused.error_class, refused.reason) == ("RuntimeError", "llama_decode returned 1")
    assert [e.n_tokens for e in log.events[: refused.seq] if e.op is Op.PREFILL] == [128, 128]
    assert log.state.resident_tokens == 2


def test_embeddings_leave_nothing_behind(tmp_path: Path) -> None:
    texts = ["one text", "another text"]
    with llama(embedding=True) as engine:
        bare = engine.embed(texts), engine.embed("alone")
    with llama(embedding=True) as engine, capture(engine, log=tmp_path / "L", check=True) as tape:
        engine.eval([5, 6])
        assert (engine.embed(texts), engine.embed("alone")) == bare
    assert tape.error is None
    log = read_back(tmp_path / "L")
    assert log.state.resident_tokens == 0
    assert [e.detail for e in log.events if e.reason == "embed" and e.detail] == [
        f'{{"aside_calls": 1, "aside_tokens": {sum(len(engine_tokens(t)) for t in texts)}}}'
    ]


def engine_tokens(text: str) -> list[int]:
    with llama() as engine:
        tokens: list[int] = engine.tokenize(text.encode())
        return tokens


def test_hashes_alone_are_stored_unless_content_is_asked_for(tmp_path: Path) -> None:
    for content in (False, True):
        with llama() as engine, capture(engine, log=tmp_path / f"{content}", content=content):
            said(engine, TEXT, max_tokens=4, seed=1)
        log = read_back(tmp_path / f"{content}")
        assert log.row.content is content
        assert all((t.tokens is not None) is content and t.hashes != "[]" for t in log.tokens.values())
        assert (TEXT.encode() in (tmp_path / f"{content}").read_bytes()) is False
