"""A Qwen3 of random weights with a tokenizer of bytes, as a Hugging Face directory, and conversations for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

LAYERS = 8
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model(directory: Path, layers: int = LAYERS) -> Path:
    """Write it; about 1 MB."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    text = "ab #### 1"
    if tokenizer.encode(text) != tokens(text):
        raise AssertionError(f"{text!r} is {tokenizer.encode(text)}, not {tokens(text)}")
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=len(letters) + 2,
        pad_token_id=len(letters),
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def conversations(count: int = 64) -> list[dict[str, object]]:
    """Chats of one turn, each of another length."""
    draw = random.Random(0)

    def words(number: int) -> str:
        return " ".join(draw.choice(("ab", "cde", "fghi", "jk", "lmno")) for _ in range(number))

    return [
        {
            "messages": [
                {"role": "user", "content": words(6)},
                {"role": "assistant", "content": words(draw.randint(4, 16))},
            ]
        }
        for _ in range(count)
    ]


def lengths() -> list[int]:
    """Tokens of each of the `conversations`, as `model`'s template writes them."""
    own: Any = conversations()
    # Begin and end of a message are a token each, and a line ends behind its role and behind its end.
    return [sum(4 + len(said["role"]) + len(said["content"]) for said in each["messages"]) for each in own]


def jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in conversations()))
    return path


def parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(conversations()), path)
    return path


def questions(path: Path, count: int) -> Path:
    """Prompts for RL, as verl and as SkyRL read them, each of another length. The answer to every one is 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "prompt": [{"role": "user", "content": "ab " * (1 + number)}],
            "data_source": "openai/gsm8k",
            "env_class": "gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "reward_spec": {"method": "rule", "ground_truth": "1"},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def answer(prompt: Sequence[int], number: int) -> list[int]:
    """What stands for an inference engine answers: the same text to the same prompt and number, right for odd numbers.

    Two answers to one prompt differ in length.
    """
    draw = random.Random(str([*prompt, number]))
    letters = "".join(draw.choices(ascii_lowercase, k=4 + (sum(prompt) + 5 * number) % 16))
    return tokens(f"{letters} #### {number % 2}")


def tokens(text: str) -> list[int]:
    """As the tokenizer has it: its letters are sorted, ASCII first, and a space is written as a later one."""
    return [220 if letter == " " else ord(letter) - ord("!") for letter in text]
