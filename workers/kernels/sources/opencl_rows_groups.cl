// Norms and softmax, a work-group per row, for GPUs: each item has every GROUP-th column, and a tree in local memory adds.

float squares_of(const global T *x, long columns, float mean) {
  float total = 0.0f;
  for (long i = get_local_id(0); i < columns; i += GROUP) {
    float apart = LOAD(x, i) - mean;
    total += apart * apart;
  }
  return total;
}

kernel void rmsnorm(const global T *x, const global W *weight, global T *out, long columns, float eps, float offset,
                    int has_weight, int rounded) {
  local float lanes[GROUP];
  long row = get_group_id(0) * columns;
  x += row, out += row;
  float root = 1.0f / sqrt(tree_sum(squares_of(x, columns, 0.0f), lanes) / (float)columns + eps);
  for (long i = get_local_id(0); i < columns; i += GROUP) {
    float normed = LOAD(x, i) * root;
    if (rounded) normed = ROUNDED(normed);
    if (has_weight) normed *= offset + LOAD_W(weight, i);
    STORE(normed, out, i);
  }
}

kernel void layernorm(const global T *x, const global W *weight, const global W *bias, global T *out, long columns,
                      float eps, int has_weight, int has_bias) {
  local float lanes[GROUP];
  long row = get_group_id(0) * columns;
  x += row, out += row;
  float sum = 0.0f;
  for (long i = get_local_id(0); i < columns; i += GROUP) sum += LOAD(x, i);
  float mean = tree_sum(sum, lanes) / (float)columns;
  float root = 1.0f / sqrt(tree_sum(squares_of(x, columns, mean), lanes) / (float)columns + eps);
  for (long i = get_local_id(0); i < columns; i += GROUP) {
    float normed = (LOAD(x, i) - mean) * root;
    if (has_weight) normed *= LOAD_W(weight, i);
    if (has_bias) normed += LOAD_W(bias, i);
    STORE(normed, out, i);
  }
}

kernel void softmax(const global T *x, global T *out, long columns) {
  local float lanes[GROUP];
  long row = get_group_id(0) * columns;
  x += row, out += row;
  float most = -INFINITY, sum = 0.0f;
  for (long i = get_local_id(0); i < columns; i += GROUP) most = fmax(most, LOAD(x, i));
  most = tree_max(most, lanes);
  for (long i = get_local_id(0); i < columns; i += GROUP) sum += exp(LOAD(x, i) - most);
  float share = 1.0f / tree_sum(sum, lanes);
  for (long i = get_local_id(0); i < columns; i += GROUP) STORE(exp(LOAD(x, i) - most) * share, out, i);
}
