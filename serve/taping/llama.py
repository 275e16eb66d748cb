"""Following a `llama_cpp.Llama` at its border to the engine: what its calls do to the KV cache, told to an account.

    Llama.generate, eval, sample, reset, embed, ...    what was asked: prompts, generation, why rows go
    LlamaContext.decode, kv_cache_seq_rm, ...          what the engine did: rows that came, went and moved

Python's own counter (`n_tokens`) is never taken for the engine's memory: `reset` only sets it, and the rows go when
the next `eval` removes them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtape.backends.llama.bystander import Bystander, Fed
from kvtape.serve.taping.account import FAR, Account, Took
from kvtape.serve.taping.errors import LostTrack
from kvtape.serve.taping.run import RUN_TOKENS, OpenRun

__all__ = ["Follower", "Offer"]


@dataclass(slots=True)
class Offer:
    """Tokens that were handed in. `whole`: they are all of the prompt, of which a prefix may be there already; else
    they come behind what there is. `left` of them are to be computed, known once the engine was first asked. `most`:
    the caller's limit on the answer.
    """

    tokens: tuple[int, ...]
    whole: bool
    left: int | None = None
    most: int | None = None
    generates: bool = False


class Follower:
    """What the engine did, in order. Every method is told after the fact; raises LostTrack and what the account raises.

    With `check` the positions of all cells are read back after each change; without, the largest one.
    """

    def __init__(self, llama: Any, engine: Bystander, account: Account, *, check: bool, drafts: bool) -> None:
        self._llama, self._engine, self._account = llama, engine, account
        self._check, self._drafts = check, drafts
        self._offer: Offer | None = None
        self._run: OpenRun | None = None
        self._sampled: int | None = None
        self._by_hand = False
        self._reason: str | None = None
        self._aside: list[int] = []
        self._unnamed = 0
        self._states: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    # -- what was asked --------------------------------------------------------------------------------------------

    def begin(self, offer: Offer) -> None:
        """A generation begins, or tokens are evaluated outside of one."""
        self._offer = offer
        self._by_hand = False

    def evaluate(self, tokens: Sequence[int]) -> None:
        """`Llama.eval` from outside `generate`: of the token that was just sampled it is a decode, else a prompt."""
        if len(tokens) == 1 and tokens[0] == self._sampled:
            if not self._by_hand:
                self._settle()
                self._account.generate(None)
            self._by_hand, self._offer = True, None
            return
        self.begin(Offer(tuple(tokens), whole=False))

    def sampled(self, token: int) -> None:
        self._resolve(None)
        self._sampled = token
        if self._run is not None:
            self._run.said.append(token)
        offer = self._offer
        if offer is not None and offer.whole and not offer.generates:
            offer.generates = True
            self._account.generate(offer.most)

    def because(self, reason: str) -> None:
        """Why rows go that are removed next."""
        self._reason = reason

    def refused(self, reason: str, error_class: str) -> None:
        self._settle()
        self._account.refuse(reason, error_class)

    # -- what the engine did ---------------------------------------------------------------------------------------

    def computed(self, fed: Fed, took: Took) -> None:
        if not len(fed.tokens):
            return
        if not fed.alone:  # of a batch of several sequences nothing is resident once it is cleared
            self._aside.append(len(fed.tokens))
            return
        self._followed()
        end = self._end()
        if int(fed.positions[0]) != end or np.any(np.diff(fed.positions) != 1):
            raise LostTrack(f"positions from {int(fed.positions[0])} on were computed, the next one is {end}")
        tokens = [int(t) for t in fed.tokens]
        if self._offer is None and not self._by_hand:  # somebody asked the engine itself
            self._offer = Offer(tuple(tokens), whole=False)
        if self._decoding():
            self._decoded(tokens, took)
        else:
            self._prefilled(tokens, took)
        self._sampled = None
        self._confirm()

    def failed(self, fed: Fed, took: Took, error: BaseException) -> None:
        """A decode call raised. What of it the engine holds all the same is recorded, then the refusal."""
        if fed.alone and not self._aside and len(fed.tokens):
            done = self._engine.position_max() + 1 - int(fed.positions[0])
            if 0 < done <= len(fed.tokens):
                part = Fed(fed.tokens[:done], fed.positions[:done], True)
                self.computed(part, took)
        self._settle()
        self._resolve(None)
        self._account.refuse(_engine_reason(error), type(error).__name__)
        self._offer = None
        self._confirm()

    def removed(self, start: int, stop: int, took: Took, *, done: bool) -> None:
        """`kv_cache_seq_rm` of sequence 0 said `done`; nothing goes where it did not."""
        start, stop = max(0, start), FAR if stop < 0 else stop
        if not done:
            self._settle()
            if self._end() > start:
                why = f"cache positions from {start} on were to go; this memory does not give up a part"
                self._account.refuse(why, "UnsupportedOperation")
            return
        if self._unnamed and start <= self._end() and stop == FAR:
            self._unnamed = 0
        run = self._run
        if run is not None and stop == FAR:
            run.verdict()
            if run.cut(start):
                self._confirm()
                return
        if start < self._end():
            self._settle()
        if stop == FAR:
            self._resolve(start)
        self._account.remove(start, stop, self._why(), took)
        self._confirm()

    def cleared(self, reason: str, took: Took) -> None:
        """The whole memory is empty."""
        self._settle()
        self._unnamed = 0
        detail = (
            json.dumps({"aside_calls": len(self._aside), "aside_tokens": sum(self._aside)}) if self._aside else None
        )
        self._aside = []
        self._resolve(0)
        self._by_hand = False
        if self._offer is not None and not self._offer.left:
            self._offer = None
        if self._account.end or detail is not None:
            self._account.truncate(0, reason, took, detail)
        self._confirm()

    def shifted(self, start: int, stop: int, delta: int, took: Took) -> None:
        self._followed()
        self._settle()
        self._account.shift(max(0, start), FAR if stop < 0 else stop, delta, took)
        self._confirm()

    def saved(self, state: Any, took: Took) -> None:
        self._followed()
        self._settle()
        self._states[state] = self._account.snapshot(int(state.llama_state_size), took)

    def loaded(self, state: Any, took: Took) -> None:
        """A state that was saved on this tape comes back; another one's rows are found, with the tokens it names."""
        self._settle()
        self._offer, self._aside, self._unnamed = None, [], 0
        number = self._states.get(state)
        if number is not None:
            self._account.restore(number, took)
        else:
            if self._account.end:
                self._account.truncate(0, "load_state", took)
            self.find("load_state")
        self._confirm()

    def find(self, reason: str) -> None:
        """Rows that are there already, as far as Python names their tokens. Raises LostTrack where it cannot."""
        held, named = self._engine.positions(), int(self._llama.n_tokens)
        if len(held) < named or not np.array_equal(held, np.arange(len(held))):
            raise LostTrack(f"the engine holds {len(held)} rows, Python names {named} tokens for them")
        self._unnamed = len(held) - named
        self._account.found([int(t) for t in self._llama.input_ids[:named]], reason)

    def outside(self, what: str) -> None:
        raise LostTrack(f"{what} was used: only sequence 0 is followed")

    def finish(self) -> None:
        """Whatever waits is recorded."""
        self._settle()

    # -- keeping the account ---------------------------------------------------------------------------------------

    def _end(self) -> int:
        return self._run.end if self._run is not None else self._account.end

    def _followed(self) -> None:
        if self._aside:
            raise LostTrack("several sequences were computed together, and not cleared")
        if self._unnamed:
            raise LostTrack(f"{self._unnamed} rows are in the engine whose tokens nobody names")

    def _decoding(self) -> bool:
        self._resolve(self._end())
        return self._by_hand if self._offer is None else self._offer.left == 0

    def _resolve(self, start: int | None) -> None:
        """The first the engine is asked for an offer says where its tokens go: from cache position `start` on."""
        offer = self._offer
        if offer is None or offer.left is not None:
            return
        self._settle()
        account = self._account
        start = account.end if start is None else min(start, account.end)
        keep = account.tape_at(start)
        offer.left = max(0, len(offer.tokens) - start) if offer.whole else len(offer.tokens)
        if offer.left == 0 and not offer.whole:
            self._offer = None
            return
        if keep < len(account.tape) and self._reason is None:
            replayed = offer.whole and offer.left == 1 and account.tape[keep] == offer.tokens[-1]
            self._reason = "logits" if replayed else "diverged" if offer.whole else "asked"
        account.prompt(keep, offer.left, suffix=not offer.whole and keep == len(account.tape) and account.turn > 0)

    def _prefilled(self, tokens: list[int], took: Took) -> None:
        self._settle()
        self._account.prefill(tokens, took)
        offer = self._offer
        if offer is not None and offer.left is not None:
            offer.left = max(0, offer.left - len(tokens))
            if not offer.whole and not offer.left:
                self._offer = None

    def _decoded(self, tokens: list[int], took: Took) -> None:
        run = self._run
        if run is not None and (run.verdict() or len(run.tokens) + len(tokens) > RUN_TOKENS):
            self._settle()
        if self._run is None:
            self._run = OpenRun(self._account.end, took.began_ns)
        self._run.call(tokens, took.elapsed_ns or 0)

    def _settle(self) -> None:
        """Record the open run. Proposals that nobody took and nobody removed are rows like others, and said to be."""
        run, self._run = self._run, None
        if run is None:
            return
        left = run.tokens[len(run.tokens) - run.verdict() :] if run.waiting else []
        proposed = run.accepted + run.rejected
        drafts: dict[str, int] = {}
        if self._drafts and proposed:
            drafts = {"drafted_tokens": proposed, "accepted_tokens": run.accepted, "rejected_tokens": run.rejected}
        self._account.decode(run.tokens[: run.settled], Took(run.began_ns, run.elapsed_ns), run.calls, **drafts)
        if left:
            self._account.left_over(left, "drafts_left")

    def _why(self) -> str:
        reason, self._reason = self._reason, None
        return reason or "asked"

    def _confirm(self) -> None:
        """Hold the account against the engine's memory. Raises LostTrack where they differ."""
        if self._aside or self._unnamed:
            return
        last = self._engine.position_max()
        if last != self._end() - 1:
            raise LostTrack(f"the engine's last position is {last}, {self._end() - 1} by what it was told")
        if self._check and not self._engine.recurrent:
            booked = self._account.cache_positions()
            if self._run is not None:
                booked = np.concatenate([booked, np.arange(self._run.at, self._run.end)])
            held = self._engine.positions()
            if not np.array_equal(held, booked):
                raise LostTrack(f"the engine holds {len(held)} rows, {len(booked)} by what it was told")


def _engine_reason(error: BaseException) -> str:
    """The engine's own words are a return code; of anything else only its class is kept."""
    text = str(error)
    return text if text.startswith("llama_decode returned ") else type(error).__name__
