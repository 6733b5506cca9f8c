// What tcgen05 instructions of a lowered kernel do on Hopper; lowering.py puts the calls.
//
// Tensor memory is device memory: [CTA of the grid][column 0..511][lane 0..127] of 32 bits, so that
// the 32 lanes of a warp lie side by side. launch.py allocates it and says where it is. Accesses are
// relaxed at gpu scope; fences in the place of tcgen05.fence and tcgen05.wait order them.
//
// Lanes that come to a call together share the work of each one that issues the instruction.
//
// Source: PTX ISA 9.0, "tcgen05": matrix and instruction descriptors, layouts of D for M 64 and 128.

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 COLUMNS = 512, LANES = 128, K = 16;
constexpr u32 NOT_A_NUMBER = 0x7fff7fff;  // as f32, and as two bf16 or f16

struct Product {  // or, in the queue, a commit; 32 bytes, as launch.py has it
  u64 a, b;
  u32 d;  // of a commit its barrier
  u32 kind, flags, lane;
};
enum Flags { ISSUES = 1, ACCUMULATES = 2, A_IN_TENSOR_MEMORY = 4, COMMITS = 8 };

extern "C" {
__device__ u32* sm100_memory;       // (CTAs, COLUMNS, LANES)
__device__ u32* sm100_columns;      // (CTAs,): columns allocated
__device__ Product* sm100_queue;    // (CTAs, WARPS, QUEUE_LENGTH): products not yet run, and commits
__device__ u32* sm100_queue_sizes;  // (CTAs, WARPS, 2): entries, and a lock
}

// -- failures: an assertion reaches stderr, what is printed is lost when a kernel stops

extern "C" __device__ void __assertfail(const void*, const void*, unsigned, const void*, size_t);

enum Failure {
  NOT_OWN_LANES = 1, NO_SUCH_COLUMN = 2, LANES_DISABLED = 3,  // lowering.py knows these
  NO_ROOM, NOT_ALLOCATED, BAD_COUNT, BAD_KIND, BAD_MATRIX, BAD_PLACE, QUEUE_FULL, A_CLUSTER
};

static __device__ __forceinline__ void fail(u32 code, u32 detail) {
  const char* text =
      code == NOT_OWN_LANES ? "tcgen05.ld or st of lanes that are not the warp's own" :
      code == NO_SUCH_COLUMN ? "tcgen05.ld or st beyond the 512 columns" :
      code == LANES_DISABLED ? "tcgen05.mma with output lanes disabled" :
      code == NO_ROOM ? "tcgen05.alloc of more columns than are free" :
      code == NOT_ALLOCATED ? "tcgen05.dealloc of columns that are not allocated" :
      code == BAD_COUNT ? "tcgen05.alloc of a number of columns that is no power of two from 32" :
      code == BAD_KIND ? "tcgen05.mma with an instruction descriptor that is not supported" :
      code == BAD_MATRIX ? "tcgen05.mma with a matrix descriptor that is not supported" :
      code == BAD_PLACE ? "tcgen05.mma outside tensor memory" :
      code == QUEUE_FULL ? "too many tcgen05.mma without a commit" :
      code == A_CLUSTER ? "a launch with clusters" : "?";
  __assertfail(text, "detail as line", detail, "sm100_on_hopper", 1);
}
extern "C" __device__ __noinline__ void sm100_fail(u32 code, u32 detail) { fail(code, detail); }

// -- places

static __device__ __forceinline__ u32 cta() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

static __device__ __forceinline__ u32 load(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
static __device__ __forceinline__ void store(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// -- allocation: what is allocated is not a number until it is written

extern "C" __device__ __noinline__ void sm100_alloc(u32 result, u32 columns) {
  u32 clusters;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(clusters));
  if (clusters != 1) fail(A_CLUSTER, clusters);
  if (columns < 32 || columns > COLUMNS || (columns & (columns - 1))) fail(BAD_COUNT, columns);
  u32 first = load(sm100_columns + cta());
  if (first + columns > COLUMNS) fail(NO_ROOM, first << 16 | columns);
  __syncwarp();
  u32* cells = sm100_memory + (size_t(cta()) * COLUMNS + first) * LANES;
  for (u32 i = lane(); i < columns * LANES; i += 32) store(cells + i, NOT_A_NUMBER);
  __threadfence();
  if (lane() == 0) {
    store(sm100_columns + cta(), first + columns);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(result), "r"(first) : "memory");
  }
  __threadfence();
  __syncwarp();
}

extern "C" __device__ __noinline__ void sm100_dealloc(u32 place, u32 columns) {
  __syncwarp();
  if (lane() != 0) return;
  u32 used = load(sm100_columns + cta());
  if (place + columns > COLUMNS || columns > used) fail(NOT_ALLOCATED, place << 16 | columns);
  store(sm100_columns + cta(), used - columns);
}

// -- operands

struct Matrix {
  u32 start, leading, stride;  // bytes
  u32 row_bits;                // log2 of the bytes of a swizzled row; 4 without a swizzle
  u32 mask;                    // of the address bits that the swizzle turns, from bit 4 on
};

static __device__ __forceinline__ Matrix matrix(u64 descriptor) {
  u32 mode = u32(descriptor >> 61);
  bool is_known = mode == 0 || mode == 2 || mode == 4 || mode == 6;
  // Bits 46 to 48 are 1; the base offset, an absolute leading distance and the rest are 0.
  if (!is_known || (descriptor >> 46 & 0x7fff) != 1) fail(BAD_MATRIX, u32(descriptor >> 32));
  Matrix m;
  m.start = u32(descriptor & 0x3fff) << 4;
  m.leading = u32(descriptor >> 16 & 0x3fff) << 4;
  m.stride = u32(descriptor >> 32 & 0x3fff) << 4;
  m.row_bits = mode == 2 ? 7 : mode == 4 ? 6 : mode == 6 ? 5 : 4;
  m.mask = (1u << (m.row_bits - 4)) - 1;
  return m;
}
static __device__ __forceinline__ u32 swizzled(const Matrix& m, u32 address) {
  return address ^ (address >> 7 & m.mask) << 4;
}
// Address of element (x, k), 16 bits each, where k is contiguous; x counts rows of A or columns of B.
static __device__ __forceinline__ u32 along_k(const Matrix& m, u32 x, u32 k) {
  u32 in_row = m.mask ? 2 * k : k / 8 * m.leading + k % 8 * 2;
  return swizzled(m, m.start + x / 8 * m.stride + (x % 8 << m.row_bits) + in_row);
}
// The same where x is contiguous.
static __device__ __forceinline__ u32 along_x(const Matrix& m, u32 x, u32 k) {
  u32 run = 1u << (m.row_bits - 1), group = x / run;
  u32 offset = x % run * 2 + (k % 8 << m.row_bits);
  offset += m.mask ? group * m.leading + k / 8 * m.stride : group * m.stride + k / 8 * m.leading;
  return swizzled(m, m.start + offset);
}

static __device__ __forceinline__ uint4 shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
static __device__ __forceinline__ u32 shared_2(u32 address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
template <bool IS_BF16> static __device__ __forceinline__ float widen(u32 half) {
  if (IS_BF16) return __uint_as_float(half << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((unsigned short)half));
  return f;
}
template <bool IS_BF16> static __device__ __forceinline__ void widen_pair(float* to, u32 pair) {
  to[0] = widen<IS_BF16>(pair & 0xffff);
  to[1] = widen<IS_BF16>(pair >> 16);
}
template <bool IS_BF16> static __device__ __forceinline__ void widen_8(float* to, uint4 v) {
  widen_pair<IS_BF16>(to, v.x);
  widen_pair<IS_BF16>(to + 2, v.y);
  widen_pair<IS_BF16>(to + 4, v.z);
  widen_pair<IS_BF16>(to + 6, v.w);
}

// -- products

// Lane of row r of A in tensor memory, and of D: all 128, or 16 rows in the lanes of each warp.
static __device__ __forceinline__ u32 lane_of(u32 row, u32 m) {
  return m == 128 ? row : row / 16 * 32 + row % 16;
}

template <bool IS_BF16>
static __device__ __forceinline__ void row_of_a(
    float (&row)[K], const Product& p, const Matrix& a, const u32* memory, u32 r, u32 m) {
  if (p.flags & A_IN_TENSOR_MEMORY) {
    u32 column = u32(p.a) & 0xffff, at = (u32(p.a) >> 16) + lane_of(r, m);
#pragma unroll
    for (u32 i = 0; i < K / 2; i++) {
      widen_pair<IS_BF16>(row + 2 * i, load(memory + size_t(column + i) * LANES + at));
    }
  } else if (p.kind >> 15 & 1) {
#pragma unroll
    for (u32 k = 0; k < K; k++) row[k] = widen<IS_BF16>(shared_2(along_x(a, r, k)));
  } else {
    widen_8<IS_BF16>(row, shared_16(along_k(a, r, 0)));
    widen_8<IS_BF16>(row + 8, shared_16(along_k(a, r, 8)));
  }
  if ((p.kind >> 13 ^ p.kind >> 14) & 1) {
#pragma unroll
    for (u32 k = 0; k < K; k++) row[k] = -row[k];
  }
}

// sums[i][j] += the product of row i of A with column n + j of B, for two rows and eight columns.
template <bool IS_BF16>
static __device__ __forceinline__ void accumulate(
    float (&sums)[2][8], const float (&rows)[2][K], const Product& p, const Matrix& b, u32 n) {
  if (p.kind >> 16 & 1) {
#pragma unroll
    for (u32 k = 0; k < K; k++) {
      float line[8];
      widen_8<IS_BF16>(line, shared_16(along_x(b, n, k)));
#pragma unroll
      for (u32 j = 0; j < 8; j++) {
        sums[0][j] += rows[0][k] * line[j];
        sums[1][j] += rows[1][k] * line[j];
      }
    }
    return;
  }
#pragma unroll
  for (u32 j = 0; j < 8; j++) {
#pragma unroll
    for (u32 half = 0; half < K; half += 8) {
      float column[8];
      widen_8<IS_BF16>(column, shared_16(along_k(b, n + j, half)));
#pragma unroll
      for (u32 k = 0; k < 8; k++) {
        sums[0][j] += rows[0][half + k] * column[k];
        sums[1][j] += rows[1][half + k] * column[k];
      }
    }
  }
}

// D (m, n) f32 (+)= A (m, 16) B (16, n). Of the `helpers` lanes that are here this one is `rank`.
template <bool IS_BF16>
static __device__ void multiply(const Product& p, u32 rank, u32 helpers) {
  const u32 n = (p.kind >> 17 & 0x3f) * 8, m = (p.kind >> 24 & 0x1f) * 16;
  const u32 first = p.d & 0xffff, from_lane = p.d >> 16;
  const bool a_in_tensor_memory = p.flags & A_IN_TENSOR_MEMORY;
  if ((m != 64 && m != 128) || n == 0 || n > 256 || n % (m / 8)) fail(BAD_KIND, p.kind);
  if (a_in_tensor_memory && (p.kind >> 15 & 1)) fail(BAD_KIND, p.kind);
  if (first + n > COLUMNS || from_lane > (m == 64 ? 16 : 0) || from_lane % 16) fail(BAD_PLACE, p.d);
  if (a_in_tensor_memory) {
    u32 column = u32(p.a) & 0xffff, at = u32(p.a) >> 16;
    if (column + K / 2 > COLUMNS || at != from_lane) fail(BAD_PLACE, u32(p.a));
  }
  const Matrix b = matrix(p.b), a = a_in_tensor_memory ? b : matrix(p.a);
  u32* memory = sm100_memory + size_t(cta()) * COLUMNS * LANES;
  for (u32 r = rank; r < m; r += 2 * helpers) {
    const u32 next = r + helpers < m ? r + helpers : r;  // the last row alone: twice the same
    float rows[2][K];
    row_of_a<IS_BF16>(rows[0], p, a, memory, r, m);
    row_of_a<IS_BF16>(rows[1], p, a, memory, next, m);
    u32* d[2] = {memory + size_t(first) * LANES + from_lane + lane_of(r, m),
                 memory + size_t(first) * LANES + from_lane + lane_of(next, m)};
    for (u32 c = 0; c < n; c += 8) {
      float sums[2][8];
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        const u32* cell = d[i / 8] + (c + i % 8) * LANES;
        sums[i / 8][i % 8] = p.flags & ACCUMULATES ? __uint_as_float(load(cell)) : 0.f;
      }
      accumulate<IS_BF16>(sums, rows, p, b, c);
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        store(d[i / 8] + (c + i % 8) * LANES, __float_as_uint(sums[i / 8][i % 8]));
      }
    }
  }
}

static __device__ void run(const Product& p, u32 rank, u32 helpers) {
  u32 a = p.kind >> 7 & 7, b = p.kind >> 10 & 7;  // 0 f16, 1 bf16
  // Dense, not saturating, D in f32, nothing reserved or of other kinds.
  bool is_known = !(p.kind & 0xc080024f) && (p.kind >> 4 & 3) == 1 && a <= 1 && a == b;
  if (!is_known || (p.kind >> 29 & 1)) fail(BAD_KIND, p.kind);
  if (a) multiply<true>(p, rank, helpers);
  else multiply<false>(p, rank, helpers);
}

#ifdef SM100_LAZY
constexpr u32 WARPS = 32, QUEUE_LENGTH = 128;  // launch.py has the same
static __device__ __forceinline__ u32 warp() { return cta() * WARPS + threadIdx.x / 32; }
// The lanes of a warp need not be together: some may run the queue while one puts into it.
static __device__ __forceinline__ u32* queue_size() { return sm100_queue_sizes + 2 * warp(); }
static __device__ __forceinline__ u32* queue_lock() { return queue_size() + 1; }

static __device__ void enqueue(const Product& p) {
  for (bool is_done = false; !is_done;) {
    if (atomicCAS(queue_lock(), 0, 1) != 0) continue;
    __threadfence();
    u32 at = load(queue_size());
    if (at >= QUEUE_LENGTH) fail(QUEUE_FULL, at);
    sm100_queue[size_t(warp()) * QUEUE_LENGTH + at] = p;
    store(queue_size(), at + 1);
    __threadfence();
    atomicExch(queue_lock(), 0);
    is_done = true;
  }
}
#endif

// A product: at once, or with SM100_LAZY when the warp next blocks after a commit.
extern "C" __device__ __noinline__ void sm100_mma(u32 d, u64 a, u64 b, u32 kind, u32 flags) {
#ifdef SM100_LAZY
  if (flags & ISSUES) enqueue(Product{a, b, d, kind, flags, lane()});
#else
  u32 here = __activemask(), helpers = __popc(here);
  u32 rank = __popc(here & ((1u << lane()) - 1)), issuing = __ballot_sync(here, flags & ISSUES);
  while (issuing) {
    int from = __ffs(issuing) - 1;
    issuing &= issuing - 1;
    Product p{};
    p.a = __shfl_sync(here, a, from);
    p.b = __shfl_sync(here, b, from);
    p.d = __shfl_sync(here, d, from);
    p.kind = __shfl_sync(here, kind, from);
    p.flags = __shfl_sync(here, flags, from);
    __syncwarp(here);
    run(p, rank, helpers);
    __threadfence();
    __syncwarp(here);
  }
#endif
}

#ifdef SM100_LAZY
// A commit: in the queue like the products that it covers, those of its own lane before it.
extern "C" __device__ __noinline__ void sm100_commit(u32 barrier, u32 flags) {
  if (flags & ISSUES) enqueue(Product{0, 0, barrier, 0, COMMITS, lane()});
}

// Index of the last commit of a lane, or -1.
static __device__ int last_commit(const Product* queue, int size, u32 of_lane) {
  int i = size - 1;
  while (i >= 0 && !(queue[i].flags & COMMITS && queue[i].lane == of_lane)) i--;
  return i;
}

// Where a warp may block: run the products that commits cover, and the arrivals of these, in order.
extern "C" __device__ __noinline__ void sm100_run_queued() {
  Product* queue = sm100_queue + size_t(warp()) * QUEUE_LENGTH;
  const u32 here = __activemask(), helpers = __popc(here), rank = __popc(here & ((1u << lane()) - 1));
  const int first = __ffs(here) - 1;
  if (__shfl_sync(here, load(queue_size()), first) == 0) return;
  if (rank == 0) {
    while (atomicCAS(queue_lock(), 0, 1) != 0) __nanosleep(100);
  }
  __threadfence();
  __syncwarp(here);
  const int size = __shfl_sync(here, load(queue_size()), first);
  int left = 0;
  for (int i = 0; i < size; i++) {
    const Product p = queue[i];
    const bool is_covered = i <= last_commit(queue, size, p.lane);
    __syncwarp(here);
    if (p.flags & COMMITS) {
      if (rank == 0) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(p.d) : "memory");
      }
    } else if (is_covered) {
      run(p, rank, helpers);
    } else {
      if (rank == 0) queue[left] = p;
      left++;
    }
    __threadfence();
    __syncwarp(here);
  }
  if (rank == 0) {
    store(queue_size(), left);
    __threadfence();
    atomicExch(queue_lock(), 0);
  }
  __syncwarp(here);
}
#endif
