"""Private PyTorch interfaces, one function per need. Nothing else in this library names one.

Each docstring says why no public way exists. `version.py` admits only versions of PyTorch that have
these interfaces. `tests/_torch` touches each of them, so a version that lacks one is found there.
Fragile ones say so: they have changed between releases, or stand on undocumented behaviour.

| file | need |
|---|---|
| `aot` | the joint forward and backward graph; flags and tables that a capture sets |
| `fake` | fake tensors and symbolic sizes |
| `storage` | which tensors share memory, and whether one was written |
| `members` | the dictionaries of a module; hooks of modules and tensors |
| `engine` | questions to the running backward; gradients added from within it |
| `dispatch` | which op a call reaches; generated functions of ops; an op's schema |
| `graphs` | code generation of fx graphs; the tracer's node creation |
| `distributed` | collectives, meshes, the group's store; marks of FSDP and of DDP |
| `functions` | calls of autograd functions, seen or replaced |
| `allocator` | allocations while a function runs |
| `autocast` | autocast switched off |
| `settings` | settings that decide what ops a forward runs, put back for its second run |
| `pytree` | nested containers as PyTorch takes them apart |
| `version` | the versions that are known |
"""
