"""Plans beside a lower bound, a proved optimum and other strategies.

`bench.plan_quality` is the command. Only predictions are compared: simulated peaks and sums of
measured op times, all of one planner and so with one set of op costs. No step is run. The lines of
JSON are of three kinds:

* `model`: what was captured, smallest peak and frontier of each strategy;
* `plan`: one strategy at one budget, with peak and time of its replayed schedule;
* `chunked`: the default strategy at a budget of `targets.SERIES`, where only the loss is returned
  and chunks are allowed.
"""
