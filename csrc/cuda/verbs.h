// The verbs that have kernels, from formats by name to their launches, for any launcher (cuda/launch.h). Declared here
// for the bindings; defined in cuda/verbs/<verb>.h and instantiated once for each launcher, each in a file of its own.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "tensor.h"

namespace mxmoe::cuda {

// 8-bit MX formats. x (B, R, L), rows 16 bytes apart; B = 1 with offs. Scales uint8: plain, or blocked.
template <class L>
void run_quantize(L& l, const Tensor& x, const Tensor& offs, const std::string& format, bool floor, bool blocked,
                  const Tensor& row_values, const Tensor& row_scales, const Tensor& column_values,
                  const Tensor& column_scales);

// NVFP4 row copies of scope "row". x (B, R, a multiple of 8), zeros past the row's length.
template <class L>
void run_quantize_nvfp4(L& l, const Tensor& x, const Tensor& offs, bool blocked, const Tensor& values,
                        const Tensor& scales, const Tensor& global);

// One copy of x (B, R, L), rows of unit stride, matrices R rows apart, of any format and option; scales plain. stream:
// of random words. dequantize: the inverse. swizzle_scales: plain (B, lines, blocks), blocked (B, bytes), which holds
// zeros where it is written.
template <class L>
void run_quantize_blocks(L& l, const Tensor& x, const Tensor& offs, const std::string& format, bool floor,
                         const std::string& scope, std::optional<int64_t> seed, bool hadamard, bool four_six,
                         bool block_2d, bool column, int64_t stream, const Tensor& values, const Tensor& scales,
                         const Tensor& global);
template <class L>
void run_dequantize(L& l, const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& offs,
                    const std::string& format, bool column, const std::string& scope, const Tensor& out);
template <class L>
void run_swizzle_scales(L& l, const Tensor& plain, const Tensor& blocked, const Tensor& offs, bool column,
                        int64_t block, bool inverse);

// a (M, contraction) and b (experts, outputs, contraction) as bytes or halves, scales blocked; formats "mxfp8",
// "mxfp8_e5m2", "nvfp4", "bf16", "fp16". b_columns: b is (experts, contraction, outputs), not NVFP4. arrived: none, or
// flags of minibatches of a's rows that dispatch brings meanwhile, BF16 and FP16 only.
template <class L>
void run_grouped_mm_sm100(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                          const std::string& a_format, const Tensor& b, const Tensor& b_scales, const Tensor& b_global,
                          const std::string& b_format, bool b_columns, const Tensor& offs, const Tensor& bias,
                          const Tensor& arrived, int64_t minibatch, const Tensor& out);

// The same for sm_90a.
template <class L>
void run_grouped_mm_sm90(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                         const std::string& a_format, const Tensor& b, const Tensor& b_scales, const Tensor& b_global,
                         const std::string& b_format, bool b_columns, const Tensor& offs, const Tensor& bias,
                         const Tensor& arrived, int64_t minibatch, const Tensor& out);

// In FP32, of operands in FP32, BF16 or FP16 with any strides: a (M, C), b (E, O, C); wgrad: a (O, tokens), b (C,
// tokens), out (E, O, C).
template <class L>
void run_grouped_mm_fp32(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& bias,
                         const Tensor& out);
template <class L>
void run_grouped_mm_wgrad_fp32(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, bool accumulate,
                               const Tensor& out);

// a (tokens, O) and b (tokens, C), column copies with their groups' blocked scales, or BF16 or FP16 rows; NVFP4 as
// (O, tokens / 2) and (C, tokens / 2) bytes, global one per group. out (E, O, C).
template <class L>
void run_grouped_mm_wgrad_sm100(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                                const std::string& a_format, const Tensor& b, const Tensor& b_scales,
                                const Tensor& b_global, const std::string& b_format, const Tensor& offs,
                                bool accumulate, const Tensor& out);

// The same for sm_90a.
template <class L>
void run_grouped_mm_wgrad_sm90(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                               const std::string& a_format, const Tensor& b, const Tensor& b_scales,
                               const Tensor& b_global, const std::string& b_format, const Tensor& offs, bool accumulate,
                               const Tensor& out);

// Verbs on routed rows, arguments as in mxmoe/backends/__init__.py. With `format` ("mxfp8", "mxfp8_e5m2") copies of the
// output are written in its place, plain scales; "": the output.
template <class L>
void run_permute(L& l, const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& offs, const Tensor& out,
                 const std::string& format, bool floor, const Tensor& row_values, const Tensor& row_scales,
                 const Tensor& column_values, const Tensor& column_scales);
template <class L>
void run_unpermute(L& l, const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out);
template <class L>
void run_unpermute_backward(L& l, const Tensor& dy, const Tensor& permutation, const Tensor& weights, int64_t top_k,
                            const Tensor& offs, const Tensor& rows, const std::string& format, bool floor,
                            const Tensor& row_values, const Tensor& row_scales, const Tensor& column_values,
                            const Tensor& column_scales);
template <class L>
void run_weights_grad(L& l, const Tensor& dy, const Tensor& y, const Tensor& permutation, int64_t top_k,
                      const Tensor& out);
template <class L>
void run_swiglu(L& l, const Tensor& h, const Tensor& offs, float alpha, std::optional<float> limit, float offset,
                bool interleaved, const Tensor& out, const std::string& format, bool floor, const Tensor& row_values,
                const Tensor& row_scales, const Tensor& column_values, const Tensor& column_scales);
template <class L>
void run_swiglu_backward(L& l, const Tensor& da, const Tensor& h, const Tensor& offs, float alpha,
                         std::optional<float> limit, float offset, bool interleaved, const Tensor& dh,
                         const std::string& format, bool floor, const Tensor& row_values, const Tensor& row_scales,
                         const Tensor& column_values, const Tensor& column_scales);

// Expert parallelism between devices that reach each other's memory (kernels/peers.h); lists have one tensor per rank.
// exchange_schedule: offs (E,) of the ranks' own routing, signals (kSignals,) of the ranks, arrived (minibatches,) ->
// starts (E + 1,), sources (E,), local_offs (E / ranks,). dispatch: rows of tokens, or none and rows in expert order
// where permutations are empty; an array of rows more (scales), or none. combine: rows (capacity, D) to the landing
// buffers (N, D) of the tokens' ranks, then out (T, D); arrived: none, or waits for each minibatch.
template <class L>
void run_exchange_schedule(L& l, const std::vector<Tensor>& offs, const std::vector<Tensor>& signals,
                           const Tensor& arrived, int64_t rank, int64_t epoch, const Tensor& starts,
                           const Tensor& sources, const Tensor& local_offs);
template <class L>
void run_dispatch(L& l, const Tensor& starts, const Tensor& sources, const std::vector<Tensor>& permutations,
                  int64_t top_k, const std::vector<Tensor>& rows, const std::vector<Tensor>& more, int64_t minibatch,
                  const Tensor& arrived, const Tensor& rows_out, const Tensor& more_out);
template <class L>
void run_combine(L& l, const Tensor& starts, const Tensor& sources, const Tensor& rows,
                 const std::vector<Tensor>& landing, const std::vector<Tensor>& signals, int64_t rank,
                 const Tensor& arrived, int64_t minibatch, const Tensor& offs, const Tensor& inverse,
                 const Tensor& weights, const Tensor& out);

// Not a verb: out = x, sum += x by clusters; (rows, 128 bytes).
template <class L>
void run_cluster_copy(L& l, const Tensor& x, const Tensor& out, const Tensor& sum);

// The levels of docs/kernels.md, 1 to 7: out = a . b^T of BF16, level 7 of MXFP8 (E4M3) bytes with blocked scales.
template <class L>
void run_ladder(L& l, int64_t level, const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
                const Tensor& out);

// The router, as in mxmoe/backends/__init__.py; score "softmax" or "sigmoid". terms (T, E + 1) and chunks (ceil(T /
// 256), E + 1): workspaces of the means probs and z, all four or none. run_counts (runs, E + 1): a workspace, runs of
// slots.
template <class L>
void run_route(L& l, const Tensor& logits, const Tensor& bias, const Tensor& replay, const std::string& score,
               int64_t num_groups, int64_t groups_kept, bool normalize, float scale, std::optional<float> threshold,
               const Tensor& ids, const Tensor& weights, const Tensor& terms, const Tensor& chunks, const Tensor& probs,
               const Tensor& z);
template <class L>
void run_route_backward(L& l, const Tensor& logits, const Tensor& ids, const Tensor& weights_grad,
                        const Tensor& probs_grad, const Tensor& z_grad, const std::string& score, bool normalize,
                        float scale, const Tensor& logits_grad);
template <class L>
void run_sort_by_expert(L& l, const Tensor& ids, const Tensor& run_counts, const Tensor& counts, const Tensor& offs,
                        const Tensor& permutation, const Tensor& inverse);

// One half of moe_decode. x BF16: of tokens, out BF16 hidden values of slots; or, down: hidden values of slots, out of
// tokens. Weights (E, O, C) of a format, scales plain, global scales and bias FP32 (E, O) or none.
template <class L>
void run_moe_decode(L& l, const Tensor& x, const Tensor& ids, const Tensor& weights, const std::string& format,
                    const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& bias,
                    bool interleaved, float alpha, std::optional<float> limit, float offset, bool down,
                    const Tensor& out);

}  // namespace mxmoe::cuda
