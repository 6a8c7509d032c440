"""Models from packages of other fields: three steps in a budget against eager.

    python -m bench.fields                                       # all that are installed
    python -m bench.fields --registry torch-geometric --name gat  # one model

As `bench.zoo`, whose options it has. registries/fields.toml has the models. Those of a package that
is not installed are left out, with a line.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from bench import zoo
from bench.command import Record
from bench.registries import fields
from bench.registries.trial import trial


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the page; 0 whether models are right or wrong."""
    return zoo.campaign("fields", __doc__, arguments, list(fields.TABLE), _names_of, _measure)


def _names_of(package: str) -> list[str]:
    if importlib.util.find_spec(fields.TABLE[package]["module"]) is None:
        sys.stderr.write(f"{package} is not installed; its models are left out\n")
        return []
    return list(fields.TABLE[package]["models"])


def _measure(registry: str, name: str, device: str) -> Record:
    """In the model's own process."""
    found = trial([fields.builder(registry, name)], fields.make_batch, device)
    return {"field": fields.TABLE[registry]["field"]} | found


if __name__ == "__main__":
    sys.exit(main())
