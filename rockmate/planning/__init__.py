"""Planning: the search for the fastest schedule within a budget.

`session` turns a captured step into plans. The forms of a step (`step_forms`) differ in chunks
(`chunk_variants`) and in kernels (`kernel_variants`). `strategies` names the searches. Solvers
(`knapsack_family`, `rotor_family`, `checkmate_strategy`) propose schedules, the simulator judges
them, and `local_search` improves them.
"""
