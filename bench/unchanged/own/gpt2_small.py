"""A GPT-2 of 124 M parameters on tokens at random: steps of seconds, on a processor."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config()).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(12):
    tokens = torch.randint(50257, (1, 256))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
