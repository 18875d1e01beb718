"""Train a small Llama with transformers' own classes, for `headwater retrofit` to take over.

    python examples/train_llama.py runs/llama          # two to six minutes on one core
    python examples/train_llama.py runs/llama-1 1      # another one: seed 1 instead of 0

Bytes of Python's standard library; no headwater model is in it, only its reading of the corpus.
"""

import math
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwater_lab.data.text import TextSettings

STEPS, WARMUP, BATCH, CONTEXT, PEAK = 1500, 50, 16, 128, 3e-3


def main(folder: str, seed: int = 0) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    data = TextSettings(source="python-stdlib", context=CONTEXT, held_out_bytes=40_000).build()
    config = LlamaConfig(
        vocab_size=data.vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = data.batches(seed=seed, batch_size=BATCH, start=0)
    for step in range(STEPS):
        done = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
        rate = PEAK * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = next(batches)
        loss = model(
            input_ids=batch["input_ids"], shift_labels=batch["shift_labels"], labels=batch["shift_labels"]
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        measured = data.evaluate(lambda batch: model(input_ids=batch["input_ids"]).logits)
    print(f"held-out bits per byte {measured.metrics['bits_per_byte']:.4f}")
    model.save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
