"""LoRA adapters on a frozen causal language model, with PEFT and Trainer, inside a budget."""

from __future__ import annotations

import tempfile
from pathlib import Path

import peft
import transformers
from arguments import parser, run
from text import Rows, rows_of_tokens

from rockmate import RockmateModule


def main() -> None:
    """Adapts, saves the adapters alone, and says what was planned."""
    options = parser(__doc__).parse_args()
    if options.model:
        base = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
        base, tokenizer = transformers.LlamaForCausalLM(config), None
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ).train()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=1e-2,
            logging_steps=max(1, options.steps // 4),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = rows_of_tokens(options.length, options.steps * options.batch_size, tokenizer)
        module = RockmateModule(
            adapted, budget=options.budget
        )  # around the adapted model, not inside it
        trainer = transformers.Trainer(model=module, args=arguments, train_dataset=Rows(rows))
        trainer.train()
        trainer.save_model(folder)
        num_bytes = (Path(folder) / "adapter_model.safetensors").stat().st_size
    print(module.plan.summary())
    print(f"saved: adapters of {num_bytes:,} bytes")


if __name__ == "__main__":
    run(main)
