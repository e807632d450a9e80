// One launch decodes a whole text: every multiprocessor has a fixed part of every layer, and the token loop is in here.
//
// Weights are most of the time a token takes, and which weights a warp reads next depends on nothing: each warp streams its own
// through slots of shared memory, ahead of the numbers they will be multiplied with. Blocks hand numbers to one another
// through memory without barriers: an output is its own flag, a pattern that no sum can be (NONE) until it is written,
// and who needs it polls it.
//
// Orders that this relies on:
//  - Within a token, a number and the flag that says it is there are the same 32 bits: nothing to order.
//  - At the end of a token every block publishes the best of its words (after a fence), and begins the next token when
//    it has seen those of all blocks (followed by a fence). So all writes of a token come before all reads of the next:
//    keys and values in the cache, and the flags of two tokens ago, which their writer sets back one token later.
//  - The best words have four places by turns. A block sets back the place of two tokens ago: whoever has published the last token
//    has read that one.
//
// Sizes are constants, as the kernel is compiled for one model: WIDTH INNER HEADS KV_HEADS HEAD VOCABULARY LAYERS, BLOCKS, MOST_SPLITS, WARPS, DEPTH (slots
// of a warp), QK_NORM, HALF (float16 in place of bfloat16), BITS (of a weight: 16, or 8 or 4 with a float16 scale for every 32).
//
// Packed weights (BITS below 16) are whole numbers, and so are what they are multiplied with: a phase rounds its input to 8 bits,
// with a scale for every 32 of them. The products of 32 are a whole number, which is scaled once.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 32 * WARPS, CHUNK = 4096;
constexpr int IN_FLIGHT = WARPS > 8 ? 2 : 4;  // loads of a warp: more warps have fewer registers, and hide one another
constexpr int Q = HEADS * HEAD, KV = KV_HEADS * HEAD, GROUP = HEADS / KV_HEADS, QKV = Q + 2 * KV;
constexpr u32 NONE = 0xfff0deadu;  // a NaN that arithmetic never makes: its own is 0x7fffffff
#ifndef PATIENCE_BITS
#define PATIENCE_BITS 22
#endif
constexpr u32 PATIENCE = 1u << PATIENCE_BITS;  // looks until something must have gone wrong: about three seconds
#ifndef NAP
#define NAP 0
#endif
#ifndef SPLIT
#define SPLIT 128  // positions that are worth a block of their own
#endif
constexpr int PART = HEAD + 2;  // of a head's attention to some positions: weighted values, maximum, sum
constexpr float LOG2E = 1.4426950408889634f;
#define LEAST __uint_as_float(0xff800000u)  // minus infinity
constexpr int NO_NUMBER = -2;  // in place of a token

struct Layer {
    const char *qkv, *out, *gate_up, *down;  // rows of 16-bit floats, or packed; of gate_up in turns
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;  // or null
    const float *norm, *after, *q_norm, *k_norm;
    u16 *keys, *values;  // [KV_HEADS, positions, HEAD]
    long long window;  // positions that are seen; 0: all
    float qkv_scale, out_scale, gate_up_scale, down_scale;  // of all products with a packed matrix
};

#ifndef TRACE
#define TRACE 0
#endif
#ifndef BITS
#define BITS 16
#endif
constexpr int MARKS = 9;  // of a layer, where it is traced

struct Run {
    const char* head;
    const u16* words;
    const float *norm, *cos, *sin;
    float* flow;  // [2, LAYERS, FLOW], NONE everywhere
    u64* best;  // [4, BLOCKS], 0 everywhere
    float* logits;  // of the last token, or null
    const int* ends;
    volatile int *made, *done;  // the host sees these
    const volatile int* stopping;
    long long positions;
    int steps, token, place, end_count;
    float eps, head_scale;
    long long* trace;  // [BLOCKS, LAYERS + 1, MARKS] nanoseconds of the last token, if TRACE
    Layer layers[LAYERS];  // here, in constant memory: a pointer that has left the caches takes a microsecond
};

// What a layer hands on, as offsets in floats. Parts of attention are [KV_HEADS, MOST_SPLITS, GROUP, PART].
constexpr int AT_QKV = 0, AT_MIXED = QKV, AT_MIDDLE = AT_MIXED + Q, AT_INNER = AT_MIDDLE + WIDTH, AT_END = AT_INNER + INNER, AT_PARTS = AT_END + WIDTH;

// ---- numbers ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low(u32 two) {
#if HALF
    float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(two)); return f;
#else
    return __uint_as_float(two << 16);
#endif
}
__device__ __forceinline__ float high(u32 two) {
#if HALF
    float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(two)); return f;
#else
    return __uint_as_float(two & 0xffff0000u);
#endif
}
__device__ __forceinline__ u32 packed(float l, float h) {
    u32 two;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(h), "f"(l));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(h), "f"(l));
#endif
    return two;
}
__device__ __forceinline__ float dot8(uint4 a, uint4 b, float sum) {
    const u32 *p = &a.x, *q = &b.x;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(low(p[i]), low(q[i]), sum), sum = fmaf(high(p[i]), high(q[i]), sum);
    return sum;
}
__device__ __forceinline__ float larger_or_none(float a, float b) {  // what is no number stays
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float over_warp(float sum) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
}

// ---- handing over -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void publish(float* at, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}
__device__ __forceinline__ void set_back(float* at) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(NONE) : "memory");
}
__device__ __forceinline__ uint4 look4(const float* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 look(const float* at) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
// Between two looks: a limit, and with NAP (nanoseconds) a pause, which leaves the second-level cache to those who compute.
__device__ __forceinline__ void look_again(u32 tries) {
    if (tries > PATIENCE) __trap();
    if (NAP) __nanosleep(NAP);
}
__device__ __forceinline__ bool is_there(uint4 v) { return v.x != NONE && v.y != NONE && v.z != NONE && v.w != NONE; }

// COUNT words from addresses that lie `stride` floats apart, as soon as all are there.
template <int COUNT> __device__ __forceinline__ void await(const float* at, int stride, float* found) {
    u32 v[COUNT];
    for (u32 tries = 0;; tries++) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++) v[i] = look(at + i * stride);
#pragma unroll
        for (int i = 0; i < COUNT; i++) all &= v[i] != NONE;
        if (all) break;
        look_again(tries);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) found[i] = __uint_as_float(v[i]);
}

// ---- weights ------------------------------------------------------------------------------------------------------------

constexpr int GROUP_SIZE = 32;  // columns of a scale
__host__ __device__ constexpr int up_to(int n, int unit) { return (n + unit - 1) / unit * unit; }
#if BITS == 16
__host__ __device__ constexpr int parts_of(int bytes) {
    int parts = 1;
    while (bytes % parts || bytes / parts > CHUNK || (bytes / parts) % 16) parts++;
    return parts;
}
// How rows of K numbers go through slots: several at once if they are short, in parts if they are long.
template <int K> struct Rows {
    static constexpr int BYTES = 2 * K, AT_ONCE = 4 * BYTES <= CHUNK ? 4 : 2 * BYTES <= CHUNK ? 2 : 1;
    static constexpr int PARTS = parts_of(BYTES), PIECE = AT_ONCE > 1 ? AT_ONCE * BYTES : BYTES / PARTS;
    static constexpr int PADDED = K, INPUT = 2 * K;  // numbers, and bytes of them in shared memory
};
#else
__host__ __device__ constexpr int packed_bytes(int groups) { return groups * GROUP_SIZE * BITS / 8 + up_to(2 * groups, 16); }
__host__ __device__ constexpr int parts_of(int groups) {
    int parts = 1;
    while (packed_bytes((groups + parts - 1) / parts) > CHUNK) parts++;
    return parts;
}
// The same for packed rows: a part of one is the numbers of its groups (all first halves, then, of 8 bits, all second ones; 4 bits
// of both share a byte), and then their scales. Groups that are there for whole parts alone are 0.
template <int K> struct Rows {
    static constexpr int PARTS = parts_of((K + GROUP_SIZE - 1) / GROUP_SIZE), GROUPS = ((K + GROUP_SIZE - 1) / GROUP_SIZE + PARTS - 1) / PARTS;
    static constexpr int PART_BYTES = packed_bytes(GROUPS), BYTES = PARTS * PART_BYTES;
    static constexpr int AT_ONCE = 4 * BYTES <= CHUNK ? 4 : 2 * BYTES <= CHUNK ? 2 : 1, PIECE = AT_ONCE > 1 ? AT_ONCE * BYTES : PART_BYTES;
    // In shared memory: first halves of all groups, second ones, then {scale, 8 times the scaled sum} of each.
    static constexpr int PADDED = PARTS * GROUPS * GROUP_SIZE, INPUT = PARTS * GROUPS * (GROUP_SIZE + 8);
};
#endif
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
// Rows that one warp takes together: gate and up meet in one warp, and a row of the residual belongs to one block for both its writers.
constexpr int QKV_UNIT = Rows<WIDTH>::AT_ONCE, PAIR_UNIT = larger(2, Rows<WIDTH>::AT_ONCE);
constexpr int BACK_UNIT = larger(Rows<Q>::AT_ONCE, Rows<INNER>::AT_ONCE);

// By a constant, and in 32 bits: a division by a number that is known only now takes longer than a row.
__device__ __forceinline__ int first_of(u32 units, u32 block) { return (int)(units * block / BLOCKS); }
__host__ __device__ constexpr int units_of(int rows, int unit) { return (rows + unit - 1) / unit; }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// One warp's weights in the order in which it needs them, from the first token to the last; `at` is the next piece.
struct Walk {
    const char *base, *at;
    int step, layer, phase, unit, end, piece;

    template <int K, int UNIT> __device__ __forceinline__ bool begin(const char* weights, int rows, int warp) {
        constexpr int own = UNIT;
        unit = first_of(units_of(rows, own), blockIdx.x) + warp;
        end = first_of(units_of(rows, own), blockIdx.x + 1);
        base = weights, piece = 0;
        at = weights + (size_t)unit * UNIT * Rows<K>::BYTES;
        return unit < end;
    }
    __device__ __forceinline__ bool begin_phase(const Run& run, int warp) {
        const Layer& l = run.layers[phase < 4 ? layer : 0];
        switch (phase) {
            case 0: return begin<WIDTH, QKV_UNIT>(l.qkv, QKV, warp);
            case 1: return begin<Q, BACK_UNIT>(l.out, WIDTH, warp);
            case 2: return begin<WIDTH, PAIR_UNIT>(l.gate_up, 2 * INNER, warp);
            case 3: return begin<INNER, BACK_UNIT>(l.down, WIDTH, warp);
            default: return begin<WIDTH, QKV_UNIT>(run.head, VOCABULARY, warp);
        }
    }
    __device__ __forceinline__ void next_phase(const Run& run, int warp) {
        do {
            if (phase == 4) phase = 0, layer = 0, step++;
            else if (phase == 3) {
                if (++layer == LAYERS) phase = 4; else phase = 0;
            } else phase++;
        } while (step < run.steps && !begin_phase(run, warp));
    }
    template <int K, int UNIT> __device__ __forceinline__ void issue(int rows, u32 slot, u32 bar) {
        u32 bytes = Rows<K>::PIECE;
        if (Rows<K>::AT_ONCE > 1) bytes = min(bytes, (u32)((rows - unit * UNIT - piece * Rows<K>::AT_ONCE) * Rows<K>::BYTES));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(slot), "l"(at), "r"(bytes), "r"(bar) : "memory");
    }
    template <int K, int UNIT> __device__ __forceinline__ bool advance(int rows) {
        constexpr int pieces = UNIT / Rows<K>::AT_ONCE * Rows<K>::PARTS;
        at += Rows<K>::PIECE;
        // The last unit may have fewer rows than the others.
        if (++piece < pieces && (Rows<K>::AT_ONCE == 1 ? unit * UNIT + piece / Rows<K>::PARTS : unit * UNIT + piece * Rows<K>::AT_ONCE) < rows) return true;
        piece = 0, unit += WARPS;
        at = base + (size_t)unit * UNIT * Rows<K>::BYTES;
        return unit < end;
    }
    template <int K, int UNIT> __device__ __forceinline__ bool go(int rows, int lane, u32 slot, u32 bar) {
        if (!lane) issue<K, UNIT>(rows, slot, bar);
        return advance<K, UNIT>(rows);
    }
    // Ask for the next piece, and go on to the one after it.
    __device__ __forceinline__ void fetch(const Run& run, int warp, int lane, u32 slot, u32 bar) {
        bool more;
        switch (phase) {
            case 0: more = go<WIDTH, QKV_UNIT>(QKV, lane, slot, bar); break;
            case 1: more = go<Q, BACK_UNIT>(WIDTH, lane, slot, bar); break;
            case 2: more = go<WIDTH, PAIR_UNIT>(2 * INNER, lane, slot, bar); break;
            case 3: more = go<INNER, BACK_UNIT>(WIDTH, lane, slot, bar); break;
            default: more = go<WIDTH, QKV_UNIT>(VOCABULARY, lane, slot, bar);
        }
        if (!more) next_phase(run, warp);
    }
};

// A lane's own of sums that all lanes have: the first lane's first, the next one's STEP behind it. By choosing, not by an index:
// that would put them into memory.
template <int STEP, int FIRST = 0, int COUNT> __device__ __forceinline__ float of_lane(const float (&found)[COUNT], int lane) {
    float own = found[FIRST];
#pragma unroll
    for (int i = FIRST + STEP; i < COUNT; i += STEP) own = lane == i / STEP ? found[i] : own;
    return own;
}

struct Stream {
    Walk walk;
    const unsigned char* slots;  // this warp's
    u32 slot_address, bars, parity;
    int slot, ahead;  // slots that hold, or wait for, weights

    __device__ __forceinline__ void wait() const {
        asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(bars + 8 * slot), "r"(parity) : "memory");
    }
    __device__ __forceinline__ void turn() {
        if (++slot == DEPTH) slot = 0, parity ^= 1;
    }
    // The slot has been read: fill it again.
    __device__ __forceinline__ void refill(const Run& run, int warp, int lane) {
        __syncwarp();
        if (walk.step < run.steps) walk.fetch(run, warp, lane, slot_address + slot * CHUNK, bars + 8 * slot);
        else ahead--;
        turn();
    }
    // Copies that nobody will read must have ended before the block does.
    __device__ __forceinline__ void drain() {
        for (; ahead; ahead--) wait(), turn();
    }
};

#if BITS == 16
// AT_ONCE rows of a slot by their part of the vector, added to `sums`.
template <int K> __device__ __forceinline__ void multiply(const unsigned char* slot, const unsigned char* xs, int part, int lane, float* sums) {
    constexpr int R = Rows<K>::AT_ONCE, N = (R > 1 ? Rows<K>::BYTES : Rows<K>::PIECE) / 16;
    const uint4 *weights = (const uint4*)slot, *x = (const uint4*)xs + part * N;
#pragma unroll IN_FLIGHT
    for (int i = lane; i < N; i += 32) {
        const uint4 own = x[i];
#pragma unroll
        for (int j = 0; j < R; j++) sums[j] = dot8(weights[j * N + i], own, sums[j]);
    }
}
#else
__device__ __forceinline__ int dot4(u32 a, u32 b, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}
template <int K> __device__ __forceinline__ void multiply(const unsigned char* slot, const unsigned char* xs, int part, int lane, float* sums) {
    using Own = Rows<K>;
    constexpr int N = Own::GROUPS, ALL = Own::PARTS * N;
    const uint4 *first = (const uint4*)xs + part * N, *second = first + ALL;
    const float2* scales = (const float2*)(xs + ALL * GROUP_SIZE) + part * N;
#pragma unroll 2
    for (int g = lane; g < N; g += 32) {
        const uint4 a = first[g], b = second[g];
        const u32 *p = &a.x, *q = &b.x;
        const float2 by = scales[g];
#pragma unroll
        for (int j = 0; j < Own::AT_ONCE; j++) {
            const unsigned char* row = slot + j * Own::BYTES;
            const uint4 c = ((const uint4*)row)[g];
            const u32* codes = &c.x;
            int sum = 0;
#if BITS == 4
#pragma unroll
            for (int i = 0; i < 4; i++) sum = dot4(codes[i] & 0x0f0f0f0fu, p[i], sum), sum = dot4(codes[i] >> 4 & 0x0f0f0f0fu, q[i], sum);
#else
            const uint4 d = ((const uint4*)row)[N + g];
            const u32* more = &d.x;
#pragma unroll
            for (int i = 0; i < 4; i++) sum = dot4(codes[i], p[i], sum), sum = dot4(more[i], q[i], sum);
#endif
            float scale;
            asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(((const u16*)(row + N * GROUP_SIZE * BITS / 8))[g]));
            sums[j] = fmaf(scale, fmaf((float)sum, by.x, -by.y), sums[j]);
        }
    }
}
#endif

// A block's rows of a matrix by the vector in `xs`: emit(row, sums of UNIT rows from there, how many there are).
template <int K, int UNIT, class Emit> __device__ __forceinline__ void product(const Run& run, Stream& stream, const unsigned char* xs, int rows, float scale, int warp, int lane, Emit emit) {
    constexpr int R = Rows<K>::AT_ONCE, PARTS = Rows<K>::PARTS;
    const int end = first_of(units_of(rows, UNIT), blockIdx.x + 1);
    for (int unit = first_of(units_of(rows, UNIT), blockIdx.x) + warp; unit < end; unit += WARPS) {
        float sums[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; i++) sums[i] = 0;
        const int there = min(UNIT, rows - unit * UNIT);
#pragma unroll
        for (int from = 0; from < UNIT; from += R) {
            if (from >= there) break;
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) {
                if (from + part) stream.refill(run, warp, lane);  // the slot before
                stream.wait();
                multiply<K>(stream.slots + stream.slot * CHUNK, xs, part, lane, sums + from);
            }
        }
#pragma unroll
        for (int i = 0; i < UNIT; i++) sums[i] = over_warp(sums[i]) * (BITS == 16 ? 1 : scale);
        emit(unit * UNIT, sums, there);
        stream.refill(run, warp, lane);  // afterwards: somebody may be waiting for the sums
    }
}

// ---- vectors ------------------------------------------------------------------------------------------------------------

// Which groups of four of a vector are this thread's, one bit for each.
template <int K> __device__ __forceinline__ u32 all_of() {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < (K / 4 + THREADS - 1) / THREADS; i++) if ((i * THREADS + (int)threadIdx.x) * 4 < K) own |= 1u << i;
    return own;
}
// Wait for the last group that is this thread's. To look at all of them while none is there would take bandwidth from weights.
template <int K> __device__ __forceinline__ void first_of_them(const float* x) {
    constexpr int LAST = (K / 4 + THREADS - 1) / THREADS - 1;
    if (LAST < 4 || (LAST * THREADS + (int)threadIdx.x) * 4 >= K) return;
    for (u32 tries = 0; !is_there(look4(x + (LAST * THREADS + threadIdx.x) * 4)); tries++) look_again(tries);
}

// This thread's four numbers of a vector's turn, for the products of all warps: from (turn * THREADS + thread) * 4 on. Every thread of
// a warp comes here, also those beyond the end. Places are a thread's own plus a constant: others would each take a register.
template <int K> __device__ __forceinline__ void put(unsigned char* xs, int turn, float a, float b, float c, float d) {
    const int at = (turn * THREADS + (int)threadIdx.x) * 4;
#if BITS == 16
    if (K % (4 * THREADS) == 0 || at < K) *(uint2*)(xs + at * 2) = make_uint2(packed(a, b), packed(c, d));
#else
    if (K % (4 * THREADS) != 0 && at >= K) a = b = c = d = 0;
    float most = larger_or_none(larger_or_none(fabsf(a), fabsf(b)), larger_or_none(fabsf(c), fabsf(d)));  // of 32: eight threads
#pragma unroll
    for (int o = 4; o; o >>= 1) most = larger_or_none(most, __shfl_xor_sync(~0u, most, o));
    const float by = most > 0 ? __fdividef(127.0f, most) : 0;
    const u32 four = (u32)(__float2int_rn(a * by) & 255) | (u32)(__float2int_rn(b * by) & 255) << 8 | (u32)(__float2int_rn(c * by) & 255) << 16 | (u32)__float2int_rn(d * by) << 24;
    int sum = dot4(four, 0x01010101u, 0);
#pragma unroll
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    constexpr int ALL = Rows<K>::PADDED / GROUP_SIZE, STEP = THREADS / 8;  // groups of all turns, and of one
    const int word = threadIdx.x % 8, group = threadIdx.x / 8;
    if (K % (4 * THREADS) != 0 && at >= Rows<K>::PADDED) return;
    *(u32*)(xs + (word / 4 * ALL + group) * 16 + word % 4 * 4 + turn * STEP * 16) = four;
    const float scale = most * (1.0f / 127.0f);  // not a number if one of the 32 is none
    if (!word) *(float2*)(xs + ALL * GROUP_SIZE + group * 8 + turn * STEP * 8) = make_float2(scale, BITS == 4 ? 8 * scale * sum : 0);
#endif
}

template <int K> struct Vector {
    static constexpr int COUNT = (Rows<K>::PADDED / 4 + THREADS - 1) / THREADS;  // groups of four for each thread
    float v[COUNT][4];
    float4 weight[COUNT];  // of the norm: read before it is needed, as it has left every cache since the last token

    __device__ __forceinline__ bool has(int i) const { return K % (4 * THREADS) == 0 || (i * THREADS + (int)threadIdx.x) * 4 < K; }
    __device__ __forceinline__ void weigh(const float* weights) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) if (has(i)) weight[i] = *(const float4*)(weights + (i * THREADS + threadIdx.x) * 4);
    }
    __device__ __forceinline__ void await(const float* x) {
        first_of_them<K>(x);
        u32 missing = all_of<K>();
        for (u32 tries = 0; missing; tries++) {
            uint4 seen[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) if (missing >> i & 1) seen[i] = look4(x + (i * THREADS + threadIdx.x) * 4);
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if ((missing >> i & 1) && is_there(seen[i])) {
                    missing &= ~(1u << i);
                    v[i][0] = __uint_as_float(seen[i].x), v[i][1] = __uint_as_float(seen[i].y), v[i][2] = __uint_as_float(seen[i].z), v[i][3] = __uint_as_float(seen[i].w);
                }
            if (missing) look_again(tries);
        }
    }
    __device__ __forceinline__ void read(const u16* x) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (has(i)) {
                const uint2 four = *(const uint2*)(x + (i * THREADS + threadIdx.x) * 4);
                v[i][0] = low(four.x), v[i][1] = high(four.x), v[i][2] = low(four.y), v[i][3] = high(four.y);
            }
    }
    // By the weights that `weigh` has read. Everybody has read what `xs` held before when it returns.
    __device__ __forceinline__ void norm(float eps, float* sums, int warp, int lane) {
        float own = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) if (has(i)) own += v[i][0] * v[i][0] + v[i][1] * v[i][1] + v[i][2] * v[i][2] + v[i][3] * v[i][3];
        own = over_warp(own);
        if (!lane) sums[warp] = own;
        __syncthreads();
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += sums[w];
        const float by = rsqrtf(all / K + eps);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (has(i)) {
                const float4 g = weight[i];
                v[i][0] *= by * g.x, v[i][1] *= by * g.y, v[i][2] *= by * g.z, v[i][3] *= by * g.w;
            }
    }
    __device__ __forceinline__ void share(unsigned char* xs) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) put<K>(xs, i, v[i][0], v[i][1], v[i][2], v[i][3]);
        __syncthreads();
    }
};

// A vector that others compute, into shared memory for products, part by part as it comes.
template <int K> __device__ __forceinline__ void take(const float* x, unsigned char* xs) {
    constexpr int COUNT = (Rows<K>::PADDED / 4 + THREADS - 1) / THREADS;
    u32 missing = all_of<K>();
    first_of_them<K>(x);
    __syncthreads();  // everybody has read what was there before
#pragma unroll
    for (int from = 0; from < COUNT; from += 4) {  // four at once: more would take registers from the weights
        uint4 seen[4];
        for (u32 tries = 0; missing >> from & 15; tries++) {
#pragma unroll
            for (int i = 0; i < 4 && from + i < COUNT; i++) if (missing >> (from + i) & 1) seen[i] = look4(x + ((from + i) * THREADS + threadIdx.x) * 4);
#pragma unroll
            for (int i = 0; i < 4 && from + i < COUNT; i++)
                if ((missing >> (from + i) & 1) && is_there(seen[i])) {
                    missing &= ~(1u << (from + i));
#if BITS == 16  // at once; packed ones are rounded together with other threads'
                    put<K>(xs, from + i, __uint_as_float(seen[i].x), __uint_as_float(seen[i].y), __uint_as_float(seen[i].z), __uint_as_float(seen[i].w));
#endif
                }
            if (missing >> from & 15) look_again(tries);
        }
#if BITS < 16
#pragma unroll
        for (int i = 0; i < 4 && from + i < COUNT; i++) put<K>(xs, from + i, __uint_as_float(seen[i].x), __uint_as_float(seen[i].y), __uint_as_float(seen[i].z), __uint_as_float(seen[i].w));
#endif
    }
    __syncthreads();
}

// ---- attention ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 cached(const u16* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// One block: the heads that share keys, to the positions of one of `splits`. `scratch`: queries, key and value, then a part for each warp.
__device__ __forceinline__ void attend(const Run& run, const Layer& layer, float* flow, float* before, int place, int begin, int splits, int kv, int split, float* scratch, int warp, int lane) {
    constexpr int LANES = HEAD / 8, TEAMS = WARPS * 32 / LANES, EACH = HEAD / 32, BATCH = IN_FLIGHT;
    const int total = place + 1 - begin;
    const int length = (total + splits - 1) / splits, from = begin + split * length, to = min(place + 1, from + length);
    const bool newest = to == place + 1;
    const int old = newest ? place : to;  // positions that are in the cache
    const u16 *keys = layer.keys + (size_t)kv * run.positions * HEAD, *values = layer.values + (size_t)kv * run.positions * HEAD;
    const int team = warp * (32 / LANES) + lane / LANES, first = lane % LANES * 8;

    uint4 k[BATCH], v[BATCH];  // of the first positions: they wait for no query
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        const int p = from + team + b * TEAMS;
        if (p < old) k[b] = cached(keys + (size_t)p * HEAD + first), v[b] = cached(values + (size_t)p * HEAD + first);
    }
    for (int one = warp; one < GROUP + (newest ? 2 : 0); one += WARPS) {
        const int row = one < GROUP ? (kv * GROUP + one) * HEAD : one == GROUP ? Q + kv * HEAD : Q + KV + kv * HEAD;
        float e[EACH], c[EACH / 2], s[EACH / 2], weight[EACH];
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) c[j] = run.cos[(size_t)place * (HEAD / 2) + lane + 32 * j], s[j] = run.sin[(size_t)place * (HEAD / 2) + lane + 32 * j];
#if QK_NORM
#pragma unroll
        for (int j = 0; j < EACH; j++) weight[j] = (one < GROUP ? layer.q_norm : layer.k_norm)[lane + 32 * j];
#endif
        await<EACH>(flow + AT_QKV + row + lane, 32, e);
        if (one <= GROUP) {
#if QK_NORM
            float squares = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) squares += e[j] * e[j];
            const float by = rsqrtf(over_warp(squares) / HEAD + run.eps);
#pragma unroll
            for (int j = 0; j < EACH; j++) e[j] *= by * weight[j];
#endif
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) {
                const float l = e[j], r = e[j + EACH / 2];
                e[j] = l * c[j] - r * s[j], e[j + EACH / 2] = r * c[j] + l * s[j];
            }
        }
        const float scale = one < GROUP ? LOG2E * rsqrtf((float)HEAD) : 1;
#pragma unroll
        for (int j = 0; j < EACH; j++) scratch[one * HEAD + lane + 32 * j] = one < GROUP ? e[j] * scale : low(packed(e[j], 0));
    }
    __syncthreads();
    if (newest)
        for (int i = threadIdx.x; i < HEAD; i += THREADS) {  // two of one word: both halves of it are one thread's
            const int which = i >= HEAD / 2, at = (i - which * (HEAD / 2)) * 2;
            const float* s = scratch + (GROUP + which) * HEAD + at;
            *(u32*)((which ? layer.values : layer.keys) + ((size_t)kv * run.positions + place) * HEAD + at) = packed(s[0], s[1]);
        }

    float q[GROUP][8], most[GROUP], sum[GROUP], mixed[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        most[g] = LEAST, sum[g] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] = scratch[g * HEAD + first + i], mixed[g][i] = 0;
    }
    // Scores of several positions first, then one step for all of them: the steps wait for one another.
    auto dots = [&](const float (&key)[8], float (&scores)[GROUP]) {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) score = fmaf(q[g][i], key[i], score);
#pragma unroll
            for (int o = LANES / 2; o; o >>= 1) score += __shfl_xor_sync(~0u, score, o);
            scores[g] = score;
        }
    };
    auto raise = [&](int g, float score) {  // from a maximum of LEAST, too, where nothing counts yet
        const float higher = fmaxf(most[g], score), by = higher == LEAST ? 1 : power_of_2(most[g] - higher);
        most[g] = higher, sum[g] *= by;
#pragma unroll
        for (int i = 0; i < 8; i++) mixed[g][i] *= by;
    };
    auto weigh = [&](int g, float score, const float (&value)[8]) {
        const float by = score == LEAST ? 0 : power_of_2(score - most[g]);
        sum[g] += by;
#pragma unroll
        for (int i = 0; i < 8; i++) mixed[g][i] = fmaf(by, value[i], mixed[g][i]);
    };
    auto unpacked = [](uint4 a, float (&eight)[8]) {
        const u32* x = &a.x;
#pragma unroll
        for (int i = 0; i < 4; i++) eight[2 * i] = low(x[i]), eight[2 * i + 1] = high(x[i]);
    };
    for (int at = from; at < old; at += BATCH * TEAMS) {  // the same count for all lanes of a warp: they meet in shuffles
        float scores[BATCH][GROUP];
        uint4 held[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int p = at + team + b * TEAMS, later = p + BATCH * TEAMS;
            float key[8];
            unpacked(k[b], key);
            if (later < old) k[b] = cached(keys + (size_t)later * HEAD + first);
            dots(key, scores[b]);
#pragma unroll
            for (int g = 0; g < GROUP; g++) if (p >= old) scores[b][g] = LEAST;
            held[b] = v[b];
            if (later < old) v[b] = cached(values + (size_t)later * HEAD + first);
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float highest = scores[0][g];
#pragma unroll
            for (int b = 1; b < BATCH; b++) highest = fmaxf(highest, scores[b][g]);
            raise(g, highest);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (at + team + b * TEAMS >= old) break;  // nothing was read there
            float value[8];
            unpacked(held[b], value);
#pragma unroll
            for (int g = 0; g < GROUP; g++) weigh(g, scores[b][g], value);
        }
    }
    if (newest && warp == WARPS - 1) {
        float key[8], value[8], scores[GROUP];
#pragma unroll
        for (int i = 0; i < 8; i++) key[i] = scratch[GROUP * HEAD + first + i], value[i] = scratch[(GROUP + 1) * HEAD + first + i];
        dots(key, scores);
        if (lane < LANES) {
#pragma unroll
            for (int g = 0; g < GROUP; g++) raise(g, scores[g]), weigh(g, scores[g], value);
        }
    }
    float* parts = scratch + (GROUP + 2) * HEAD;  // [WARPS, GROUP, PART]
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1) {
            const float other = __shfl_xor_sync(~0u, most[g], o), theirs = __shfl_xor_sync(~0u, sum[g], o), higher = fmaxf(most[g], other);
            const float by = most[g] == LEAST ? 0 : power_of_2(most[g] - higher), their_by = other == LEAST ? 0 : power_of_2(other - higher);
            most[g] = higher, sum[g] = sum[g] * by + theirs * their_by;
#pragma unroll
            for (int i = 0; i < 8; i++) mixed[g][i] = mixed[g][i] * by + __shfl_xor_sync(~0u, mixed[g][i], o) * their_by;
        }
        if (lane < LANES) {
            float* own = parts + (warp * GROUP + g) * PART;
#pragma unroll
            for (int i = 0; i < 8; i++) own[first + i] = mixed[g][i];
            if (!lane) own[HEAD] = most[g], own[HEAD + 1] = sum[g];
        }
    }
    __syncthreads();
    const size_t task = (size_t)AT_PARTS + (size_t)(kv * MOST_SPLITS + split) * GROUP * PART;
    for (int i = threadIdx.x; i < GROUP * HEAD; i += THREADS) {
        const int g = i / HEAD, d = i % HEAD;
        float highest = LEAST, total_sum = 0, value = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, parts[(w * GROUP + g) * PART + HEAD]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float* part = parts + (w * GROUP + g) * PART;
            const float by = power_of_2(part[HEAD] - highest);
            total_sum += part[HEAD + 1] * by, value += part[d] * by;
        }
        if (split) {
            publish(flow + task + g * PART + d, value), set_back(before + task + g * PART + d);
            if (!d) {
                publish(flow + task + g * PART + HEAD, highest), set_back(before + task + g * PART + HEAD);
                publish(flow + task + g * PART + HEAD + 1, total_sum), set_back(before + task + g * PART + HEAD + 1);
            }
            continue;
        }
        for (int other = 1; other < splits; other += 4) {  // four at once: each look takes as long as four
            float found[4][3];
#pragma unroll
            for (int b = 0; b < 4; b++) found[b][1] = LEAST;
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (other + b < splits) {
                    const float* part = flow + task + (size_t)(other + b) * GROUP * PART + g * PART;
                    found[b][0] = __uint_as_float(look(part + d)), found[b][1] = __uint_as_float(look(part + HEAD)), found[b][2] = __uint_as_float(look(part + HEAD + 1));
                }
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (other + b < splits) {
                    const float* part = flow + task + (size_t)(other + b) * GROUP * PART + g * PART;
                    if (__float_as_uint(found[b][0]) == NONE) await<1>(part + d, 0, &found[b][0]);
                    if (__float_as_uint(found[b][1]) == NONE) await<1>(part + HEAD, 0, &found[b][1]);
                    if (__float_as_uint(found[b][2]) == NONE) await<1>(part + HEAD + 1, 0, &found[b][2]);
                    const float higher = fmaxf(highest, found[b][1]), by = power_of_2(highest - higher), their_by = power_of_2(found[b][1] - higher);
                    highest = higher, total_sum = total_sum * by + found[b][2] * their_by, value = value * by + found[b][0] * their_by;
                }
        }
        const int at = AT_MIXED + (kv * GROUP + g) * HEAD + d;
        publish(flow + at, value / total_sum), set_back(before + at);
    }
}

// ---- words --------------------------------------------------------------------------------------------------------------

// A logit and its row as one number that is larger the better: of equal logits the first row. The lowest bit but for block 0's is 0.
__device__ __forceinline__ u64 ranked(float logit, int row) {
    const u32 bits = __float_as_uint(logit), rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)((bits & 0x7f800000u) != 0x7f800000u ? rising : 0xffffffffu) << 32 | (u64)(0x7fffffffu - (u32)row) << 1;
}
__device__ __forceinline__ u64 larger_of(u64 a, u64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Run run) {
    extern __shared__ __align__(128) unsigned char raw[];
    constexpr int XS = larger(larger(larger(Rows<WIDTH>::INPUT, Rows<Q>::INPUT), Rows<INNER>::INPUT), 4 * ((GROUP + 2) * HEAD + WARPS * GROUP * PART));
    unsigned char* slots = raw;
    u64* full = (u64*)(raw + WARPS * DEPTH * CHUNK);
    u64* bests = full + WARPS * DEPTH;  // of warps
    float* sums = (float*)(bests + WARPS);
    unsigned char* xs = (unsigned char*)(sums + WARPS);
    float* rest = (float*)(xs + (XS + 15) / 16 * 16);  // this block's rows of the residual
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x < WARPS * DEPTH) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + threadIdx.x)));
    asm volatile("fence.mbarrier_init.release.cluster;");
    __syncthreads();
    Stream stream{};
    stream.slots = slots + warp * DEPTH * CHUNK;
    stream.slot_address = shared_address(stream.slots), stream.bars = shared_address(full + warp * DEPTH);
    if (!stream.walk.begin_phase(run, warp)) stream.walk.next_phase(run, warp);
    for (int d = 0; d < DEPTH && stream.walk.step < run.steps; d++, stream.ahead++) stream.walk.fetch(run, warp, lane, stream.slot_address + d * CHUNK, stream.bars + 8 * d);

    const int first_row = first_of(units_of(WIDTH, BACK_UNIT), blockIdx.x) * BACK_UNIT, last_row = min(WIDTH, first_of(units_of(WIDTH, BACK_UNIT), blockIdx.x + 1) * BACK_UNIT);
    const size_t layer_flow = (AT_PARTS + (size_t)KV_HEADS * MOST_SPLITS * GROUP * PART + 3) / 4 * 4;  // four are looked at together
    int token = run.token, place = run.place;
    auto mark = [&](int step, int number, int what) {
#if TRACE
        if (!threadIdx.x && step == run.steps - 1) asm volatile("{.reg .u64 t; mov.u64 t, %%globaltimer; st.global.u64 [%0], t;}" ::"l"(run.trace + ((size_t)blockIdx.x * (LAYERS + 1) + number) * MARKS + what) : "memory");
#endif
    };
    for (int step = 0; step < run.steps; step++, place++) {
        float* flows = run.flow + (step & 1) * LAYERS * layer_flow;
        float* befores = run.flow + (~step & 1) * LAYERS * layer_flow;
        const u16* word = run.words + (size_t)token * WIDTH;
        for (int i = first_row + threadIdx.x; i < last_row; i += THREADS) rest[i - first_row] = low(word[i]);
        for (int number = 0; number <= LAYERS; number++) {
            Vector<WIDTH> x;
            const Layer& layer = run.layers[min(number, LAYERS - 1)];
            float *flow = flows + number * layer_flow, *before = befores + number * layer_flow;
            x.weigh(number < LAYERS ? layer.norm : run.norm);
            if (number) x.await(flow - layer_flow + AT_END); else x.read(word);
            x.norm(run.eps, sums, warp, lane);
            x.share(xs);
            mark(step, number, 0);
            if (number == LAYERS) break;
            product<WIDTH, QKV_UNIT>(run, stream, xs, QKV, layer.qkv_scale, warp, lane, [&](int row, const float (&found)[QKV_UNIT], int there) {
                const float own = of_lane<1>(found, lane);
                if (lane < there) publish(flow + AT_QKV + row + lane, own + (layer.qkv_bias ? layer.qkv_bias[row + lane] : 0)), set_back(before + AT_QKV + row + lane);
            });
            __syncthreads();  // attention overwrites the vector
            mark(step, number, 1);
            {
                const int begin = layer.window > 0 && layer.window <= place ? place + 1 - (int)layer.window : 0;
                const int splits = min(MOST_SPLITS, (place - begin) / SPLIT + 1), kv = blockIdx.x / MOST_SPLITS, split = blockIdx.x % MOST_SPLITS;
                if (kv < KV_HEADS && split < splits) attend(run, layer, flow, before, place, begin, splits, kv, split, (float*)xs, warp, lane);
            }
            mark(step, number, 2);
            take<Q>(flow + AT_MIXED, xs);
            mark(step, number, 3);
            auto add = [&](int at, const float* bias, int row, const float (&found)[BACK_UNIT], int there) {
                const float own = of_lane<1>(found, lane);
                if (lane < there) {
                    const int i = row + lane;
                    const float sum = rest[i - first_row] + own + (bias ? bias[i] : 0);
                    rest[i - first_row] = sum;
                    publish(flow + at + i, sum), set_back(before + at + i);
                }
            };
            product<Q, BACK_UNIT>(run, stream, xs, WIDTH, layer.out_scale, warp, lane, [&](int row, const float (&found)[BACK_UNIT], int there) { add(AT_MIDDLE, layer.out_bias, row, found, there); });
            mark(step, number, 4);
            x.weigh(layer.after);
            x.await(flow + AT_MIDDLE);
            x.norm(run.eps, sums, warp, lane);
            x.share(xs);
            mark(step, number, 5);
            product<WIDTH, PAIR_UNIT>(run, stream, xs, 2 * INNER, layer.gate_up_scale, warp, lane, [&](int row, const float (&found)[PAIR_UNIT], int there) {
                const int i = row + 2 * lane;
                float gate = of_lane<2>(found, lane), up = of_lane<2, 1>(found, lane);
                if (2 * lane < there) {
                    if (layer.gate_up_bias) gate += layer.gate_up_bias[i], up += layer.gate_up_bias[i + 1];
                    publish(flow + AT_INNER + i / 2, __fdividef(gate, 1 + power_of_2(-LOG2E * gate)) * up), set_back(before + AT_INNER + i / 2);
                }
            });
            mark(step, number, 6);
            take<INNER>(flow + AT_INNER, xs);
            mark(step, number, 7);
            product<INNER, BACK_UNIT>(run, stream, xs, WIDTH, layer.down_scale, warp, lane, [&](int row, const float (&found)[BACK_UNIT], int there) { add(AT_END, layer.down_bias, row, found, there); });
            mark(step, number, 8);
        }
        u64 best = 0;
        const bool keeps = run.logits != nullptr && step == run.steps - 1;
        product<WIDTH, QKV_UNIT>(run, stream, xs, VOCABULARY, run.head_scale, warp, lane, [&](int row, const float (&found)[QKV_UNIT], int there) {
            const float own = of_lane<1>(found, lane);
            if (lane < there) {
                best = larger_of(best, ranked(own, row + lane));
                if (keeps) run.logits[row + lane] = own;
            }
        });
        mark(step, LAYERS, 1);
#pragma unroll
        for (int o = QKV_UNIT / 2; o; o >>= 1) best = larger_of(best, __shfl_xor_sync(~0u, best, o));
        if (!lane) bests[warp] = best;
        __syncthreads();
        u64* turn = run.best + (step & 3) * BLOCKS;
        if (!threadIdx.x) {
            for (int w = 1; w < WARPS; w++) best = larger_of(best, bests[w]);
            if (!blockIdx.x && *run.stopping) best |= 1;
            __threadfence();
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(run.best + ((step + 2) & 3) * BLOCKS + blockIdx.x), "l"(0ull) : "memory");
            // 2: nothing of this block's is a word, and yet it is here.
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(turn + blockIdx.x), "l"(larger_of(best, 2)) : "memory");
        }
        u64 all = 0;
        bool stops = false;
        for (int b = threadIdx.x; b < BLOCKS; b += THREADS) {
            u64 one;
            for (u32 tries = 0;; tries++) {
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(one) : "l"(turn + b) : "memory");
                if (one) break;
                look_again(tries);
            }
            if (!b) stops = one & 1;
            all = larger_of(all, one & ~1ull);
        }
        __threadfence();
#pragma unroll
        for (int o = 16; o; o >>= 1) all = larger_of(all, __shfl_xor_sync(~0u, all, o));
        __syncthreads();  // everybody has read the warps' bests
        if (!lane) bests[warp] = all;
        stops = __syncthreads_or(stops);
        for (int w = 0; w < WARPS; w++) all = larger_of(all, bests[w]);
        token = (u32)(all >> 32) == 0xffffffffu ? NO_NUMBER : (int)(0x7fffffffu - (u32)((all & 0xffffffffu) >> 1));
        bool over = token < 0 || stops || place + 1 >= run.positions;
        for (int i = 0; i < run.end_count; i++) over |= token == run.ends[i];
        if (!blockIdx.x && !threadIdx.x) {
            run.made[step] = token;
            __threadfence_system();
            *run.done = step + 1;
        }
        if (over) break;
    }
    stream.drain();
}
