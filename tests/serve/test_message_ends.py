"""Chats through templates of the shapes that models have: segments, control tokens, and how much work they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.serve.answers import AnswerMemory
from kvtape.serve.message_ends import message_ends
from kvtape.serve.prompts import PromptMaker
from kvtape.serve.requests import BadPrompt
from kvtape.serve.templates import ChatTemplate
from kvtape.serve.vocabulary import Vocabulary
from support.chat_templates import CONTROL, TEMPLATES

Message = Mapping[str, Any]
IDS = {text: 0x200000 + i for i, text in enumerate(CONTROL)}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def characters(text: str) -> list[int]:
    assert not any(c in text for c in CONTROL), text
    return [ord(c) for c in text]


def maker(family: str, answers: AnswerMemory | None = None) -> PromptMaker:
    template = ChatTemplate(TEMPLATES[family], bos="<bos>", eos="<eos>")
    return PromptMaker(characters, Vocabulary(IDS), answers or AnswerMemory(), template=template, n_vocab=0x300000)


def flat(made: PromptMaker, chat: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
    return [t for s in made.chat(chat, tools) for t in s.tokens or ()]


def by_rendering_each(text: str, chat: Sequence[Message], template: ChatTemplate) -> list[tuple[int, int]]:
    """What `message_ends` finds, the dear way."""
    ends, last = [], 0
    for i in range(len(chat)):
        try:
            head = template.render(chat[: i + 1], (), cue=False)
        except BadPrompt:
            continue
        if last < len(head) <= len(text) and text.startswith(head):
            last = len(head)
            ends.append((i, last))
    return ends


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    text = st.sampled_from(["", "a", "b\n", " c ", "<think>x</think>\ny", "<|/im|>\n<|im|>user\nz"])
    chat = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 5))):
        chat.append({"role": "user", "content": draw(text)})
        chat.append({"role": "assistant", "content": draw(text)})
    return chat[: -1 if draw(st.booleans()) else None]


@pytest.mark.parametrize("family", [f for f in TEMPLATES if f != "thinking"])
@given(chat=chats())
@settings(max_examples=25, deadline=None)
def test_ends_are_those_of_each_beginning(family: str, chat: list[dict[str, str]]) -> None:
    template = ChatTemplate(TEMPLATES[family], bos="<bos>", eos="<eos>")
    text = template.render(chat, (), cue=True)
    got = list(message_ends(text, chat, lambda m: template.render(m, (), cue=False)))
    assert got == by_rendering_each(text, chat, template)


@given(chat=chats())
@settings(max_examples=40, deadline=None)
def test_rewritten_messages_go_with_the_next_one(chat: list[dict[str, str]]) -> None:
    template = ChatTemplate(TEMPLATES["thinking"])
    text = template.render(chat, (), cue=True)
    ends = dict(message_ends(text, chat, lambda m: template.render(m, (), cue=False)))
    assert list(ends.values()) == sorted(set(ends.values()))
    users = [i for i, m in enumerate(chat) if m["role"] == "user"]
    assert set(users) <= set(ends)
    for i in users:
        assert text[: ends[i]].endswith(f"<|im|>user\n{chat[i]['content']}<|/im|>\n")


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_next_prompt_begins_with_the_last_one_and_its_answer(family: str) -> None:
    answers = AnswerMemory()
    made = maker(family, answers)
    chat = [{"role": "system", "content": "be"}] if family != "phi" else []
    tape: list[int] = []
    for turn in range(4):
        chat.append({"role": "user", "content": f"question {turn}"})
        prompt = flat(made, chat)
        assert prompt[: len(tape)] == tape, family
        said = f" answer {turn}\n"
        tokens = (0x300001 + turn, 0x300101)
        answers.remember(said, tokens)
        # Templates that put a space of their own before an answer have it in the next prompt alone.
        tape = prompt if family == "mistral" else [*prompt, *tokens]
        chat.append({"role": "assistant", "content": said})


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_system_message_behind_a_user(family: str) -> None:
    chat = [{"role": r, "content": r} for r in ("user", "system", "user")]
    kinds = [s.kind for s in maker(family).chat(chat, ())]
    assert [k for k in kinds if k != "assistant_prompt"][-3:] == ["user", "system", "user"] or family == "phi"


def test_turns_that_a_template_refuses_are_a_bad_prompt() -> None:
    with pytest.raises(BadPrompt, match="roles must alternate"):
        maker("gemma").chat([{"role": "user", "content": "x"}] * 2, ())


def test_tool_calls_and_answers() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|/im|>"}'}}
    chat = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "1"},
        {"role": "assistant", "content": "so"},
    ]
    segments = maker("qwen").chat(chat, [TOOL])
    assert [s.kind for s in segments] == [
        "system",
        "tools",
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant_prompt",
    ]
    text = "".join(chr(t) for s in segments for t in s.tokens or () if t < 0x110000)
    assert json.dumps(TOOL) in text
    assert '"arguments": {"at": "<|/im|>"}' in text
    assert "<answer>\none\n</answer>\n<answer>\ntwo\n</answer>" in text


def test_tools_that_a_template_has_no_place_for_are_refused() -> None:
    with pytest.raises(BadPrompt, match="no place for tools"):
        maker("phi").chat([{"role": "user", "content": "x"}], [TOOL])


def test_control_tokens_in_names_and_keys_stay_text() -> None:
    tool = {"type": "function", "function": {"name": "<|/im|>", "parameters": {"<|im|>system": ["<bos>"]}}}
    call = {"id": "1", "type": "function", "function": {"name": "<|im|>", "arguments": '{"<|/im|>": 1}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "n", "arguments": '{"k": 1}'}}
    ]}]  # fmt: skip

    def control(chat: Sequence[Message], tool: Message) -> list[int]:
        return [t for t in flat(maker("qwen"), chat, [tool]) if t >= 0x200000]

    assert control(chat, tool) == control(plain, TOOL)


def test_a_content_that_uses_up_the_marks_is_refused() -> None:
    every = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(BadPrompt, match="private use"):
        maker("qwen").chat([{"role": "user", "content": every + "<|im|>"}], ())
    assert flat(maker("qwen"), [{"role": "user", "content": every}])


@pytest.mark.parametrize("family", ["qwen", "llama3", "gemma", "thinking"])
def test_the_work_grows_with_the_chat_and_not_with_its_square(family: str) -> None:
    made = ChatTemplate(TEMPLATES[family], bos="<bos>", eos="<eos>")
    rendered = 0

    def render(messages: Sequence[Message]) -> str:
        nonlocal rendered
        rendered += len(messages)
        return made.render(messages, (), cue=False)

    text = "a<think>b</think>\nc"
    chat = [{"role": r, "content": text} for _ in range(1000) for r in ("user", "assistant")]
    ends = list(message_ends(made.render(chat, (), cue=True), chat, render))
    assert len(ends) >= 1000
    assert rendered < 12 * len(chat) + 20_000


def test_a_long_chain_of_tool_calls_keeps_its_ends() -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for i in range(400):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"i": i}}}
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        chat.append({"role": "tool", "content": str(i), "tool_call_id": "1"})
    template = ChatTemplate(TEMPLATES["qwen"])
    text = template.render(chat, (), cue=True)
    assert len(list(message_ends(text, chat, lambda m: template.render(m, (), cue=False)))) == len(chat)
