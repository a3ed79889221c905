// Attention with a running softmax: scores of a block of rows and keys are never all in memory.
//
// The rows of a task are tokens of all heads that one kept head serves (grouped queries), so that its keys and values
// are laid out once for them.

#include "cpu_threads.hpp"
#include "cpu_tiles.hpp"

namespace polyfleet {
namespace {

constexpr int64_t ROWS = 96, KEYS = 64;

struct Shape {
    int64_t batch, heads, groups, tokens, kept, width, value_width;
    double scale;
    int causal, mask_dtype;  // of the mask: -1 for none, 3 for bool, else as of arrays
    int64_t mask_steps[4];   // how far apart the mask's values are in each dimension, 0 where one serves all
};

struct Row {
    int64_t head, token;
};

template <class T> struct Task {
    const Shape& of;
    const T *q, *k, *v;
    const void* mask;
    T* out;
    float* lse;
    int64_t batch, group;

    int64_t heads_each() const { return of.heads / of.groups; }
    int64_t count() const { return heads_each() * of.tokens; }
    Row row(int64_t i) const { return {group * heads_each() + i / of.tokens, i % of.tokens}; }
    // Rows of one group lie one after the other in q and in the result.
    int64_t place(int64_t i) const { return (batch * of.heads + group * heads_each()) * of.tokens + i; }
    int64_t seen(int64_t token) const {
        return of.causal ? std::min(of.kept, std::max<int64_t>(0, token + of.kept - of.tokens + 1)) : of.kept;
    }

    template <class M> void add(const M* from, int64_t step, float* scores, int64_t many) const {
        if (step) over(many, [&](int64_t i, auto size) { store(scores + i, load(scores + i, size) + load(from + i, size), size); });
        else for (int64_t i = 0; i < many; i++) scores[i] += one(from);
    }

    // Scores [many] of a row and the keys from `first` on, masked.
    void masked(const Row& row, int64_t first, float* scores, int64_t many) const {
        const int64_t* steps = of.mask_steps;
        const int64_t at = batch * steps[0] + row.head * steps[1] + row.token * steps[2] + first * steps[3];
        if (of.mask_dtype == 3) {
            const uint8_t* shown = (const uint8_t*)mask + at;
            for (int64_t i = 0; i < many; i++) scores[i] = shown[i * steps[3]] ? scores[i] : -INF;
        } else if (of.mask_dtype == 0) {
            add((const float*)mask + at, steps[3], scores, many);
        } else if (of.mask_dtype > 0) {
            add((const T*)mask + at, steps[3], scores, many);
        }
        for (int64_t i = std::max<int64_t>(0, seen(row.token) - first); i < many; i++) scores[i] = -INF;
    }

    void compute(int64_t begin, int64_t end) const;
};

// The greatest so far, and the sum of exponentials of what is below it. A row that has seen nothing has -inf.
struct Running {
    float most = -INF, sum = 0;

    // Scores [KEYS] become weights; `before` is what older sums and values are worth now.
    void add(float* scores, int64_t many, float& before) {
        float next = most;
        V top = splat(-INF);
        over(many, [&](int64_t i, auto size) {
            const V v = keep(load(scores + i, size), size, -INF);
            top = v > top ? v : top;
        });
        for (int lane = 0; lane < LANES; lane++) next = std::max(next, float(top[lane]));
        const float base = next == -INF ? 0.0f : next;
        before = exponential(splat(most - base))[0];
        V partial = {};
        over(many, [&](int64_t i, auto size) {
            const V e = keep(exponential(load(scores + i, size) - base), size);
            store(scores + i, e, size);
            partial += e;
        });
        sum = sum * before + total(partial);
        most = next;
    }
};

// Few rows: keys are read where they lie.
template <class T>
void scores_of_few(const float* asked, const T* keys, int64_t rows, int64_t many, int64_t width, float* scores) {
    for (int64_t s = 0; s < many; s++)
        for (int64_t r = 0; r < rows; r++)
            scores[r * KEYS + s] = sum(width, [&](int64_t i, auto size) {
                return load(asked + r * width + i, size) * load(keys + s * width + i, size);
            });
}

template <class T>
void values_of_few(const float* weights, const T* values, int64_t rows, int64_t many, int64_t width, float* held, int64_t step) {
    for (int64_t r = 0; r < rows; r++)
        over(width, [&](int64_t i, auto size) {
            V first = {}, second = {};
            int64_t s = 0;
            for (; s + 2 <= many; s += 2) {
                first += weights[r * KEYS + s] * load(values + s * width + i, size);
                second += weights[r * KEYS + s + 1] * load(values + (s + 1) * width + i, size);
            }
            if (s < many) first += weights[r * KEYS + s] * load(values + s * width + i, size);
            float* to = held + r * step + i;
            store(to, load(to, size) + (first + second), size);
        });
}

constexpr int64_t FEW = 4;

template <class T> void Task<T>::compute(int64_t begin, int64_t end) const {
    const int64_t rows = end - begin, width = of.width, wide = in_strips(of.value_width);
    float* asked = scratch<0>(ROWS * width);
    float* scores = scratch<1>(ROWS * KEYS);
    float* held = scratch<2>(ROWS * wide);
    float* keys = scratch<3>(KEYS * width);
    float* values = scratch<4>(KEYS * wide);
    Running running[ROWS];
    const float scale = float(of.scale);
    over(rows * width, [&](int64_t i, auto size) { store(asked + i, load(q + place(begin) * width + i, size) * scale, size); });
    std::fill(held, held + rows * wide, 0.0f);
    int64_t last = 0;
    for (int64_t i = begin; i < end; i++) last = std::max(last, seen(row(i).token));
    const int64_t kept_at = (batch * of.groups + group) * of.kept;
    for (int64_t first = 0; first < last; first += KEYS) {
        const int64_t many = std::min(KEYS, last - first);
        const T *near_k = k + (kept_at + first) * width, *near_v = v + (kept_at + first) * of.value_width;
        if (rows > FEW) {
            lay_turned_in_strips(near_k, width, width, many, keys);
            std::fill(scores, scores + rows * KEYS, 0.0f);
            multiply(rows, width, in_strips(many), asked, width, keys, scores, KEYS);
        } else {
            scores_of_few(asked, near_k, rows, many, width, scores);
        }
        for (int64_t i = 0; i < rows; i++) {
            float before;
            masked(row(begin + i), first, scores + i * KEYS, many);
            running[i].add(scores + i * KEYS, many, before);
            if (before != 1.0f)
                over(wide, [&](int64_t j, auto size) { store(held + i * wide + j, load(held + i * wide + j, size) * before, size); });
        }
        if (rows > FEW) {
            lay_in_strips(near_v, of.value_width, many, of.value_width, values);
            multiply(rows, many, wide, scores, KEYS, values, held, wide);
        } else {
            values_of_few(scores, near_v, rows, many, of.value_width, held, wide);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = place(begin + i);
        const float share = running[i].sum == 0 ? 0.0f : 1.0f / running[i].sum;
        over(of.value_width, [&](int64_t j, auto size) { store(out + at * of.value_width + j, load(held + i * wide + j, size) * share, size); });
        if (lse) lse[at] = running[i].sum == 0 ? -INF : running[i].most + std::log(running[i].sum);
    }
}

}  // namespace

extern "C" int polyfleet_attention(int dtype, const void* q, const void* k, const void* v, const void* mask, void* out,
                                   float* lse, int64_t batch, int64_t heads, int64_t groups, int64_t tokens,
                                   int64_t kept, int64_t width, int64_t value_width, int mask_dtype, int64_t step_batch,
                                   int64_t step_head, int64_t step_token, int64_t step_key, double scale, int causal,
                                   int threads) {
    const Shape of{batch, heads, groups, tokens, kept, width, value_width, scale, causal, mask_dtype,
                   {step_batch, step_head, step_token, step_key}};
    return with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t each = heads / groups * tokens, blocks = (each + ROWS - 1) / ROWS;
        const int64_t values = std::min(each, ROWS) * kept * (width + value_width) / 16;
        return share(batch * groups * blocks, WORTH_A_THREAD / (values + 1) + 1, threads, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; task++) {
                const int64_t at = task / blocks, first = task % blocks * ROWS;
                const Task<T> one{of, (const T*)q, (const T*)k, (const T*)v, mask, (T*)out, lse, at / groups, at % groups};
                one.compute(first, std::min(each, first + ROWS));
            }
        });
    });
}

}  // namespace polyfleet
