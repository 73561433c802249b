"""Chat templates in our own words, which render as the published ones are documented to, the tokenizers that
they are for, and what they render, written by hand.

In a marked text, what is between « and » is a target, and a backslash stands before a special token that a
message spells, which is text.
"""

import functools
import json
import re
from pathlib import Path

import numpy as np
from support.preparation import shared

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}{{ call.function | tojson }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LLAMA3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls -%}
{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}
{%- else -%}{{ m.content | trim }}{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
CALLS = """\
{%- macro calls(m, said) -%}
{%- for call in m.tool_calls or [] -%}
{{ '\\n' if said or loop.index0 else '' }}{{ '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{%- endmacro -%}
"""
RESULT = """\
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
"""
QWEN25 = f"""{CALLS}
{{%- if messages and messages[0].role != 'system' -%}}
{{{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}}}
{{%- endif -%}}
{{%- for m in messages -%}}
{{%- if m.role == 'assistant' -%}}
{{{{ '<|im_start|>assistant\\n' + m.content + calls(m, m.content) + '<|im_end|>\\n' }}}}
{RESULT}
{{%- else -%}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\\n' }}}}{{%- endif -%}}
"""
# thinking stays in the answers after the last question, of which the last one always has a block for it
QWEN3 = f"""{CALLS}
{{%- set asked = namespace(last=-1) -%}}
{{%- for m in messages if m.role == 'user' -%}}{{%- set asked.last = messages.index(m) -%}}{{%- endfor -%}}
{{%- for m in messages -%}}
{{%- if m.role == 'assistant' -%}}
{{%- set thought, said = '', m.content -%}}
{{%- if '</think>' in m.content -%}}
{{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() -%}}
{{%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}}
{{%- endif -%}}
{{{{ '<|im_start|>assistant\\n' }}}}
{{%- if loop.index0 > asked.last and (loop.last or thought) -%}}
{{{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
{{%- endif -%}}
{{{{ said + calls(m, said) + '<|im_end|>\\n' }}}}
{RESULT}
{{%- else -%}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\\n' }}}}{{%- endif -%}}
"""
OURS = """\
{%- for m in messages -%}
{{ '<|turn|>' + m.role + ':\\n' }}
{%- if m.role == 'assistant' -%}
{%- generation -%}{{ m.content }}
{%- for call in m.tool_calls or [] -%}{{ call.function.name + '()' }}{%- endfor -%}
{{ '<|end|>' }}{%- endgeneration -%}
{%- else -%}{{ m.content + '<|end|>' }}{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn|>assistant:\\n' }}{%- endif -%}
"""

IM = ["<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN_WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# name -> (template, published tokenizer, special tokens, added tokens that are not special)
FAMILIES = {
    "chatml": (CHATML, "gpt2", IM, []),
    "llama3": (LLAMA3, "llama3", HEADERS, []),
    "qwen2.5": (QWEN25, "qwen3", IM, QWEN_WORDS[:4]),
    "qwen3": (QWEN3, "qwen3", IM, QWEN_WORDS),
    "ours": (OURS, "gpt2", ["<|turn|>", "<|end|>"], []),
}


@functools.cache
def trained_tokenizer() -> str:
    """A tokenizer.json of 400 ids, byte-level, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([CHATML, LLAMA3, QWEN25, QWEN3, OURS, __doc__ or ""] * 3, trainer)
    return tokenizer.to_str()


def chat_folder(folder: Path, family: str, published: bool = False, template: str | None = None) -> Path:
    """A folder with the tokenizer and the chat template of a family."""
    from tokenizers import AddedToken, Tokenizer

    own, name, special, words = FAMILIES[family]
    path = shared(f"tokenizers/hf/{name}/tokenizer.json") if published else None
    tokenizer = Tokenizer.from_file(str(path)) if path else Tokenizer.from_str(trained_tokenizer())
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1]}
    config |= {"bos_token": special[0]} if family == "llama3" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(own if template is None else template)
    return folder


@functools.cache
def open_file(path: Path):
    """A tokenizer.json, for which what looks like a special token is text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def by_hand(folder: Path, family: str, marked: str) -> list[int]:
    """The ids of a marked text, each special token by its name and each piece of text between two of them by
    itself; ~id of what is no target, by the places of the characters."""
    tokenizer = open_file(folder / "tokenizer.json")
    special = "|".join(map(re.escape, FAMILIES[family][2]))
    stored, inside = [], False
    for piece in re.split(rf"((?<!\\)(?:{special}))", marked):
        text = re.sub("[«»\\\\]", "", piece)
        targets = []
        for char in piece:
            inside = char == "«" or (inside and char != "»")
            targets += [inside] if char not in "«»\\" else []
        if re.fullmatch(special, piece):
            stored.append(tokenizer.token_to_id(text) if inside else ~tokenizer.token_to_id(text))
            continue
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ends = {place for place in range(1, len(text)) if targets[place] != targets[place - 1]}
        assert ends <= {first for first, _ in encoding.offsets}, (piece, encoding.tokens)
        stored += [
            one if targets[first] else ~one
            for one, (first, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]
    return np.array(stored).tolist()
