// Attention, a row of a head per work-group, for GPUs: GROUP keys at a time, an item for each; then an item for each
// value of the result. `kept_sums` has a row of floats for each group.

float shown(float score, const global void *mask, int kind, long at) {
  if (kind == MASK_BOOL) return ((const global uchar *)mask)[at] ? score : -INFINITY;
  if (kind == MASK_F32) return score + ((const global float *)mask)[at];
  return kind == MASK_T ? score + LOAD((const global T *)mask, at) : score;
}

kernel void attention(const global T *q, const global T *k, const global T *v, const global void *mask, global T *out,
                      global float *lse, global float *kept_sums, long length, long many, long heads, long groups,
                      long width, long wide, float scale, int causal, int kind, long by_batch, long by_head,
                      long by_row, long by_key, int has_lse) {
  local float p[GROUP], lanes[GROUP];
  long item = get_group_id(0), t = item % length, h = item / length % heads, b = item / length / heads;
  long kept = (b * groups + h / (heads / groups)) * many, seen = causal ? min(many, t + many - length + 1) : many;
  global float *sums = kept_sums + item * wide;
  q += item * width, k += kept * width, v += kept * wide, out += item * wide;
  long at = b * by_batch + h * by_head + t * by_row;
  int own = get_local_id(0);
  float top = -INFINITY, total = 0.0f;
  for (long e = own; e < wide; e += GROUP) sums[e] = 0.0f;
  for (long s = 0; s < seen; s += GROUP) {
    int count = min((long)GROUP, seen - s);
    float score = -INFINITY, before = top;
    if (own < count) score = shown(dot_of(q, k + (s + own) * width, width) * scale, mask, kind, at + (s + own) * by_key);
    top = fmax(top, tree_max(score, lanes));
    float shrink = before == -INFINITY ? 0.0f : exp(before - top);
    p[own] = score == -INFINITY ? 0.0f : exp(score - top);
    total = total * shrink + tree_sum(p[own], lanes);
    for (long e = own; e < wide; e += GROUP) {
      float sum = sums[e] * shrink;
      for (int i = 0; i < count; i++) sum += p[i] * LOAD(v, (s + i) * wide + e);
      sums[e] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  for (long e = own; e < wide; e += GROUP) STORE(total == 0.0f ? 0.0f : sums[e] / total, out, e);
  if (has_lse && own == 0) lse[item] = total == 0.0f ? -INFINITY : top + log(total);
}
