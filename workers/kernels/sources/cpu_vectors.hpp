// Vectors of float32 as wide as this CPU has them, and how float32, float16 and bfloat16 are read into and out of them.
//
// GCC's vector extensions (clang has them too) compile for any CPU. POLYFLEET_SCALAR makes vectors of one value.
// Nothing here may be built with -ffast-math: NaN, infinities and subnormal numbers count.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX__) && !defined(POLYFLEET_SCALAR)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace polyfleet {

#if defined(POLYFLEET_SCALAR)
constexpr int LANES = 1;
#elif defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t VI __attribute__((vector_size(LANES * 4)));
typedef uint32_t VU __attribute__((vector_size(LANES * 4)));
typedef uint16_t VH __attribute__((vector_size(LANES * 2)));

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

constexpr float INF = std::numeric_limits<float>::infinity();

static INLINE V splat(float x) { return V{} + x; }

// How much of a vector lies in memory: all of it, or the first `count` values at the end of a row.
struct Whole {};
struct Part { int count; };

static INLINE VI lane_numbers() {
    VI numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

// `v` where there are values, `rest` beyond them.
static INLINE V keep(V v, Whole, float = 0) { return v; }
static INLINE V keep(V v, Part part, float rest = 0) { return lane_numbers() < part.count ? v : splat(rest); }

// float16

#if defined(__F16C__) && !defined(POLYFLEET_SCALAR) && defined(__AVX512F__)
static INLINE V widen_f16(VH h) { return (V)_mm512_cvtph_ps((__m256i)h); }
static INLINE VH narrow_f16(V v) { return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__F16C__) && !defined(POLYFLEET_SCALAR) && defined(__AVX__)
static INLINE V widen_f16(VH h) { return (V)_mm256_cvtph_ps((__m128i)h); }
static INLINE VH narrow_f16(V v) { return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
// Arithmetic on bits, for CPUs without the instruction. Source: F. Giesen, "Half to float done quick" and its reverse.
static INLINE V widen_f16(VH h) {
    const VU wide = __builtin_convertvector(h, VU), zero = wide & 0u;
    const VU moved = (wide & 0x7fffu) << 13, exponent = moved & 0x0f800000u;
    const VU normal = moved + (112u << 23);
    const V subnormal = (V)(normal + (1u << 23)) - (V)(zero + (113u << 23));
    VU found = exponent == 0x0f800000u ? normal + (112u << 23) : normal;
    found = exponent == 0u ? (VU)subnormal : found;
    return (V)(found | (wide & 0x8000u) << 16);
}

static INLINE VH narrow_f16(V v) {
    const VU sign = (VU)v & 0x80000000u, size = (VU)v ^ sign, zero = size & 0u;
    const VU beyond = size > 0x7f800000u ? zero + 0x7e00u : zero + 0x7c00u;
    const VU magic = zero + (126u << 23);
    const VU subnormal = (VU)((V)size + (V)magic) - magic;
    const VU normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    VU found = size < (113u << 23) ? subnormal : normal;
    found = size >= (143u << 23) ? beyond : found;
    return __builtin_convertvector(found | sign >> 16, VH);
}
#endif

// bfloat16: the upper half of a float32. The CPU's own instruction takes subnormal numbers for zero, so it is not used.

static INLINE V widen_bf16(VH h) { return (V)(__builtin_convertvector(h, VU) << 16); }

static INLINE VH narrow_bf16(V v) {
    const VU bits = (VU)v;
    const VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    return __builtin_convertvector(v != v ? (bits >> 16 | 0x40u) : rounded, VH);
}

// Memory

static INLINE VH read_half(const void* p, Whole) { VH h; memcpy(&h, p, sizeof h); return h; }
static INLINE void write_half(void* p, VH h, Whole) { memcpy(p, &h, sizeof h); }

static INLINE V load(const float* p, Whole) { V v; memcpy(&v, p, sizeof v); return v; }
static INLINE void store(float* p, V v, Whole) { memcpy(p, &v, sizeof v); }

// Ends of rows: under a mask where the CPU has them, else through a copy. What lies beyond the end is never touched.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(POLYFLEET_SCALAR)
static INLINE __mmask16 mask(Part part) { return __mmask16((1u << part.count) - 1); }
static INLINE VH read_half(const void* p, Part part) { return (VH)_mm256_maskz_loadu_epi16(mask(part), p); }
static INLINE void write_half(void* p, VH h, Part part) { _mm256_mask_storeu_epi16(p, mask(part), (__m256i)h); }
static INLINE V load(const float* p, Part part) { return (V)_mm512_maskz_loadu_ps(mask(part), p); }
static INLINE void store(float* p, V v, Part part) { _mm512_mask_storeu_ps(p, mask(part), (__m512)v); }
#else
static INLINE VH read_half(const void* p, Part part) { VH h = {}; memcpy(&h, p, part.count * 2); return h; }
static INLINE void write_half(void* p, VH h, Part part) { memcpy(p, &h, part.count * 2); }
static INLINE V load(const float* p, Part part) { V v = {}; memcpy(&v, p, part.count * 4); return v; }
static INLINE void store(float* p, V v, Part part) { memcpy(p, &v, part.count * 4); }
#endif

template <class S> static INLINE V load(const f16* p, S size) { return widen_f16(read_half(p, size)); }
template <class S> static INLINE V load(const bf16* p, S size) { return widen_bf16(read_half(p, size)); }
template <class S> static INLINE void store(f16* p, V v, S size) { write_half(p, narrow_f16(v), size); }
template <class S> static INLINE void store(bf16* p, V v, S size) { write_half(p, narrow_bf16(v), size); }

// A value as memory of type T would hold it.
template <class T> static INLINE V rounded_to(V v);
template <> INLINE V rounded_to<float>(V v) { return v; }
template <> INLINE V rounded_to<f16>(V v) { return widen_f16(narrow_f16(v)); }
template <> INLINE V rounded_to<bf16>(V v) { return widen_bf16(narrow_bf16(v)); }

static INLINE float one(const float* p) { return *p; }
static INLINE float one(const bf16* p) { const uint32_t bits = uint32_t(p->bits) << 16; float x; memcpy(&x, &bits, 4); return x; }
static INLINE float one(const f16* p) { return load(p, Part{1})[0]; }
template <class T> static INLINE void put(T* p, float x) { store(p, splat(x), Part{1}); }

// Loops

// f(i, size) for each vector of `n` values.
template <class F> static INLINE void over(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, Whole{});
    if (i < n) f(i, Part{int(n - i)});
}

static INLINE float total(V v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// At least 32 partial sums: one running sum of 131,072 values is off by 1e-5, these by 2e-7.
constexpr int SUMS = LANES >= 8 ? 4 : 32 / LANES;

// N sums over a row in one pass. f(i, size, terms) gives the N vectors to add; what lies beyond the row must be 0.
template <int N, class F> static INLINE void sums(int64_t n, float* found, F f) {
    V partial[SUMS][N] = {}, terms[N];
    int64_t i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES)
        for (int k = 0; k < SUMS; k++) {
            f(i + k * LANES, Whole{}, terms);
            for (int j = 0; j < N; j++) partial[k][j] += terms[j];
        }
    over(n - i, [&](int64_t more, auto size) {
        f(i + more, size, terms);
        for (int j = 0; j < N; j++) partial[0][j] += terms[j];
    });
    for (int j = 0; j < N; j++) {
        for (int half = SUMS / 2; half; half /= 2)
            for (int k = 0; k < half; k++) partial[k][j] += partial[k + half][j];
        found[j] = total(partial[0][j]);
    }
}

template <class F> static INLINE float sum(int64_t n, F term) {
    float found;
    sums<1>(n, &found, [&](int64_t i, auto size, V* terms) { terms[0] = term(i, size); });
    return found;
}

// Functions

// The greater of both, and NaN where `x` is NaN.
static INLINE V at_least(float least, V x) {
#if defined(__AVX512F__) && !defined(POLYFLEET_SCALAR)
    return (V)_mm512_max_ps((__m512)splat(least), (__m512)x);
#elif defined(__AVX__) && !defined(POLYFLEET_SCALAR)
    return (V)_mm256_max_ps((__m256)splat(least), (__m256)x);
#else
    return x < least ? splat(least) : x;
#endif
}

// e^x for x <= 0, all that softmax and sigmoid need, with a relative error of at most 8.3e-8. Results may be subnormal
// or 0; NaN stays NaN.
static INLINE V exponential(V x) {
    x = at_least(-104.0f, x);            // below: zero
    const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const V shifted = x * 1.44269504088896341f + magic, power = shifted - magic;
    V r = x - power * 0.693145751953125f;
    r = r - power * 1.42860682030941723e-6f;
    V p = splat(1.9875691500e-4f);  // Cephes' expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const VI scale = (VI)shifted - (0x4b400000 - 127 - 64);  // 2^(n + 64), as n reaches down to -150
    return p * (V)(scale << 23) * 5.42101086242752217e-20f;
}

static INLINE V minus_size(V x) { return (V)((VU)x | 0x80000000u); }

static INLINE V silu(V x) {
    const V e = exponential(minus_size(x));
    return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// 1 / (1 + e^-x) and, in `rest`, 1 minus it; exact where either is near 0.
static INLINE V sigmoid(V x, V& rest) {
    const V e = exponential(minus_size(x)), high = 1.0f / (1.0f + e), low = e * high;
    rest = x < 0.0f ? high : low;
    return x < 0.0f ? low : high;
}

// Types by number, as the Python side gives them.

enum Status { DONE = 0, NO_MEMORY = 1, UNKNOWN_DTYPE = 2 };

template <class F> static int with_type(int dtype, F f) {
    switch (dtype) {
        case 0: return f(float{});
        case 1: return f(f16{});
        case 2: return f(bf16{});
        default: return UNKNOWN_DTYPE;
    }
}

// Weights and tables are in the dtype of the rows, or in float32.
template <class F> static int with_types(int dtype, int other, F f) {
    return with_type(dtype, [&](auto t) {
        if (other == 0) return f(t, float{});
        return other == dtype ? f(t, t) : int(UNKNOWN_DTYPE);
    });
}

}  // namespace polyfleet
