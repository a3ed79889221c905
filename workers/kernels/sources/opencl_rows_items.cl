// Norms and softmax, a row per work-item, for devices whose work-items are threads: sixteen columns at a time.

float sum_of(const global T *x, long columns) {
  float16 total = 0.0f;
  long i = 0;
  while (i + 16 <= columns) {
    long end = min(columns - 15, i + 16 * PART);
    float16 part = 0.0f;
    for (; i < end; i += 16) part += LOAD16(x, i);
    total += part;
  }
  if (i < columns) total += load_tail(x + i, columns - i, 0.0f);
  return sum16(total);
}

float squares_of(const global T *x, long columns, float mean) {
  float16 total = 0.0f;
  long i = 0;
  while (i + 16 <= columns) {
    long end = min(columns - 15, i + 16 * PART);
    float16 part = 0.0f;
    for (; i < end; i += 16) {
      float16 apart = LOAD16(x, i) - mean;
      part += apart * apart;
    }
    total += part;
  }
  if (i < columns) {
    float16 apart = load_tail(x + i, columns - i, mean) - mean;
    total += apart * apart;
  }
  return sum16(total);
}

kernel void rmsnorm(const global T *x, const global W *weight, global T *out, long columns, float eps, float offset,
                    int has_weight, int rounded) {
  long row = get_global_id(0) * columns;
  x += row, out += row;
  float root = 1.0f / sqrt(squares_of(x, columns, 0.0f) / (float)columns + eps);
  long i = 0;
  for (; i + 16 <= columns; i += 16) {
    float16 normed = LOAD16(x, i) * root;
    if (rounded) normed = ROUNDED16(normed);
    if (has_weight) normed *= offset + LOAD_W16(weight, i);
    STORE16(normed, out, i);
  }
  for (; i < columns; i++) {
    float normed = LOAD(x, i) * root;
    if (rounded) normed = ROUNDED(normed);
    if (has_weight) normed *= offset + LOAD_W(weight, i);
    STORE(normed, out, i);
  }
}

kernel void layernorm(const global T *x, const global W *weight, const global W *bias, global T *out, long columns,
                      float eps, int has_weight, int has_bias) {
  long row = get_global_id(0) * columns;
  x += row, out += row;
  float mean = sum_of(x, columns) / (float)columns;
  float root = 1.0f / sqrt(squares_of(x, columns, mean) / (float)columns + eps);
  long i = 0;
  for (; i + 16 <= columns; i += 16) {
    float16 normed = (LOAD16(x, i) - mean) * root;
    if (has_weight) normed *= LOAD_W16(weight, i);
    if (has_bias) normed += LOAD_W16(bias, i);
    STORE16(normed, out, i);
  }
  for (; i < columns; i++) {
    float normed = (LOAD(x, i) - mean) * root;
    if (has_weight) normed *= LOAD_W(weight, i);
    if (has_bias) normed += LOAD_W(bias, i);
    STORE(normed, out, i);
  }
}

kernel void softmax(const global T *x, global T *out, long columns) {
  long row = get_global_id(0) * columns;
  x += row, out += row;
  float16 most = -INFINITY, total = 0.0f;
  long i = 0;
  for (; i + 16 <= columns; i += 16) most = fmax(most, LOAD16(x, i));
  if (i < columns) most = fmax(most, load_tail(x + i, columns - i, -INFINITY));
  float top = max16(most);
  for (i = 0; i + 16 <= columns;) {
    long end = min(columns - 15, i + 16 * PART);
    float16 part = 0.0f;
    for (; i < end; i += 16) part += exp(LOAD16(x, i) - top);
    total += part;
  }
  float sum = sum16(total);
  for (; i < columns; i++) sum += exp(LOAD(x, i) - top);
  float share = 1.0f / sum;
  for (i = 0; i + 16 <= columns; i += 16) STORE16(exp(LOAD16(x, i) - top) * share, out, i);
  for (; i < columns; i++) STORE(exp(LOAD(x, i) - top) * share, out, i);
}
