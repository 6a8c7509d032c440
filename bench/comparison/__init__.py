"""All methods on one model: the lines that are measured, and the pages and pictures made of them.

`bench.compare` starts a process for each model (`measurement`), which starts another (`plans`).
Every measurement is one line of JSON. Lines by kind:

* `run`: machine, versions and options of one start;
* `point`: peaks and gradients of one method, and the seconds that its first step took beyond a
  later one;
* `plan`: the budget and the predictions of one of our points;
* `failed`, `infeasible`: a method without a point, and why; earlier also `skipped`;
* `time`: one step of one method, and the mean of the eager steps before and after it.
"""
