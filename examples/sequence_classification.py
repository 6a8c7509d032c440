"""Sequence classification with Trainer.

Is a piece of Python's standard library code, or the prose of a docstring?.
"""

from __future__ import annotations

import ast
import random
import tempfile
from typing import Any

import transformers
from arguments import parser, run
from text import source_text

from rockmate import RockmateModule


def pieces(length: int) -> list[tuple[str, int]]:
    """Texts of at least `length` characters, cut there: 0 is code, 1 prose.

    As many of each, shuffled.
    """
    found: tuple[list[str], list[str]] = ([], [])
    text = source_text()
    for node in ast.walk(ast.parse(text.replace("from __future__", "from future"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            prose = ast.get_docstring(node)
            node.body = node.body[1:] if prose else node.body
            code = "\n".join(map(ast.unparse, node.body))
            for kind, piece in enumerate((code, prose or "")):
                if len(piece) >= length:
                    found[kind].append(piece[:length])
    count = min(map(len, found))
    mixed = [(piece, kind) for kind in (0, 1) for piece in found[kind][:count]]
    random.Random(0).shuffle(mixed)
    return mixed


def main() -> None:
    """Trains, measures the accuracy on pieces held back, and says what was planned."""
    command = parser(__doc__)
    command.set_defaults(steps=40)
    options = command.parse_args()
    if options.model:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            options.model, num_labels=2
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

        def encoded(piece: str) -> dict[str, Any]:
            return dict(
                tokenizer(piece, truncation=True, max_length=options.length)
            )  # the trainer pads each batch to its longest
    else:
        config = transformers.BertConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=options.length,
        )
        model, tokenizer = transformers.BertForSequenceClassification(config), None

        def encoded(piece: str) -> dict[str, Any]:
            return {"input_ids": [*piece.encode()[: options.length]]}

    rows = [{**encoded(piece), "labels": kind} for piece, kind in pieces(options.length)]
    held_back, rows = rows[:32], rows[32:]
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
            dataloader_drop_last=True,
        )
        module = RockmateModule(model.train(), budget=options.budget)
        trainer = transformers.Trainer(
            model=module,
            args=arguments,
            train_dataset=rows,
            eval_dataset=held_back,
            processing_class=tokenizer,
            compute_metrics=lambda found: {
                "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
            },
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
    print(module.plan.summary())
    print(f"accuracy {accuracy:.2f} on {len(held_back)} pieces")


if __name__ == "__main__":
    run(main)
