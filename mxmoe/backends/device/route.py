"""The router by csrc/cuda/kernels/{route,mean_tokens,route_backward,sort_by_expert}.h."""

CHUNK = 256  # tokens that a sum over tokens adds at a time
MAX_EXPERTS, MAX_TOP_K, MAX_SORTED_EXPERTS = 1024, 32, 16382  # of the kernels
MAX_RUNS = 1024  # warps that sort


def route(on, logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold,
          ids_out, weights_out, probs_out, z_out):  # fmt: skip
    _check(on, logits.shape[1], top_k)
    workspaces = [None] * 4
    if probs_out is not None or z_out is not None:
        tokens, num_experts = logits.shape
        rows = (tokens, -(-tokens // CHUNK))  # of the terms, of the sums of chunks
        means = (m if m is not None else logits.new_empty(n) for m, n in ((probs_out, num_experts), (z_out, 1)))
        workspaces = [*(logits.new_empty(n, num_experts + 1) for n in rows), *means]
    on.launch(
        "route", logits, bias, replay, score, num_groups, groups_kept, normalize, scale, replay_threshold,
        ids_out, weights_out, *workspaces,
    )  # fmt: skip


def route_backward(on, logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad_out):
    _check(on, logits.shape[1], ids.shape[1])
    on.launch("route_backward", logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad_out)


def sort_by_expert(on, ids, num_experts, counts_out, offs_out, permutation_out, inverse_out):
    if num_experts > MAX_SORTED_EXPERTS:
        raise NotImplementedError(f"the {on.name} backend sorts by at most {MAX_SORTED_EXPERTS} experts, got {num_experts}")
    runs = min(-(-ids.numel() // 256), MAX_RUNS)
    run_counts = ids.new_empty(runs, num_experts + 1)
    on.launch("sort_by_expert", ids, run_counts, counts_out, offs_out, permutation_out, inverse_out)


def _check(on, num_experts: int, top_k: int):
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        raise NotImplementedError(
            f"the {on.name} backend routes to at most {MAX_TOP_K} of {MAX_EXPERTS} experts, got {top_k} of {num_experts}"
        )
