"""Planning: the search for the fastest schedule within a budget.

`session` turns a captured step into plans. The forms of a step (`forms`) differ in chunks
(`chunked_forms`) and in kernels (`checked_forms`). `strategies` names the searches. Solvers
(`starts`, `rotor_family`, `checkmate_strategy`) propose schedules, the simulator judges them, and
`local_search` improves them.
"""
