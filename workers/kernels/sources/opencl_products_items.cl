// Products, for devices whose work-items are threads: an item has sixteen columns of a row, or a row of a vector.

// `share` matrices of the first serve one of the second, as heads that ask share one that is kept.
kernel void matmul(const global T *a, const global T *b, global T *out, long rows, long columns, long depth, long share,
                   float scale, int a_turned, int b_turned) {
  long blocks = (columns + 15) / 16, item = get_global_id(0);
  long n = item % blocks * 16, m = item / blocks % rows, batch = item / blocks / rows;
  long a_step = a_turned ? rows : 1, many = min(16L, columns - n);
  a += batch * rows * depth + (a_turned ? m : m * depth), b += batch / share * depth * columns;
  out += (batch * rows + m) * columns + n;
  float found[16];
  if (b_turned && !a_turned) {
    for (int i = 0; i < many; i++) found[i] = dot_of(a, b + (n + i) * depth, depth);
  } else {
    float16 total = 0.0f;
    for (long k = 0; k < depth;) {
      float16 part = 0.0f;
      for (long end = min(depth, k + PART); k < end; k++) {
        float16 right;
        if (b_turned) {
          float lanes[16];
          for (int i = 0; i < 16; i++) lanes[i] = i < many ? LOAD(b, (n + i) * depth + k) : 0.0f;
          right = vload16(0, lanes);
        } else {
          right = many == 16 ? LOAD16(b, k * columns + n) : load_tail(b + k * columns + n, many, 0.0f);
        }
        part += LOAD(a, k * a_step) * right;
      }
      total += part;
    }
    vstore16(total, 0, found);
  }
  for (int i = 0; i < many; i++) STORE(found[i] * scale, out, i);
}

kernel void matmul_vec(const global T *a, const global T *x, global T *out, long rows, long depth) {
  long row = get_global_id(0);
  STORE(dot_of(a + row * depth, x + row / rows * depth, depth), out, row);
}

kernel void weighted_sum_rows(const global T *weights, const global T *values, global T *out, long length, long width) {
  long blocks = (width + 15) / 16, d = get_global_id(0) % blocks * 16, batch = get_global_id(0) / blocks;
  long many = min(16L, width - d);
  weights += batch * length, values += batch * length * width + d;
  float16 total = 0.0f;
  for (long t = 0; t < length;) {
    float16 part = 0.0f;
    for (long end = min(length, t + PART); t < end; t++) {
      const global T *row = values + t * width;
      part += LOAD(weights, t) * (many == 16 ? LOAD16(row, 0) : load_tail(row, many, 0.0f));
    }
    total += part;
  }
  float found[16];
  vstore16(total, 0, found);
  for (int i = 0; i < many; i++) STORE(found[i], out, batch * width + d + i);
}
