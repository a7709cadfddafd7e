"""A small Llama: its folder, as vLLM loads it, and a trainer of the same shape."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[1, 7, 3, 9], [2, 11, 5, 40, 8, 100], [300, 3]]
NEW_TOKENS = 12


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        torch_dtype="float32",
    )
    return LlamaForCausalLM(config).float()


def save(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    """The folder of a model with random weights, and of a tokenizer with a word for each token."""
    model = make_model(seed)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(512)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w0", pad_token="w0"
    ).save_pretrained(folder)


def train(model: LlamaForCausalLM, steps: int = 3) -> None:
    """A few steps that change what it generates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(1, 512, (4, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def greedy(model: LlamaForCausalLM) -> list[list[int]]:
    """What the trainer itself generates for the prompts."""
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
