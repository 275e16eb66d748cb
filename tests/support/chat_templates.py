"""Chat templates in the shapes that families of models have."""

from __future__ import annotations

__all__ = ["CONTROL", "TEMPLATES"]

TEMPLATES = {
    # A header for each role, contents trimmed, the beginning of text in the first message.
    "llama3": (
        "{% for m in messages %}"
        "{% set text = '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' %}"
        "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    ),
    # A system message of its own where there is none, tools in it, neighbouring tool answers in one user turn.
    "qwen": (
        "{%- if tools %}{{- '<|im|>system\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'Be of help.' }}{%- endif %}"
        "{{- '\n\n# Tools\n\n<tools>' }}{%- for t in tools %}{{- '\n' }}{{- t | tojson }}{%- endfor %}"
        "{{- '\n</tools><|/im|>\n' }}"
        "{%- elif messages[0]['role'] == 'system' %}{{- '<|im|>system\n' + messages[0]['content'] + '<|/im|>\n' }}"
        "{%- else %}{{- '<|im|>system\nBe of help.<|/im|>\n' }}{%- endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) "
        "or (m.role == 'assistant' and not m.tool_calls) %}"
        "{{- '<|im|>' + m.role + '\n' + m.content + '<|/im|>\n' }}"
        "{%- elif m.role == 'assistant' %}{{- '<|im|>assistant' }}"
        "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
        "{%- for c in m.tool_calls %}{%- set f = c.function %}"
        '{{- \'\n<call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
        "{{- f.arguments | tojson }}{{- '}\n</call>' }}"
        "{%- endfor %}{{- '<|/im|>\n' }}"
        "{%- elif m.role == 'tool' %}"
        "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im|>user' }}{%- endif %}"
        "{{- '\n<answer>\n' + m.content + '\n</answer>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|/im|>\n' }}{%- endif %}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im|>assistant\n' }}{%- endif %}"
    ),
    # What was thought is kept behind the last user message alone.
    "thinking": (
        "{%- set ns = namespace(last=-1) %}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content %}"
        "{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im|>' + m.role + '\n' + content + '<|/im|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im|>assistant\n' }}{%- endif %}"
    ),
    # Turns must alternate; the system message is the beginning of the first user's; the assistant is called model.
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<|turn|>' + role + '\n' + (first if loop.first else '') }}{{ m['content'] | trim }}{{ '<|/turn|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
    ),
    # No role names; the tools stand before the last user message, so that they move with the chat.
    "mistral": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'user' %}"
        "{% if loop.last and tools %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}"
        "{{ '[INST] ' + m['content'] + '[/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
        "{% elif m['role'] == 'system' %}{{ '[SYS] ' + m['content'] + '[/SYS]' }}"
        "{% else %}{{ raise_exception('only user, system and assistant') }}{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
}

CONTROL = [
    *("<bos>", "<eos>", "<|head|>", "<|/head|>", "<|eot|>", "<|im|>", "<|/im|>", "<|turn|>", "<|/turn|>"),
    *("<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("[INST]", "[/INST]", "[SYS]", "[/SYS]", "[TOOLS]", "[/TOOLS]"),
]
