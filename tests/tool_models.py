"""Tiny models whose chat templates take tools: short forms of those of Hermes, Llama 3.1 and 3.2, and Mistral."""

from pathlib import Path
from typing import Any, NamedTuple

from .tiny import make_tiny_llama

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.name and message.role == 'user' %}{{ message.name }}: {% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
_HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call them as <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call><|im_end|>\n{% endif %}' + _CHATML
)
_LLAMA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and tools is not none and tools %}"
    'Answer with {"name": function name, "parameters": dictionary of arguments}.\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
    "{{ message.tool_calls[0].function.arguments | tojson }}}{% else %}{{ message['content'] | trim }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }} {{ message.tool_call_id }}[/TOOL_RESULTS]"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
_PYTHONIC = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.first and tools %}Answer with [func_name1(params_name1=params_value1), func_name2(params)].\n"
    "{{ tools | tojson }}{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}, {% endfor %})]"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ToolModel(NamedTuple):
    """A template, and the tokens that its calls need: special or plain."""

    template: str
    tokens: dict[str, bool]


TOOL_MODELS = {
    "hermes": ToolModel(_HERMES, {"<tool_call>": False, "</tool_call>": False}),
    "llama": ToolModel(_LLAMA, {"<|python_tag|>": True}),
    "mistral": ToolModel(_MISTRAL, {"[TOOL_CALLS]": True, "[INST]": True, "[/INST]": True}),
    "pythonic": ToolModel(_PYTHONIC, {}),
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def make_tool_model(directory: Path, form: str) -> Path:
    """Writes the checkpoint of a tiny Llama with the template of this form."""
    model = TOOL_MODELS[form]
    return make_tiny_llama(directory, chat_template=model.template, more_tokens=model.tokens)
