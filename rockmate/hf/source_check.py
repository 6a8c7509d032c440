"""Whether a model is where its name on the command line says; PyTorch is not loaded to tell."""

from __future__ import annotations

from pathlib import Path

from rockmate.errors import RockmateError

FUNCTION_HINT = (
    "Write package.module:function, of a function without arguments that returns (model, "
    "sample_input)."
)
_FORMS = (
    "Give a Hugging Face configuration file (config.json), a folder that holds one, the name of a "
    "model whose configuration has been "
    "downloaded before, or package.module:function, which returns (model, sample_input)."
)
_MAX_TEXT = 300
_HUB_TIMEOUT_S = 3


class ModelSourceError(RockmateError, ValueError):
    """The model cannot be had as asked; the text says what to give instead."""


def check_source(source: str) -> bool:
    """Whether a configuration is on this machine; otherwise the hub has it.

    Raises:
        ModelSourceError: it is at neither.
    """
    path = Path(source)
    if not source.strip():
        raise ModelSourceError(f"the model is empty. {_FORMS}")
    if source.endswith(".py"):
        raise ModelSourceError(
            f"{source!r} is a Python file, and which function of it makes the model is not said. "
            f"{FUNCTION_HINT}"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelSourceError(f"the folder {source!r} holds no config.json. {_FORMS}")
    if path.exists():
        return True
    if source.endswith(".json") or source.startswith((".", "/", "~")):
        raise ModelSourceError(f"there is no file or folder {source!r}. {_FORMS}")
    import huggingface_hub as hub

    try:
        if isinstance(hub.try_to_load_from_cache(source, "config.json"), str):
            return True
        # The hub's own functions ask six times, in 23 s, where it cannot be reached.
        hub.get_hf_file_metadata(hub.hf_hub_url(source, "config.json"), timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        raise ModelSourceError(
            f"there is no model {source!r} here, nor can its configuration be fetched: "
            f"{first_line(error)} {_FORMS}"
        ) from error
    return False


def first_line(error: BaseException) -> str:
    """The text of an error in one line; of a long one the beginning."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return text if text.endswith((".", "?", "!")) else text + "."
