"""Training of DeepSeek-V3 / Kimi-K2 style models on mxmoe's layers: `python -m training demo`, `python -m training
run`."""
