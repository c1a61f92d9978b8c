// route and route_backward, one token after the other: scores and lane sums over the experts, then the top-k.
#include "host/exp.h"
#include "host/route.h"
#include "host/threads.h"
#include "host/top_k.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kChunk = 256;  // tokens whose losses are summed together; part of the contract
constexpr float kEpsilon = 1e-20f;
constexpr float kInf = __builtin_inff(), kNaN = __builtin_nanf("");

constexpr int64_t padded(int64_t experts) {
  return (experts + LaneSum::kWidth - 1) / LaneSum::kWidth * LaneSum::kWidth;
}
MXMOE_INLINE bool any(i32 mask) {
  return any_above((u32)mask, 0);
}
MXMOE_INLINE int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Rows of `width` floats that one thread reuses for every token; `width` is a multiple of 32.
struct Scratch {
  float *logits, *softmax, *scores;
  int32_t* keys;
  int32_t *top_k, *own;  // memory of TopK, [top_k]
};

MXMOE_INLINE Scratch scratch_of(int64_t width, int64_t top_k) {
  const int64_t size = 4 * width + TopK::memory_size(top_k) + top_k;
  auto* base = static_cast<float*>(workspace(WorkspaceSlot::kThread, size * sizeof(float)));
  auto* keys = reinterpret_cast<int32_t*>(base + 3 * width);
  return {base, base + width, base + 2 * width, keys, keys + width, keys + width + TopK::memory_size(top_k)};
}

// Copies the logits with NaN and +Inf as -Inf, padded with -Inf; returns whether there was one.
bool clean_logits(const float* logits, int64_t experts, int64_t width, float* out) {
  int64_t e = 0;
  i32 poison = {};
  for (; e + kLanes <= experts; e += kLanes) {
    f32 x = load<f32>(logits + e);
    auto fine = x < kInf;
    poison |= ~(i32)fine;
    store(out + e, fine ? x : splat(-kInf));
  }
  bool poisoned = any(poison);
  for (; e < experts; ++e) {
    bool fine = logits[e] < kInf;
    poisoned |= !fine;
    out[e] = fine ? logits[e] : -kInf;
  }
  for (; e < width; ++e) out[e] = -kInf;
  return poisoned;
}

float sum_lanes(const float* x, int64_t width) {
  LaneSum sum;
  for (int64_t e = 0; e < width; e += LaneSum::kWidth)
    for (int i = 0; i < LaneSum::kVectors; ++i) sum.lanes[i] += load<f32>(x + e + i * kLanes);
  return LaneSum::tree(sum);
}

void divide(float* x, int64_t width, float by) {
  for (int64_t e = 0; e < width; e += kLanes) store(x + e, load<f32>(x + e) / by);
}

// fn(f32 (&x)[N]) on the row, LaneSum::kWidth elements at a time, from `x` to `out`.
template <typename F>
MXMOE_INLINE void map_row(const float* x, int64_t width, float* out, F&& fn) {
  for (int64_t e = 0; e < width; e += LaneSum::kWidth) {
    f32 v[LaneSum::kVectors];
    for (int i = 0; i < LaneSum::kVectors; ++i) v[i] = load<f32>(x + e + i * kLanes);
    fn(v);
    for (int i = 0; i < LaneSum::kVectors; ++i) store(out + e + i * kLanes, v[i]);
  }
}

// Of a cleaned row: its logsumexp, and exp(x - max) over their sum, or undivided where only the logsumexp is wanted.
// The padding becomes 0 (NaN where every logit is -Inf).
float softmax_row(const float* logits, int64_t width, float* out, bool divided) {
  f32 tops = splat(-kInf);
  for (int64_t e = 0; e < width; e += kLanes) {
    f32 x = load<f32>(logits + e);
    tops = x > tops ? x : tops;
  }
  float top = -kInf;
  for (int i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  map_row(logits, width, out, [&](auto& x) __attribute__((always_inline)) {
    for (f32& v : x) v = v - top;
    exp(x);
  });
  float total = sum_lanes(out, width);
  if (divided) divide(out, width, total);
  return top + log(total);
}

void sigmoid_row(const float* logits, int64_t width, float* out) {
  map_row(logits, width, out, [](auto& x) __attribute__((always_inline)) { sigmoid(x); });
}

// Signed integers in the order of the floats, both zeros alike.
MXMOE_INLINE i32 key_of(f32 x) {
  i32 b = (i32)(x + 0.0f);
  return b ^ ((b >> 31) & 0x7fffffff);
}

// Keys of score + bias, of -Inf where the logit is; the padding is taken. Returns whether a value was NaN (it counts as
// -Inf).
bool selection_keys(const Scratch& s, const float* scores, const float* bias, int64_t experts, int64_t width) {
  i32 poison = {};
  for (int64_t e = 0; e < width; e += kLanes) {
    f32 value = load<f32>(scores + e);
    if (bias) value += load<f32>(bias + e);
    value = load<f32>(s.logits + e) == -kInf ? splat(-kInf) : value;
    auto fine = value == value;
    poison |= ~(i32)fine;
    store(s.keys + e, key_of(fine ? value : splat(-kInf)));
  }
  for (int64_t e = experts; e < width; ++e) s.keys[e] = kNoKey;
  return any(poison);
}

MXMOE_INLINE float value_of(int32_t key) {
  return f32_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

// Masks (-Inf) the experts outside the best groups. A group counts the sum of its two best values, or the one it has.
void keep_groups(int32_t* keys, int64_t experts, int64_t num_groups, int64_t groups_kept, float* values) {
  const int64_t size = experts / num_groups;
  const int32_t masked = key_of(splat(-kInf))[0];
  for (int64_t g = 0; g < num_groups; ++g) {
    int32_t first = masked, second = masked;
    for (int64_t i = 0; i < size; ++i) {
      int32_t key = keys[g * size + i], lower = key < first ? key : first;
      first = key > first ? key : first;
      second = lower > second ? lower : second;
    }
    values[g] = value_of(first) + (second == masked ? 0.0f : value_of(second));
  }
  for (int64_t kept = 0; kept < groups_kept; ++kept) {
    int64_t best = -1;
    for (int64_t g = 0; g < num_groups; ++g)
      if (values[g] == values[g] && (best < 0 || values[g] > values[best])) best = g;
    if (best >= 0) values[best] = kNaN;  // kept; a value is NaN before only as Inf - Inf
  }
  for (int64_t g = 0; g < num_groups; ++g)
    if (values[g] == values[g])
      for (int64_t i = 0; i < size; ++i) keys[g * size + i] = masked;
}

MXMOE_INLINE bool is_expert(int32_t id, int64_t experts) {
  return id >= 0 && id < experts;
}

// ids = replay, with implausible experts replaced by the router's own that the replay does not keep, in rank order.
void filter_replay(const RouteArgs& args, const int32_t* replay, const int32_t* own, const float* scores,
                   int32_t* ids) {
  float smallest = scores[own[0]];
  for (int64_t k = 1; k < args.top_k; ++k) smallest = scores[own[k]] < smallest ? scores[own[k]] : smallest;
  const float limit = smallest * args.replay_threshold;
  auto implausible = [&](int32_t id) { return is_expert(id, args.num_experts) && scores[id] < limit; };
  int64_t rank = 0;
  for (int64_t k = 0; k < args.top_k; ++k) {
    ids[k] = replay[k];
    if (!implausible(replay[k])) continue;
    for (bool kept = true; kept; ++rank) {
      kept = false;
      for (int64_t j = 0; j < args.top_k; ++j) kept |= replay[j] == own[rank] && !implausible(replay[j]);
      if (!kept) ids[k] = own[rank];
    }
  }
}

void slot_weights(const RouteArgs& args, const int32_t* ids, const float* scores, bool poisoned, float* weights) {
  float total = 0.0f;
  for (int64_t k = 0; k < args.top_k; ++k) {
    weights[k] = is_expert(ids[k], args.num_experts) ? scores[ids[k]] : 0.0f;
    total = total + weights[k];
  }
  total = total + kEpsilon;
  for (int64_t k = 0; k < args.top_k; ++k) {
    float weight = args.normalize ? weights[k] / total : weights[k];
    weights[k] = poisoned && is_expert(ids[k], args.num_experts) ? kNaN : weight * args.scale;
  }
}

// Routes token t and adds its probabilities and logsumexp^2 to its chunk's sums.
void route_token(const RouteArgs& args, int64_t t, const float* bias, int64_t width, const Scratch& s, float* probs_sum,
                 float* z_sum) {
  const int64_t experts = args.num_experts, top_k = args.top_k;
  bool poisoned = clean_logits(args.logits + t * experts, experts, width, s.logits);
  float logsumexp = args.sigmoid && !args.z ? 0.0f : softmax_row(s.logits, width, s.softmax, !args.sigmoid);
  if (args.sigmoid) sigmoid_row(s.logits, width, s.scores);
  const float* scores = args.sigmoid ? s.scores : s.softmax;

  poisoned |= selection_keys(s, scores, bias, experts, width);
  int32_t* ids = args.ids + t * top_k;
  const int32_t* replay = args.replay ? args.replay + t * top_k : nullptr;
  if (!replay || (args.filter_replay && !poisoned)) {
    int32_t* own = replay ? s.own : ids;
    if (args.groups_kept < args.num_groups)
      keep_groups(s.keys, experts, args.num_groups, args.groups_kept, args.sigmoid ? s.softmax : s.scores);
    TopK(s.top_k, top_k).select(s.keys, width, own);
    if (replay) filter_replay(args, replay, own, scores, ids);
  } else {
    memcpy(ids, replay, top_k * sizeof(int32_t));
  }
  slot_weights(args, ids, scores, poisoned, args.weights + t * top_k);

  *z_sum = *z_sum + (poisoned ? kNaN : logsumexp * logsumexp);
  if (!args.probs) return;
  float by = args.sigmoid ? sum_lanes(scores, width) + kEpsilon : 1.0f;
  if (poisoned) by = kNaN;
  for (int64_t e = 0; e < width; e += kLanes)
    store(probs_sum + e, load<f32>(probs_sum + e) + load<f32>(scores + e) / by);
}

}  // namespace

void route(const RouteArgs& args, int threads) {
  const int64_t width = padded(args.num_experts), num_chunks = (args.num_tokens + kChunk - 1) / kChunk;
  auto* sums = static_cast<float*>(workspace(WorkspaceSlot::kA, (num_chunks + 1) * (width + 1) * sizeof(float)));
  float* bias = args.bias ? sums + num_chunks * (width + 1) : nullptr;
  if (bias) {
    memcpy(bias, args.bias, args.num_experts * sizeof(float));
    memset(bias + args.num_experts, 0, (width - args.num_experts) * sizeof(float));
  }
  parallel(threads, num_chunks, [&](int64_t chunk, int) {
    Scratch scratch = scratch_of(width, args.top_k);
    float* probs_sum = sums + chunk * (width + 1);
    memset(probs_sum, 0, (width + 1) * sizeof(float));
    int64_t end = min_of(args.num_tokens, (chunk + 1) * kChunk);
    for (int64_t t = chunk * kChunk; t < end; ++t)
      route_token(args, t, bias, width, scratch, probs_sum, probs_sum + width);
  });
  parallel(1, 1, [&](int64_t, int) {  // a task for its floating-point state
    const float tokens = static_cast<float>(args.num_tokens > 0 ? args.num_tokens : 1);
    auto mean = [&](int64_t column) {
      float total = 0.0f;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) total = total + sums[chunk * (width + 1) + column];
      return total / tokens;
    };
    for (int64_t e = 0; args.probs && e < args.num_experts; ++e) args.probs[e] = mean(e);
    if (args.z) *args.z = mean(width);
  });
}

namespace {

// a_k = dL/d(score of slot k) * score, see the reference; returns their sum by ascending rank.
float slot_gradients(const RouteBackwardArgs& args, int64_t t, const float* scores, float* a) {
  const int32_t* ids = args.ids + t * args.top_k;
  const float* grad = args.weights_grad + t * args.top_k;
  auto score = [&](int64_t k) { return is_expert(ids[k], args.num_experts) ? scores[ids[k]] : 0.0f; };
  auto gradient = [&](int64_t k) { return is_expert(ids[k], args.num_experts) ? grad[k] : 0.0f; };
  float total = 0.0f, dot = 0.0f, sum = 0.0f;
  if (args.normalize) {
    for (int64_t k = 0; k < args.top_k; ++k) total = total + score(k);
    total = total + kEpsilon;
    for (int64_t k = 0; k < args.top_k; ++k) dot = dot + gradient(k) * (score(k) / total);
  }
  for (int64_t k = 0; k < args.top_k; ++k) {
    float product = args.normalize ? (score(k) / total) * (gradient(k) - dot) : score(k) * gradient(k);
    a[k] = product * args.scale;
    sum = sum + a[k];
  }
  return sum;
}

// Rows as in Scratch; `share` is probs_grad / T, padded with zeros.
void backward_token(const RouteBackwardArgs& args, int64_t t, const float* share, int64_t width, const Scratch& s,
                    float* a) {
  const int64_t experts = args.num_experts;
  float* out = args.logits_grad + t * experts;
  if (clean_logits(args.logits + t * experts, experts, width, s.logits)) {
    for (int64_t e = 0; e < experts; ++e) out[e] = kNaN;
    return;
  }
  float logsumexp = args.sigmoid && !args.z_grad ? 0.0f : softmax_row(s.logits, width, s.softmax, true);
  if (args.sigmoid) sigmoid_row(s.logits, width, s.scores);
  const float* scores = args.sigmoid ? s.scores : s.softmax;
  float* grad = s.logits;  // the logits are not needed any more

  float by = args.sigmoid && share ? sum_lanes(scores, width) + kEpsilon : 1.0f, dot = 0.0f;
  if (share) {
    for (int64_t e = 0; e < width; e += kLanes) store(grad + e, load<f32>(share + e) * (load<f32>(scores + e) / by));
    dot = sum_lanes(grad, width);
  }
  float z = args.z_grad ? (logsumexp * (*args.z_grad * 2.0f)) / static_cast<float>(args.num_tokens) : 0.0f;
  float sum = args.weights_grad ? slot_gradients(args, t, scores, a) : 0.0f;
  for (int64_t e = 0; e < width; e += kLanes) {
    f32 score = load<f32>(scores + e), value = {};
    if (share) {
      value = (score / by) * (load<f32>(share + e) - dot);
      if (args.sigmoid) value = value * (1.0f - score);
    }
    if (args.z_grad) value = value + z * load<f32>(s.softmax + e);
    if (args.weights_grad && !args.sigmoid) value = value - score * sum;
    store(grad + e, value);
  }
  memcpy(out, grad, experts * sizeof(float));
  for (int64_t k = 0; args.weights_grad && k < args.top_k; ++k) {
    int32_t id = args.ids[t * args.top_k + k];
    if (is_expert(id, experts)) out[id] = out[id] + (args.sigmoid ? a[k] * (1.0f - scores[id]) : a[k]);
  }
}

}  // namespace

void route_backward(const RouteBackwardArgs& args, int threads) {
  constexpr int64_t kTokens = 64;  // of one task
  const int64_t width = padded(args.num_experts), experts = args.num_experts;
  float* share = nullptr;
  if (args.probs_grad) share = static_cast<float*>(workspace(WorkspaceSlot::kA, width * sizeof(float)));
  if (share) {
    parallel(1, 1, [&](int64_t, int) {
      for (int64_t e = 0; e < experts; ++e) share[e] = args.probs_grad[e] / static_cast<float>(args.num_tokens);
      memset(share + experts, 0, (width - experts) * sizeof(float));
    });
  }
  parallel(threads, (args.num_tokens + kTokens - 1) / kTokens, [&](int64_t task, int) {
    Scratch scratch = scratch_of(width, args.top_k);
    float* a = reinterpret_cast<float*>(scratch.own);
    int64_t end = min_of(args.num_tokens, (task + 1) * kTokens);
    for (int64_t t = task * kTokens; t < end; ++t) backward_token(args, t, share, width, scratch, a);
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
