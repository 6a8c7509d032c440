"""A causal language model in a loop of accelerate: mixed precision, accumulation, saved states."""

from __future__ import annotations

import tempfile

import accelerate
import torch
import transformers
from arguments import parser, run
from text import rows_of_tokens

from rockmate import RockmateModule


def main() -> None:
    """Trains, saves the state, and says what was planned."""
    command = parser(__doc__)
    command.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
    command.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step")
    options = command.parse_args()
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        mixed_precision=options.mixed_precision, gradient_accumulation_steps=options.accumulate
    )
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
    rows = rows_of_tokens(options.length, options.steps * options.batch_size, tokenizer)
    loader = torch.utils.data.DataLoader(rows, batch_size=options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module = RockmateModule(model.train(), budget=options.budget)  # the one line
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(module):
            loss = module(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
    accelerator.print(accelerator.unwrap_model(module).plan.summary())
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
