"""Chat templates: equal to transformers', and contained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from twostroke.engine.chat_template import ChatOptions, ChatTemplate
from twostroke.engine.tokenizer import Tokenizer
from twostroke.errors import ConfigError, InvalidRequest

from ..tool_models import TOOL_MODELS

Messages = list[dict[str, str]]

CONVERSATIONS: list[Messages] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 👋🏽"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2  \n"},
        {"role": "user", "content": "<b>{{ 'x' }} {% raise %}</b> <|im_end|>"},
    ],
    [{"role": "tool", "content": ""}],
]

TEMPLATES = [
    "{% for m in messages %}\n    {{ m.content | trim }}\n{% endfor %}\n{%- if add_generation_prompt %}A:{% endif %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ eos_token }}{{ bos_token }}{{ missing }}",
    "{% for m in messages %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools }}",
    "{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(messages[-1].role) }}{{ strftime_now('%Y') }}",
    "{{ messages | tojson(indent=2) }}{{ {'a': '<é&>'} | tojson }}{{ messages | map(attribute='role') | join(',') }}",
]

MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()})


@pytest.fixture(scope="session")
def reference(smollm2_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(smollm2_dir)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_equals_transformers(smollm2: Tokenizer, reference: PreTrainedTokenizerBase, messages: Messages) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.encode_chat(messages) == expected


@given(st.lists(MESSAGES, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_any_conversation_equals_transformers(
    smollm2: Tokenizer, reference: PreTrainedTokenizerBase, messages: Messages
) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.encode_chat(messages) == expected


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_what_templates_use(reference: PreTrainedTokenizerBase, source: str, messages: Messages) -> None:
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(messages, ChatOptions(add_generation_prompt=prompt)) == expected


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź", "days": 1}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c", "name": "weather"},
]
TOOL_TEMPLATES = [
    *(model.template for form, model in TOOL_MODELS.items() if form != "mistral"),
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}",
    "{% if custom is defined %}{% set tools = custom %}{% endif %}{{ tools }}{{ documents }}{{ style }}",
]


@pytest.mark.parametrize("source", TOOL_TEMPLATES)
@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_tools_and_variables_as_transformers_has_them(
    reference: PreTrainedTokenizerBase, source: str, tools: tuple[dict[str, Any], ...]
) -> None:
    variables = {"style": "terse", "documents": [{"text": "x"}], "enable_thinking": False}
    expected = reference.apply_chat_template(
        CALLED, chat_template=source, tokenize=False, tools=list(tools) or None, add_generation_prompt=True, **variables
    )
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert template.render(CALLED, ChatOptions(tools, variables)) == expected


@pytest.mark.parametrize("last", ["So far", " spaced \n", "<|im_end|>", "é", "So"])
@pytest.mark.parametrize("source", [None, "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"])
def test_the_last_message_is_gone_on_with(
    smollm2: Tokenizer, reference: PreTrainedTokenizerBase, source: str | None, last: str
) -> None:
    messages = [{"role": "user", "content": "So far"}, {"role": "assistant", "content": last}]
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    template = smollm2.template if source is None else ChatTemplate(source, {})
    assert template is not None
    assert template.render(messages, GOING_ON) == expected


GOING_ON = ChatOptions(add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_drops_the_last_message() -> None:
    with pytest.raises(InvalidRequest, match="does not show the last message") as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render([{"content": "a"}, {"content": "b"}], GOING_ON)
    assert caught.value.field == "input.chat"


def test_what_a_template_looks_for() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% macro f(x) %}{{ x }}{{ inner }}{% endmacro %}{{ f(bos_token) }}"
        "{% for m in messages %}{{ loop.index }}{{ m.name }}{% endfor %}{{ raise_exception if add_generation_prompt }}"
        "{% if enable_thinking is defined %}{{ strftime_now('%Y') }}{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert (template.variables, template.takes_tools) == ({"inner", "enable_thinking"}, False)
    assert ChatTemplate("{{ tools }}{{ documents }}", {}).takes_tools
    assert ChatTemplate("{{ tools }}{{ documents }}", {}).variables == {"documents"}


def test_a_template_for_conversations_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}{{ style }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None
    assert (template.takes_tools, template.source) == (True, "{{ tools }}{{ style }}")
    message = [{"role": "user", "content": "hi"}]
    assert template.render(message) == "plain"
    assert template.render(message, ChatOptions((WEATHER,), {"style": "x"})) == f"{[WEATHER]}x"
    (tmp_path / "chat_template.jinja").write_text("file")
    other = ChatTemplate.from_dir(tmp_path)
    assert other is not None
    assert not other.takes_tools
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].type }}")
    third = ChatTemplate.from_dir(tmp_path)
    assert third is not None
    assert (third.render(message), third.render(message, ChatOptions((WEATHER,)))) == ("file", "function")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + none }}", "NoneType"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages[0].update(role='x') }}", "unsafe|not safely callable"),
        ("{% set ns = namespace(__class__=1) %}", "takes no name like '__class__'"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_refusals(source: str, message: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match=message) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert caught.value.field == "input.chat"


def test_output_is_bounded() -> None:
    loops = "{% for i in range(100) %}{% for j in range(1000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    template = ChatTemplate(loops, {}, limit=5000)
    with pytest.raises(InvalidRequest, match="longer than 5000 characters"):
        template.render([{"role": "user", "content": "0123456789"}])
    assert len(ChatTemplate("{{ messages[0].content }}", {}, limit=5000).render([{"content": "x" * 5000}])) == 5000


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        ChatTemplate("x", {}).render([])


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi"}]
    ChatTemplate("{% set m = messages[0] %}{{ m.pop('role') if false }}{{ m.content }}", {}).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}"])
def test_invalid_templates(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate(source, {})


def test_where_it_is_found(tmp_path: Path) -> None:
    def load(config: dict[str, object]) -> ChatTemplate | None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatTemplate.from_dir(tmp_path)

    def text(template: ChatTemplate | None) -> str:
        assert template is not None
        return template.render([{"role": "user", "content": "hi"}])

    assert ChatTemplate.from_dir(tmp_path) is None
    assert load({}) is None
    assert load({"chat_template": None}) is None
    assert text(load({"chat_template": "one"})) == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    assert text(load({"chat_template": named})) == "two"
    assert load({"chat_template": named[:1]}) is None
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    assert text(load({"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}", **tokens})) == "<s></s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    assert text(load({"chat_template": "one", **tokens})) == "file </s>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=re.escape("chat_template.jinja")):
        ChatTemplate.from_dir(tmp_path)
