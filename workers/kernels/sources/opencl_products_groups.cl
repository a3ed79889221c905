// Products, for GPUs: TILE x TILE results of a matrix by a work-group, through tiles in local memory; a row of a matrix
// times a vector by a tree.

kernel void matmul(const global T *a, const global T *b, global T *out, long rows, long columns, long depth, long share,
                   float scale, int a_turned, int b_turned) {
  local float left[TILE][TILE + 1], right[TILE][TILE + 1];
  long blocks = (columns + TILE - 1) / TILE, tall = (rows + TILE - 1) / TILE, group = get_group_id(0);
  long batch = group / blocks / tall, own = get_local_id(0), i = own / TILE, j = own % TILE;
  long m = group / blocks % tall * TILE, n = group % blocks * TILE;
  a += batch * rows * depth, b += batch / share * depth * columns;
  float total = 0.0f, part = 0.0f;
  for (long k = 0; k < depth; k += TILE) {
    // neighbours in memory are read by neighbouring items, whichever way the matrix lies
    long am = a_turned ? m + j : m + i, ak = a_turned ? k + i : k + j;
    long bn = b_turned ? n + i : n + j, bk = b_turned ? k + j : k + i;
    float av = am < rows && ak < depth ? LOAD(a, a_turned ? ak * rows + am : am * depth + ak) : 0.0f;
    float bv = bn < columns && bk < depth ? LOAD(b, b_turned ? bn * depth + bk : bk * columns + bn) : 0.0f;
    left[am - m][ak - k] = av;
    right[bk - k][bn - n] = bv;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = 0; t < TILE; t++) part += left[i][t] * right[t][j];
    barrier(CLK_LOCAL_MEM_FENCE);
    if (k / TILE % (PART / TILE) == PART / TILE - 1) total += part, part = 0.0f;
  }
  if (m + i < rows && n + j < columns) STORE((total + part) * scale, out, (batch * rows + m + i) * columns + n + j);
}

kernel void matmul_vec(const global T *a, const global T *x, global T *out, long rows, long depth) {
  local float lanes[GROUP];
  long row = get_group_id(0);
  a += row * depth, x += row / rows * depth;
  float sum = 0.0f;
  for (long k = get_local_id(0); k < depth; k += GROUP) sum += LOAD(a, k) * LOAD(x, k);
  sum = tree_sum(sum, lanes);
  if (get_local_id(0) == 0) STORE(sum, out, row);
}

kernel void weighted_sum_rows(const global T *weights, const global T *values, global T *out, long length, long width) {
  long blocks = (width + GROUP - 1) / GROUP, batch = get_group_id(0) / blocks;
  long d = get_group_id(0) % blocks * GROUP + get_local_id(0);
  if (d >= width) return;
  weights += batch * length, values += batch * length * width + d;
  float total = 0.0f;
  for (long t = 0; t < length;) {
    float part = 0.0f;
    for (long end = min(length, t + PART); t < end; t++) part += LOAD(weights, t) * LOAD(values, t * width);
    total += part;
  }
  STORE(total, out, batch * width + d);
}
