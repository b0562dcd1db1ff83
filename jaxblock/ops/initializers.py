"""Initial values of the kernels and of the table, in the form that Flax takes: (key, shape, dtype).

The variance is 1 / fan-in, the length of the sum that an element is part of.
"""

from jax.nn import initializers

# [D 2 F] is summed over D; the common default would count the axis of 2 in as well.
default_gate_up_init = initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
default_down_init = initializers.lecun_normal()
# [V D] is summed over D, as the projection to logits.
default_embedding_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
