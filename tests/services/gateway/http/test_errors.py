"""The exception tree as HTTP statuses and OpenAI's error objects, fields by the API's names."""

import json

import pytest

from twostroke import errors as tree
from twostroke.errors import (
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    HandoverExpired,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RunningAlready,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
    Unsupported,
    WorkerNotFound,
    WrongState,
)
from twostroke.services.gateway.http.errors import ClientGone, HttpRefusal, error_body, error_headers, kind_of
from twostroke.services.gateway.http.names import openai_name

STATUSES: list[tuple[type[TwostrokeError], int, str, str]] = [
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied, 403, "permission_error", "permission_denied"),
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (WrongState, 409, "conflict_error", "wrong_state"),
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (TwostrokeError, 500, "server_error", "internal_error"),
    (Unavailable, 503, "server_error", "service_unavailable"),
    (HandoverExpired, 503, "server_error", "service_unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
]


@pytest.mark.parametrize(("cls", "status", "kind", "code"), STATUSES)
def test_each_class(cls: type[TwostrokeError], status: int, kind: str, code: str) -> None:
    error = cls("what is wrong")
    assert kind_of(error).status == status
    told = json.loads(error_body(error))
    assert told == {"error": {"message": "what is wrong", "type": kind, "param": None, "code": code}}


def test_the_whole_tree_is_known() -> None:
    inside = {ConfigError, Mismatch, WorkerNotFound, ClientGone}  # no request of this door ends with one
    inside |= {RunningAlready, Unsupported}
    classes = {cls for cls in vars(tree).values() if isinstance(cls, type) and issubclass(cls, TwostrokeError)}
    assert classes - inside <= {cls for cls, *_ in STATUSES}


def test_a_refusal_of_http_s_has_its_own_status() -> None:
    error = HttpRefusal("too long", status=413, code="request_too_large", headers=((b"allow", b"GET"),))
    assert kind_of(error) == (413, "invalid_request_error", "request_too_large")
    assert error_headers(error) == [(b"allow", b"GET")]


def test_when_to_come_back() -> None:
    for seconds, told, ms in (
        (0.2, b"1", b"200"),
        (1.0, b"1", b"1000"),
        (1.01, b"2", b"1010"),
        (30.0, b"30", b"30000"),
    ):
        wanted = [(b"retry-after", told), (b"retry-after-ms", ms)]
        assert error_headers(Overloaded("full", retry_after_s=seconds)) == wanted
    assert error_headers(Overloaded("full")) == []
    assert error_headers(Overloaded("full", retry_after_s=float("inf"))) == []
    assert error_headers(Unauthenticated("no key")) == [(b"www-authenticate", b"Bearer")]


def test_messages_are_bounded_and_hold_any_text() -> None:
    told = json.loads(error_body(TwostrokeError("é" * 5000)))
    assert told["error"]["message"] == "é" * 1000
    assert json.loads(error_body(TwostrokeError("\ud800 \n")))["error"]["message"] == "? \n"


@pytest.mark.parametrize(
    ("field", "in_completions", "in_chats"),
    [
        ("sampling.top_p", "top_p", "top_p"),
        ("sampling.logit_bias[5]", "logit_bias[5]", "logit_bias[5]"),
        ("sampling.bad_words[3]", "bad_words[3]", "bad_words[3]"),
        ("stopping.max_tokens", "max_tokens", "max_tokens"),
        ("stopping.min_tokens", "min_tokens", "min_tokens"),
        ("stopping.strings", "stop", "stop"),
        ("stopping.strings[2]", "stop[2]", "stop[2]"),
        ("stopping.token_ids", "stop_token_ids", "stop_token_ids"),
        ("stopping.token_ids[1]", "stop_token_ids[1]", "stop_token_ids[1]"),
        ("stopping.ignore_eos", "ignore_eos", "ignore_eos"),
        ("stopping.include_stop", "include_stop_str_in_output", "include_stop_str_in_output"),
        ("input", "prompt", "messages"),
        ("input.text", "prompt", "messages"),
        ("input.token_ids.ids", "prompt", "messages"),
        ("input.token_ids.ids[7]", "prompt[7]", "messages"),
        ("input.chat", "messages", "messages"),
        ("input.chat.messages", "messages", "messages"),
        ("input.chat.messages[3].role", "messages[3].role", "messages[3].role"),
        ("logprobs", "logprobs", "top_logprobs"),
        ("prompt_logprobs", "prompt_logprobs", "prompt_logprobs"),
        ("n", "n", "n"),
        ("model", "model", "model"),
        ("stream_options.foo", "stream_options.foo", "stream_options.foo"),
    ],
)
def test_names(field: str, in_completions: str, in_chats: str) -> None:
    assert openai_name(field, chat=False) == in_completions
    assert openai_name(field, chat=True) == in_chats
    told = json.loads(error_body(InvalidRequest("wrong", field=field), chat=True))
    assert told["error"]["param"] == in_chats
