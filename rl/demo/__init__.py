"""The demo: a mixture of experts of a million parameters that learns to use tools, on two cores, from nothing but this package."""
