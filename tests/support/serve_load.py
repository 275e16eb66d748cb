"""Many multi-turn conversations by the `openai` client, a bounded number at once, over a server that may fail."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

__all__ = ["Conversation", "Load", "Told", "conversations"]

_WORDS = ("cache", "key", "token", "page", "sink", "log", "slot", "river", "garden", "winter", "stone", "bridge")
_GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user will say, turn by turn, whatever is answered."""

    name: str
    system: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that came to its end. `messages`: the prompt; `calm`: nothing failed and nobody left before it in this
    conversation."""

    conversation: str
    turn: int
    messages: tuple[dict[str, str], ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    turn_s: float
    calm: bool


def conversations(n: int, turns: int, seed: int, *, words: int = 8) -> list[Conversation]:
    """Drawn from `seed`; each has a system message that names it, so that no two share more than their beginning."""
    rng = random.Random(seed)

    def said() -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(words))

    return [
        Conversation(f"c{i}", f"You are reader number {i}. {said()}.", tuple(f"{said()}?" for _ in range(turns)))
        for i in range(n)
    ]


@dataclass(slots=True)
class Load:
    """`url` may change while it runs: it is asked before each request. `leave`: the share of turns whose first request
    is left after a few pieces. `on_turn` hears how many turns have ended."""

    url: Callable[[], str]
    model: str
    max_tokens: int
    seed: int
    leave: float = 0.0
    on_turn: Callable[[int], None] = lambda n: None
    usage_in_stream: bool = True
    told: list[Told] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, talks: Sequence[Conversation], clients: int) -> list[Told]:
        """All of them, `clients` at once; the answers, by conversation and turn. Raises what a client gives up on."""
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(self._talk, talk) for talk in talks]:
                done.result()
        return sorted(self.told, key=lambda t: (t.conversation, t.turn))

    def _talk(self, talk: Conversation) -> None:
        rng = random.Random(f"{self.seed}/{talk.name}")
        messages = [{"role": "system", "content": talk.system}]
        calm = True
        for turn, topic in enumerate(talk.topics):
            messages.append({"role": "user", "content": topic})
            streamed = rng.random() < 0.75
            if rng.random() < self.leave:
                self._leave(talk.name, messages, pieces=rng.randint(1, 4))
                calm = False
            told = self._insist(talk.name, turn, messages, streamed, calm)
            calm = told.calm
            messages.append({"role": "assistant", "content": told.text})
            with self._lock:
                self.told.append(told)
                n = len(self.told)
            self.on_turn(n)

    def _insist(self, name: str, turn: int, messages: list[dict[str, str]], streamed: bool, calm: bool) -> Told:
        """Ask until there is an answer."""
        until = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                return self._ask(name, turn, messages, streamed, calm)
            except (openai.APIError, httpx.HTTPError) as err:
                calm = False
                with self._lock:
                    self.failures[_kind(err)] += 1
                if isinstance(err, openai.APIStatusError) and err.status_code < 429:
                    raise  # a request that is wrong stays wrong
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _ask(self, name: str, turn: int, messages: list[dict[str, str]], streamed: bool, calm: bool) -> Told:
        began = time.perf_counter()
        first = 0.0
        text, usage, reason = "", None, None
        with self._client() as client:
            if streamed:
                for chunk in self._stream(client, name, messages):
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        first = first or (time.perf_counter() if text else 0.0)
                        reason = choice.finish_reason or reason
            else:
                whole = client.chat.completions.create(**self._body(name, messages))
                text, usage = whole.choices[0].message.content or "", whole.usage
                reason = whole.choices[0].finish_reason
        if reason is None:
            raise httpx.RemoteProtocolError("the stream ended before the answer did")
        ended = time.perf_counter()
        details = usage and usage.prompt_tokens_details
        return Told(
            name,
            turn,
            tuple(dict(m) for m in messages),
            text,
            usage.prompt_tokens if usage else 0,
            (details.cached_tokens or 0) if details else 0,
            usage.completion_tokens if usage else 0,
            (first or ended) - began if streamed else float("nan"),
            ended - began,
            calm,
        )

    def _leave(self, name: str, messages: list[dict[str, str]], pieces: int) -> None:
        try:
            with self._client() as client:
                stream = self._stream(client, name, messages)
                for _ in zip(range(pieces), stream, strict=False):
                    pass
                stream.close()
            kind = "client left"
        except (openai.APIError, httpx.HTTPError) as err:
            kind = _kind(err)
        with self._lock:
            self.failures[kind] += 1

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url()}/v1", api_key="none", max_retries=0, timeout=_GIVE_UP_S)

    def _stream(self, client: openai.OpenAI, name: str, messages: list[dict[str, str]]) -> Any:
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if self.usage_in_stream else {}
        return client.chat.completions.create(**self._body(name, messages), stream=True, **more)

    def _body(self, name: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": self.model, "messages": messages, "max_tokens": self.max_tokens, "temperature": 0}


def _kind(err: Exception) -> str:
    """What went wrong, without what changes from run to run."""
    if isinstance(err, openai.APIStatusError):
        return f"HTTP {err.status_code} {err.code or ''}".strip()
    code = getattr(err, "code", None)
    return f"error in the stream {code}" if code else type(err).__name__
