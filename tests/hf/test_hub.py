"""What a planned model pushes to the hub is the plain model's.

The calls that upload are caught, and their files loaded back.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from fine_tuning import batch, gpt2, llama, trainer
from helpers import differing, same_bits
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from rockmate import RockmateModule

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer and of PEFT


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes what would be uploaded, each repository under its name."""
    folder = tmp_path / "hub"

    def create_repo(_: Any, repo_id: str, **options: Any) -> huggingface_hub.RepoUrl:
        (folder / repo_id).mkdir(parents=True)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(_: Any, repo_id: str, operations: Sequence[Any], **options: Any) -> None:
        for operation in operations:
            shutil.copy(operation.path_or_fileobj, folder / repo_id / operation.path_in_repo)

    def upload_folder(
        _: Any, *, repo_id: str, folder_path: str, ignore_patterns: Sequence[str], **options: Any
    ) -> None:
        shutil.copytree(
            folder_path,
            folder / repo_id,
            ignore=shutil.ignore_patterns(*ignore_patterns),
            dirs_exist_ok=True,
        )

    def no_card(*args: Any, **options: Any) -> Any:
        raise EntryNotFoundError("a new repository has none")

    for function in (create_repo, create_commit, upload_folder):
        monkeypatch.setattr(huggingface_hub.HfApi, function.__name__, function)
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", no_card)
    return folder


def trained(model: nn.Module) -> RockmateModule:
    """A module that has taken one step, so that its weights are no longer those that `gpt2()`
    makes."""
    module = RockmateModule(model, batch(), 0.6)
    module(**batch()).loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return module


def test_a_pushed_module_is_loaded_by_the_plain_class(hub: Path) -> None:
    model = gpt2()
    trained(model).push_to_hub("someone/plain")
    recompute = type(model).from_pretrained(hub / "someone/plain").train()
    assert differing(gpt2().state_dict(), model.state_dict())
    assert not differing(recompute.state_dict(), model.state_dict())
    assert recompute.config.architectures == ["GPT2LMHeadModel"]
    pushed = {path.name for path in (hub / "someone/plain").iterdir()}
    gpt2().push_to_hub("someone/reference")
    assert pushed == {path.name for path in (hub / "someone/reference").iterdir()}
    for name in ("config.json", "README.md"):
        assert "Rockmate" not in (hub / "someone/plain" / name).read_text()
    torch.manual_seed(2)
    loss = recompute(**batch()).loss
    torch.manual_seed(2)
    assert same_bits(loss, model(**batch()).loss)


def test_pushed_adapters_are_loaded_onto_the_plain_base(hub: Path) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(llama(), config)
    trained(adapted).push_to_hub("someone/adapters")
    assert not list((hub / "someone/adapters").glob("model*"))
    recompute = peft.PeftModel.from_pretrained(llama(), hub / "someone/adapters")
    assert not differing(recompute.state_dict(), adapted.state_dict())


def test_a_trainer_pushes_the_plain_model(hub: Path, tmp_path: Path) -> None:
    model = llama()
    worker, _ = trainer(
        RockmateModule(model, budget=0.6),
        tmp_path / "run",
        max_steps=2,
        hub_model_id="someone/trained",
    )
    worker.train()
    worker.push_to_hub()
    recompute = type(model).from_pretrained(hub / "someone/trained")
    assert differing(llama().state_dict(), model.state_dict())
    assert not differing(recompute.state_dict(), model.state_dict())
