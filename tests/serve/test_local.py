"""The service over real tiny engines."""

from __future__ import annotations

import asyncio

import pytest

from kvtape.planner.events import Op
from kvtape.serve.local import Limits, LocalService
from kvtape.serve.requests import (
    Deadline,
    End,
    GenerationRequest,
    Overloaded,
    Piece,
    Sampling,
    ShuttingDown,
    TooLong,
)
from kvtape.testing.sink import ListSink
from support.served import GREEDY, answer, ask, run, talk, tiny_service

BACKENDS = ("llama", "openvino")
F32 = {"weights": "f32", "kv_type_k": "f32", "kv_type_v": "f32"}
"""One slot computes a conversation in other pieces than two do; f16 rows would round where the pieces meet."""
ONE = ("keys and values", "what is evicted", "and the sinks")
TWO = ("another place", "of other tokens", "to keep")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("policy", ["none", "stream:sink=4,recent=60"])
def test_two_conversations_say_what_each_says_alone(backend: str, slots: int, policy: str) -> None:
    def alone(topics: tuple[str, ...]) -> list[str]:
        with tiny_service(backend, policy=policy, **F32) as service:
            return [text for text, _ in run(lambda: talk(service, topics))]

    async def both(service: LocalService) -> list[list[tuple[str, End]]]:
        return list(await asyncio.gather(talk(service, ONE), talk(service, TWO)))

    with tiny_service(backend, slots=slots, policy=policy, **F32) as service:
        mixed = run(lambda: both(service))
    assert [[text for text, _ in answers] for answers in mixed] == [alone(ONE), alone(TWO)]
    if slots == 2:
        assert all(end.usage.cached_tokens > 0 for answers in mixed for _, end in answers[1:])


def test_a_turn_reuses_all_that_was_said() -> None:
    sink = ListSink()
    with tiny_service(sink=sink) as service:
        (_, first), (_, second) = run(lambda: talk(service, ("one", "two"), 6))
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert service.status().counters["prompt_tokens"] == first.usage.prompt_tokens + second.usage.prompt_tokens
    assert [e.op for e in sink.events][-1] is Op.CLOSE


def test_more_tokens_than_a_slice_are_one_answer() -> None:
    with tiny_service() as service:
        text, end = run(lambda: ask(service, [{"role": "user", "content": "x"}], 80))
    assert end.usage.completion_tokens == 80
    assert end.reason == "length"
    assert text


def test_a_seed_repeats_and_is_told() -> None:
    async def twice(service: LocalService) -> list[tuple[str, End]]:
        first = await ask(service, [{"role": "user", "content": "x"}], sampling=Sampling(1.5, 0.9))
        again = Sampling(1.5, 0.9, first[1].seed)
        return [first, await ask(service, [{"role": "user", "content": "x"}], sampling=again)]

    with tiny_service() as service:
        first, second = run(lambda: twice(service))
    assert first[0] == second[0]


def test_a_stop_string_ends_it_and_is_not_told() -> None:
    async def both(service: LocalService) -> list[tuple[str, End]]:
        whole = await ask(service, [{"role": "user", "content": "x"}], 20)
        stop = whole[0][4:6]
        return [whole, await ask(service, [{"role": "user", "content": "x"}], 20, stop=(stop,))]

    with tiny_service() as service:
        (whole, _), (cut, end) = run(lambda: both(service))
    assert end.reason == "stop"
    assert cut == whole[: whole.index(whole[4:6])]


def test_log_probabilities_are_those_of_the_chosen() -> None:
    async def pieces(service: LocalService) -> list[Piece]:
        request = GenerationRequest(await service.text_prompt("abc"), 5, GREEDY, logprobs=3)
        return [p async for p in service.generate(request) if isinstance(p, Piece)]

    with tiny_service() as service:
        choices = [c for p in run(lambda: pieces(service)) for c in p.choices]
    assert len(choices) == 5
    for choice in choices:
        assert choice.top[0][:1] == (choice.token,)
        assert choice.top[0][2] == choice.logprob
        assert sorted((t[2] for t in choice.top), reverse=True) == [t[2] for t in choice.top]


def test_what_cannot_be_served_is_told() -> None:
    async def too_long(service: LocalService) -> None:
        await answer(service, GenerationRequest(service.token_prompt([5] * 600), 4, GREEDY))

    async def late(service: LocalService) -> None:
        await answer(service, GenerationRequest(service.token_prompt([5] * 100), 400, GREEDY))

    async def crowd(service: LocalService) -> list[object]:
        requests = [GenerationRequest(service.token_prompt([5 + i] * 50), 20, GREEDY) for i in range(6)]
        return list(await asyncio.gather(*(answer(service, r) for r in requests), return_exceptions=True))

    with tiny_service() as service, pytest.raises(TooLong, match="600 tokens"):
        run(lambda: too_long(service))
    with tiny_service(limits=Limits(turn_s=0.02)) as service, pytest.raises(Deadline):
        run(lambda: late(service))
    with tiny_service(limits=Limits(queue=2)) as service:
        told = run(lambda: crowd(service))
    assert any(isinstance(t, Overloaded) for t in told)
    assert sum(isinstance(t, tuple) for t in told) >= 2
    with pytest.raises(ShuttingDown):
        run(lambda: answer(service, GenerationRequest(service.token_prompt([5]), 1)))


def test_a_listener_who_leaves_gives_the_slot_back() -> None:
    sink = ListSink()

    async def leave(service: LocalService) -> tuple[str, End]:
        stream = service.generate(GenerationRequest(service.token_prompt([7] * 40), 300, GREEDY))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        return await answer(service, GenerationRequest(service.token_prompt([9] * 40), 4, GREEDY))

    with tiny_service(sink=sink) as service:
        _, end = run(lambda: leave(service))
        assert service.status().running == 0
    assert end.usage.completion_tokens == 4
    assert sum(e.completion_tokens or 0 for e in sink.events) < 300


def test_a_cancelled_prefill_leaves_a_session_that_goes_on() -> None:
    async def leave(service: LocalService) -> tuple[str, End]:
        turn = asyncio.create_task(answer(service, GenerationRequest(service.token_prompt([7] * 500), 4, GREEDY)))
        await asyncio.sleep(0.005)
        turn.cancel()
        return await answer(service, GenerationRequest(service.token_prompt([7] * 40), 4, GREEDY))

    with tiny_service() as service:
        _, end = run(lambda: leave(service))
    assert end.usage.completion_tokens == 4


def test_a_name_keeps_its_session() -> None:
    async def named(service: LocalService) -> list[End]:
        prompt = service.token_prompt([7] * 30)
        other = service.token_prompt([7] * 30 + [8] * 10)
        return [
            (await answer(service, GenerationRequest(p, 2, GREEDY, session=name)))[1]
            for p, name in ((prompt, "a"), (prompt, "b"), (other, "a"))
        ]

    with tiny_service(slots=2) as service:
        ends = run(lambda: named(service))
    assert [e.usage.cached_tokens for e in ends] == [0, 0, 30]
