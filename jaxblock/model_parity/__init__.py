"""`jaxblock parity`: a checkpoint in PyTorch and in `jaxblock`, whole and component by component.

Here are the models; `jaxblock.parity` is the harness, which knows none.
"""
