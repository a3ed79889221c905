// Norms and softmax over rows, and their gradients. A result may be written over its input.

#include <algorithm>
#include <vector>

#include "cpu_threads.hpp"
#include "cpu_vectors.hpp"

namespace polyfleet {
namespace {

template <class T> INLINE float sum_of_squares(const T* x, int64_t n) {
    return sum(n, [&](int64_t i, auto size) {
        const V v = load(x + i, size);
        return v * v;
    });
}

struct Moments {
    float mean, variance;
};

// In one pass over memory, a part of the row at a time. Each but the first is summed around the mean of those before it,
// so that no large numbers are subtracted: how far its own mean is from that one counts in the variance as well.
// Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
template <class T> INLINE Moments moments(const T* x, int64_t n) {
    constexpr int64_t PART = 1024;
    double mean = 0, squares = 0;
    for (int64_t first = 0; first < n; first += PART) {
        const int64_t many = std::min(PART, n - first);
        const T* from = x + first;
        if (!first) mean = double(sum(many, [&](int64_t i, auto size) { return load(from + i, size); })) / double(many);
        const float around = float(mean);
        float found[2];  // of what is left, and of its squares
        sums<2>(many, found, [&](int64_t i, auto size, V* terms) {
            terms[0] = keep(load(from + i, size) - around, size);
            terms[1] = terms[0] * terms[0];
        });
        const double own = around + found[0] / double(many);  // the mean of this part
        squares += found[1] - found[0] * (own - around);
        squares += (own - mean) * (own - mean) * (double(first) * many / double(first + many));
        mean += (own - mean) * (many / double(first + many));
    }
    return {float(mean), float(std::max(squares / double(n), 0.0))};
}

INLINE float inverse_root(double mean_square, double eps) { return float(1.0 / std::sqrt(mean_square + eps)); }

template <class T, class W>
void rmsnorm(const T* x, const W* weight, T* out, int64_t n, double eps, float offset, bool round_first) {
    const float scale = inverse_root(sum_of_squares(x, n) / double(n), eps);
    over(n, [&](int64_t i, auto size) {
        V v = load(x + i, size) * scale;
        if (round_first) v = rounded_to<T>(v);
        if (weight) v = v * (load(weight + i, size) + offset);
        store(out + i, v, size);
    });
}

template <class T, class W> void layernorm(const T* x, const W* weight, const W* bias, T* out, int64_t n, double eps) {
    const Moments of = moments(x, n);
    const float mean = of.mean, scale = inverse_root(of.variance, eps);
    over(n, [&](int64_t i, auto size) {
        V v = (load(x + i, size) - mean) * scale;
        if (weight) v = v * load(weight + i, size);
        if (bias) v = v + load(bias + i, size);
        store(out + i, v, size);
    });
}

// -inf for a row of NaN, which then makes the sum NaN.
template <class T> INLINE float greatest(const T* x, int64_t n) {
    V most[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            const V v = load(x + i + k * LANES, Whole{});
            most[k] = v > most[k] ? v : most[k];
        }
    over(n - i, [&](int64_t more, auto size) {
        const V v = keep(load(x + i + more, size), size, -INF);
        most[0] = v > most[0] ? v : most[0];
    });
    float found = -INF;
    for (int k = 0; k < 4; k++)
        for (int lane = 0; lane < LANES; lane++) found = std::max(found, float(most[k][lane]));
    return found;
}

// Exponentials are kept in float32, in the place of the result or beside it, up to this many columns: 512 KB stay near.
// Of longer rows they are computed twice.
constexpr int64_t KEPT_COLUMNS = 131072;

template <class T> void softmax(const T* x, T* out, int64_t n) {
    const float most = greatest(x, n);
    const auto above = [&](int64_t i, auto size) { return exponential(load(x + i, size) - most); };
    if (n > KEPT_COLUMNS) {
        const float scale = 1.0f / sum(n, [&](int64_t i, auto size) { return keep(above(i, size), size); });
        over(n, [&](int64_t i, auto size) { store(out + i, above(i, size) * scale, size); });
        return;
    }
    float* held;
    if constexpr (std::is_same_v<T, float>) held = out;
    else held = scratch<0>(n);
    const float shares = sum(n, [&](int64_t i, auto size) {
        const V e = above(i, size);
        store(held + i, e, size);
        return keep(e, size);
    });
    const float scale = 1.0f / shares;
    over(n, [&](int64_t i, auto size) { store(out + i, load(held + i, size) * scale, size); });
}

// Gradients. Those of weights are summed over blocks of rows, and the blocks in their order: how many blocks there are
// follows from the number of rows alone, so that results do not depend on threads.

constexpr int64_t BLOCKS = 64, LEAST_ROWS = 16;

struct Blocks {
    int64_t rows, each, count;
    explicit Blocks(int64_t r) : rows(r), each(std::max(LEAST_ROWS, (r + BLOCKS - 1) / BLOCKS)), count((r + each - 1) / each) {}
};

// f(row, sums of its block [width]) for every row; then `found` [width] is the sum of all blocks.
template <class F>
int sum_over_rows(int64_t rows, int64_t width, int64_t columns, int threads, float* found, F f) {
    const Blocks blocks(rows);
    std::vector<float> partial(size_t(blocks.count * width));
    const int64_t grain = WORTH_A_THREAD / (columns * blocks.each) + 1;
    const int told = share(blocks.count, grain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++)
            for (int64_t row = block * blocks.each; row < std::min(rows, (block + 1) * blocks.each); row++)
                f(row, partial.data() + block * width);
    });
    if (told || !width) return told;
    return share(width, WORTH_A_THREAD / blocks.count + LANES, threads, [&](int64_t begin, int64_t end) {
        over(end - begin, [&](int64_t i, auto size) {
            V all = {};
            for (int64_t block = 0; block < blocks.count; block++)
                all += load(partial.data() + block * width + begin + i, size);
            store(found + begin + i, all, size);
        });
    });
}

template <class T, class W>
void rmsnorm_backward(const T* g, const T* x, const W* weight, T* dx, float* dw, int64_t n, double eps, float offset) {
    float found[2];  // of x², and of the gradient of the normed row times x
    const auto grown = [&](int64_t i, auto size) {
        const V v = load(g + i, size);
        return weight ? v * (load(weight + i, size) + offset) : v;
    };
    sums<2>(n, found, [&](int64_t i, auto size, V* terms) {
        const V v = load(x + i, size);
        terms[0] = v * v;
        terms[1] = v * grown(i, size);
    });
    const float scale = inverse_root(found[0] / double(n), eps);
    const float slope = float(double(scale) * scale * found[1] / double(n));
    over(n, [&](int64_t i, auto size) {
        const V v = load(x + i, size);
        store(dx + i, (grown(i, size) - v * slope) * scale, size);
        if (weight) store(dw + i, load(dw + i, size) + load(g + i, size) * (v * scale), size);
    });
}

template <class T, class W>
void layernorm_backward(const T* g, const T* x, const W* weight, T* dx, float* dw, float* db, int64_t n, double eps) {
    const Moments of = moments(x, n);
    const float mean = of.mean, scale = inverse_root(of.variance, eps);
    const auto grown = [&](int64_t i, auto size) {
        const V v = load(g + i, size);
        return weight ? v * load(weight + i, size) : v;
    };
    const auto normed = [&](int64_t i, auto size) { return (load(x + i, size) - mean) * scale; };
    float found[2];
    sums<2>(n, found, [&](int64_t i, auto size, V* terms) {
        terms[0] = grown(i, size);
        terms[1] = terms[0] * normed(i, size);
    });
    const float level = float(found[0] / double(n)), slope = float(found[1] / double(n));
    over(n, [&](int64_t i, auto size) {
        const V v = normed(i, size), given = load(g + i, size);
        store(dx + i, (grown(i, size) - level - v * slope) * scale, size);
        if (weight) store(dw + i, load(dw + i, size) + given * v, size);
        if (db) store(db + i, load(db + i, size) + given, size);
    });
}

template <class T> void softmax_backward(const T* g, const T* y, T* dx, int64_t n) {
    const float level = sum(n, [&](int64_t i, auto size) { return load(g + i, size) * load(y + i, size); });
    over(n, [&](int64_t i, auto size) { store(dx + i, load(y + i, size) * (load(g + i, size) - level), size); });
}

}  // namespace

extern "C" {

int polyfleet_rmsnorm(int dtype, int other, const void* x, const void* weight, void* out, int64_t rows, int64_t columns,
                      double eps, double offset, int round_first, int threads) {
    return with_types(dtype, other, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        return share_rows(rows, columns, threads, [&](int64_t row) {
            rmsnorm((const T*)x + row * columns, (const W*)weight, (T*)out + row * columns, columns, eps, float(offset),
                    round_first != 0);
        });
    });
}

int polyfleet_layernorm(int dtype, int other, const void* x, const void* weight, const void* bias, void* out,
                        int64_t rows, int64_t columns, double eps, int threads) {
    return with_types(dtype, other, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        return share_rows(rows, columns, threads, [&](int64_t row) {
            layernorm((const T*)x + row * columns, (const W*)weight, (const W*)bias, (T*)out + row * columns, columns, eps);
        });
    });
}

int polyfleet_softmax(int dtype, const void* x, void* out, int64_t rows, int64_t columns, int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_rows(rows, columns, threads, [&](int64_t row) {
            softmax((const T*)x + row * columns, (T*)out + row * columns, columns);
        }, 2);
    });
}

int polyfleet_rmsnorm_backward(int dtype, int other, const void* g, const void* x, const void* weight, void* dx,
                               float* dw, int64_t rows, int64_t columns, double eps, double offset, int threads) {
    return guarded([&] {
        return with_types(dtype, other, [&](auto t, auto w) {
            using T = decltype(t);
            using W = decltype(w);
            return sum_over_rows(rows, weight ? columns : 0, columns, threads, dw, [&](int64_t row, float* partial) {
                const int64_t at = row * columns;
                rmsnorm_backward((const T*)g + at, (const T*)x + at, (const W*)weight, (T*)dx + at, partial, columns,
                                 eps, float(offset));
            });
        });
    });
}

// `sums` [2, columns] gets the gradients of weight and bias; each is computed only where it is wanted.
int polyfleet_layernorm_backward(int dtype, int other, const void* g, const void* x, const void* weight, void* dx,
                                 float* sums, int with_bias, int64_t rows, int64_t columns, double eps, int threads) {
    return guarded([&] {
        return with_types(dtype, other, [&](auto t, auto w) {
            using T = decltype(t);
            using W = decltype(w);
            const int64_t width = weight || with_bias ? 2 * columns : 0;
            return sum_over_rows(rows, width, columns, threads, sums, [&](int64_t row, float* partial) {
                const int64_t at = row * columns;
                layernorm_backward((const T*)g + at, (const T*)x + at, (const W*)weight, (T*)dx + at, partial,
                                   with_bias ? partial + columns : nullptr, columns, eps);
            });
        });
    });
}

int polyfleet_softmax_backward(int dtype, const void* g, const void* y, void* dx, int64_t rows, int64_t columns,
                               int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_rows(rows, columns, threads, [&](int64_t row) {
            const int64_t at = row * columns;
            softmax_backward((const T*)g + at, (const T*)y + at, (T*)dx + at, columns);
        });
    });
}

int polyfleet_lanes() { return LANES; }

}  // extern "C"
}  // namespace polyfleet
