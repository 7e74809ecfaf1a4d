// What the parts of the native attention share: the call as Python passes it, and the unit of work.
//
// Legend: H kv heads, G query heads per kv head, R = G * query tokens packed rows, D head_dim,
// T tokens per block, N blocks of the table. Strides count elements.

#pragma once

#include <cstdint>

namespace specoffload {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Must match `_Call` in native/library.py field by field: every member is 8 bytes wide.
struct Call {
  const void* q;  // [B, Hq, Q, D]
  int64_t q_stride_row, q_stride_head, q_stride_token, q_dtype;
  const void* arena;  // [S, 2, H, T, D], each [T, D] contiguous
  int64_t arena_stride_slot, arena_stride_kv, arena_stride_head, arena_dtype;
  int64_t num_slots;
  const int32_t* table;  // [B, N]
  int64_t table_stride;
  const int64_t* q_start;  // [B]
  const int64_t* kv_len;   // [B]
  float* out;              // [B, Q, Hq, D]
  float* lse;              // [B, Hq, Q]
  float* block_lse;        // [B, Hq, Q, N] or null
  int64_t num_rows, num_q_heads, num_heads, num_q, head_dim, block_size, num_blocks;
  int64_t window;  // 0 = none
  double scale, softcap;  // softcap 0 = none
  int64_t isa, num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null
};

// Must match `_AppendCall` in native/library.py likewise. Strides count bytes.
struct AppendCall {
  char* arena;  // [S, 2, H, T, D]
  int64_t arena_stride_slot, arena_stride_kv, arena_stride_head, arena_stride_token;
  const char* k;  // [B, H, Q, D]
  int64_t k_stride_row, k_stride_head, k_stride_token;
  const char* v;
  int64_t v_stride_row, v_stride_head, v_stride_token;
  const int64_t* slots;    // [B, Q]
  const int64_t* offsets;  // [B, Q]
  int64_t num_rows, num_heads, num_q, num_slots, block_size, token_bytes;
};

// Must match `_MergeCall` in native/library.py likewise. Everything is float32 and contiguous.
struct MergeCall {
  const float* const* outs;        // P x [B, Q, Hq, D]
  const float* const* lses;        // P x [B, Hq, Q]
  const float* const* block_lses;  // P x [B, Hq, Q, N], or null
  const float* sinks;              // [Hq], or null
  float* out;
  float* lse;
  float* block_lse;
  int64_t num_parts, num_rows, num_q, num_q_heads, head_dim, num_blocks;
};

// Must match `_CopyCall` in native/library.py likewise. Strides count bytes.
struct CopyCall {
  char* to;
  const int32_t* to_slots;  // [n]
  int64_t to_stride, num_to;
  const char* from;
  const int32_t* from_slots;  // [n]
  int64_t from_stride, num_from;
  int64_t num, block_bytes;
};

// Blocks [j_begin, j_end) for query tokens [i_begin, i_end) of kv heads [h_begin, h_end) of one row.
// A block's heads lie side by side: taking them in turn reads memory in order.
struct Task {
  int64_t row, h_begin, h_end, i_begin, i_end, j_begin, j_end;
  int64_t first_fill, last_fill;  // blocks whose block_lse this task writes; beyond j: -inf
  float* acc;                     // [h, R, D] sum of exp(logit - max) * v
  float* max;                     // [h, R] largest logit; -inf if nothing was seen
  float* sum;                     // [h, R] sum of exp(logit - max)
  int64_t group;
};

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kRunFloats = 2048;  // of V that are weighed at a time: 8 KiB
static_assert(kRunFloats >= kMaxHeadDim);

// Floats of scratch memory that one thread needs for tasks of at most `rows` packed rows, counted
// over all heads of a task.
inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
inline int64_t scratch_floats(int64_t rows, int64_t head_dim, int64_t block_size) {
  return padded(rows * head_dim) + rows * padded(block_size) + kRunFloats + 2 * padded(rows);
}

using RunTask = void (*)(const Call&, const Task&, float* scratch);

namespace portable { void run_task(const Call&, const Task&, float* scratch); }
namespace avx2 { void run_task(const Call&, const Task&, float* scratch); }
namespace avx512 { void run_task(const Call&, const Task&, float* scratch); }

}  // namespace specoffload
