"""Image classification in a plain PyTorch loop.

A ResNet that learns digits, inside a memory budget.
"""

from __future__ import annotations

import torch
import transformers
from arguments import parser, run
from PIL import Image, ImageDraw, ImageFont

from rockmate import RockmateModule


def pictures(count: int, pixels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits of Pillow's own font, moved and with noise.

    (count, 3, pixels, pixels) in 0 to 1, and what they are, (count,).
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(10, (count,), generator=generator)
    images = torch.empty(count, 1, pixels, pixels)
    font = ImageFont.load_default()
    for place, kind in enumerate(kinds.tolist()):
        small = Image.new("L", (12, 12))
        x, y = torch.randint(0, 5, (2,), generator=generator).tolist()
        ImageDraw.Draw(small).text((x, y - 2), str(kind), fill=255, font=font)
        large = bytearray(small.resize((pixels, pixels)).tobytes())
        images[place, 0] = torch.frombuffer(large, dtype=torch.uint8).view(pixels, pixels) / 255
    images += 0.1 * torch.randn(images.shape, generator=generator)
    return images.expand(-1, 3, -1, -1).contiguous(), kinds


def main() -> None:
    """Trains, measures the accuracy on new pictures, and says what was planned."""
    command = parser(__doc__)
    command.add_argument(
        "--pixels",
        type=int,
        default=24,
        help="height and width of a picture; most models of the hub want 224",
    )
    command.set_defaults(batch_size=16, budget=0.9, steps=80)
    options = command.parse_args()
    if options.model:
        model = transformers.AutoModelForImageClassification.from_pretrained(
            options.model, num_labels=10, ignore_mismatched_sizes=True
        )
    else:
        config = transformers.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            num_labels=10,
        )
        model = transformers.ResNetForImageClassification(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = RockmateModule(model.to(device).train(), budget=options.budget)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for step in range(options.steps):
        images, kinds = pictures(options.batch_size, options.pixels, seed=step)
        loss = module(pixel_values=images.to(device), labels=kinds.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    module.eval()
    images, kinds = pictures(64, options.pixels, seed=options.steps)
    with torch.no_grad():
        accuracy = (
            (module(pixel_values=images.to(device)).logits.argmax(-1).cpu() == kinds)
            .float()
            .mean()
            .item()
        )
    print(module.plan.summary())
    print(f"accuracy {accuracy:.2f} on {len(kinds)} pictures")


if __name__ == "__main__":
    run(main)
