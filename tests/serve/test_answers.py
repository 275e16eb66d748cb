"""Answers that come back as the tokens that they were, and those that another conversation could have given too."""

from __future__ import annotations

from kvtape.serve.local import LocalService
from support.served import ask, run, tiny_service


async def prompt_of(service: LocalService, text: str) -> list[int]:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    return [t for s in await service.chat_prompt(messages) for t in s.tokens or ()]


def test_a_broken_character_comes_back_as_what_was_sent() -> None:
    async def given(service: LocalService) -> tuple[str, list[int], int]:
        text, _ = await ask(service, [{"role": "user", "content": "x"}], 20)
        rest = await service.text_prompt(text[text.index("\ufffd") :])
        return text, await prompt_of(service, text), sum(len(s.tokens or ()) for s in rest) - 1  # it begins with <s>

    with tiny_service() as service:
        text, known, n_rest = run(lambda: given(service))
    with tiny_service() as service:
        sent = run(lambda: prompt_of(service, text))
    # As if nobody here had given it: behind the broken character the tokens are those of the text.
    same = next(i for i in range(1, len(sent) + 1) if i == len(sent) or known[-i - 1 :] != sent[-i - 1 :])
    assert same >= n_rest > 20
