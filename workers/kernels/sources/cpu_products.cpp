// Products of matrices and vectors. Sums are kept in float32 in an order that does not depend on threads.

#include <algorithm>
#include <vector>

#include "cpu_threads.hpp"
#include "cpu_tiles.hpp"

namespace polyfleet {
namespace {

constexpr int64_t ROWS = 96, COLUMNS = 256, DEPTH = 192;  // of a task: 100 KB of sums, 200 KB of the second matrix

template <class T> INLINE float dot(const T* a, const T* b, int64_t n) {
    return sum(n, [&](int64_t i, auto size) { return load(a + i, size) * load(b + i, size); });
}

struct Sizes {
    int64_t rows, depth, columns;
    bool turned_a, turned_b;
};

// A part of the first matrix in float32, in rows of `step`: where it lies, if it lies so.
template <class T>
const float* part_of_a(const T* a, const Sizes& of, int64_t m, int64_t rows, int64_t k, int64_t depth, int64_t& step) {
    if constexpr (std::is_same_v<T, float>)
        if (!of.turned_a) {
            step = of.depth;
            return a + m * of.depth + k;
        }
    float* found = scratch<0>(ROWS * (DEPTH + LANES));
    step = DEPTH + LANES;
    if (!of.turned_a) {
        for (int64_t i = 0; i < rows; i++)
            over(depth, [&](int64_t j, auto size) { store(found + i * step + j, load(a + (m + i) * of.depth + k + j, size), Whole{}); });
        return found;
    }
    float held[LANES];
    for (int64_t j = 0; j < depth; j++)
        over(rows, [&](int64_t i, auto size) {
            store(held, load(a + (k + j) * of.rows + m + i, size), Whole{});
            const int64_t many = std::min<int64_t>(LANES, rows - i);
            for (int64_t lane = 0; lane < many; lane++) found[(i + lane) * step + j] = held[lane];
        });
    return found;
}

template <class T>
void multiply_block(const T* a, const T* b, T* out, const Sizes& of, int64_t m, int64_t n, float scale) {
    const int64_t rows = std::min(ROWS, of.rows - m), columns = std::min(COLUMNS, of.columns - n), wide = in_strips(columns);
    float *held = scratch<1>(ROWS * COLUMNS), *strips = scratch<2>(DEPTH * COLUMNS);
    std::fill(held, held + rows * wide, 0.0f);
    for (int64_t k = 0; k < of.depth; k += DEPTH) {
        const int64_t depth = std::min(DEPTH, of.depth - k);
        if (of.turned_b) lay_turned_in_strips(b + n * of.depth + k, of.depth, depth, columns, strips);
        else lay_in_strips(b + k * of.columns + n, of.columns, depth, columns, strips);
        int64_t step;
        const float* part = part_of_a(a, of, m, rows, k, depth, step);
        multiply(rows, depth, wide, part, step, strips, held, wide);
    }
    for (int64_t i = 0; i < rows; i++)
        over(columns, [&](int64_t j, auto size) {
            store(out + (m + i) * of.columns + n + j, load(held + i * wide + j, size) * scale, size);
        });
}

// A few rows: each value of the second matrix is used too seldom to be laid out anew.
constexpr int64_t FEW = 4;

template <class T>
int multiply_few(const T* a, const T* b, T* out, int64_t batch, const Sizes& of, float scale, int threads) {
    return share_rows(batch * of.columns, of.depth, threads, [&](int64_t row) {
        const int64_t at = row / of.columns, n = row % of.columns;
        for (int64_t m = 0; m < of.rows; m++)
            put(out + (at * of.rows + m) * of.columns + n,
                scale * dot(a + (at * of.rows + m) * of.depth, b + row * of.depth, of.depth));
    });
}

// Rows that are weighed are added in chunks of a fixed length, first within each, then one after the other.
constexpr int64_t CHUNK = 64, MANY_CHUNKS = 32, WIDE = 2048, AT_ONCE = 8;

// found [width] = the sum of weights[t] * rows[t] for `count` rows of `step` values.
template <class T>
void weigh(const T* weights, const T* rows, int64_t step, int64_t count, int64_t width, float* found) {
    alignas(64) float near[WIDE + LANES];
    std::fill(found, found + width, 0.0f);
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t last = std::min(count, first + CHUNK);
        over(width, [&](int64_t i, auto size) { store(near + i, V{}, size); });
        int64_t t = first;
        for (; t + AT_ONCE <= last; t += AT_ONCE) {
            const T* row = rows + t * step;
            float w[AT_ONCE];
            for (int k = 0; k < AT_ONCE; k++) w[k] = one(weights + t + k);
            over(width, [&](int64_t i, auto size) {
                V v = load(near + i, size);
                for (int k = 0; k < AT_ONCE; k++) v += w[k] * load(row + k * step + i, size);
                store(near + i, v, size);
            });
        }
        for (; t < last; t++) {
            const float w = one(weights + t);
            over(width, [&](int64_t i, auto size) {
                store(near + i, load(near + i, size) + w * load(rows + t * step + i, size), size);
            });
        }
        over(width, [&](int64_t i, auto size) { store(found + i, load(found + i, size) + load(near + i, size), size); });
    }
}

template <class T>
int weighted_sum(const T* weights, const T* rows, T* out, int64_t batch, int64_t count, int64_t width, int threads) {
    const int64_t across = (width + WIDE - 1) / WIDE, each = CHUNK * MANY_CHUNKS;
    const int64_t down = std::max<int64_t>(1, (count + each - 1) / each);
    std::vector<float> partial(size_t(batch * across * down * WIDE));
    const int64_t grain = WORTH_A_THREAD / (std::min(count, each) * std::min(width, WIDE) + 1) + 1;
    const int told = share(batch * across * down, grain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t part = task % down, column = task / down % across * WIDE, at = task / down / across;
            const int64_t first = part * each, many = std::min(each, count - first);
            weigh(weights + at * count + first, rows + (at * count + first) * width + column, width, many,
                  std::min(WIDE, width - column), partial.data() + task * WIDE);
        }
    });
    if (told) return told;
    return share(batch * across, WORTH_A_THREAD / (down * WIDE) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t column = task % across * WIDE, at = task / across;
            over(std::min(WIDE, width - column), [&](int64_t i, auto size) {
                V all = {};
                for (int64_t part = 0; part < down; part++)
                    all += load(partial.data() + (task * down + part) * WIDE + i, size);
                store(out + at * width + column + i, all, size);
            });
        }
    });
}

template <class T>
int matmul(const T* a, const T* b, T* out, int64_t batch, const Sizes& of, float scale, int threads) {
    if (of.rows == 1 && !of.turned_b && scale == 1.0f) return weighted_sum(a, b, out, batch, of.depth, of.columns, threads);
    if (of.rows <= FEW && of.turned_b && !of.turned_a) return multiply_few(a, b, out, batch, of, scale, threads);
    const int64_t down = (of.rows + ROWS - 1) / ROWS, across = (of.columns + COLUMNS - 1) / COLUMNS;
    const int64_t each = std::min(ROWS, of.rows) * std::min(COLUMNS, of.columns) * std::max<int64_t>(of.depth, 1) / 16;
    return share(batch * down * across, WORTH_A_THREAD / (each + 1) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t at = task / (down * across), left = task % (down * across);
            multiply_block(a + at * of.rows * of.depth, b + at * of.depth * of.columns, out + at * of.rows * of.columns,
                           of, left % down * ROWS, left / down * COLUMNS, scale);
        }
    });
}

}  // namespace

extern "C" {

// a [batch, rows, depth], or [batch, depth, rows] where it is turned; b [batch, depth, columns], or [batch, columns, depth].
int polyfleet_matmul(int dtype, const void* a, const void* b, void* out, int64_t batch, int64_t rows, int64_t depth,
                     int64_t columns, int turned_a, int turned_b, double scale, int threads) {
    const Sizes sizes{rows, depth, columns, turned_a != 0, turned_b != 0};
    return guarded([&] {
        return with_type(dtype, [&](auto t) {
            using T = decltype(t);
            return matmul((const T*)a, (const T*)b, (T*)out, batch, sizes, float(scale), threads);
        });
    });
}

int polyfleet_matmul_vec(int dtype, const void* a, const void* x, void* out, int64_t batch, int64_t rows, int64_t depth,
                         int threads) {
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        return share_rows(batch * rows, depth, threads, [&](int64_t row) {
            put((T*)out + row, dot((const T*)a + row * depth, (const T*)x + row / rows * depth, depth));
        });
    });
}

int polyfleet_weighted_sum_rows(int dtype, const void* weights, const void* rows, void* out, int64_t batch,
                                int64_t count, int64_t width, int threads) {
    return guarded([&] {
        return with_type(dtype, [&](auto t) {
            using T = decltype(t);
            return weighted_sum((const T*)weights, (const T*)rows, (T*)out, batch, count, width, threads);
        });
    });
}

}  // extern "C"
}  // namespace polyfleet
