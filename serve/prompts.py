"""Messages and texts into segments of tokens.

    messages --guard--> chat template --> one text --cut at message ends--> pieces --tokenize--> segments

Control tokens come from the template alone: what a content spells like one is guarded by a character of the private
use area while the template renders, and is tokenised in two halves afterwards, so that it stays text on every engine.
An answer that was given here comes back as the tokens that it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.planner.blocks import PromptSegment
from kvtape.serve.answers import AnswerMemory
from kvtape.serve.message_ends import message_ends
from kvtape.serve.requests import BadPrompt
from kvtape.serve.templates import ChatTemplate
from kvtape.serve.vocabulary import Vocabulary

__all__ = ["PromptMaker"]

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Unicode's private use plane 15: no text means anything by these."""


class PromptMaker:
    """`tokenize`: plain text into ids, nothing added. `template` None: the model has none, and chats are refused."""

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        vocabulary: Vocabulary,
        answers: AnswerMemory,
        *,
        template: ChatTemplate | None,
        n_vocab: int,
    ) -> None:
        self._tokenize = tokenize
        self._vocabulary = vocabulary
        self._template = template
        self._answers = answers
        self._n_vocab = n_vocab
        spelled = sorted(vocabulary.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def text(self, text: str) -> tuple[PromptSegment, ...]:
        """One user segment. Raises BadPrompt."""
        tokens = (*self._vocabulary.begin, *self._plain(text))
        if not tokens:
            raise BadPrompt("the prompt is empty; give at least one token")
        return (PromptSegment(kind="user", tokens=tokens),)

    def tokens(self, tokens: Sequence[int]) -> tuple[PromptSegment, ...]:
        """One user segment of these ids. Raises BadPrompt."""
        if not tokens:
            raise BadPrompt("the prompt is empty; give at least one token")
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            raise BadPrompt(f"a token id is outside the vocabulary [0, {self._n_vocab})")
        return (PromptSegment(kind="user", tokens=tuple(tokens)),)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[PromptSegment, ...]:
        """A segment for each message, one for the tools where they can be told from the system message, and one for
        the cue. Raises BadPrompt."""
        if self._template is None:
            raise BadPrompt("this model has no chat template; use /v1/completions, or start the server with one")
        guard = _Guard(self._control, [*messages, *tools])
        hidden = [self._guarded(guard, message) for message in messages]
        tools = [guard.hide(tool) for tool in tools]
        guarded, text = self._rendered(hidden, tools)
        heads = partial(self._template.render, tools=tools, cue=False)
        ends = [(str(guarded[i].get("role", "user")), at) for i, at in message_ends(text, guarded, heads)]
        segments, start = [], 0
        for kind, stop in [*ends, ("assistant_prompt", len(text))]:
            for part, piece in (
                self._tools_apart(kind, text[start:stop], guarded, tools)
                if tools and not start
                else ((kind, text[start:stop]),)
            ):
                tokens = tuple(self._marked(guard, piece))
                if tokens:
                    segments.append(PromptSegment(kind=part, tokens=tokens))
            start = max(start, stop)
        if not segments:
            raise BadPrompt("the chat template makes nothing of these messages")
        return tuple(segments)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """The messages as the template takes them, and their text.

        The arguments of a tool call are JSON in a text; most templates want the object, some the text.
        """
        assert self._template is not None
        objects = [_with_objects(message) for message in messages]
        try:
            told, text = objects, self._template.render(objects, tools, cue=True)
        except BadPrompt:
            if objects == list(messages):
                raise
            told, text = list(messages), self._template.render(messages, tools, cue=True)
        if tools and text == self._template.render(told, (), cue=True):
            raise BadPrompt("this model's chat template has no place for tools; send the request without them")
        return told, text

    def _guarded(self, guard: _Guard, message: Mapping[str, Any]) -> Mapping[str, Any]:
        hidden: dict[str, Any] = guard.hide(message)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            known = self._answers.tokens_of(content)
            if known is not None:
                tokens, rest = known
                hidden["content"] = guard.stand_for((*tokens, *self._plain(rest)), hidden["content"])
        return hidden

    def _tools_apart(
        self, kind: str, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[tuple[str, str]]:
        """The first message's text in three: what stands there without tools too, and whole lines for the tools."""
        assert self._template is not None
        try:
            plain = self._template.render(messages[:1], (), cue=False)
        except BadPrompt:
            return ((kind, text),)
        same = next(
            (i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), min(len(text), len(plain))
        )
        begin = text.rfind("\n", 0, same) + 1
        tail = 0
        while tail < min(len(text), len(plain)) - begin and text[-tail - 1] == plain[-tail - 1]:
            tail += 1
        line = text.find("\n", len(text) - tail - 1) if tail else -1
        stop = line + 1 if line >= begin else len(text)
        # What a template says before its tools is its system message, whoever speaks first.
        return [(k, t) for k, t in (("system", text[:begin]), ("tools", text[begin:stop]), (kind, text[stop:])) if t]

    def _marked(self, guard: _Guard, text: str) -> Iterator[int]:
        """Tokens of a text with the template's control tokens and the guard's marks in it."""
        for piece in guard.pieces(text):
            if isinstance(piece, tuple):
                yield from piece
            elif piece in guard.spelled:
                yield from self._plain(guard.spelled[piece])
            else:
                yield from self._with_control(piece)

    def _with_control(self, text: str) -> Iterator[int]:
        at = 0
        for found in self._control.finditer(text) if self._control else ():
            yield from self._tokenized(text[at : found.start()])
            yield self._vocabulary.control[found.group()]
            at = found.end()
        yield from self._tokenized(text[at:])

    def _plain(self, text: str) -> Iterator[int]:
        """Tokens of a text in which nothing is a control token."""
        at = 0
        for found in self._control.finditer(text) if self._control else ():
            half = found.start() + max(1, (found.end() - found.start()) // 2)
            yield from self._tokenized(text[at:half])
            at = half
        yield from self._tokenized(text[at:])

    def _tokenized(self, text: str) -> list[int]:
        try:
            return self._tokenize(text) if text else []
        except UsageError as err:
            raise BadPrompt(str(err)) from None
        except EnvironmentProblem:  # its text names files of this machine
            raise BadPrompt("this server cannot make tokens of a text; send token ids to /v1/completions") from None


class _Guard:
    """Stands characters that the messages do not use for what the template must not see."""

    def __init__(self, control: re.Pattern[str] | None, messages: Sequence[Mapping[str, Any]]) -> None:
        self._control = control
        used = set(_characters(messages))
        self._free = (chr(c) for c in _PRIVATE if chr(c) not in used)
        self._mark_of: dict[str, str] = {}
        self.spelled: dict[str, str] = {}
        """Mark -> the text like a control token that it stands for."""
        self._answers: dict[str, tuple[int, ...]] = {}

    def hide(self, value: Any) -> Any:
        """The same value with every text in it guarded."""
        if isinstance(value, str):
            return self._control.sub(lambda m: self._mark(m.group()), value) if self._control else value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry) for entry in value]
        return value

    def stand_for(self, tokens: tuple[int, ...], text: str) -> str:
        """`text` between two marks; where both come out in one piece, its tokens are `tokens`."""
        mark = self._next_mark()
        self._answers[mark] = tokens
        return f"{mark}{text}{mark}"

    def pieces(self, text: str) -> Iterator[str | tuple[int, ...]]:
        """Texts, marks and the tokens of answers, in order. A mark that lost its other half is left out."""
        marks = "".join([*self.spelled, *self._answers])
        if not marks:
            yield text
            return
        rest = re.split(f"([{marks}])", text)
        at = 0
        while at < len(rest):
            piece = rest[at]
            if piece in self._answers:
                if piece in rest[at + 1 :]:
                    yield self._answers[piece]
                    at = rest.index(piece, at + 1)
            elif piece:
                yield piece
            at += 1

    def _mark(self, spelled: str) -> str:
        if spelled not in self._mark_of:
            mark = self._next_mark()
            self._mark_of[spelled] = mark
            self.spelled[mark] = spelled
        return self._mark_of[spelled]

    def _next_mark(self) -> str:
        mark = next(self._free, None)
        if mark is None:
            raise BadPrompt("the messages use up Unicode's private use plane 15, of which this server needs a few")
        return mark


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of its tool calls as the objects whose JSON they are."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if function is None or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _characters(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from set(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from str(key)
            yield from _characters(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _characters(entry)
