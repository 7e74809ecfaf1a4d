// The C interface: splits a call into tasks, runs them on the caller's threads, merges the results.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "attention.h"

namespace specoffload {
namespace {

constexpr int64_t kMaxQueryFloats = 6144;   // of a head's packed rows, unless one token has more
constexpr int64_t kMaxTaskFloats = 24576;  // of a task's, over its heads, unless one head has more
constexpr int64_t kTasksPerRow = 16;        // that a row's work is split into, until a task has
constexpr int64_t kMinTaskTokens = 128;     // as few tokens as this
constexpr int64_t kMaxTaskTokens = 2048;    // or where more leave it more than this

constexpr int64_t kMinThreadWork = 1 << 18;  // below this, some 10 us, waking a thread costs more

enum Isa : int64_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

int64_t best_isa() {
#if defined(SPECOFFLOAD_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return kAvx512;
#endif
#if defined(SPECOFFLOAD_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPortable;
}

// The widest vectors that divide head_dim: the tasks know no remainders.
RunTask task_function([[maybe_unused]] int64_t isa, [[maybe_unused]] int64_t head_dim) {
#if defined(SPECOFFLOAD_HAS_AVX512)
  if (isa >= kAvx512 && head_dim % 16 == 0) return avx512::run_task;
#endif
#if defined(SPECOFFLOAD_HAS_AVX2)
  if (isa >= kAvx2 && head_dim % 8 == 0) return avx2::run_task;
#endif
  return portable::run_task;
}

// Tasks [first, first + count) that attend for the same rows.
struct Group {
  int64_t first, count;
  std::atomic<int64_t> unfinished;
};

struct Shared {
  const Call& call;
  RunTask run;
  const std::vector<Task>& tasks;
  std::vector<Group>& groups;
  float* scratch;
  int64_t scratch_stride;
  std::atomic<int64_t> next_task{0}, next_thread{0};
};

int64_t group_size(const Call& call) { return call.num_q_heads / call.num_heads; }

// How a task list is split depends on each row alone, not on its neighbours or on the threads, so
// that results do not either.
void plan(const Call& call, std::vector<Task>& tasks, std::vector<int64_t>& first_tasks) {
  const int64_t groups = group_size(call), block = call.block_size;
  const int64_t most = std::max<int64_t>(1, kMaxQueryFloats / (groups * call.head_dim));
  const int64_t parts = (call.num_q + most - 1) / most;
  const int64_t tokens = parts ? (call.num_q + parts - 1) / parts : 1;
  const int64_t head_floats = groups * tokens * call.head_dim;
  const int64_t fitting = std::clamp<int64_t>(kMaxTaskFloats / head_floats, 1, call.num_heads);
  const int64_t spans = (call.num_heads + fitting - 1) / fitting;
  const int64_t heads = (call.num_heads + spans - 1) / spans;
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t i = 0; i < call.num_q; i += tokens) {
      const int64_t i_end = std::min(call.num_q, i + tokens);
      const int64_t end = std::min(call.kv_len[row], call.q_start[row] + i_end);
      const int64_t begin =
          call.window ? std::max<int64_t>(0, call.q_start[row] + i - call.window + 1) : 0;
      const int64_t j_lo = std::min(call.num_blocks, begin / block);
      const int64_t end_block = (std::max<int64_t>(0, end) + block - 1) / block;
      const int64_t j_hi = std::max(j_lo, std::min(call.num_blocks, end_block));
      const int64_t chunks = (kTasksPerRow + spans * parts - 1) / (spans * parts);
      const int64_t chunk_tokens =
          std::clamp((j_hi - j_lo) * block / chunks, kMinTaskTokens, kMaxTaskTokens);
      const int64_t chunk = (chunk_tokens + block - 1) / block;
      for (int64_t head = 0; head < call.num_heads; head += heads) {
        first_tasks.push_back(static_cast<int64_t>(tasks.size()));
        int64_t j = j_lo;
        do {
          Task task{};
          task.row = row, task.i_begin = i, task.i_end = i_end;
          task.h_begin = head, task.h_end = std::min(call.num_heads, head + heads);
          task.j_begin = j, task.j_end = std::min(j_hi, j + chunk);
          task.first_fill = j == j_lo ? 0 : j;
          j += chunk;
          task.last_fill = j < j_hi ? j : call.num_blocks;
          task.group = static_cast<int64_t>(first_tasks.size()) - 1;
          tasks.push_back(task);
        } while (j < j_hi);
      }
    }
}

void finish(const Call& call, const Task* tasks, int64_t count) {
  const Task& task = tasks[0];
  const int64_t groups = group_size(call), head_dim = call.head_dim;
  const int64_t rows = groups * (task.i_end - task.i_begin);
  for (int64_t r = 0; r < rows * (task.h_end - task.h_begin); ++r) {
    const int64_t head = (task.h_begin + r / rows) * groups + r % groups;
    const int64_t i = task.i_begin + r % rows / groups;
    float* out = call.out + ((task.row * call.num_q + i) * call.num_q_heads + head) * head_dim;
    float* lse = call.lse + (task.row * call.num_q_heads + head) * call.num_q + i;
    float best = -std::numeric_limits<float>::infinity();
    for (int64_t c = 0; c < count; ++c) best = std::max(best, tasks[c].max[r]);
    for (int64_t d = 0; d < head_dim; ++d) out[d] = 0;
    *lse = best;
    if (std::isinf(best)) continue;
    double sum = 0;
    for (int64_t c = 0; c < count; ++c)
      sum += std::exp(static_cast<double>(tasks[c].max[r]) - best) * tasks[c].sum[r];
    *lse = static_cast<float>(best + std::log(sum));
    for (int64_t c = 0; c < count; ++c) {
      const float* acc = tasks[c].acc + r * head_dim;
      const float weight =
          static_cast<float>(std::exp(static_cast<double>(tasks[c].max[r]) - best) / sum);
      for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * acc[d];
    }
  }
}

void work(void* argument) {
  Shared& shared = *static_cast<Shared*>(argument);
  float* scratch = shared.scratch + shared.next_thread.fetch_add(1) * shared.scratch_stride;
  const int64_t num_tasks = static_cast<int64_t>(shared.tasks.size());
  for (;;) {
    const int64_t index = shared.next_task.fetch_add(1, std::memory_order_relaxed);
    if (index >= num_tasks) return;
    const Task& task = shared.tasks[index];
    shared.run(shared.call, task, scratch);
    Group& group = shared.groups[task.group];
    // Acquires what the other tasks of the group wrote, for whoever ends up last.
    if (group.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1)
      finish(shared.call, &shared.tasks[group.first], group.count);
  }
}

}  // namespace
}  // namespace specoffload

using namespace specoffload;

#define EXPORT extern "C" __attribute__((visibility("default")))

// The best instruction set of this processor: 0 portable, 1 AVX2, 2 AVX-512.
EXPORT int64_t specoffload_isa() { return best_isa(); }

// Returns 0; 1 if memory ran out or 2 if the table names a slot that the arena lacks. Nothing is
// written in those cases.
EXPORT int64_t specoffload_paged_attention(const Call* call) try {
  for (int64_t row = 0; row < call->num_rows; ++row)
    for (int64_t j = 0; j < call->num_blocks; ++j)
      if (call->table[row * call->table_stride + j] >= call->num_slots) return 2;

  std::vector<Task> tasks;
  std::vector<int64_t> first_tasks;
  plan(*call, tasks, first_tasks);
  if (tasks.empty()) return 0;

  std::vector<Group> groups(first_tasks.size());
  int64_t num_floats = 0, max_rows = 0, total_work = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t end = g + 1 < groups.size() ? first_tasks[g + 1] : tasks.size();
    groups[g].first = first_tasks[g];
    groups[g].count = end - first_tasks[g];
    groups[g].unfinished.store(groups[g].count, std::memory_order_relaxed);
  }
  auto rows_of = [&](const Task& t) {
    return group_size(*call) * (t.i_end - t.i_begin) * (t.h_end - t.h_begin);
  };
  for (const Task& task : tasks) {
    num_floats += padded(rows_of(task) * call->head_dim) + 2 * padded(rows_of(task));
    max_rows = std::max(max_rows, rows_of(task));
    // Reading an element takes about as long as the arithmetic of four rows on it.
    const int64_t tokens = (task.j_end - task.j_begin) * call->block_size;
    total_work += tokens * call->head_dim * (rows_of(task) + 4 * (task.h_end - task.h_begin));
  }
  const int64_t useful = std::min<int64_t>(tasks.size(), total_work / kMinThreadWork);
  const int64_t num_threads =
      call->parallel ? std::max<int64_t>(1, std::min(call->num_threads, useful)) : 1;
  const int64_t stride = padded(scratch_floats(max_rows, call->head_dim, call->block_size));
  const size_t bytes = static_cast<size_t>(num_floats + num_threads * stride) * sizeof(float);
  float* memory = static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (!memory) return 1;
  float* at = memory + num_threads * stride;
  for (Task& task : tasks) {
    task.acc = at, at += padded(rows_of(task) * call->head_dim);
    task.max = at, at += padded(rows_of(task));
    task.sum = at, at += padded(rows_of(task));
  }
  Shared shared{*call,  task_function(call->isa, call->head_dim), tasks, groups, memory, stride};
  if (num_threads == 1) work(&shared);
  else call->parallel(work, &shared, static_cast<unsigned>(num_threads), 0);
  std::free(memory);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Returns 0, or 2 if a slot or an offset lies outside the arena (nothing is written then).
EXPORT int64_t specoffload_append(const AppendCall* call) {
  const AppendCall& c = *call;
  for (int64_t n = 0; n < c.num_rows * c.num_q; ++n)
    if (c.slots[n] >= c.num_slots ||
        (c.slots[n] >= 0 && (c.offsets[n] < 0 || c.offsets[n] >= c.block_size)))
      return 2;
  for (int64_t row = 0, n = 0; row < c.num_rows; ++row)
    for (int64_t i = 0; i < c.num_q; ++i, ++n) {
      if (c.slots[n] < 0) continue;
      char* to = c.arena + c.slots[n] * c.arena_stride_slot + c.offsets[n] * c.arena_stride_token;
      const char* k = c.k + row * c.k_stride_row + i * c.k_stride_token;
      const char* v = c.v + row * c.v_stride_row + i * c.v_stride_token;
      for (int64_t head = 0; head < c.num_heads; ++head) {
        std::memcpy(to, k + head * c.k_stride_head, c.token_bytes);
        std::memcpy(to + c.arena_stride_kv, v + head * c.v_stride_head, c.token_bytes);
        to += c.arena_stride_head;
      }
    }
  return 0;
}

// Returns 0, or 2 if a slot lies outside its arena (nothing is written then).
EXPORT int64_t specoffload_copy_blocks(const CopyCall* call) {
  const CopyCall& c = *call;
  for (int64_t n = 0; n < c.num; ++n)
    if (c.to_slots[n] < 0 || c.to_slots[n] >= c.num_to || c.from_slots[n] < 0 ||
        c.from_slots[n] >= c.num_from)
      return 2;
  for (int64_t n = 0; n < c.num; ++n)
    std::memcpy(c.to + c.to_slots[n] * c.to_stride, c.from + c.from_slots[n] * c.from_stride,
                c.block_bytes);
  return 0;
}

// Combines parts over disjoint sets of blocks by their log-sum-exp.
EXPORT void specoffload_merge(const MergeCall* call) {
  const MergeCall& c = *call;
  const float nothing = -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < c.num_rows; ++row)
    for (int64_t head = 0; head < c.num_q_heads; ++head)
      for (int64_t i = 0; i < c.num_q; ++i) {
        const int64_t at = (row * c.num_q_heads + head) * c.num_q + i;
        float* out = c.out + ((row * c.num_q + i) * c.num_q_heads + head) * c.head_dim;
        std::fill(out, out + c.head_dim, 0.0f);
        float best = nothing;
        for (int64_t p = 0; p < c.num_parts; ++p) best = std::max(best, c.lses[p][at]);
        c.lse[at] = nothing;
        if (best > nothing) {
          double sum = 0;
          for (int64_t p = 0; p < c.num_parts; ++p) sum += std::exp(double(c.lses[p][at]) - best);
          c.lse[at] = static_cast<float>(best + std::log(sum));
          if (c.sinks) sum += std::exp(double(c.sinks[head]) - best);
          for (int64_t p = 0; p < c.num_parts; ++p) {
            const float share = static_cast<float>(std::exp(double(c.lses[p][at]) - best) / sum);
            const float* part = c.outs[p] + (out - c.out);
            for (int64_t d = 0; d < c.head_dim; ++d) out[d] += share * part[d];
          }
        }
        if (!c.block_lses) continue;
        float* block_lse = c.block_lse + at * c.num_blocks;
        std::copy_n(c.block_lses[0] + at * c.num_blocks, c.num_blocks, block_lse);
        for (int64_t p = 1; p < c.num_parts; ++p) {
          const float* part = c.block_lses[p] + at * c.num_blocks;
          for (int64_t j = 0; j < c.num_blocks; ++j) block_lse[j] = std::max(block_lse[j], part[j]);
        }
      }
}
