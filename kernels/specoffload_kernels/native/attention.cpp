// One task of paged attention: online softmax over blocks read in place, with per-block sums.
//
// Compiled once per instruction set, with SPECOFFLOAD_ISA naming the namespace and
// SPECOFFLOAD_LANES the floats of a vector. Nothing here is inline-linkable (no standard library
// templates), so that code for one instruction set cannot be picked by the linker for another.

#include "attention.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specoffload {
namespace SPECOFFLOAD_ISA {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t W = SPECOFFLOAD_LANES;
constexpr int64_t kAheadBytes = 8192;  // how far reading is preceded by fetching
constexpr float kInf = __builtin_inff();

typedef float V __attribute__((vector_size(4 * W)));
typedef float VLoad __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VHalf __attribute__((vector_size(2 * W)));
typedef uint16_t VHalfLoad __attribute__((vector_size(2 * W), aligned(2), may_alias));

typedef uint32_t VPairLoad __attribute__((vector_size(4 * W), aligned(2), may_alias));

struct Bf16 { uint16_t bits; };

INLINE V load(const float* p) { return *reinterpret_cast<const VLoad*>(p); }
INLINE V load(const Bf16* p) {
  VHalf half = *reinterpret_cast<const VHalfLoad*>(p);
  return reinterpret_cast<V>(__builtin_convertvector(half, VU) << 16);
}
// 2 W elements, as two vectors. Those of bfloat16 are split into the even and the odd ones, which
// costs half of what widening in order does. Queries are packed in the same order, and sums are put
// back in order at the end of a task; only whole pairs of vectors are permuted.
INLINE void load_pair(const float* p, V* v) {
  v[0] = load(p);
  v[1] = load(p + W);
}
INLINE void load_pair(const Bf16* p, V* v) {
  VU pair = *reinterpret_cast<const VPairLoad*>(p);
  v[0] = reinterpret_cast<V>(pair << 16);
  v[1] = reinterpret_cast<V>(pair & 0xffff0000);
}
INLINE void store(float* p, V v) { *reinterpret_cast<VLoad*>(p) = v; }
INLINE V splat(float x) { return x - V{}; }
INLINE V larger(V a, V b) { return a > b ? a : b; }
INLINE VI bits(V v) { return reinterpret_cast<VI>(v); }
INLINE V from_bits(VI v) { return reinterpret_cast<V>(v); }
INLINE float scalar(const float* p) { return *p; }
INLINE float scalar(const Bf16* p) {
  uint32_t word = static_cast<uint32_t>(p->bits) << 16;
  float x;
  __builtin_memcpy(&x, &word, 4);
  return x;
}

// ---- vector to scalar

typedef float Quad __attribute__((vector_size(16)));

INLINE Quad quad(V v, int64_t n) {
  Quad quads[W / 4];
  __builtin_memcpy(quads, &v, sizeof v);
  return quads[n];
}
INLINE Quad sum_quads(V v) {
  Quad total = quad(v, 0);
  for (int64_t n = 1; n < W / 4; ++n) total += quad(v, n);
  return total;
}
INLINE float sum_lanes(V v) {
  Quad q = sum_quads(v);
  return (q[0] + q[1]) + (q[2] + q[3]);
}
INLINE float max_lanes(V v) {
  Quad q = quad(v, 0);
  for (int64_t n = 1; n < W / 4; ++n) q = quad(v, n) > q ? quad(v, n) : q;
  float a = q[0] > q[1] ? q[0] : q[1], b = q[2] > q[3] ? q[2] : q[3];
  return a > b ? a : b;
}

// to[n] = sum of the lanes of a[n], for four vectors.
#if SPECOFFLOAD_LANES >= 8
INLINE __m256 fold(V v) {
  __m256 parts[W / 8];
  __builtin_memcpy(parts, &v, sizeof v);
  __m256 total = parts[0];
  for (int64_t n = 1; n < W / 8; ++n) total = _mm256_add_ps(total, parts[n]);
  return total;
}
INLINE __m256 add_neighbours(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
INLINE void sum4(const V* a, float* to) {
  __m256 ab = add_neighbours(fold(a[0]), fold(a[1])), cd = add_neighbours(fold(a[2]), fold(a[3]));
  __m256 abcd = add_neighbours(ab, cd);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
#else
INLINE void sum4(const V* a, float* to) {
  for (int64_t n = 0; n < 4; ++n) to[n] = sum_lanes(a[n]);
}
#endif

// ---- exp, log, tanh: the single precision polynomials of Cephes, 1 to 2 ulp

INLINE V exp_clamped(V x) {  // for x <= 88; 0 below -87.3, also for -inf
  V clamped = larger(x, splat(-87.3f));
  V shifted = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  V n = shifted - 12582912.0f;
  V f = clamped - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  V power = from_bits((bits(shifted) << 23) + 0x3f800000);
  return from_bits(bits(p * power) & (x >= splat(-87.3f)));
}

INLINE V log_positive(V x) {  // for normal x > 0
  VI exponent = ((bits(x) >> 23) & 0xff) - 126;
  V m = from_bits((bits(x) & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  VI low = m < splat(0.707106781f);
  V e = __builtin_convertvector(exponent, V) + __builtin_convertvector(low, V);
  m = m + from_bits(bits(m) & low) - 1.0f;
  V z = m * m;
  V p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  p = p - e * 2.12194440e-4f - z * 0.5f;
  return m + p + e * 0.693359375f;
}

INLINE V tanh(V x) {
  V z = x * x;
  V p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  V small = p * z * x + x;
  V size = from_bits(bits(x) & 0x7fffffff);
  V large = 1.0f - 2.0f / (exp_clamped(size < splat(40.0f) ? size * 2.0f : splat(80.0f)) + 1.0f);
  large = from_bits(bits(large) | (bits(x) & static_cast<int32_t>(0x80000000)));
  return size < splat(0.625f) ? small : large;
}

// ---- fetching ahead

// Memory that will be read next, fetched at an even pace between the arithmetic: fetches in a burst
// would fill the miss buffers, and the arithmetic behind them would wait.
template <int64_t kLines>  // fetched at each step
struct Ahead {
  const char* at;
  int64_t step_bytes;
  INLINE void fetch() {
    for (int64_t n = 0; n < kLines; ++n) __builtin_prefetch(at + 64 * n);
    at += step_bytes;
  }
};

// What to fetch while reading a region from `offset` on, given the region that is read after it and
// the number of elements read at each step.
template <int64_t kLines, class T>
INLINE Ahead<kLines> ahead_of(const T* region, int64_t offset, int64_t size, const T* next,
                              int64_t step) {
  constexpr int64_t kSize = sizeof(T);
  const int64_t target = offset + kAheadBytes / kSize;
  const T* at = target < size ? region + target : next + (target - size);
  return {reinterpret_cast<const char*>(at), step * kSize};
}

constexpr int64_t lines_of(int64_t floats) { return floats > 16 ? floats / 16 : 1; }

// Four tokens of a block, the last one repeated where the block has no more.
template <class T>
INLINE void four_tokens(const T* block, int64_t t, int64_t num, int64_t head_dim,
                        const T** tokens) {
  for (int64_t n = 0; n < 4; ++n) tokens[n] = block + (t + n < num ? t + n : num - 1) * head_dim;
}

// ---- logits: s[rows, tokens] = q[rows, D] k[tokens, D], four tokens at a time

template <int R, class K, class A>
INLINE void logits_tile(const float* q, int64_t head_dim, const K* const* k, float* s,
                        int64_t s_stride, A& ahead) {
  V acc[R][4] = {};
  int64_t d = 0;
  if (sizeof(K) == 2)
    for (; d + 2 * W <= head_dim; d += 2 * W) {
      ahead.fetch();
      for (int n = 0; n < 4; ++n) {
        V kv[2];
        load_pair(k[n] + d, kv);
        for (int r = 0; r < R; ++r) {
          acc[r][n] += load(q + r * head_dim + d) * kv[0];
          acc[r][n] += load(q + r * head_dim + d + W) * kv[1];
        }
      }
    }
  for (; d < head_dim; d += W) {
    ahead.fetch();
    V qv[R];
    for (int r = 0; r < R; ++r) qv[r] = load(q + r * head_dim + d);
    for (int n = 0; n < 4; ++n) {
      V kv = load(k[n] + d);
      for (int r = 0; r < R; ++r) acc[r][n] += qv[r] * kv;
    }
  }
  for (int r = 0; r < R; ++r) sum4(acc[r], s + r * s_stride);
}

// Rows come in threes and twos.
template <class K, class A>
INLINE void logits_rows(const float* q, int64_t rows, int64_t head_dim, const K* const* k, float* s,
                        int64_t s_stride, A& ahead) {
  int64_t r = 0;
  for (; rows - r >= 3 && rows - r != 4; r += 3)
    logits_tile<3>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride, ahead);
  for (; rows - r >= 2; r += 2)
    logits_tile<2>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride, ahead);
  if (r < rows) logits_tile<1>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride, ahead);
}

template <class K>
void logits(const float* q, int64_t rows, int64_t head_dim, const K* k, int64_t num, const K* next,
            float* s, int64_t s_stride) {
  const int64_t size = num * head_dim, tiles = (rows + 2) / 3;
  const int64_t step = 4 * W * (sizeof(K) == 2 ? 2 : 1);
  for (int64_t t = 0; t < num; t += 4) {
    const K* tokens[4];
    four_tokens(k, t, num, head_dim, tokens);
    if (tiles == 1) {
      auto ahead = ahead_of<lines_of(4 * W)>(k, t * head_dim, size, next, step);
      logits_rows(q, rows, head_dim, tokens, s + t, s_stride, ahead);
    } else {
      auto ahead = ahead_of<lines_of(2 * W)>(k, t * head_dim, size, next, step / tiles);
      logits_rows(q, rows, head_dim, tokens, s + t, s_stride, ahead);
    }
  }
}

// ---- values: acc[rows, D] += p[rows, tokens] * v[tokens, D]

// For few rows, when memory sets the pace: four tokens at a time, so that v is read in order.
template <int R, class T, class A>
INLINE void values_four(const float* p, int64_t p_stride, const T* const* v, int64_t head_dim,
                        float* acc, A& ahead) {
  V weight[R][4];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 4; ++n) weight[r][n] = splat(p[r * p_stride + n]);
  int64_t d = 0;
  if (sizeof(T) == 2)
    for (; d + 2 * W <= head_dim; d += 2 * W) {
      ahead.fetch();
      V sums[R][2];
      for (int r = 0; r < R; ++r) load_pair(acc + r * head_dim + d, sums[r]);
      for (int n = 0; n < 4; ++n) {
        V vv[2];
        load_pair(v[n] + d, vv);
        for (int r = 0; r < R; ++r) {
          sums[r][0] += weight[r][n] * vv[0];
          sums[r][1] += weight[r][n] * vv[1];
        }
      }
      for (int r = 0; r < R; ++r) {
        store(acc + r * head_dim + d, sums[r][0]);
        store(acc + r * head_dim + d + W, sums[r][1]);
      }
    }
  for (; d < head_dim; d += W) {
    ahead.fetch();
    V sums[R];
    for (int r = 0; r < R; ++r) sums[r] = load(acc + r * head_dim + d);
    for (int n = 0; n < 4; ++n) {
      V vv = load(v[n] + d);
      for (int r = 0; r < R; ++r) sums[r] += weight[r][n] * vv;
    }
    for (int r = 0; r < R; ++r) store(acc + r * head_dim + d, sums[r]);
  }
}

template <class T>
INLINE void values_few(int64_t rows, const float* p, int64_t p_stride, const T* v, int64_t head_dim,
                       int64_t num, float* acc, const T* next) {
  const int64_t size = num * head_dim, step = 4 * W * (sizeof(T) == 2 ? 2 : 1);
  for (int64_t t = 0; t < num; t += 4) {
    const T* tokens[4];
    four_tokens(v, t, num, head_dim, tokens);  // a repeated token has weight 0
    auto ahead = ahead_of<lines_of(4 * W)>(v, t * head_dim, size, next, step);
    auto slower = ahead_of<lines_of(2 * W)>(v, t * head_dim, size, next, step / 2);
    switch (rows) {
      case 1: values_four<1>(p + t, p_stride, tokens, head_dim, acc, ahead); break;
      case 2: values_four<2>(p + t, p_stride, tokens, head_dim, acc, ahead); break;
      case 3: values_four<3>(p + t, p_stride, tokens, head_dim, acc, ahead); break;
      default:
        for (int64_t r = 0; r < 4; r += 2)
          values_four<2>(p + r * p_stride + t, p_stride, tokens, head_dim, acc + r * head_dim,
                         slower);
    }
  }
}

template <class T>
INLINE void widen(const T* from, int64_t num, float* to) {
  int64_t d = 0;
  for (; d + 2 * W <= num; d += 2 * W) {
    V v[2];
    load_pair(from + d, v);
    store(to + d, v[0]);
    store(to + d + W, v[1]);
  }
  if (d < num) store(to + d, load(from + d));
}

// For many rows, when arithmetic does: a tile of R rows and NV vectors stays in registers for a run
// of tokens.
template <int R, int NV, class A>
INLINE void values_tile(const float* p, int64_t p_stride, const float* v, int64_t head_dim,
                        int64_t num, float* acc, A& ahead) {
  V sums[R][NV];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < NV; ++n) sums[r][n] = load(acc + r * head_dim + n * W);
  for (int64_t t = 0; t < num; ++t, v += head_dim) {
    ahead.fetch();
    V vv[NV];
    for (int n = 0; n < NV; ++n) vv[n] = load(v + n * W);
    for (int r = 0; r < R; ++r) {
      V weight = splat(p[r * p_stride + t]);
      for (int n = 0; n < NV; ++n) sums[r][n] += weight * vv[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < NV; ++n) store(acc + r * head_dim + n * W, sums[r][n]);
}

template <int R, class A>
void values_rows(const float* p, int64_t p_stride, const float* v, int64_t head_dim, int64_t num,
                 float* acc, A& ahead) {
  int64_t d = 0;
  for (; d + 2 * W <= head_dim; d += 2 * W)
    values_tile<R, 2>(p, p_stride, v + d, head_dim, num, acc + d, ahead);
  if (d < head_dim) values_tile<R, 1>(p, p_stride, v + d, head_dim, num, acc + d, ahead);
}

template <class A>
INLINE void values_any(int64_t rows, const float* p, int64_t p_stride, const float* v,
                       int64_t head_dim, int64_t num, float* acc, A& ahead) {
  switch (rows) {
    case 3: return values_rows<3>(p, p_stride, v, head_dim, num, acc, ahead);
    case 4: return values_rows<4>(p, p_stride, v, head_dim, num, acc, ahead);
    case 5: return values_rows<5>(p, p_stride, v, head_dim, num, acc, ahead);
    default: return values_rows<6>(p, p_stride, v, head_dim, num, acc, ahead);
  }
}

// Rows in tiles of at most 6, as equal as possible: 3 at least, for more than 4 rows.
template <class T>
void values(int64_t rows, const float* p, int64_t p_stride, const T* v, int64_t head_dim,
            int64_t num, float* acc, float* v_buffer, const T* next) {
  if (rows <= 4) return values_few(rows, p, p_stride, v, head_dim, num, acc, next);
  const int64_t tiles = (rows + 5) / 6, run = kRunFloats / head_dim;
  for (int64_t t = 0; t < num; t += run) {
    const int64_t count = t + run < num ? run : num - t;
    auto ahead = ahead_of<lines_of(2 * W)>(v, t * head_dim, num * head_dim, next, 2 * W / tiles);
    const float* wide = v_buffer;
    if constexpr (sizeof(T) == 4) wide = v + t * head_dim;
    else
      for (int64_t n = 0; n < count; ++n)
        widen(v + (t + n) * head_dim, head_dim, v_buffer + n * head_dim);
    for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
      const int64_t num_rows = (rows - r + tiles - tile - 1) / (tiles - tile);
      values_any(num_rows, p + r * p_stride + t, p_stride, wide, head_dim, count,
                 acc + r * head_dim, ahead);
      r += num_rows;
    }
  }
}

// ---- one task

// Copies a row into the order of load_pair, or back.
template <bool kBack, class From>
INLINE void reorder(const From* from, int64_t head_dim, float scale, float* to) {
  int64_t d = 0;
  for (; d + 2 * W <= head_dim; d += 2 * W)
    for (int64_t n = 0; n < W; ++n) {
      to[d + (kBack ? 2 * n : n)] = scalar(from + d + (kBack ? n : 2 * n)) * scale;
      to[d + (kBack ? 2 * n + 1 : W + n)] = scalar(from + d + (kBack ? W + n : 2 * n + 1)) * scale;
    }
  for (; d < head_dim; ++d) to[d] = scalar(from + d) * scale;
}

template <class Q, bool kPaired>
INLINE void pack_queries(const Call& call, const Task& task, float* q) {
  int64_t groups = call.num_q_heads / call.num_heads;
  float scale = static_cast<float>(call.scale);
  for (int64_t head = task.h_begin; head < task.h_end; ++head)
    for (int64_t i = task.i_begin; i < task.i_end; ++i)
      for (int64_t g = 0; g < groups; ++g, q += call.head_dim) {
        const Q* from = static_cast<const Q*>(call.q) + task.row * call.q_stride_row +
                        (head * groups + g) * call.q_stride_head + i * call.q_stride_token;
        if (kPaired) reorder<false>(from, call.head_dim, scale, q);
        else
          for (int64_t d = 0; d < call.head_dim; ++d) q[d] = scalar(from + d) * scale;
      }
}

INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Turns a row's logits into weights relative to the row's running maximum, and the sums with them.
// Beyond `num` the row is padded to whole vectors; all of it may be -inf.
INLINE void soften(float* row, int64_t num, int64_t head_dim, float* acc, float* max, float* sum,
                   float* block_max, float* block_sum) {
  const int64_t num_padded = (num + W - 1) / W * W;
  for (int64_t t = num; t < num_padded; ++t) row[t] = -kInf;
  V best_v = load(row);
  for (int64_t t = W; t < num_padded; t += W) best_v = larger(best_v, load(row + t));
  const float best = max_lanes(best_v);
  *block_max = best;
  *block_sum = 1;
  if (best == -kInf) {
    for (int64_t t = 0; t < num_padded; t += W) store(row + t, V{});
    return;
  }
  // Weights are relative to the block's own largest logit, so that its sum is exact however small
  // its share; what the blocks before weighed is rescaled only when the maximum grows.
  float factor = 1;
  if (best > *max) {
    if (*sum != 0) {
      float shrink = exp_clamped(splat(*max - best))[0];
      for (int64_t d = 0; d < head_dim; d += W) store(acc + d, load(acc + d) * shrink);
      *sum *= shrink;
    }
    *max = best;
  } else {
    factor = exp_clamped(splat(best - *max))[0];
  }
  V total = V{};
  for (int64_t t = 0; t < num_padded; t += W) {
    V weight = exp_clamped(load(row + t) - best);
    total += weight;
    store(row + t, weight * factor);
  }
  *block_sum = sum_lanes(total);
  *sum += *block_sum * factor;
}

template <class T>
INLINE void attend(const Call& call, const Task& task, float* scratch) {
  const int64_t groups = call.num_q_heads / call.num_heads;
  const int64_t rows = groups * (task.i_end - task.i_begin);  // of one head
  const int64_t heads = task.h_end - task.h_begin, all_rows = heads * rows;
  const int64_t head_dim = call.head_dim, block_size = call.block_size;
  const int64_t s_stride = padded(block_size);

  float* q = scratch;
  float* s = q + padded(all_rows * head_dim);
  float* v_buffer = s + all_rows * s_stride;
  float* block_max = v_buffer + kRunFloats;
  float* block_sum = block_max + padded(all_rows);

  constexpr bool kPaired = sizeof(T) == 2;
  if (call.q_dtype == kFloat32) pack_queries<float, kPaired>(call, task, q);
  else pack_queries<Bf16, kPaired>(call, task, q);

  for (int64_t r = 0; r < all_rows; ++r) {
    task.max[r] = -kInf;
    task.sum[r] = 0;
    for (int64_t d = 0; d < head_dim; ++d) task.acc[r * head_dim + d] = 0;
  }

  const int64_t q_start = call.q_start[task.row], kv_len = call.kv_len[task.row];
  const int64_t window = call.window ? call.window : INT64_MAX / 2;
  // Tokens that some query of the task sees; nothing outside may be read.
  const int64_t begin = at_least(0, q_start + task.i_begin - window + 1);
  const int64_t end = at_most(kv_len, q_start + task.i_end);
  // Tokens that every query of the task sees.
  const int64_t all_begin = at_least(0, q_start + task.i_end - window);
  const int64_t all_end = at_most(kv_len, q_start + task.i_begin + 1);

  const int32_t* table = call.table + task.row * call.table_stride;
  const T* arena = static_cast<const T*>(call.arena) + task.h_begin * call.arena_stride_head;

  // Where block_lse of a head's packed row r, block j is.
  const int64_t per_head = call.num_q * call.num_blocks;
  auto row_lse = [&](int64_t head, int64_t r) {
    const int64_t q_head = (task.h_begin + head) * groups + r % groups;
    return call.block_lse + (task.row * call.num_q_heads + q_head) * per_head +
           (task.i_begin + r / groups) * call.num_blocks;
  };
  if (call.block_lse)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t r = 0; r < rows; ++r) {
        float* to = row_lse(head, r);
        for (int64_t j = task.first_fill; j < task.last_fill; ++j) to[j] = -kInf;
      }

  int64_t j = task.j_begin;
  while (j < task.j_end && table[j] < 0) ++j;
  if (j < task.j_end)
    for (int64_t n = 0; n < kAheadBytes / static_cast<int64_t>(sizeof(T)); n += 64 / sizeof(T))
      __builtin_prefetch(arena + table[j] * call.arena_stride_slot + n);
  while (j < task.j_end) {
    int64_t next = j + 1;
    while (next < task.j_end && table[next] < 0) ++next;

    const int64_t base = j * block_size;
    const int64_t t_begin = at_least(0, begin - base), t_end = at_most(block_size, end - base);
    const int64_t num = t_end - t_begin;
    const T* k = arena + table[j] * call.arena_stride_slot + t_begin * head_dim;
    const T* v = k + call.arena_stride_kv;
    // A fetch may name any address; the last block has no next one, and fetches itself.
    const T* next_k = next < task.j_end ? arena + table[next] * call.arena_stride_slot : k;
    const bool masked = base + t_begin < all_begin || base + t_end > all_end;

    for (int64_t head = 0; head < heads; ++head) {
      const T* k_head = k + head * call.arena_stride_head;
      const T* after = head + 1 < heads ? k_head + call.arena_stride_head : v;
      float* s_head = s + head * rows * s_stride;
      logits(q + head * rows * head_dim, rows, head_dim, k_head, num, after, s_head, s_stride);
      for (int64_t r = 0; r < rows; ++r) {
        float* row = s_head + r * s_stride;
        if (call.softcap != 0) {
          const float cap = static_cast<float>(call.softcap);
          const float inverse = static_cast<float>(1 / call.softcap);
          for (int64_t t = 0; t < num; t += W) store(row + t, tanh(load(row + t) * inverse) * cap);
        }
        if (masked) {
          int64_t position = q_start + task.i_begin + r / groups - (base + t_begin);
          for (int64_t t = at_least(0, position + 1); t < num; ++t) row[t] = -kInf;
          for (int64_t t = 0; t < at_most(num, position - window + 1); ++t) row[t] = -kInf;
        }
        const int64_t at = head * rows + r;
        soften(row, num, head_dim, task.acc + at * head_dim, task.max + at, task.sum + at,
               block_max + at, block_sum + at);
      }
    }
    for (int64_t head = 0; head < heads; ++head) {
      const T* v_head = v + head * call.arena_stride_head;
      const T* after = head + 1 < heads ? v_head + call.arena_stride_head : next_k;
      values(rows, s + head * rows * s_stride, s_stride, v_head, head_dim, num,
             task.acc + head * rows * head_dim, v_buffer, after);
    }

    if (call.block_lse) {
      for (int64_t r = 0; r < all_rows; r += W)
        store(block_sum + r, log_positive(load(block_sum + r)) + load(block_max + r));
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t r = 0; r < rows; ++r) row_lse(head, r)[j] = block_sum[head * rows + r];
    }
    j = next;
  }
  if (kPaired)
    for (int64_t r = 0; r < all_rows; ++r) {
      float* acc = task.acc + r * head_dim;
      reorder<true>(acc, head_dim, 1, v_buffer);
      __builtin_memcpy(acc, v_buffer, head_dim * sizeof(float));
    }
}

}  // namespace

void run_task(const Call& call, const Task& task, float* scratch) {
  if (call.arena_dtype == kFloat32) attend<float>(call, task, scratch);
  else attend<Bf16>(call, task, scratch);
}

}  // namespace SPECOFFLOAD_ISA
}  // namespace specoffload
