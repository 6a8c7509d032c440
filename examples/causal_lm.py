"""A causal language model, fine-tuned with Hugging Face's Trainer inside a memory budget."""

from __future__ import annotations

import tempfile

import transformers
from arguments import parser, run
from text import Rows, rows_of_tokens

from rockmate import wrap_trainer


def main() -> None:
    """Trains, saves, and says what was planned."""
    command = parser(__doc__)
    command.add_argument(
        "--memory-limit", help="instead of a budget, a bound on the whole device, as 24GiB"
    )
    options = command.parse_args()
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        sizes = {
            "vocab_size": 256,
            "n_positions": options.length,
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
        }
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model, tokenizer = transformers.GPT2LMHeadModel(config), None
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=1e-3,
            logging_steps=max(1, options.steps // 4),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = rows_of_tokens(options.length, options.steps * options.batch_size, tokenizer)
        trainer = transformers.Trainer(
            model=model.train(), args=arguments, train_dataset=Rows(rows)
        )
        # The one line; Trainer(model=RockmateModule(model, budget=...)) is the same.
        module = wrap_trainer(
            trainer,
            None if options.memory_limit else options.budget,
            memory_limit=options.memory_limit,
        )
        trainer.train()
        trainer.save_model(folder)
        trainer.accelerator.end_training()  # under torchrun all processes leave together
        if not trainer.is_world_process_zero():  # the first has saved
            return
        again = type(model).from_pretrained(folder)
    print(module.plan.summary())
    print(
        f"saved and loaded: {sum(parameter.numel() for parameter in again.parameters()):,} "
        "parameters"
    )


if __name__ == "__main__":
    run(main)
