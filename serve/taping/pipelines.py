"""Following an `openvino_genai` pipeline through its calls: a session for each chat, and for each other request."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtape.backends.openvino import bystander
from kvtape.backends.openvino.bystander import Answer, Cache, Prompted, Usage
from kvtape.backends.protocol import Clock, EventSink
from kvtape.planner.rows import SessionRow
from kvtape.serve.taping.class_taps import Listener
from kvtape.serve.taping.guard import Guard
from kvtape.serve.taping.requests import RequestLog

__all__ = ["PipelineFollower"]

_CHAT: Final = ("start_chat", "finish_chat")


@dataclass(slots=True)
class _Chat:
    log: RequestLog
    messages: list[dict[str, str]]


@dataclass(slots=True)
class _Running:
    """A request that was added and not yet finished; its handle is the caller's, and ends it by going away."""

    log: RequestLog
    handle: weakref.ref[Any]
    given: Prompted
    detail: dict[str, Any]
    began_ns: int
    steps: int = 0
    fullest: Cache | None = None


class PipelineFollower:
    """Listens to one pipeline; `row` is what every session's row says but for its name."""

    def __init__(
        self, pipeline: Any, sink: EventSink, clock: Clock, row: SessionRow, said: Mapping[str, Any], guard: Guard
    ) -> None:
        self._pipeline, self._sink, self._clock, self._guard = pipeline, sink, clock, guard
        self._row, self._said = row, said
        self._chat: _Chat | None = None
        self._chats = self._requests = 0
        self._running: list[_Running] = []

    def listeners(self) -> dict[str, Listener]:
        """For the methods that this kind of pipeline has."""
        heard: dict[str, Listener] = {"generate": self._generate, "__call__": self._generate}
        heard |= {"start_chat": self._start_chat, "finish_chat": self._finish_chat}
        heard |= {"add_request": self._add_request, "step": self._step}
        return {name: listener for name, listener in heard.items() if hasattr(type(self._pipeline), name)}

    # -- calls -----------------------------------------------------------------------------------------------------

    def _generate(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.call("generate"):
            inputs = args[0] if args else next(iter(kwargs.values()), None)
            began = self._clock.now_ns()
            try:
                result = call(*args, **kwargs)
            except BaseException as err:
                self._guard.note(self._failed, type(err).__name__)
                raise
            self._guard.note(self._generated, inputs, result, began, self._clock.now_ns() - began)
            return result

    def _start_chat(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.call("start_chat"):
            result = call(*args, **kwargs)
            system = args[0] if args else kwargs.get("system_message", "")
            self._guard.note(self._chat_began, str(system))
            return result

    def _finish_chat(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.call("finish_chat"):
            result = call(*args, **kwargs)
            self._guard.note(self._chat_ended)
            return result

    def _add_request(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.call("add_request"):
            began = self._clock.now_ns()
            handle = call(*args, **kwargs)
            number, inputs = [*args, *kwargs.values()][:2]
            self._guard.note(self._added, handle, int(number), inputs, began)
            return handle

    def _step(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.call("step"):
            result = call(*args, **kwargs)
            self._guard.note(self._stepped)
            return result

    # -- what they come to -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The capture ends: what still runs is told as far as it is known, and open chats are closed."""
        for running in self._running:
            self._ended(running)
        self._running = []
        self._chat_ended()

    def lost(self, cause: Exception) -> None:
        for log in [r.log for r in self._running] + ([self._chat.log] if self._chat else []):
            log.lost(cause)

    def _chat_began(self, system: str) -> None:
        self._chat_ended()
        self._chats += 1
        messages = [{"role": "system", "content": system}] if system else []
        self._chat = _Chat(self._open(f"chat-{self._chats}"), messages)

    def _chat_ended(self) -> None:
        if self._chat is not None:
            self._chat.log.close()
        self._chat = None

    def _failed(self, error_class: str) -> None:
        log = self._chat.log if self._chat else self._request()
        log.refused(error_class)
        if self._chat is None:
            log.close()

    def _generated(self, inputs: object, result: object, began_ns: int, elapsed_ns: int) -> None:
        """A call of `generate`, of one prompt or several."""
        detail = _cache_detail(bystander.cache_of(self._pipeline))
        answers = bystander.answers(inputs, result)
        for answer in answers:
            self._told(answer, began_ns, elapsed_ns, detail | ({"batch": len(answers)} if len(answers) > 1 else {}))

    def _told(self, answer: Answer, began_ns: int, elapsed_ns: int, detail: Mapping[str, Any]) -> None:
        log = self._chat.log if self._chat else self._request()
        source = "engine" if answer.usage is not None else "fallback"
        usage = answer.usage or self._counted(answer, elapsed_ns)
        first = usage.first_token_ns
        log.asked(began_ns, usage.prompt_tokens, source, _unknown(), first)
        whole = usage.total_ns if usage.total_ns is not None else elapsed_ns
        rest = max(0, whole - (first or 0))
        log.answered(began_ns + (first or 0), usage.completion_tokens, source, answer.ended, rest, detail)
        if self._chat is None:
            log.close()
        elif answer.given.text is not None:
            self._chat.messages += [_message("user", answer.given.text), _message("assistant", answer.text or "")]

    def _counted(self, answer: Answer, elapsed_ns: int) -> Usage:
        """Our own count, where the pipeline gives no figures, or only those of several prompts together."""
        said = answer.n_tokens
        if said is None:
            said = bystander.tokens_in(self._pipeline, None, answer.text) if answer.text else 0
        return Usage(self._prompt_tokens(answer.given), said, None, elapsed_ns)

    def _prompt_tokens(self, given: Prompted) -> int:
        if given.n_tokens is not None:
            return given.n_tokens
        text = given.text or ""
        before = self._chat.messages if self._chat else []
        messages = [*before, _message("user", text)] if self._chat or self._templates() else None
        return bystander.tokens_in(self._pipeline, messages, text)

    def _templates(self) -> bool:
        """Whether a plain text goes through the chat template, as it does unless that was switched off."""
        ask = getattr(self._pipeline, "get_generation_config", None) or self._pipeline.get_config
        config = ask()
        return bool(config.apply_chat_template and self._pipeline.get_tokenizer().chat_template)

    def _added(self, handle: Any, number: int, inputs: object, began_ns: int) -> None:
        detail = {"request_id": number}
        running = _Running(self._request(), weakref.ref(handle), bystander.prompted(inputs)[0], detail, began_ns)
        self._running.append(running)

    def _stepped(self) -> None:
        cache = bystander.cache_of(self._pipeline)
        still: list[_Running] = []
        for running in self._running:
            running.steps += 1
            if cache is not None and (running.fullest is None or cache.usage_percent > running.fullest.usage_percent):
                running.fullest = cache
            handle = running.handle()
            if handle is not None and bystander.is_running(handle):
                still.append(running)
            else:
                self._ended(running)
        self._running = still

    def _ended(self, running: _Running) -> None:
        handle = running.handle()
        usage = None if handle is None else bystander.usage_of(handle)
        given, log = running.given, running.log
        elapsed = self._clock.now_ns() - running.began_ns
        detail = {**running.detail, "steps": running.steps, **_cache_detail(running.fullest)}
        if usage is not None and usage.prompt_tokens:
            log.asked(running.began_ns, usage.prompt_tokens, "engine", _unknown(), usage.first_token_ns)
            ended, first = bystander.ended_as(handle), usage.first_token_ns or 0
            log.answered(running.began_ns + first, usage.completion_tokens, "engine", ended, elapsed - first, detail)
        else:  # the caller gave its handle up, and with it what the engine would have said
            log.asked(running.began_ns, self._prompt_tokens(given), "fallback", _unknown(), None)
            log.answered(
                running.began_ns, None, "fallback", "dropped" if handle is None else "running", elapsed, detail
            )
        log.close()

    def _request(self) -> RequestLog:
        self._requests += 1
        return self._open(f"request-{self._requests}")

    def _open(self, name: str) -> RequestLog:
        return RequestLog(self._sink, self._clock, replace(self._row, session_id=name), self._said)


def _unknown() -> dict[str, str]:
    """Said with every prompt, so that nobody takes the NULL of `reused` for none."""
    return {"residency": "unknown", "reused": "unknown"}


def _cache_detail(cache: Cache | None) -> dict[str, Any]:
    """Of the whole pipeline, whatever requests it had."""
    if cache is None:
        return {}
    return {"cache": {"usage_percent": round(cache.usage_percent, 4), "size_bytes": cache.size_bytes}}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
