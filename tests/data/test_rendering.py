"""A demonstration has the tokens of the chat template's own rendering of the conversation."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gac.data import DataConfig, DataError, encoding, load_demos, load_prompts
from gac.data.examples import load_references
from gac.integrations.demonstrations import encode
from tests.data.templates import (
    DEEPSEEK_R1,
    ENDS,
    LLAMA3,
    MISTRAL,
    QWEN3,
    QWEN3_THINKING,
    SMOLLM2,
    TEMPLATES,
    byte_tokenizer,
    word_tokenizer,
)

USER = {"role": "user", "content": "2+2="}
FOUR = {"role": "assistant", "content": "4"}
REASONED = {**FOUR, "reasoning_content": "add"}
ADD = {"name": "add", "arguments": {"x": 1}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}
TURNS = [USER, FOUR, {"role": "user", "content": "and 1+3?"}]


def saved(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(folder: Path, tokenizer: Any, row: dict[str, Any], **options: Any) -> list[int]:
    """The tokens of prompt and demonstration in `gac train`; GACTrainer's must be the same."""
    config = DataConfig(prompts=saved(folder / "rows.jsonl", row), answer_field=None, **options)
    (example,) = load_demos(config, tokenizer)
    ids = [*example.prompt, *example.demo]
    if isinstance(row.get("prompt", []), list):
        other = encode(row, "row", tokenizer)
        assert (other["ids"], other["start"]) == (ids, len(example.prompt))
    return ids


def rendered(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    """The tokens of the whole conversation, up to and including the last end of a turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    end = ENDS[tokenizer.chat_template]
    text = text[: text.rindex(end) + len(end)]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


RESPONSES = {"text": FOUR, "reasoning": REASONED, "call": CALL}
RESPONSES["reasoned call"] = {**CALL, "reasoning_content": "add"}
PROMPTS = {"one turn": [USER], "three turns": TURNS}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("template", "response"),
    [
        (template, response)
        for template in TEMPLATES
        for response in RESPONSES
        if template != "SmolLM2" or "call" not in response  # which it does not write
    ],
)
def test_a_demonstration_is_what_the_template_renders(
    tmp_path: Path, template: str, response: str, prompt: str
) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    messages = [*PROMPTS[prompt], RESPONSES[response]]
    expected = rendered(tokenizer, messages)
    split = {"prompt": messages[:-1], "completion": messages[-1:]}
    for row in ({"messages": messages}, split):
        ids = trained(tmp_path, tokenizer, row)
        assert tokenizer.decode(ids) == tokenizer.decode(expected)
        if template != "Qwen3 Thinking" or "reason" in response:  # else see the next test
            assert ids == expected


def test_a_token_across_the_boundary_is_split(tmp_path: Path) -> None:
    """The prompt ends in a line break, and the template writes another one after it."""
    tokenizer = byte_tokenizer(QWEN3_THINKING)
    ids = trained(tmp_path, tokenizer, {"messages": [USER, FOUR]})
    (prompt,) = load_prompts(
        DataConfig(prompts=str(tmp_path / "rows.jsonl"), answer_field=None), tokenizer
    )
    assert tuple(ids[: len(prompt.prompt)]) == prompt.prompt
    assert tokenizer.decode(ids) == tokenizer.decode(rendered(tokenizer, [USER, FOUR]))
    assert tokenizer.decode(prompt.demo) == "\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_prompts_are_rendered_too(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    ids = trained(tmp_path, tokenizer, {"prompt": "2+2=", "solution": "4"}, chat=True)
    expected = rendered(tokenizer, [USER, FOUR])
    assert tokenizer.decode(ids) == tokenizer.decode(expected)


def test_reasoning_that_the_template_does_not_write_is_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    for template, warned in ((QWEN3, False), (SMOLLM2, True)):
        encoding._warn_unwritten.cache_clear()
        caplog.clear()
        for row in (REASONED, FOUR):
            trained(tmp_path, byte_tokenizer(template), {"messages": [USER, row]})
        texts = [
            r.message for r in caplog.records if "does not write the reasoning_content" in r.message
        ]
        assert len(texts) == warned


@pytest.mark.parametrize(
    ("template", "response"),
    [
        (DEEPSEEK_R1, FOUR),
        (DEEPSEEK_R1, {**FOUR, "content": "<think>\nadd\n</think>4"}),
        (SMOLLM2 + "{% if add_generation_prompt %}<think>\n{% endif %}", FOUR),
        (
            SMOLLM2 + "{% if add_generation_prompt %}<think>\n{% endif %}",
            {**FOUR, "content": "<think>add</think>4"},
        ),
        (QWEN3.replace("<|im_start|>assistant\n", "<|im_start|>assistant: "), FOUR),
    ],
)
def test_a_prompt_that_is_no_prefix_is_an_error_that_names_the_row(
    tmp_path: Path, template: str, response: dict[str, Any]
) -> None:
    tokenizer = byte_tokenizer(template)
    row = {"messages": [USER, response]}
    path = saved(tmp_path / "rows.jsonl", {"messages": [USER]}, row)
    config = DataConfig(prompts=path, answer_field=None)
    prompt, whole = (
        tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True),
        tokenizer.apply_chat_template([USER, response], tokenize=False),
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, field 'solution'.*differently") as e:
        load_demos(config, tokenizer)
    for text in (prompt[-5:], whole[-20:-12]):  # both texts
        assert repr(text)[1:-1] in str(e.value)
    with pytest.raises(ValueError, match=r"demos\[7\]: field 'completion'.*differently"):
        encode(row, "demos[7]", tokenizer)
    # a run without demonstrations, or an evaluation, needs the prompt only
    examples = load_prompts(config, tokenizer, demos=False)
    assert [example.demo for example in examples] == [None, None]
    assert examples[1].prompt_text == prompt
    assert list(examples.dropped) == ["demonstration that the chat template does not render"]


def test_a_response_that_opens_its_reasoning_as_the_prompt_does(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SMOLLM2 + "{% if add_generation_prompt %}<think>\n{% endif %}")
    message = {**FOUR, "content": "<think>\nadd\n</think>\n4"}
    text = tokenizer.decode(trained(tmp_path, tokenizer, {"messages": [USER, message]}))
    assert text.count("<think>") == 1
    assert text.endswith("<|im_start|>assistant\n<think>\nadd\n</think>\n4<|im_end|>")


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3, MISTRAL])
@pytest.mark.parametrize("tail", ["", "\n", " ", "{end}", "{end}\n", "<eos>"])
def test_a_demonstration_has_one_end_token(tmp_path: Path, template: str, tail: str) -> None:
    tokenizer = byte_tokenizer(template)
    end = ENDS[template]
    once = trained(tmp_path, tokenizer, {"messages": [USER, FOUR]})
    message = {**FOUR, "content": f"4{end}{tail.format(end=end)}"}
    for row in (
        {"messages": [USER, message]},
        {"prompt": "2+2=", "solution": message["content"]},
    ):
        assert trained(tmp_path, tokenizer, row) == once
    # without the template, EOS ends it, whatever end token it has
    row = {"prompt": "2+2=", "solution": message["content"]}
    text = tokenizer.decode(trained(tmp_path, tokenizer, row, chat=False))
    assert text == "2+2=4<eos>"
    plain = {"prompt": "2+2=", "completion": message["content"]}
    assert tokenizer.decode(encode(plain, "row", tokenizer)["ids"]) == "2+2=4<eos>"


def test_an_end_token_inside_of_a_response_stays(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SMOLLM2)
    message = {**FOUR, "content": "4<|im_end|>5"}
    ids = trained(tmp_path, tokenizer, {"messages": [USER, message]})
    assert ids == rendered(tokenizer, [USER, message])
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    message = {**FOUR, "content": "4<eos>5"}
    ids = trained(tmp_path, tokenizer, {"messages": [USER, message]})
    assert tokenizer.decode(ids) == "2+2=4<eos>5<eos>"


# --- tokens in their context


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("template", [None, SMOLLM2, LLAMA3, MISTRAL])
def test_words_continue_without_a_boundary(
    tmp_path: Path, template: str | None, scheme: str
) -> None:
    tokenizer = word_tokenizer(template, scheme)
    row = {"prompt": "2+2=", "solution": "4"}
    ids = trained(tmp_path, tokenizer, row)
    if template is None:
        expected = tokenizer("2+2=4", add_special_tokens=False)["input_ids"]
        assert ids == [*expected, tokenizer.eos_token_id]
    else:
        assert ids == rendered(tokenizer, [USER, FOUR])
    plain = encode({"prompt": "2+2=", "completion": "4"}, "row", tokenizer)["ids"]
    if template is None:
        assert plain == ids
    turns = ["4", " is ", "it", ". ", "Yes"]
    text = "".join(turns)
    ids = trained(tmp_path, tokenizer, {**row, "solution": turns})
    (example,) = load_demos(
        DataConfig(prompts=str(tmp_path / "rows.jsonl"), answer_field=None), tokenizer
    )
    if template is None:
        expected = tokenizer(f"2+2={text}", add_special_tokens=False)["input_ids"]
        assert ids == [*expected, tokenizer.eos_token_id]
    else:
        assert ids == rendered(tokenizer, [USER, {**FOUR, "content": text}])
    marked = [[], []]
    for token, own in zip(example.demo, example.demo_mask, strict=True):
        marked[own].append(token)
    assert tokenizer.convert_ids_to_tokens(marked[False]) == [*"\u2581is\u2581.\u2581"]


def test_a_merged_word_boundary_stays_with_the_prompt(tmp_path: Path) -> None:
    """The token "=4" would reach into the prompt; what remains must not begin a word."""
    tokenizer = byte_tokenizer()
    ids = trained(tmp_path, tokenizer, {"prompt": "2+2=", "solution": "4 4"})
    assert tokenizer.convert_ids_to_tokens(ids) == [*"2+2=4", "Ġ4", "<eos>"]
    merged = word_tokenizer()
    merged.add_tokens(["=4"])
    ids = trained(tmp_path, merged, {"prompt": "2+2=", "solution": "4"})
    assert merged.convert_ids_to_tokens(ids) == ["\u2581", *"2+2=4", "<eos>"]


def test_several_turns_in_a_template(tmp_path: Path) -> None:
    turns = [" add(1)", "\n1\n", "4 "]
    text = "".join(turns)
    for template in (SMOLLM2, QWEN3, LLAMA3, MISTRAL):
        tokenizer = byte_tokenizer(template)
        row = {"prompt": "2+2=", "solution": turns}
        ids = trained(tmp_path, tokenizer, row)
        assert ids == rendered(tokenizer, [USER, {**FOUR, "content": text}])
        (example,) = load_demos(
            DataConfig(prompts=str(tmp_path / "rows.jsonl"), answer_field=None), tokenizer
        )
        pairs = zip(example.demo, example.demo_mask, strict=True)
        assert tokenizer.decode([token for token, own in pairs if not own]) == "\n1\n"
    tokenizer = byte_tokenizer(SMOLLM2.replace("m.content", "m.content | upper"))
    with pytest.raises(DataError, match="field 'solution': the chat template changes the text"):
        trained(tmp_path, tokenizer, row)


# --- the row's own arguments of the template


def test_a_rows_template_arguments_act(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(QWEN3)
    tools = [{"name": "add"}]
    row = {
        "messages": [USER, FOUR],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    expected = rendered(tokenizer, [USER, FOUR], tools=tools)
    assert trained(tmp_path, tokenizer, row) == expected
    (example,) = load_prompts(
        DataConfig(prompts=str(tmp_path / "rows.jsonl"), answer_field=None), tokenizer
    )
    assert example.prompt_text.endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(example.demo) == "4<|im_end|>"
    # as JSON text
    texts = {**row, **{name: json.dumps(row[name]) for name in ("tools", "chat_template_kwargs")}}
    assert trained(tmp_path, tokenizer, texts) == expected
    # the row's replace the trainer's
    both = encode(row, "row", tokenizer, {"tools": [{"name": "other"}], "enable_thinking": True})
    assert both["ids"] == expected
    ids = encode({"messages": [USER, FOUR]}, "row", tokenizer, {"tools": tools})["ids"]
    assert ids == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [USER, FOUR], "chat_template_kwargs": {"tokenize": True}},
            "'chat_template_kwargs': 'tokenize' is not an argument of a template",
        ),
        ({"messages": [USER, FOUR], "chat_template_kwargs": "x"}, "expected a mapping"),
        ({"messages": [USER, FOUR], "tools": "x"}, "'tools': expected a list of tools, found 'x'"),
        (
            {"prompt": "a", "completion": "b", "chat_template_kwargs": {"a": 1}},
            "'chat_template_kwargs': has no effect on a text prompt",
        ),
    ],
)
def test_template_arguments_that_cannot_act_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    tokenizer = byte_tokenizer(QWEN3)
    config = DataConfig(
        prompts=saved(tmp_path / "a.jsonl", row), answer_field=None, template="{prompt}", chat=None
    )
    if "messages" in row:
        config = DataConfig(prompts=config.prompts, answer_field=None)
    with pytest.raises(DataError, match=message):
        load_demos(config, tokenizer)
    with pytest.raises(ValueError, match=f"row: .*{message}"):
        encode(row, "row", tokenizer)


# --- whether the template is used


def test_the_template_is_used_if_there_is_one_and_said_once(tmp_path: Path, caplog: Any) -> None:
    row = {"prompt": "2+2=", "solution": "4", "answer": "4"}
    path = saved(tmp_path / "rows.jsonl", row)
    chat = "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    chat += "<|im_start|>assistant\n"
    for template, options, text, decision in (
        (SMOLLM2, {}, chat.format("2+2="), "with the tokenizer's chat template"),
        (SMOLLM2, {"template": "Q: {prompt}"}, "Q: 2+2=", "because data.template is set"),
        (None, {}, "2+2=", "the tokenizer has no chat template"),
        (SMOLLM2, {"chat": False}, "2+2=", None),
        (SMOLLM2, {"chat": True, "template": "Q: {prompt}"}, chat.format("Q: 2+2="), None),
    ):
        tokenizer = byte_tokenizer(template)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gac.data"):
            for load in (load_prompts, load_demos):
                (example,) = load(DataConfig(prompts=path, **options), tokenizer)
                assert example.prompt_text == text
        said = [r.message for r in caplog.records if r.message.startswith("data.chat=null: ")]
        assert len(said) == (decision is not None)
        assert decision is None or decision in said[0]


def test_a_message_with_more_than_content_needs_the_template(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "solution": [REASONED]}
    tokenizer = byte_tokenizer(QWEN3)
    ids = trained(tmp_path, tokenizer, row)
    assert ids == rendered(tokenizer, [USER, REASONED])
    assert trained(tmp_path, tokenizer, {**row, "solution": REASONED}) == ids
    with pytest.raises(DataError, match="'solution': a message with reasoning_content needs data"):
        trained(tmp_path, tokenizer, row, chat=False)
    with pytest.raises(DataError, match="'solution': has reasoning_content: data.demo_template"):
        trained(tmp_path, tokenizer, row, demo_template="{demo}")
    path = str(tmp_path / "rows.jsonl")
    assert [x for _, x in load_references(DataConfig(prompts=path, answer_field=None))] == ["4"]
