"""Parameters of sampling: their values as such and as text, what is unknown or not supported."""

from typing import Any

import pytest

from twostroke.errors import InvalidRequest
from twostroke.services.gateway.http.generation_fields import GenerationFields
from twostroke.services.gateway.oip.sampling_fields import MAX_JSON, TAKEN, SamplingFields, plain, read_object


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("temperature", "1", 1.0),
        ("max_tokens", " 7 ", 7),
        ("top_k", "-1", -1),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("logprobs", "None", None),
        ("stop_token_ids", "[3, 4]", [3, 4]),
        ("bad_words", '["a"]', ["a"]),
        ("logit_bias", '{"7": 1}', {"7": 1.0}),
        ("stop", "7", ["7"]),
        ("stop", '["a"]', ['["a"]']),
        ("cache_salt", "7", "7"),
    ],
)
def test_values_may_come_as_text(name: str, text: str, value: Any) -> None:
    assert getattr(SamplingFields.of({name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("max_tokens", "7.5"),
        ("max_tokens", 7.0),
        ("top_k", "[1]"),
        ("ignore_eos", "yes"),
        ("ignore_eos", 1),
        ("stop_token_ids", "3"),
        ("stop", 7),
        ("n", 0),
        ("n", "17"),
        ("cache_salt", "x" * 300),
        ("bad_words", '["' + "x" * MAX_JSON + '"]'),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
        SamplingFields.of({name: value})
    assert caught.value.field == name
    assert type(caught.value) is InvalidRequest
    assert "xxx" not in caught.value.message


@pytest.mark.parametrize("name", ["temprature", "", "stream", "model", "user", "text_input", "x" * 500])
def test_what_is_unknown_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no parameter") as caught:
        SamplingFields.of({name: 1})
    assert name.startswith((caught.value.field or "").removesuffix("..."))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("name", "harmless", "value"),
    [
        ("best_of", 1, 2),
        ("detokenize", True, False),
        ("flat_logprobs", False, True),
        ("use_beam_search", "false", True),
        ("length_penalty", "1.0", 2.0),
        ("early_stopping", False, True),
        ("spaces_between_special_tokens", True, False),
        ("extra_args", {}, {"a": 1}),
        ("lora_name", None, "x"),
        ("output_kind", None, 1),
        ("prompt_logprobs", None, 1),
        ("skip_reading_prefix_cache", False, True),
        ("logits_processors", [], ["x"]),
    ],
)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str, harmless: Any, value: Any) -> None:
    SamplingFields.of({name: harmless})
    with pytest.raises(InvalidRequest, match="is not supported here") as caught:
        SamplingFields.of({name: value})
    assert caught.value.field == name


def test_every_field_that_doors_share_is_taken_or_refused() -> None:
    """One that is new has to be decided on here before anything can be asked with it."""
    assert SamplingFields.model_fields.keys() >= TAKEN
    assert not TAKEN & SamplingFields.unsupported.keys()
    for name in GenerationFields.model_fields.keys() - TAKEN:
        with pytest.raises(InvalidRequest, match=r"there is no parameter|is not supported here"):
            SamplingFields.of({name: [{"odd": 1}]})


def test_an_object_of_parameters() -> None:
    assert read_object(b'{"top_k": 7}') == {"top_k": 7}
    for text, why in ((b"", "no valid JSON"), (b"[1]", "must be a JSON object"), (b'{"a": NaN}', "no valid JSON"),
                      (b'{"a": "\xff"}', "no valid JSON"), (b"[" * 5000, "no valid JSON"),
                      (b" " * (MAX_JSON + 1), "at most")):  # fmt: skip
        with pytest.raises(InvalidRequest, match=why) as caught:
            read_object(text)
        assert caught.value.field == "sampling_parameters"


def test_plain_values_stay() -> None:
    for value in (1, 0.5, True, None, [1], {"a": "1"}):
        assert plain("temperature", value) == value
    assert plain("temperature", "\ud800") == "\ud800"


@pytest.mark.parametrize("text", ["[" + "[]," * 100_000 + "0]", "{" + '"":{},' * 60_000 + '"a":0}'])
def test_what_would_take_long_to_read_is_refused_before(text: str) -> None:
    """Wherever it stands."""
    with pytest.raises(InvalidRequest, match="too many values") as caught:
        SamplingFields.of({"stop_token_ids": text})
    assert caught.value.field == "stop_token_ids"
    with pytest.raises(InvalidRequest, match="too many values"):
        read_object(b'{"stop":' + text.encode() + b"}")
