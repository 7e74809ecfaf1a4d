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
#ifndef SPECOFFLOAD_PREFETCH
#define SPECOFFLOAD_PREFETCH 3
#endif
constexpr int kPrefetchLocality = SPECOFFLOAD_PREFETCH;
constexpr float kInf = __builtin_inff();

typedef float V __attribute__((vector_size(4 * W)));
typedef float VLoad __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VHalf __attribute__((vector_size(2 * W)));
typedef uint16_t VHalfLoad __attribute__((vector_size(2 * W), aligned(2), may_alias));

struct Bf16 { uint16_t bits; };

INLINE V load(const float* p) { return *reinterpret_cast<const VLoad*>(p); }
INLINE V load(const Bf16* p) {
  VHalf half = *reinterpret_cast<const VHalfLoad*>(p);
  return reinterpret_cast<V>(__builtin_convertvector(half, VU) << 16);
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

#if SPECOFFLOAD_LANES == 8 && defined(__AVX2__)
INLINE void sum4(const V* a, float* to) {
  __m256 ab = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]);
  __m256 cd = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
  __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
#elif SPECOFFLOAD_LANES == 16 && defined(__AVX512F__)
INLINE __m256 fold(V v) {
  __m256 half[2];
  __builtin_memcpy(half, &v, sizeof half);
  return _mm256_add_ps(half[0], half[1]);
}
INLINE void sum4(const V* a, float* to) {
  __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(fold(a[0]), fold(a[1])),
                               _mm256_hadd_ps(fold(a[2]), fold(a[3])));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
#else
INLINE void sum4(const V* a, float* to) {
  for (int64_t n = 0; n < 4; ++n) {
    float total = 0;
    for (int64_t lane = 0; lane < W; ++lane) total += a[n][lane];
    to[n] = total;
  }
}
#endif

INLINE float sum_lanes(V v) {
  float total = 0;
  for (int64_t lane = 0; lane < W; ++lane) total += v[lane];
  return total;
}
INLINE float max_lanes(V v) {
  float best = v[0];
  for (int64_t lane = 1; lane < W; ++lane) best = v[lane] > best ? v[lane] : best;
  return best;
}

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

// ---- logits: rows x 4 tokens at a time, dot products along D

INLINE void prefetch(const char* p) { __builtin_prefetch(p, 0, kPrefetchLocality); }
INLINE void prefetch(const char* p, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += 64) prefetch(p + at);
}

template <int R, class K>
INLINE void logits_tile(const float* q, int64_t head_dim, const K* const* k, float* s,
                        int64_t s_stride) {
  V acc[R][4] = {};
  for (int64_t d = 0; d < head_dim; d += W) {
    V qv[R];
    for (int r = 0; r < R; ++r) qv[r] = load(q + r * head_dim + d);
    for (int n = 0; n < 4; ++n) {
      V kv = load(k[n] + d);
      for (int r = 0; r < R; ++r) acc[r][n] += qv[r] * kv;
    }
  }
  for (int r = 0; r < R; ++r) sum4(acc[r], s + r * s_stride);
}

template <class K>
INLINE void logits_rows(const float* q, int64_t rows, int64_t head_dim, const K* const* k, float* s,
                        int64_t s_stride) {
  int64_t r = 0;
  for (; r + 3 <= rows; r += 3) logits_tile<3>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride);
  if (rows - r == 2) logits_tile<2>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride);
  if (rows - r == 1) logits_tile<1>(q + r * head_dim, head_dim, k, s + r * s_stride, s_stride);
}

// Logits of `num` tokens from k; past the last token of a group of four it is repeated. `ahead` is
// fetched at the pace at which k is read.
template <class K>
void logits(const float* q, int64_t rows, int64_t head_dim, const K* k, int64_t num, const K* ahead,
            float* s, int64_t s_stride, float* k_buffer) {
  for (int64_t t = 0; t < num; t += 4) {
    const K* tokens[4];
    for (int64_t n = 0; n < 4; ++n) {
      int64_t token = t + n < num ? t + n : num - 1;
      tokens[n] = k + token * head_dim;
    }
    prefetch(reinterpret_cast<const char*>(ahead + t * head_dim), 4 * head_dim * sizeof(K));
    if (sizeof(K) == 4 || rows <= 3) {
      logits_rows(q, rows, head_dim, tokens, s + t, s_stride);
    } else {  // widen once for all the rows
      const float* wide[4];
      for (int64_t n = 0; n < 4; ++n) {
        float* to = k_buffer + n * padded(head_dim);
        for (int64_t d = 0; d < head_dim; d += W) store(to + d, load(tokens[n] + d));
        wide[n] = to;
      }
      logits_rows(q, rows, head_dim, wide, s + t, s_stride);
    }
  }
}

// ---- values: acc[rows, stripe of D] += p[rows, tokens] * v[tokens, stripe]

template <int R, int NV, bool kPrefetch, class T>
INLINE void values_tile(const float* p, int64_t p_stride, const T* v, int64_t v_stride, int64_t num,
                        float* acc, int64_t acc_stride, const char* ahead) {
  constexpr int64_t kBytes = NV * W * sizeof(T);  // of the next K per token of V, at equal pace
  V sums[R][NV];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < NV; ++n) sums[r][n] = load(acc + r * acc_stride + n * W);
  for (int64_t t = 0; t < num; ++t) {
    if (kPrefetch)
      for (int64_t at = 0; at < kBytes; at += 64) prefetch(ahead + t * kBytes + at);
    V vv[NV];
    for (int n = 0; n < NV; ++n) vv[n] = load(v + t * v_stride + n * W);
    for (int r = 0; r < R; ++r) {
      V weight = splat(p[r * p_stride + t]);
      for (int n = 0; n < NV; ++n) sums[r][n] += weight * vv[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < NV; ++n) store(acc + r * acc_stride + n * W, sums[r][n]);
}

template <int NV, bool kPrefetch, class T>
INLINE void values_rows(int64_t rows, const float* p, int64_t p_stride, const T* v,
                        int64_t v_stride, int64_t num, float* acc, int64_t acc_stride,
                        const char* ahead) {
  switch (rows) {
    case 1: values_tile<1, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
    case 2: values_tile<2, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
    case 3: values_tile<3, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
    case 4: values_tile<4, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
    case 5: values_tile<5, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
    default: values_tile<6, NV, kPrefetch>(p, p_stride, v, v_stride, num, acc, acc_stride, ahead); break;
  }
}

// One stripe of NV vectors for all rows, the rows in tiles of at most 6, as equal as possible.
template <int NV, class T>
INLINE void values_stripe(int64_t rows, const float* p, int64_t p_stride, const T* v,
                          int64_t head_dim, int64_t num, float* acc, float* v_buffer,
                          const char* ahead) {
  int64_t tiles = (rows + 5) / 6;
  if (tiles == 1) {
    values_rows<NV, true>(rows, p, p_stride, v, head_dim, num, acc, head_dim, ahead);
    return;
  }
  // A dense float32 copy: widened once, and without the cache conflicts of a power-of-two stride.
  constexpr int64_t kStripe = NV * W;
  constexpr int64_t kBytes = kStripe * sizeof(T);
  for (int64_t t = 0; t < num; ++t) {
    for (int64_t at = 0; at < kBytes; at += 64) prefetch(ahead + t * kBytes + at);
    for (int n = 0; n < NV; ++n) store(v_buffer + t * kStripe + n * W, load(v + t * head_dim + n * W));
  }
  for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
    int64_t count = (rows - r + tiles - tile - 1) / (tiles - tile);
    values_rows<NV, false>(count, p + r * p_stride, p_stride, v_buffer, kStripe, num,
                           acc + r * head_dim, head_dim, ahead);
    r += count;
  }
}

template <class T>
void values(int64_t rows, const float* p, int64_t p_stride, const T* v, int64_t head_dim,
            int64_t num, float* acc, float* v_buffer, const T* ahead) {
  int64_t d = 0;
  const char* next = reinterpret_cast<const char*>(ahead);
  if (rows <= 3) {
    for (; d + 4 * W <= head_dim; d += 4 * W)
      values_stripe<4>(rows, p, p_stride, v + d, head_dim, num, acc + d, v_buffer, next + d * num * sizeof(T));
  }
  for (; d + 2 * W <= head_dim; d += 2 * W)
    values_stripe<2>(rows, p, p_stride, v + d, head_dim, num, acc + d, v_buffer, next + d * num * sizeof(T));
  for (; d < head_dim; d += W)
    values_stripe<1>(rows, p, p_stride, v + d, head_dim, num, acc + d, v_buffer, next + d * num * sizeof(T));
}

// ---- one task

template <class Q>
INLINE void pack_queries(const Call& call, const Task& task, float* q) {
  int64_t groups = call.num_q_heads / call.num_heads;
  float scale = static_cast<float>(call.scale);
  for (int64_t i = task.i_begin; i < task.i_end; ++i)
    for (int64_t g = 0; g < groups; ++g, q += call.head_dim) {
      const Q* from = static_cast<const Q*>(call.q) + task.row * call.q_stride_row +
                      (task.head * groups + g) * call.q_stride_head + i * call.q_stride_token;
      for (int64_t d = 0; d < call.head_dim; ++d) q[d] = scalar(from + d) * scale;
    }
}

INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
INLINE void attend(const Call& call, const Task& task, float* scratch) {
  const int64_t groups = call.num_q_heads / call.num_heads;
  const int64_t rows = groups * (task.i_end - task.i_begin);
  const int64_t head_dim = call.head_dim, block_size = call.block_size;
  const int64_t s_stride = padded(block_size);

  float* q = scratch;
  float* s = q + padded(rows * head_dim);
  float* k_buffer = s + rows * s_stride;
  float* v_buffer = k_buffer + 4 * padded(head_dim);
  float* block_max = v_buffer + padded(block_size) * 64;
  float* block_sum = block_max + padded(rows);

  if (call.q_dtype == kFloat32) pack_queries<float>(call, task, q);
  else pack_queries<Bf16>(call, task, q);

  for (int64_t r = 0; r < rows; ++r) {
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
  const T* heads = static_cast<const T*>(call.arena) + task.head * call.arena_stride_head;

  // Where block_lse of packed row r, block j is.
  float* block_lse = nullptr;
  const int64_t per_head = call.num_q * call.num_blocks;
  if (call.block_lse)
    block_lse = call.block_lse + (task.row * call.num_q_heads + task.head * groups) * per_head +
                task.i_begin * call.num_blocks;
  auto row_lse = [&](int64_t r) {
    return block_lse + (r % groups) * per_head + (r / groups) * call.num_blocks;
  };
  if (block_lse)
    for (int64_t r = 0; r < rows; ++r) {
      float* to = row_lse(r);
      for (int64_t j = task.first_fill; j < task.last_fill; ++j) to[j] = -kInf;
    }

  int64_t j = task.j_begin;
  while (j < task.j_end && table[j] < 0) ++j;
  if (j < task.j_end)
    prefetch(reinterpret_cast<const char*>(heads + table[j] * call.arena_stride_slot), 2048);
  while (j < task.j_end) {
    int64_t next = j + 1;
    while (next < task.j_end && table[next] < 0) ++next;

    const int64_t base = j * block_size;
    const int64_t t_begin = at_least(0, begin - base), t_end = at_most(block_size, end - base);
    const int64_t num = t_end - t_begin;
    const T* k = heads + table[j] * call.arena_stride_slot + t_begin * head_dim;
    const T* v = k + call.arena_stride_kv;
    // A fetch may name any address; the last block has no next one, and fetches itself.
    const T* next_k = next < task.j_end ? heads + table[next] * call.arena_stride_slot : k;

    logits(q, rows, head_dim, k, num, v, s, s_stride, k_buffer);

    const bool masked = base + t_begin < all_begin || base + t_end > all_end;
    const int64_t num_padded = (num + W - 1) / W * W;
    for (int64_t r = 0; r < rows; ++r) {
      float* row = s + r * s_stride;
      if (call.softcap != 0) {
        float cap = static_cast<float>(call.softcap), inverse = static_cast<float>(1 / call.softcap);
        for (int64_t t = 0; t < num; t += W) store(row + t, tanh(load(row + t) * inverse) * cap);
      }
      for (int64_t t = num; t < num_padded; ++t) row[t] = -kInf;
      if (masked) {
        int64_t position = q_start + task.i_begin + r / groups - (base + t_begin);
        for (int64_t t = at_least(0, position + 1); t < num; ++t) row[t] = -kInf;
        for (int64_t t = 0; t < at_most(num, position - window + 1); ++t) row[t] = -kInf;
      }
      V best_v = load(row);
      for (int64_t t = W; t < num_padded; t += W) best_v = larger(best_v, load(row + t));
      float best = max_lanes(best_v);
      block_max[r] = best;
      block_sum[r] = 1;
      if (best == -kInf) {
        for (int64_t t = 0; t < num_padded; t += W) store(row + t, V{});
        continue;
      }
      // Weights are relative to the block's own largest logit, so that its sum is exact however
      // small its share; what the rows before weighed is rescaled only when the maximum grows.
      float factor = 1;
      if (best > task.max[r]) {
        if (task.sum[r] != 0) {
          float shrink = exp_clamped(splat(task.max[r] - best))[0];
          float* acc = task.acc + r * head_dim;
          for (int64_t d = 0; d < head_dim; d += W) store(acc + d, load(acc + d) * shrink);
          task.sum[r] *= shrink;
        }
        task.max[r] = best;
      } else {
        factor = exp_clamped(splat(best - task.max[r]))[0];
      }
      V total = V{};
      for (int64_t t = 0; t < num_padded; t += W) {
        V weight = exp_clamped(load(row + t) - best);
        total += weight;
        store(row + t, weight * factor);
      }
      block_sum[r] = sum_lanes(total);
      task.sum[r] += block_sum[r] * factor;
    }

    values(rows, s, s_stride, v, head_dim, num, task.acc, v_buffer, next_k);

    if (block_lse) {
      for (int64_t r = 0; r < rows; r += W)
        store(block_sum + r, log_positive(load(block_sum + r)) + load(block_max + r));
      for (int64_t r = 0; r < rows; ++r) row_lse(r)[j] = block_sum[r];
    }
    j = next;
  }
}

}  // namespace

void run_task(const Call& call, const Task& task, float* scratch) {
  if (call.arena_dtype == kFloat32) attend<float>(call, task, scratch);
  else attend<Bf16>(call, task, scratch);
}

}  // namespace SPECOFFLOAD_ISA
}  // namespace specoffload
