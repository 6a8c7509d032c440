"""In the shape of transformers' run_mae.py: pictures of a folder, a masked autoencoder, Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.datasets import ImageFolder  # pyright: ignore[reportMissingImports]
from torchvision.transforms import (  # pyright: ignore[reportMissingImports]
    Compose,
    RandomResizedCrop,
    ToTensor,
)
from transformers import HfArgumentParser, Trainer, TrainingArguments, ViTMAEConfig
from transformers.models.vit_mae import ViTMAEForPreTraining


class Pictures(torch.utils.data.Dataset[dict[str, Any]]):
    """Pictures without their classes."""

    def __init__(self, folder: str) -> None:
        self._inner = ImageFolder(folder, Compose([RandomResizedCrop(32), ToTensor()]))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self._inner[index][0]}


def main() -> None:
    """Pretrains and saves."""
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()  # pyright: ignore
    torch.manual_seed(0)
    config = ViTMAEConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, decoder_hidden_size=32, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4, decoder_intermediate_size=64,
    )  # fmt: skip
    trainer = Trainer(
        model=ViTMAEForPreTraining(config), args=arguments, train_dataset=Pictures("images/train")
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
