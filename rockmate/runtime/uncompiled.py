"""Calls from compiled code. To load this loads Dynamo, so it is imported where Dynamo runs."""

from typing import Any

import torch

# A call of a planned module as it is, whoever compiles its caller.
run_uncompiled: Any = torch.compiler.disable(lambda module, *call: module._run(*call))
