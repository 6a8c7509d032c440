"""Scripts that train language models, as people write them, plain and wrapped."""

from __future__ import annotations

import io
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twice import Numbers, Script, Wrap, differences, wrapped

VOCABULARY, BLOCK = 64, 16


class SelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads, self.width, self.dropout = num_heads, width, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            each.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for each in self.c_attn(x).split(self.width, dim=2)
        )
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, 2, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CharacterModel(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.1, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(BLOCK, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(width, dropout) for _ in range(2)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(4))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def optimizer(self) -> torch.optim.AdamW:
        decayed = [each for each in self.parameters() if each.dim() >= 2]
        others = [each for each in self.parameters() if each.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx: Tensor, num_tokens: int) -> Tensor:
        for _ in range(num_tokens):
            logits, _ = self(idx[:, -BLOCK:])
            following = torch.multinomial(F.softmax(logits[:, -1, :], dim=-1), num_samples=1)
            idx = torch.cat((idx, following), dim=1)
        return idx


TEXT = torch.randint(VOCABULARY, (400,), generator=torch.Generator().manual_seed(1))


def text_batch() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(TEXT) - BLOCK, (4,))
    x = torch.stack([TEXT[i : i + BLOCK] for i in starts])
    return x, torch.stack([TEXT[i + 1 : i + 1 + BLOCK] for i in starts])


@torch.no_grad()
def estimated_loss(model: nn.Module) -> Tensor:
    model.eval()
    losses = torch.stack([model(*text_batch())[1] for _ in range(2)])
    model.train()
    return losses.mean()


def character_model(wrap: Wrap, tied: bool, accumulated: int) -> Numbers:
    """Clips, decays the learning rate, evaluates, resumes from a checkpoint, talks."""
    model = wrap(CharacterModel(tied=tied))
    optimizer = model.optimizer()
    losses: list[Tensor] = []
    checkpoint = io.BytesIO()
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / 6)) * 9e-4
        if step % 3 == 0:
            losses.append(estimated_loss(model))
            checkpoint = io.BytesIO()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint)
        if step == 4:  # a new process would build the model again
            checkpoint.seek(0)
            loaded = torch.load(checkpoint)
            model = wrap(CharacterModel(tied=tied))
            model.load_state_dict(loaded["model"])
            optimizer = model.optimizer()
            optimizer.load_state_dict(loaded["optimizer"])
        for _ in range(accumulated):
            x, y = text_batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(x, y)
                loss = loss / accumulated
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    model.eval()
    for x, y in [text_batch()]:
        model(x, y)[1].backward()
    return [*losses, model.generate(x[:, :2], 8), model]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(partial(character_model, tied=True, accumulated=1), id="character_model"),
        pytest.param(partial(character_model, tied=False, accumulated=3),
                     id="character_model_in_micro_batches"),
    ],
)  # fmt: skip
def test_a_script_logs_and_trains_the_same_numbers(script: Script) -> None:
    assert differences(script) == []


def test_a_language_model_trains_in_frames() -> None:
    script = partial(character_model, tied=True, accumulated=1)
    assert differences(script, lambda model: wrapped(model, mode="frames")) == []
