"""Plans beside a lower bound, a proved optimum, other strategies and a plain knapsack.

`bench.plan_quality` is the command. Only predictions are compared: simulated peaks and sums of
measured op times, all of one planner and so with one set of op costs. No step is run. The lines of
JSON are of five kinds:

* `model`: what was captured, planning times, smallest peak and frontier of each strategy;
* `plan`: one strategy at one budget, with peak and time of its replayed schedule;
* `chunked`: the default strategy at a budget of `targets.SERIES`, where only the loss is returned
  and chunks are allowed;
* `yardstick`: the plain knapsack at one limit, and the default strategy with that knapsack's peak
  as its budget;
* `skipped`: a limit for which the knapsack has no proved answer.
"""
