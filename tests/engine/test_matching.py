"""What may come next: against languages listed whole; ends put off; states from tokens; slow ones in the background."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from twostroke.engine import matching as matching_module
from twostroke.engine.grammar import compile_grammar
from twostroke.engine.grammars import Grammars
from twostroke.engine.matching import Matching
from twostroke.engine.request import Constraint, ConstraintKind, SamplingParams
from twostroke.errors import InvalidRequest

from .byte_vocabulary import byte_vocabulary, encode, token_bytes
from .fake_runner import allowed_ids

SIZE = 301  # no multiple of 32
K = ConstraintKind
PROMPT = [5, 6, 7]
BYTES = token_bytes(SIZE)


class AtOnce:
    """Implements `Background` on the caller's thread; `held` keeps jobs back."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] | None = None
        self.jobs = 0

    def compile(self, constraint: Constraint) -> Any:
        class Compiled:
            done, error = True, ""

            def matcher(self) -> LLMatcher:
                return compile_grammar(byte_vocabulary(SIZE), constraint)

        return Compiled()

    def run(self, work: Callable[[], None]) -> Any:
        class Job:
            done = False

        job = Job()

        def both() -> None:
            work()
            job.done = True

        self.jobs += 1
        both() if self.held is None else self.held.append(both)
        return job


def make(constraint: Constraint, tokens: list[int], background: AtOnce | None = None, **params: Any) -> Matching:
    wanted = SamplingParams(constraint=constraint, **params)
    return Matching(wanted, constraint, tokens, len(PROMPT), SIZE, frozenset({0}), background or AtOnce())


def next_of(matching: Matching) -> set[int]:
    assert matching.ready(0) or matching.ready(0), "a job has been done in between"
    words = matching.allowed()
    assert (words.shape, words.dtype.itemsize) == ((10,), 4)
    return set(allowed_ids(words))


def whole(language: set[bytes], prefix: bytes) -> set[int]:
    """What may follow, by looking at every text of the language; 0 where one of them is complete."""
    found = {
        token for token, raw in enumerate(BYTES) if raw and token and any(w.startswith(prefix + raw) for w in language)
    }
    return found | ({0} if prefix in language else set())


def check(allowed: set[int], language: set[bytes], prefix: bytes) -> None:
    """Where the next bytes are forced, only the tokens that the tokenizer makes of them are taken."""
    expected = whole(language, prefix)
    if allowed != expected:
        assert len(allowed) == 1
        assert allowed < expected
        assert len({BYTES[token][0] for token in expected} - {0}) == 1
        assert 0 not in expected


TEXTS = st.text(st.sampled_from('ab,é"日 \n\\'), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(st.lists(TEXTS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_mask_of_a_choice_is_that_of_the_listed_language(texts: list[str], chance: Any) -> None:
    language = {text.encode() for text in texts}
    tokens = list(PROMPT)
    matching = make(Constraint(K.CHOICE, json.dumps(texts)), tokens)
    prefix = b""
    while True:
        allowed = next_of(matching)
        check(allowed, language, prefix)
        token = chance.choice(sorted(allowed))
        if token == 0:
            break
        prefix += BYTES[token]
        tokens.append(token)
    assert prefix in language


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(["a", "b", "[ab]", "(ab|b)", "a?", "b{1,2}"]), min_size=1, max_size=4))
def test_every_mask_of_an_expression_is_that_of_the_listed_language(parts: list[str]) -> None:
    import itertools
    import re

    expression = "".join(parts)
    words = ("".join(letters) for n in range(9) for letters in itertools.product("ab", repeat=n))
    language = {word.encode() for word in words if re.fullmatch(expression, word)}
    tokens = list(PROMPT)
    matching, prefix = make(Constraint(K.REGEX, expression), tokens), b""
    while (allowed := next_of(matching)) != {0}:
        check(allowed, language, prefix)
        token = max(allowed)
        prefix += BYTES[token]
        tokens.append(token)
    assert prefix in language


def test_ids_without_bytes_and_special_ones_are_never_allowed() -> None:
    allowed = next_of(make(Constraint(K.REGEX, r"(.|\n)*"), list(PROMPT)))
    assert 0 in allowed, "the empty text is complete"
    assert not allowed & set(range(SIZE - 7, 320))
    assert all(BYTES[token] != b"<end>" for token in allowed - {0})


def test_the_state_follows_from_the_tokens_alone() -> None:
    constraint = Constraint(K.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["ab", 12]}}')
    text = encode('["ab", 12, "ab"')
    growing = list(PROMPT)
    stepwise = make(constraint, growing)
    for index in range(len(text) + 1):
        fresh = make(constraint, [*PROMPT, *text[:index]])
        assert next_of(fresh) == next_of(stepwise) == next_of(stepwise.twin([*PROMPT, *text[:index]]))
        growing += text[index : index + 1]


@pytest.mark.parametrize(
    ("params", "text", "ends"),
    [
        ({}, "a", True),
        ({}, "aaa", True),
        ({"ignore_eos": True}, "a", False),
        ({"ignore_eos": True}, "aaa", True),  # nothing else can follow
        ({"min_tokens": 3}, "aa", False),
        ({"min_tokens": 2}, "aa", True),
        ({"min_tokens": 9}, "aaa", True),
    ],
)
def test_ends_are_put_off_only_as_long_as_something_can_follow(params: dict[str, Any], text: str, ends: bool) -> None:
    allowed = next_of(make(Constraint(K.REGEX, "a{1,3}"), [*PROMPT, *encode(text)], **params))
    assert (0 in allowed) == ends
    assert bool(allowed - {0}) == (text != "aaa")


def test_stop_tokens_count_as_ends_before_min_tokens() -> None:
    b = encode("b")[0]
    params = {"stop_token_ids": (b,), "min_tokens": 2}
    assert b not in next_of(make(Constraint(K.REGEX, "[ab]{4}"), [*PROMPT, *encode("a")], **params))
    assert b in next_of(make(Constraint(K.REGEX, "[ab]{4}"), [*PROMPT, *encode("aa")], **params))
    assert b in next_of(make(Constraint(K.REGEX, "b{4}"), list(PROMPT), **params)), "nothing else can follow"


def test_tokens_that_it_does_not_allow_end_it() -> None:
    matching = make(Constraint(K.REGEX, "a+"), [*PROMPT, *encode("ax")])
    assert next_of(matching) == set()
    assert "cannot be followed" in matching.error
    assert matching.ready(0)
    assert matching.ready(1), "it can be drawn for: nothing comes of it"


def test_a_dead_end_is_not_taken_for_an_end() -> None:
    """Half of a character that no text of the language goes on with."""
    matching = make(Constraint(K.GRAMMAR, 'start: "a" b\nb: "b" b'), list(PROMPT))
    try:
        allowed = next_of(matching)
    except InvalidRequest:
        return  # told at once
    assert allowed == set() or 0 not in allowed


def test_slow_masks_are_made_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching_module, "SLOW_S", -1.0)
    background, tokens = AtOnce(), list(PROMPT)
    matching = make(Constraint(K.REGEX, "a+"), tokens, background)
    assert next_of(matching)  # the first one is slow for everybody
    tokens += encode("a")
    assert next_of(matching)
    assert background.jobs == 0
    monkeypatch.setattr(matching_module, "SLOW_S", 1e9)
    background.held = []
    assert not matching.ready(1), "it sits out a step until its token is seen"
    tokens += encode("a")
    assert not matching.ready(0)
    assert not matching.ready(0)
    assert background.jobs == 1
    background.held.pop()()
    assert matching.ready(0)
    assert {BYTES[token] for token in allowed_ids(matching.allowed()) if token} == {b"a", b"aa"}
    background.held = None
    for _ in range(matching_module.CAREFUL):
        tokens += encode("a")
        next_of(matching)
    jobs = background.jobs
    tokens += encode("a")
    assert matching.ready(1), "it was quick for so long"
    assert next_of(matching)
    assert background.jobs == jobs


def test_a_replay_is_taken_in_in_the_background() -> None:
    background = AtOnce()
    matching = make(Constraint(K.REGEX, "a+"), [*PROMPT, *encode("a" * 50)], background)
    assert not matching.ready(1)
    assert not matching.ready(0)
    assert matching.ready(0)
    assert background.jobs == 1


def grammars() -> Grammars:
    return Grammars(byte_vocabulary(SIZE), SIZE, frozenset({0}))


def ready(matching: Matching | None, made: Grammars) -> Matching:
    assert matching is not None
    until = time.monotonic() + 20
    while not matching.ready(0):
        made.wait()
        assert time.monotonic() < until
    return matching


def test_a_constraint_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(vocabulary: Any, constraint: Constraint) -> LLMatcher:
        compiled.append(constraint.text)
        return compile_grammar(vocabulary, constraint)

    monkeypatch.setattr("twostroke.engine.grammars.compile_grammar", count)
    made = grammars()
    params = [SamplingParams(constraint=Constraint(K.REGEX, text)) for text in ("a+", "b+", "a+", "a+")]
    each = [ready(made.matching(own, list(PROMPT), len(PROMPT)), made) for own in params]
    assert sorted(compiled) == ["a+", "b+"]
    assert [sorted(next_of(own)) for own in each] == [
        sorted({token for token, raw in enumerate(BYTES) if raw and set(raw) == {letter}}) for letter in b"abaa"
    ]


def test_what_cannot_be_compiled_says_so_and_the_next_goes_on() -> None:
    made = grammars()
    bad, good = (
        ready(made.matching(SamplingParams(constraint=Constraint(K.REGEX, text)), [], 0), made) for text in ("(", "a")
    )
    assert next_of(bad) == set()
    assert "unclosed" in bad.error
    assert next_of(good)


def test_what_a_worker_refuses_at_once() -> None:
    assert grammars().matching(SamplingParams(), [], 0) is None
    for made, text in ((grammars(), "a" * (1 << 20)), (Grammars("no tokenizer", SIZE, frozenset({0})), "a")):
        with pytest.raises(InvalidRequest) as caught:
            made.matching(SamplingParams(constraint=Constraint(K.REGEX, text)), [], 0)
        assert caught.value.field == "constraint"


def test_whoever_drives_the_engine_is_woken() -> None:
    made, woken = grammars(), threading.Event()
    made.wake = woken.set
    assert made.matching(SamplingParams(constraint=Constraint(K.REGEX, "a")), [], 0) is not None
    assert woken.wait(20)
    assert not made.wait(), "nobody waits within a step"
