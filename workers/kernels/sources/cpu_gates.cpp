// SiLU, SwiGLU and rotary embeddings, and the gradients of the gates. A result may be written over its input.

#include <algorithm>

#include "cpu_threads.hpp"
#include "cpu_vectors.hpp"

namespace polyfleet {
namespace {

// The derivative of x · sigmoid(x); 0 for -inf and 1 for inf, where x · (1 - sigmoid(x)) alone would be NaN.
INLINE V silu_slope(V x) {
    V rest;
    const V share = sigmoid(x, rest);
    return (x == INF) | (x == -INF) ? share : share * (1.0f + x * rest);
}

// f(i, size) over all values, in ranges that begin at a whole vector.
template <class F> int share_values(int64_t count, int threads, F f) {
    const int64_t vectors = (count + LANES - 1) / LANES;
    return share(vectors, WORTH_A_THREAD / 2 / LANES, threads, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * LANES;
        over(std::min(count, end * LANES) - first, [&](int64_t i, auto size) { f(first + i, size); });
    });
}

// One token: `second` lies `pairs` values after `first`.
template <class T, class W> void turn_halves(const T* x, const W* cos, const W* sin, T* out, int64_t pairs) {
    over(pairs, [&](int64_t i, auto size) {
        const V first = load(x + i, size), second = load(x + pairs + i, size);
        const V c = load(cos + i, size), s = load(sin + i, size);
        store(out + i, first * c - second * s, size);
        store(out + pairs + i, second * c + first * s, size);
    });
}

// One token: pairs lie side by side, and go through a buffer to be apart.
template <class T, class W> void turn_pairs(const T* x, const W* cos, const W* sin, T* out, int64_t pairs) {
    over(pairs, [&](int64_t i, auto size) {
        const int count = std::min<int64_t>(LANES, pairs - i);
        float both[2 * LANES] = {}, c[LANES], s[LANES], turned[2 * LANES];
        over(2 * count, [&](int64_t k, auto part) { store(both + k, load(x + 2 * i + k, part), part); });
        store(c, load(cos + i, size), Whole{});
        store(s, load(sin + i, size), Whole{});
        for (int k = 0; k < LANES; k++) {
            turned[2 * k] = both[2 * k] * c[k] - both[2 * k + 1] * s[k];
            turned[2 * k + 1] = both[2 * k + 1] * c[k] + both[2 * k] * s[k];
        }
        over(2 * count, [&](int64_t k, auto part) { store(out + 2 * i + k, load(turned + k, part), part); });
    });
}

}  // namespace

extern "C" {

int polyfleet_silu(int dtype, const void* x, void* out, int64_t count, int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_values(count, threads, [&](int64_t i, auto size) {
            store((T*)out + i, silu(load((const T*)x + i, size)), size);
        });
    });
}

int polyfleet_swiglu(int dtype, const void* gate, const void* up, void* out, int64_t count, int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_values(count, threads, [&](int64_t i, auto size) {
            store((T*)out + i, silu(load((const T*)gate + i, size)) * load((const T*)up + i, size), size);
        });
    });
}

int polyfleet_silu_backward(int dtype, const void* g, const void* x, void* dx, int64_t count, int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_values(count, threads, [&](int64_t i, auto size) {
            store((T*)dx + i, load((const T*)g + i, size) * silu_slope(load((const T*)x + i, size)), size);
        });
    });
}

int polyfleet_swiglu_backward(int dtype, const void* g, const void* gate, const void* up, void* dgate, void* dup,
                              int64_t count, int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_values(count, threads, [&](int64_t i, auto size) {
            const V given = load((const T*)g + i, size), x = load((const T*)gate + i, size);
            const V other = load((const T*)up + i, size);
            store((T*)dgate + i, given * other * silu_slope(x), size);
            store((T*)dup + i, given * silu(x), size);
        });
    });
}

// x [batch, tokens, width]; token t turns by row `position` + t of the tables [·, pairs].
int polyfleet_rope(int dtype, int other, const void* x, const void* cos, const void* sin, void* out, int64_t batch,
                   int64_t tokens, int64_t width, int64_t pairs, int64_t position, int adjacent, int threads) {
    return with_types(dtype, other, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        return share_rows(batch * tokens, width, threads, [&](int64_t row) {
            const int64_t angle = (position + row % tokens) * pairs;
            const T* from = (const T*)x + row * width;
            T* to = (T*)out + row * width;
            const W *c = (const W*)cos + angle, *s = (const W*)sin + angle;
            adjacent ? turn_pairs(from, c, s, to, pairs) : turn_halves(from, c, s, to, pairs);
            if (from != to && 2 * pairs < width) memcpy(to + 2 * pairs, from + 2 * pairs, (width - 2 * pairs) * sizeof(T));
        });
    });
}

}  // extern "C"
}  // namespace polyfleet
