"""The backends, one module each; `rl.environments.open_backend` loads them by name."""
