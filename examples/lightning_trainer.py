"""A causal language model in Lightning's Trainer, with its default settings and validation."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
import transformers
from arguments import parser, run
from text import Rows, rows_of_tokens

from rockmate import RockmateModule


class Language(lightning.LightningModule):
    """A language model inside a budget."""

    def __init__(self, model: torch.nn.Module, budget: float | int | str) -> None:
        super().__init__()
        self.model = RockmateModule(model, budget=budget)  # the one line; it was self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        """The loss."""
        loss = self.model(**batch).loss
        print(f"step {index}: loss {loss.item():.3f}")
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        """Runs the plain model; the first time in the sanity check, before anything is planned."""
        self.log("valid", self.model(**batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As for a plain model."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains, validates, saves, and says what was planned."""
    options = parser(__doc__).parse_args()
    torch.manual_seed(0)
    tokenizer = None
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        sizes = {"vocab_size": 256, "n_layer": 2, "n_embd": 64, "n_head": 4}
        config = transformers.GPT2Config(
            **sizes, n_positions=options.length, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    rows = rows_of_tokens(options.length, (options.steps + 1) * options.batch_size, tokenizer)
    train, valid = (
        torch.utils.data.DataLoader(Rows(part), batch_size=options.batch_size)
        for part in (rows[options.batch_size :], rows[: options.batch_size])
    )
    module = Language(model.train(), options.budget)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(max_epochs=1, default_root_dir=folder).fit(module, train, valid)
    print(module.model.plan.summary())


if __name__ == "__main__":
    run(main)
