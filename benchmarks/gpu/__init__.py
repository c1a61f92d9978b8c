"""What `python -m benchmarks.gpu_check` runs on a GPU: conformance of the cuda backend, and its speed."""
