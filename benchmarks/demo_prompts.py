"""The demonstration's prompts: a tokenizer of bytes, and the sentences that its text encoder learns digits from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import Qwen2Tokenizer

from slipcast.demo.prompted import NAMES

SPELLINGS: tuple[Callable[[int], str], ...] = (
    lambda digit: NAMES[digit],
    lambda digit: NAMES[digit].capitalize(),
    lambda digit: NAMES[digit].upper(),
    lambda digit: str(digit),
)
TEMPLATES = (
    *("{}",) * 6,  # the bare name more often than any sentence
    "{}.",
    "{}!",
    " {} ",
    "a {}",
    "A {}",
    "the {}",
    "digit {}",
    "the digit {}",
    "The digit {}",
    "a digit: {}",
    "number {}",
    "the number {}",
    "the figure {}",
    "draw {}",
    "draw a {}",
    "Draw the digit {}",
    "write {}",
    "write a {}",
    "a handwritten {}",
    "handwritten digit {}",
    "a picture of a {}",
    "an image of {}",
    "a photo of a {}",
    "{} by hand",
    "{}, in white on black",
    "a picture of the handwritten digit {}",
    "an image of the number {}, white on black",
    "please draw a handwritten {} for me",
    "a {}, handwritten in white on a black background",
    "a black and white photo of the number {}",
)
UNSEEN = ("show the {}", "give me a {}", "a drawing of the number {}", "Please write the digit {}, thank you")
"""No training step sees these: they say whether the encoder found the word in a sentence."""

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}" + START + "{{ message.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + START + "{% endif %}"
)
MULTIPLE = 32
"""The denoiser pads every caption to a multiple of so many tokens."""


def build_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer of the encoder's own class whose 259 tokens are the bytes and three marks: it has no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 512
    return tokenizer


def token_ids(tokenizer: Qwen2Tokenizer, prompt: str) -> list[int]:
    """A prompt's token numbers, as the pipeline makes them, without its padding."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text)["input_ids"])


@dataclass(frozen=True)
class PromptTable:
    """Prompts of one padded length.

    Attributes:
        ids: ``[prompts, length]`` int64, padded at the end.
        lengths: ``[prompts]``, the tokens that aren't padding.
        rows: ``[10, choices]``, the prompts of each digit.
        empty: the row of the empty prompt, or -1 where the table has none.
    """

    ids: Tensor
    lengths: Tensor
    rows: Tensor
    empty: int

    def padding(self, rows: Tensor) -> Tensor:
        """Which tokens of these prompts are padding, ``[n, length]`` bool."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) >= self.lengths[rows, None]

    def choose(self, digits: Tensor, generator: torch.Generator, unconditional: float) -> Tensor:
        """A prompt for each digit, ``[n]`` rows; where there is an empty prompt, that one for a part of them."""
        size, device = digits.shape, digits.device
        choice = torch.randint(self.rows.shape[1], size, generator=generator, device=device)
        rows = self.rows[digits, choice]
        if self.empty < 0:
            return rows
        dropped = torch.rand(size, generator=generator, device=device) < unconditional
        return rows.masked_fill(dropped, self.empty)


def prompt_tables(tokenizer: Qwen2Tokenizer, templates: Sequence[str], device: torch.device) -> tuple[PromptTable, ...]:
    """All the templates filled with all the spellings of the ten names, a table for each padded length."""
    groups: dict[int, list[list[tuple[int, ...]]]] = {}
    for digit in range(len(NAMES)):
        for template in templates:
            for spelling in SPELLINGS:
                ids = tuple(token_ids(tokenizer, template.format(spelling(digit))))
                length = -(-len(ids) // MULTIPLE) * MULTIPLE
                groups.setdefault(length, [[] for _ in NAMES])[digit].append(ids)
    empty = tuple(token_ids(tokenizer, ""))
    return tuple(
        _table(choices, length, int(tokenizer.pad_token_id), empty if length == MULTIPLE else None, device)
        for length, choices in sorted(groups.items())
        if all(choices)
    )


def _table(
    choices: list[list[tuple[int, ...]]],
    length: int,
    pad: int,
    empty: tuple[int, ...] | None,
    device: torch.device,
) -> PromptTable:
    prompts = list(dict.fromkeys(ids for digit in choices for ids in digit))
    place = {ids: row for row, ids in enumerate(prompts)}
    if empty is not None:
        prompts.append(empty)
    most = max(len(digit) for digit in choices)
    rows = [[place[digit[index % len(digit)]] for index in range(most)] for digit in choices]
    padded = [[*ids, *[pad] * (length - len(ids))] for ids in prompts]
    return PromptTable(
        torch.tensor(padded, device=device),
        torch.tensor([len(ids) for ids in prompts], device=device),
        torch.tensor(rows, device=device),
        -1 if empty is None else len(prompts) - 1,
    )
