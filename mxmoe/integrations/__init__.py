"""Other libraries' models on mxmoe's kernels; each module imports its library, `mxmoe` imports none of them."""
