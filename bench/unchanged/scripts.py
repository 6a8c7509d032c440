"""The scripts: where they are, and the arguments that make them short."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        name: in the table.
        path: in the folder of the checkouts; of `own`, in that of this file.
        arguments: of the script.
        data: names of what it needs; see `data.make_data`.
        cwd: where it runs, in a folder of its own.
        beside: a file of its folder that it reads from where it runs.
        measured: step of an optimizer after which memory is recorded. A call that needs a plan
            while it is runs as in eager.
        note: what a reader of its row has to know.
    """

    name: str
    path: str
    arguments: str = ""
    data: str = ""
    cwd: str = "."
    beside: str = ""
    measured: int = 4
    note: str = ""

    @property
    def folder(self) -> str:
        """Of its runs."""
        return re.sub(r"\W+", "_", self.name)


_EXAMPLES = "pytorch+examples"
_NANO = (
    "--dataset=tiny --device=cpu --compile=False --eval_iters=2 --eval_interval=12 "
    "--log_interval=1 --block_size=64 --batch_size=8 --n_layer=4 --n_head=4 --n_embd=64 "
    "--max_iters=24 --lr_decay_iters=24 --dropout=0.1 --gradient_accumulation_steps=2 "
    "--wandb_log=False"
)
_ACCELERATE = "huggingface+accelerate/examples"
_SHORT = (
    "--output_dir out --max_steps 24 --per_device_train_batch_size 2 --report_to none --use_cpu "
    "--save_strategy no"
)
SCRIPTS = (
    Script(
        "nanoGPT train.py", "karpathy+nanoGPT/train.py", _NANO, "characters",
        beside="configurator.py",
    ),
    Script(
        "minGPT chargpt.py", "karpathy+minGPT/projects/chargpt/chargpt.py",
        "--trainer.max_iters=24 --trainer.batch_size=8 --trainer.num_workers=0 "
        "--model.model_type=gpt-nano",
        "text",
    ),
    Script(
        "minGPT adder.py", "karpathy+minGPT/projects/adder/adder.py",
        "--trainer.max_iters=24 --trainer.batch_size=8 --trainer.num_workers=0",
    ),
    Script(
        "examples mnist", f"{_EXAMPLES}/mnist/main.py", "--epochs 5 --no-accel", "mnist", cwd="w"
    ),
    Script(
        "examples vae", f"{_EXAMPLES}/vae/main.py", "--epochs 5 --batch-size 64 --no-accel",
        "mnist", cwd="w",
    ),
    Script(
        "examples mnist_rnn", f"{_EXAMPLES}/mnist_rnn/main.py", "--epochs 5", "mnist", cwd="w"
    ),
    Script(
        "examples siamese_network", f"{_EXAMPLES}/siamese_network/main.py",
        "--epochs 2 --no-accel --batch-size 32", "mnist", cwd="w",
    ),
    Script(
        "examples dcgan", f"{_EXAMPLES}/dcgan/main.py",
        "--dataset folder --dataroot ../images --workers 0 --batchSize 8 --ngf 16 --ndf 16 "
        "--niter 3 --manualSeed 1",
        "images", cwd="w", measured=9,
    ),
    Script(
        "examples word_language_model, transformer", f"{_EXAMPLES}/word_language_model/main.py",
        "--data ../data/wikitext-2 --model Transformer --emsize 64 --nhead 4 --nhid 128 "
        "--nlayers 3 --batch_size 8 --bptt 20 --epochs 2 --lr 0.001 --use-optimizer",
        "wikitext", cwd="w",
    ),
    Script(
        "examples word_language_model, LSTM", f"{_EXAMPLES}/word_language_model/main.py",
        "--data ../data/wikitext-2 --model LSTM --emsize 64 --nhid 64 --nlayers 2 --batch_size 8 "
        "--bptt 20 --epochs 2 --lr 0.001 --use-optimizer",
        "wikitext", cwd="w",
    ),
    Script(
        "examples imagenet", f"{_EXAMPLES}/imagenet/main.py",
        "-a resnet18 -j 0 --epochs 4 -b 8 --seed 1 --no-accel ../images", "images", cwd="w",
    ),
    Script("accelerate nlp_example", f"{_ACCELERATE}/nlp_example.py", "--cpu", "bert glue"),
    Script(
        "accelerate complete_nlp_example", f"{_ACCELERATE}/complete_nlp_example.py", "--cpu",
        "bert glue",
    ),
    Script(
        "accelerate cv_example", f"{_ACCELERATE}/cv_example.py", "--cpu --data_dir pets",
        "images resnet50d", measured=2,
        note="A step of 16 images of 224 pixels; three steps",
    ),
    Script(
        "TRL sft.py", "huggingface+trl/trl/scripts/sft.py",
        f"--model_name_or_path gpt2-tiny --dataset_name sft {_SHORT}", "gpt2 preferences",
    ),
    Script(
        "TRL dpo.py", "huggingface+trl/trl/scripts/dpo.py",
        f"--model_name_or_path gpt2-tiny --dataset_name dpo {_SHORT}", "gpt2 preferences",
        note="4.3 MiB are a buffer of TRL's loss, outside of the model. In eager, TRL checkpoints "
        "each layer, which holds less than 0.6 of the peak without recomputation",
    ),
    Script(
        "Lightning transformer.py", "Lightning-AI+pytorch-lightning/examples/pytorch/basics/"
        "transformer.py", "", "demo_text",
    ),
    Script(
        "timm train.py", "huggingface+pytorch-image-models/train.py",
        "--data-dir images --model vit_tiny_patch16_224 --model-kwargs img_size=64 --img-size 64 "
        "--num-classes 2 -b 8 "
        "--epochs 4 --workers 1 --device cpu --warmup-epochs 0 --no-prefetcher --output out",
        "images",
    ),
    Script(
        "diffusers train_text_to_image_lora",
        "huggingface+diffusers/examples/text_to_image/train_text_to_image_lora.py",
        "--pretrained_model_name_or_path sd-tiny --train_data_dir captions --resolution 32 "
        "--train_batch_size 2 --max_train_steps 24 --output_dir out --seed 0 "
        "--dataloader_num_workers 0",
        "diffusion",
    ),
    Script(
        "own, as run_clm", "own/causal_lm.py",
        "--output_dir=out --num_train_epochs=8 --report_to=none --use_cpu", "gpt2 preferences",
    ),
    Script(
        "own, as run_mae", "own/masked_autoencoder.py",
        "--output_dir=out --num_train_epochs=4 --report_to=none --use_cpu "
        "--remove_unused_columns=False",
        "images",
    ),
    Script(
        "own, as torchvision's detection", "own/detection.py",
        note="The fourth step plans the insides of frames, which takes most of the time of the run",
    ),
)  # fmt: skip
FULL_SIZED = Script("GPT-2 small", "own/gpt2_small.py", measured=0)
