"""Tiny data in the places where public scripts look for theirs."""

from __future__ import annotations

import json
import pickle
import string
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_TEXT = (
    "the model reads a line and predicts the next word of it . memory is what it runs out of . "
    "a plan saves some values and computes others a second time when the backward needs them . "
)


def make_data(names: str, folder: Path) -> None:
    """Makes what a script needs in a folder."""
    for name in names.split():
        _MAKERS[name](folder)


def _mnist(folder: Path) -> None:
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (folder / "w" / "results").mkdir(parents=True)  # examples vae writes into it
    generator = np.random.default_rng(0)
    for name, number in (("train", 320), ("t10k", 128)):
        images = generator.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, number, dtype=np.uint8)
        header = struct.pack(">IIII", 2051, number, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, number)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def _wikitext(folder: Path) -> None:
    path = folder / "data" / "wikitext-2"
    path.mkdir(parents=True)
    for name, times in (("train", 60), ("valid", 12), ("test", 12)):
        (path / f"{name}.txt").write_text((_TEXT + "\n") * times)


def _characters(folder: Path) -> None:
    """Tokens as files, and their number, as nanoGPT reads them."""
    path = folder / "data" / "tiny"
    path.mkdir(parents=True)
    text = _TEXT * 40
    letters = sorted(set(text))
    tokens = np.array([letters.index(each) for each in text], dtype=np.uint16)
    tokens.tofile(path / "train.bin")
    tokens[:2000].tofile(path / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters))}
    (path / "meta.pkl").write_bytes(pickle.dumps(meta))


def _input_text(folder: Path) -> None:
    (folder / "input.txt").write_text(_TEXT * 40 + "O God, O God!")


def _images(folder: Path) -> None:
    """`images/train|val/CLASS/*.jpg`, and `pets/CLASS_N.jpg`."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for part, number in (("train", 24), ("val", 8), ("validation", 8)):
        for label in ("cat", "dog"):
            path = folder / "images" / part / label
            path.mkdir(parents=True)
            for index in range(number):
                pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path / f"{index}.jpg")
    pets = folder / "pets"
    pets.mkdir()
    for index in range(20):
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pets / f"{('cat', 'dog')[index % 2]}_{index}.jpg")


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([_TEXT], trainers.WordLevelTrainer(special_tokens=special))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", eos_token="<|endoftext|>",
        bos_token="<|endoftext|>", model_max_length=128,
    )  # fmt: skip
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def _bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    path = folder / "bert-base-cased"
    _tokenizer(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=128,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(path)


def _gpt2(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    path = folder / "gpt2-tiny"
    _tokenizer(path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_layer=3, n_embd=64, n_head=4, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(path)


def _resnet50d(folder: Path) -> None:
    """Weights at random, where the hub's cache has those of timm."""
    import timm  # pyright: ignore[reportMissingImports]
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path = folder / "hf/hub/models--timm--resnet50d.ra2_in1k"
    snapshot = path / "snapshots/0"
    snapshot.mkdir(parents=True)
    save_file(timm.create_model("resnet50d").state_dict(), snapshot / "model.safetensors")
    (path / "refs").mkdir()
    (path / "refs/main").write_text("0")


def _glue(folder: Path) -> None:
    path = folder / "nyu-mll" / "glue"
    path.mkdir(parents=True)
    words = _TEXT.split()
    for part, number in (("train", 128), ("validation", 16)):
        with open(path / f"{part}.jsonl", "w", encoding="utf-8") as file:
            for index in range(number):
                first, second = (" ".join(words[(index * 3 + at) % 20 :][:9]) for at in (0, 5))
                row = {"sentence1": first, "sentence2": second, "label": index % 2, "idx": index}
                file.write(json.dumps(row) + "\n")
    (path / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )


def _preferences(folder: Path) -> None:
    words = _TEXT.split()
    for name in ("sft", "dpo"):
        path = folder / name
        path.mkdir()
        with open(path / "train.jsonl", "w", encoding="utf-8") as file:
            for index in range(24):
                texts = [" ".join(words[(index * 3 + at) % 20 :][:9]) for at in (0, 5, 9)]
                row = {"text": " ".join(texts)}
                if name == "dpo":
                    row = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
                file.write(json.dumps(row) + "\n")


def _demo_text(folder: Path) -> None:
    """Lightning's demo takes 4,000 of the blocks for validation and test."""
    path = folder / "data"
    path.mkdir()
    words = _TEXT.split()
    (path / "wikitext-2.txt").write_text("\n".join([" ".join(words[:34])] * 4060))


def _diffusion(folder: Path) -> None:
    """A tiny Stable Diffusion in `sd-tiny`, and pictures with captions in `captions`."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    path = folder / "sd-tiny"
    torch.manual_seed(0)
    DDPMScheduler(beta_schedule="scaled_linear").save_pretrained(path / "scheduler")
    letters = [f"{each}{end}" for end in ("", "</w>") for each in string.ascii_lowercase]
    letters += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {each: at for at, each in enumerate(letters)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)
    tokenizer.save_pretrained(path / "tokenizer")
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, bos_token_id=52, eos_token_id=53,
    )  # fmt: skip
    CLIPTextModel(config).save_pretrained(path / "text_encoder")
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    sizes: dict[str, Any] = {"block_out_channels": (16, 16), "down_block_types": down}
    sizes |= {"up_block_types": up, "norm_num_groups": 8}
    AutoencoderKL(**sizes).save_pretrained(path / "vae")
    UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    ).save_pretrained(path / "unet")  # fmt: skip
    _images(folder)
    captions = folder / "captions"
    captions.mkdir()
    with open(captions / "metadata.jsonl", "w", encoding="utf-8") as file:
        for index, picture in enumerate(sorted((folder / "pets").iterdir())[:12]):
            (captions / f"{index}.jpg").write_bytes(picture.read_bytes())
            file.write(json.dumps({"file_name": f"{index}.jpg", "text": "a cat"}) + "\n")


_MAKERS: dict[str, Callable[[Path], None]] = {
    "mnist": _mnist,
    "wikitext": _wikitext,
    "characters": _characters,
    "text": _input_text,
    "images": _images,
    "resnet50d": _resnet50d,
    "bert": _bert,
    "gpt2": _gpt2,
    "glue": _glue,
    "preferences": _preferences,
    "demo_text": _demo_text,
    "diffusion": _diffusion,
}
