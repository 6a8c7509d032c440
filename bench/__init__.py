"""Measurements of training inside a memory budget: models, peers, meters, pages.

| folder or file | has |
|---|---|
| `models`, `unet` | the workloads |
| `peers` | the other ways to train in less memory |
| `measure` | the meters of peaks and times |
| `comparison`, `compare`, `branched` | all methods on one model, measured; the commands |
| `quality`, `plan_quality` | plans beside a lower bound and other planners; the command |
| `fingerprint` | digests of plans, to compare two versions of the code |
| `release` | everything that README states, by one command |
| `results` | pages and data |

`run`, `loss_block`, `chunk_curves`, `lengths`, `call_cost`, `sweep_time`, `rotor_time`, `estimate`
and `walkthrough` are commands of their own. The packages that are measured import nothing from
here.
"""
