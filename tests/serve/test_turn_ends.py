"""How a turn ends when it does not end by itself."""

from __future__ import annotations

import asyncio

import pytest

from kvtape.planner.events import Event, Op
from kvtape.serve.local import Limits, LocalService
from kvtape.serve.requests import Deadline, End, EngineGone, GenerationRequest, Piece, ShuttingDown
from kvtape.testing.sink import ListSink
from kvtape.traces.errors import LogWriteFailed
from support.served import GREEDY, answer, ask, run, talk, tiny_service


def tokens(service: LocalService, n: int, most: int, token: int = 7) -> GenerationRequest:
    return GenerationRequest(service.token_prompt([token] * n), most, GREEDY)


@pytest.mark.parametrize("n_prompt", [479, 480, 481, 500, 511])
def test_a_full_context_ends_an_answer_by_length(n_prompt: int) -> None:
    """512 tokens of context; a slice is 32, so that it fills within one, and exactly at the end of one."""
    with tiny_service(policy="none") as service:
        _, end = run(lambda: answer(service, tokens(service, n_prompt, 400)))
    assert end.reason == "length"
    assert end.usage.completion_tokens == 512 - n_prompt


def test_the_deadline_holds_whoever_listens() -> None:
    async def from_two_tasks(service: LocalService) -> int:
        stream = service.generate(tokens(service, 20, 4000))
        heard = 0
        await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        async for item in stream:
            heard += isinstance(item, Piece)
        return heard

    with (
        tiny_service(n_ctx=4096, limits=Limits(turn_s=0.3)) as service,
        pytest.raises(Deadline, match="longer than"),
    ):
        run(lambda: from_two_tasks(service))


def test_the_deadline_holds_when_nobody_listens() -> None:
    sink = ListSink()

    async def asleep(service: LocalService) -> End:
        stream = service.generate(tokens(service, 20, 4000))
        await anext(stream)
        while service.status().running:  # noqa: ASYNC110 -- it is not told
            await asyncio.sleep(0.01)
        return (await answer(service, tokens(service, 20, 4, 9)))[1]

    with tiny_service(n_ctx=4096, limits=Limits(turn_s=0.3), sink=sink) as service:
        assert run(lambda: asleep(service)).usage.completion_tokens == 4
    assert sum(e.completion_tokens or 0 for e in sink.events) < 4000


def test_who_leaves_the_line_makes_room_in_it_at_once() -> None:
    async def crowd(service: LocalService) -> int:
        running = asyncio.create_task(answer(service, tokens(service, 20, 1000)))
        await asyncio.sleep(0.05)
        waiting = [asyncio.create_task(answer(service, tokens(service, 20, 4, 9))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert service.status().waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        left = service.status().waiting
        running.cancel()
        return left

    with tiny_service(n_ctx=4096) as service:
        assert run(lambda: crowd(service)) == 0


def test_an_answer_that_the_end_of_the_server_cuts_is_not_called_whole() -> None:
    async def end(service: LocalService) -> None:
        stream = service.generate(tokens(service, 20, 4000))
        await anext(stream)
        service.hurry()
        async for item in stream:
            assert not isinstance(item, End)

    with tiny_service(n_ctx=4096) as service, pytest.raises(ShuttingDown):
        run(lambda: end(service))


class _Failing(ListSink):
    """A log that fails at an operation, or when it is to be made durable."""

    def __init__(self, at: Op | None) -> None:
        super().__init__()
        self.at = at
        self.broken = False

    def record(self, event: Event, **content: object) -> None:  # type: ignore[override]
        self.broken |= event.op is self.at
        if self.broken:
            raise LogWriteFailed("no space left on /some/disk")
        super().record(event, **content)  # type: ignore[arg-type]

    def flush(self) -> int:
        if self.at is None:
            raise LogWriteFailed("no space left on /some/disk")
        return super().flush()


@pytest.mark.parametrize("at", [Op.PREFILL, Op.DECODE, None])
def test_nothing_is_served_that_cannot_be_recorded(at: Op | None) -> None:
    async def twice(service: LocalService) -> list[object]:
        first = await asyncio.gather(answer(service, tokens(service, 20, 40)), return_exceptions=True)
        return first + await asyncio.gather(answer(service, tokens(service, 20, 40)), return_exceptions=True)

    with tiny_service(sink=_Failing(at)) as service:
        told = run(lambda: twice(service))
        assert all(isinstance(t, ShuttingDown) for t in told)
        assert not any("disk" in str(t) for t in told)
        assert not service.status().ready
        assert "no space left" in (service.broken or "")


def test_a_defect_of_the_line_ends_every_wait(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a secret")

    with tiny_service() as service:
        service._seats.find = broken  # type: ignore[assignment]
        with pytest.raises(ShuttingDown):
            run(lambda: answer(service, tokens(service, 20, 4)))
        assert not service.status().ready
    assert "ValueError at " in caplog.text
    assert "secret" not in caplog.text


def test_an_engine_that_fails_ends_one_turn() -> None:
    with tiny_service() as service:
        whole = run(lambda: ask(service, [{"role": "user", "content": "x"}]))
        spell = service._worker._spell

        def once(_: object) -> str:
            service._worker._spell = spell
            raise EngineGone("gone")

        service._worker._spell = once
        with pytest.raises(EngineGone):
            run(lambda: ask(service, [{"role": "user", "content": "x"}]))
        assert run(lambda: ask(service, [{"role": "user", "content": "x"}]))[0] == whole[0]


def test_a_turn_behind_an_answer_that_was_cut_reuses_it() -> None:
    """A stop string in the middle of a token: the client sends back less than the tape holds."""

    async def both(service: LocalService) -> tuple[int, End]:
        whole, _ = await ask(service, [{"role": "user", "content": "x"}], 20)
        stop = whole[7:9]
        chat = [{"role": "user", "content": "x"}]
        cut, first = await ask(service, chat, 20, stop=(stop,))
        chat += [{"role": "assistant", "content": cut}, {"role": "user", "content": "more"}]
        _, second = await ask(service, chat, 4)
        return first.usage.prompt_tokens, second

    with tiny_service() as service:
        prompt, second = run(lambda: both(service))
    assert second.usage.cached_tokens > prompt


def test_a_regenerated_and_an_edited_turn_keep_what_is_before_them() -> None:
    async def turns(service: LocalService) -> list[End]:
        chat = [{"role": "user", "content": "first"}]
        text, _ = await ask(service, chat)
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "second"}]
        _, end = await ask(service, chat)
        _, again = await ask(service, chat)
        _, edited = await ask(service, [*chat[:2], {"role": "user", "content": "other"}])
        return [end, again, edited]

    with tiny_service() as service:
        end, again, edited = run(lambda: turns(service))
    assert again.usage.cached_tokens == end.usage.prompt_tokens - 1
    assert edited.usage.cached_tokens >= end.usage.cached_tokens


@pytest.mark.parametrize("policy", ["class:budget=128", "h2o:budget=128,recent=64", "snapkv:budget=128,window=16"])
def test_policies_that_rank_go_on_past_their_budget(policy: str) -> None:
    sink = ListSink()
    with tiny_service(policy=policy, sink=sink) as service:
        ends = [end for _, end in run(lambda: talk(service, [f"topic {i} " * 6 for i in range(5)]))]
    assert all(end.usage.completion_tokens == 12 for end in ends)
    assert ends[-1].usage.prompt_tokens > 128
    assert any(e.op is Op.EVICT for e in sink.events)


def test_the_loop_is_never_kept_waiting() -> None:
    """While a prompt is computed and its answer is written, the loop still turns every few milliseconds."""

    async def pings(service: LocalService) -> tuple[list[float], End]:
        loop = asyncio.get_running_loop()
        turn = asyncio.create_task(answer(service, tokens(service, 4000, 40)))
        late = []
        while not turn.done():
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            service.status()
            late.append(loop.time() - due)
        return late, (await turn)[1]

    with tiny_service(n_ctx=8192) as service:
        late, end = run(lambda: pings(service))
    assert end.usage.completion_tokens == 40
    assert len(late) > 20
    # Far below the prefill's time; other work on the machine makes some of these late.
    assert sorted(late)[len(late) * 9 // 10] < 0.1
