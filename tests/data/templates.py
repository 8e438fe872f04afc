"""Small chat templates in the style of published models, and tokenizers for them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# ChatML; a default system message (SmolLM2)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the last response has its reasoning, or an empty one; earlier ones have none
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# the same, and the prompt opens the reasoning
QWEN3_THINKING = QWEN3.replace(
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}",
    "<think>\n",
)
# the prompt opens the reasoning, and responses are written without it
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# content is trimmed, and the turns end in another token than EOS
LLAMA3 = (
    "<bos>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    '{% if m.tool_calls %}{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# no marker of the assistant's turn; a blank before its text
MISTRAL = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    '{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": '
    '"{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]<eos>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<eos>{% else %}"
    "{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "SmolLM2": SMOLLM2,
    "Qwen3": QWEN3,
    "Qwen3 Thinking": QWEN3_THINKING,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
}
SPECIAL = [
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|User|>",
    "<|Assistant|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
]
ENDS = {SMOLLM2: "<|im_end|>", QWEN3: "<|im_end|>", QWEN3_THINKING: "<|im_end|>"}
ENDS |= {LLAMA3: "<|eot_id|>", MISTRAL: "<eos>", DEEPSEEK_R1: "<eos>"}


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that merges two line breaks, and a blank with a digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), *(("Ġ", digit) for digit in "0123456789"), ("=", "4")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return _with_special(raw, template)


def word_tokenizer(template: str | None = None, scheme: str = "first") -> PreTrainedTokenizerFast:
    """A tokenizer of characters that marks word boundaries, as Metaspace does."""
    tokens = ["<unk>", "\u2581", *map(chr, range(33, 127)), "\n"]
    raw = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _with_special(raw, template)


def _with_special(raw: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer
