"""Speed side by side with peers: each in a process of its own, taking turns, in one run.

`rows` says what is measured, `jax_side` and `torch_side` how each contender does it, `worker` is
the process that one side lives in, `measure` lets the two take turns, `report` shows the result.
"""
