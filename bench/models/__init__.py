"""The workloads that are measured: a model, its batches, its loss and its layers, by name.

Every model is built from values that stand in the tables of this folder, with fixed seeds. Nothing
is downloaded, and two runs train the same numbers. Models are in train mode. Dropout is that of
their configuration's default: 0.1 in GPT-2, BERT, T5 and the plain encoder, none in the others. No
model keeps a key-value cache, and token batches carry no padding mask. A vocabulary is that of the
published model, or 8192 in models that are made small for a CPU.

A full-size step takes about half a second to four seconds on one CPU thread. The `tiny` variant of
a model takes milliseconds and is meant for tests. Names:

* a number at the end counts layers;
* `-2layer` models are small enough for a solver that sees the whole graph; their vocabulary of 512
  leaves most of the memory to the layers.
"""

from bench.models.batches import TARGET
from bench.models.plain import MLP
from bench.models.registry import BRANCHED, COMPARED, REGISTRY, Maker, build, built, makers
from bench.models.workload import Batch, LossFunction, LossInside, Workload

__all__ = [
    "BRANCHED",
    "COMPARED",
    "MLP",
    "REGISTRY",
    "TARGET",
    "Batch",
    "LossFunction",
    "LossInside",
    "Maker",
    "Workload",
    "build",
    "built",
    "makers",
]
