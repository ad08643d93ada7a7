"""A random tiny Llama, made on the spot: fast enough for wide test matrices."""

import shutil
from pathlib import Path


def make_tiny_llama(folder: Path, tokenizer_from: Path, seed: int = 7) -> Path:
    """Writes a Llama of 4 layers, hidden size 128, with the vocabulary and tokenizer of the model in `tokenizer_from`."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    vocabulary = AutoConfig.from_pretrained(tokenizer_from).vocab_size
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder
