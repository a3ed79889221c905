// The inner loop of products of matrices: a few rows times a strip of columns, kept in registers, all in float32.
#pragma once

#include <algorithm>

#include "cpu_vectors.hpp"

namespace polyfleet {

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;  // with 6 rows: 24 of 32 registers, or 12 of 16
constexpr int STRIP = TILE_VECTORS * LANES;

static INLINE int64_t in_strips(int64_t columns) { return (columns + STRIP - 1) / STRIP * STRIP; }

// c [ROWS, STRIP] += a [ROWS, depth] times b [depth, STRIP].
template <int ROWS> static INLINE void tile(int64_t depth, const float* a, int64_t step_a, const float* b, float* c, int64_t step_c) {
    V held[ROWS][TILE_VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < TILE_VECTORS; j++) held[m][j] = load(c + m * step_c + j * LANES, Whole{});
    for (int64_t k = 0; k < depth; k++) {
        V across[TILE_VECTORS];
        for (int j = 0; j < TILE_VECTORS; j++) across[j] = load(b + k * STRIP + j * LANES, Whole{});
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < TILE_VECTORS; j++) held[m][j] += a[m * step_a + k] * across[j];
    }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < TILE_VECTORS; j++) store(c + m * step_c + j * LANES, held[m][j], Whole{});
}

// c [rows, columns] += a [rows, depth] times b, which lies in strips [columns / STRIP, depth, STRIP].
static inline void multiply(int64_t rows, int64_t depth, int64_t columns, const float* a, int64_t step_a, const float* b,
                            float* c, int64_t step_c) {
    for (int64_t strip = 0; strip < columns; strip += STRIP, b += depth * STRIP) {
        int64_t m = 0;
        for (; m + TILE_ROWS <= rows; m += TILE_ROWS) tile<TILE_ROWS>(depth, a + m * step_a, step_a, b, c + m * step_c + strip, step_c);
        const float* from = a + m * step_a;
        float* to = c + m * step_c + strip;
        switch (rows - m) {
            case 5: tile<5>(depth, from, step_a, b, to, step_c); break;
            case 4: tile<4>(depth, from, step_a, b, to, step_c); break;
            case 3: tile<3>(depth, from, step_a, b, to, step_c); break;
            case 2: tile<2>(depth, from, step_a, b, to, step_c); break;
            case 1: tile<1>(depth, from, step_a, b, to, step_c); break;
            default: break;
        }
    }
}

// from [depth, columns], a part of rows of `step` values, as strips [columns / STRIP, depth, STRIP], 0 beyond the columns.
template <class T>
static inline void lay_in_strips(const T* from, int64_t step, int64_t depth, int64_t columns, float* strips) {
    for (int64_t strip = 0; strip < columns; strip += STRIP, strips += depth * STRIP) {
        const int64_t width = std::min<int64_t>(STRIP, columns - strip);
        for (int64_t k = 0; k < depth; k++) {
            float* to = strips + k * STRIP;
            over(width, [&](int64_t i, auto size) { store(to + i, load(from + k * step + strip + i, size), Whole{}); });
            for (int64_t i = (width + LANES - 1) / LANES * LANES; i < STRIP; i += LANES) store(to + i, V{}, Whole{});
        }
    }
}

// The same of its transpose, from [columns, depth]. A few columns of all rows at a time, so that what is written stays near.
template <class T>
static inline void lay_turned_in_strips(const T* from, int64_t step, int64_t depth, int64_t columns, float* strips) {
    constexpr int64_t NEAR = 16;
    float held[NEAR + LANES];
    for (int64_t strip = 0; strip < columns; strip += STRIP, strips += depth * STRIP) {
        const int64_t width = std::min<int64_t>(STRIP, columns - strip);
        for (int64_t near = 0; near < depth; near += NEAR) {
            const int64_t many = std::min(NEAR, depth - near);
            for (int64_t n = 0; n < width; n++) {
                over(many, [&](int64_t i, auto size) { store(held + i, load(from + (strip + n) * step + near + i, size), Whole{}); });
                for (int64_t i = 0; i < many; i++) strips[(near + i) * STRIP + n] = held[i];
            }
            for (int64_t n = width; n < STRIP; n++)
                for (int64_t i = 0; i < many; i++) strips[(near + i) * STRIP + n] = 0;
        }
    }
}

}  // namespace polyfleet
