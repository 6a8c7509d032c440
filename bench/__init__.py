"""Measurements of training inside a memory budget: models, peers, meters, pages.

| folder or file | has |
|---|---|
| `command` | the options, lines and pages of all commands |
| `pages`, `templates` | pages with their tables and targets; pictures; where lines come from |
| `measure` | a training step, the meters of peaks and times |
| `models`, `unet` | the workloads: tables of architectures and of sizes, and what needs code |
| `peers` | the other ways to train in less memory |
| `comparison`, `compare` | all methods on one model, measured; the command |
| `plan_quality` | plans beside a lower bound, other strategies and measured costs |
| `cuda`, `campaign` | a GPU, in parts that resume; their cases |
| `zoo`, `fields`, `registries`, `scripts`, `forks` | models and scripts in processes of their own |
| `fingerprint` | digests of plans, to compare two versions of the code |
| `results` | pages and data |

The other files are commands of their own; docs/internals/benchmarks.md lists them with their pages.
The packages that are measured import nothing from here.
"""

import os

os.environ["ROCKMATE_CACHE"] = "off"  # what is measured is planned
