"""Reading what is to be recorded: a text, or a chat. Bad input is one clear line before any model is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtape.backends.errors import InputRejected, UsageError

if TYPE_CHECKING:
    from kvtape.backends.protocol import Engine
    from kvtape.backends.session import Session

__all__ = ["Message", "Script", "chat_script", "read_chat", "read_file", "read_text", "text_script"]

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One line of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Script:
    """What a recording does. `n_tokens`: an upper bound of the tape, in tokens; `play` gives the last answer.

    `prompt`: every token that is offered.
    """

    n_tokens: int
    decode_tokens: int
    prompt: tuple[int, ...]
    play: Callable[[Session], list[int]]


def read_text(path: str) -> str:
    """The text of a file, or of stdin for `-`. Raises InputRejected when it is empty or not UTF-8."""
    text = read_file(path, "a text file")
    if not text.strip():
        raise InputRejected(f"{_name(path)}: the text is empty; give at least one word")
    return text


def read_chat(path: str) -> list[Message]:
    """JSON lines `{"role": ..., "content": ...}`. Raises InputRejected naming the line that is wrong."""
    text = read_file(path, "a chat file, one JSON message a line")
    messages = [_message(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not any(m.role == "user" for m in messages):
        raise InputRejected(f"{_name(path)}: the chat has no user message")
    return messages


def text_script(engine: Engine, text: str, decode: int) -> Script:
    """One prompt, then `decode` tokens."""
    tokens = engine.tokenize(text)

    def play(session: Session) -> list[int]:
        session.ensure_prefix(tokens)
        return list(session.decode(decode).tokens) if decode else []

    return Script(len(tokens) + decode, decode, tuple(tokens), play)


def chat_script(engine: Engine, messages: Sequence[Message], decode: int) -> Script:
    """One turn for each user message. Where the chat has the assistant's answer, the next turn goes on from that
    one (and diverges from what was generated); where it has none, from the generated one.

    A message stands on the tape as plain transcript, `role: content`, so that any model can read it.
    """
    from kvtape.backends.transcript import Transcript

    empty = Transcript(engine.tokenize)
    said = [empty.message(m.role, m.content) for m in messages]

    def play(session: Session) -> list[int]:
        transcript = Transcript(engine.tokenize)
        answer: list[int] = []
        for i, (message, spoken) in enumerate(zip(messages, said, strict=True)):
            transcript.say(spoken)
            if message.role != "user":
                continue
            session.ensure_prefix(transcript.offer())
            answer = list(session.decode(decode).tokens) if decode else []
            if i + 1 == len(messages) or messages[i + 1].role != "assistant":
                transcript.answered(answer)
        return answer

    turns = sum(m.role == "user" for m in messages)
    extra = len(empty.cue.tokens or ()) + len(empty.blank.tokens or ()) + decode
    prompt = tuple(token for segment in said for token in segment.tokens or ())
    return Script(len(prompt) + turns * extra, decode, prompt, play)


def _message(path: str, number: int, line: str) -> Message:
    where = f"{_name(path)}, line {number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as err:
        raise InputRejected(
            f"{where}: not JSON ({err.msg} at column {err.colno})"
            '; write {"role": "user", "content": "..."} on each line'
        ) from None
    if not isinstance(value, dict) or not {"role", "content"} <= set(value):
        raise InputRejected(f'{where}: needs {{"role": ..., "content": ...}}')
    role, content = value["role"], value["content"]
    if role not in ROLES:
        raise InputRejected(f"{where}: role {role!r}; allowed: {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise InputRejected(f"{where}: content must be a text that is not empty")
    return Message(role, content)


def read_file(path: str, wanted: str) -> str:
    """What a file holds, or stdin for `-`. `wanted`: what it is to be, for the errors.

    Raises UsageError for a path that is no file, InputRejected for what is not UTF-8, OSError.
    """
    if path == "-":
        data = sys.stdin.buffer.read()
    else:
        file = Path(path)
        if not file.exists():
            raise UsageError(f"{path}: no such file; give {wanted}, or - for stdin")
        if file.is_dir():
            raise UsageError(f"{path}: a folder; give {wanted}, or - for stdin")
        data = file.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise InputRejected(
            f"{_name(path)}: not UTF-8 at byte {err.start} (0x{data[err.start]:02x}); convert it first, with iconv"
        ) from None


def _name(path: str) -> str:
    return "stdin" if path == "-" else path
