"""The harness: tools that work inside a sandbox, the agent loop over them, and its trajectories.

The same tools and the same loop serve training, evaluation and a user's own directory.
"""
