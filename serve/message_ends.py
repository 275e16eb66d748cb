"""Where each message of a rendered chat ends, found without rendering every beginning of it anew.

A message's text is what a short chat grows by when it is added: the leading system messages, the last user message
before it, and what came after that. Where the whole text has just this text next, it is the message's; where it has
not (a template that rewrites earlier messages, or numbers them), the beginning up to the message is rendered, as long
as that is not too much work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtape.serve.requests import BadPrompt

__all__ = ["message_ends"]

_LEADING = frozenset({"system", "developer"})
_WORK = 16_384
"""Messages in all the longer beginnings that are rendered for one chat: some tenths of a second."""
_SHORT = 16
"""Messages that a message's own growth may be looked for in without being counted as work."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


def message_ends(text: str, messages: Sequence[Message], render: Render) -> Iterator[tuple[int, int]]:
    """Index and end of each message in `text`, ascending, where the template shows it; else it goes with the next one.

    What is found for a message depends on nothing behind it but `text`, so that a chat that grew keeps its ends.
    `render` raises BadPrompt for a beginning that is no chat to the template.
    """
    lead = next((i for i, m in enumerate(messages) if m.get("role") not in _LEADING), len(messages))
    known = at = 0
    work = _WORK
    near: list[Message] = []
    near_text: str | None = None
    for i in range(len(messages)):
        since = i + 1 - known
        if known and (since <= _SHORT or (work := work - since) > 0):
            grown = _growth(near_text, near, messages[known : i + 1], render)
            if grown and text.startswith(grown, at):
                known, at = i + 1, at + len(grown)
                near = _near(messages, lead, known)
                near_text = _text(near, render)
                yield i, at
                continue
        work -= i + 1
        head = _text(messages[: i + 1], render) if work > 0 else None
        if head is not None and at < len(head) <= len(text) and text.startswith(head):
            known, at = i + 1, len(head)
            near = _near(messages, lead, known)
            near_text = _text(near, render)
            yield i, at


def _near(messages: Sequence[Message], lead: int, known: int) -> list[Message]:
    """A short chat that ends as the first `known` messages do, and is one to templates that want turns to alternate."""
    user = next((i for i in range(known - 1, lead - 1, -1) if messages[i].get("role") == "user"), known)
    said = next((i for i in range(known - 1, user, -1) if messages[i].get("role") == "assistant"), user + 1)
    between = messages[max(said, known - _SHORT) : known]
    return [*messages[: min(lead, _SHORT)], *messages[user : min(user + 1, known)], *between]


def _growth(before: str | None, near: list[Message], new: Sequence[Message], render: Render) -> str | None:
    """What `near`, whose text is `before`, grows by with `new`."""
    if before is None:
        return None
    after = _text([*near, *new], render)
    return after[len(before) :] if after is not None and after.startswith(before) else None


def _text(messages: Sequence[Message], render: Render) -> str | None:
    try:
        return render(messages)
    except BadPrompt:
        return None
